"""Running Dynamo beside what the process has compiled, and taking away afterwards what that has left.

Dynamo keeps what it compiles on code objects, which a function to be explained shares with the same function compiled by the
user. So all entries that came meanwhile are taken out of them again: where there are no others the code object is as new,
else ours are made ones that never match, never count as a recompilation, and hold nothing. The functions in which code goes
on after a graph break are made anew. Functions that Dynamo has given up on it tries again, or else it would not say why.

Worked example: ``model`` is compiled and called, explained, and called again: the last call compiles nothing.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import convert_frame, eval_frame, pgo, resume_execution
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import ExactWeakKeyDictionary, graph_break_reasons

NO_LIMIT = 1 << 30


@contextlib.contextmanager
def beside_what_is_compiled(backend: Callable[..., Any]) -> Iterator[None]:
    """Let Dynamo compile with ``backend``, which has to be a new object, as if nothing had been compiled before."""
    codes: dict[int, CodeType] = {}
    told = len(graph_break_reasons)
    hook = convert_frame.register_bytecode_hook(lambda code, _: codes.setdefault(id(code), code) and None)
    known = set(eval_frame.cached_backends)
    limits = torch._dynamo.config.patch(recompile_limit=NO_LIMIT, accumulated_recompile_limit=NO_LIMIT)
    try:
        _try_again()
        with limits, _no_profile(), _own_resumptions():
            yield
    finally:
        hook.remove()
        for code in codes.values():
            _forget(code, backend)
        for name in set(eval_frame.cached_backends) - known:
            del eval_frame.cached_backends[name]
        del graph_break_reasons[told:]


@contextlib.contextmanager
def _no_profile() -> Iterator[None]:
    """Without what Dynamo has seen of sizes, by which it makes them dynamic, and without leaving any."""
    names = ("_CODE_STATE", "_INIT_CODE_STATE")
    before = {name: getattr(pgo, name) for name in names}
    for name in names:
        setattr(pgo, name, defaultdict(pgo.CodeState))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(pgo, name, value)


@contextlib.contextmanager
def _own_resumptions() -> Iterator[None]:
    """With functions for the code behind graph breaks that nobody else has."""
    caches = resume_execution.ContinueExecutionCache
    before = caches.cache, caches.generated_code_metadata
    caches.cache, caches.generated_code_metadata = ExactWeakKeyDictionary(), ExactWeakKeyDictionary()
    try:
        yield
    finally:
        caches.cache, caches.generated_code_metadata = before


def _try_again() -> None:
    """Forget which functions could not be compiled: nothing is kept of them but that."""
    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        if code is not None and not _debug_get_cache_entry_list(code):
            reset_code(code)


def _forget(code: CodeType, backend: Callable[..., Any]) -> None:
    """Take what was compiled by ``backend`` out of a code object."""
    entries = _debug_get_cache_entry_list(code)
    ours = [entry for entry in entries if _compiled_by(entry, backend)]
    if len(ours) == len(entries):
        reset_code(code)
        return
    for entry in ours:
        manager: Any = entry.guard_manager
        manager.extra_state.invalidate(entry, _Gone("it was compiled to be explained"))


def _compiled_by(entry: Any, backend: Callable[..., Any]) -> bool:
    """Whether a cache entry is one of ``backend``, however Dynamo has wrapped it."""
    return getattr(entry.backend, "compiler_fn", entry.backend) is backend


class _Gone(DeletedGuardManagerWrapper):
    """The guards of an entry that is gone: Dynamo counts those as recompilations whose objects are a frame's own."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.id_matched_objs = {"": object}  # type: ignore[dict-item]
