"""Isolation of :func:`explain`: Dynamo runs as in a fresh process, and what it leaves behind is removed afterwards.

Dynamo keeps what it compiles on code objects, which a function to be explained shares with the same function compiled by the
user. So the entries that were added inside the block are removed again: a code object without others is reset, and on one
with others ours are replaced by entries that never match, never count as a recompilation, and hold nothing. The functions in
which code resumes after a graph break are made anew. Functions that Dynamo had given up on are tried again, so that it says
why.

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
def isolated(backend: Callable[..., Any]) -> Iterator[None]:
    """Let Dynamo compile with ``backend``, which has to be a new object, as if nothing had been compiled before."""
    codes: dict[int, CodeType] = {}
    reasons_before = len(graph_break_reasons)
    hook = convert_frame.register_bytecode_hook(lambda code, _: codes.setdefault(id(code), code) and None)
    backends_before = set(eval_frame.cached_backends)
    limits = torch._dynamo.config.patch(recompile_limit=NO_LIMIT, accumulated_recompile_limit=NO_LIMIT)
    try:
        _retry_given_up()
        with limits, _no_profile(), _fresh_resumptions():
            yield
    finally:
        hook.remove()
        for code in codes.values():
            _forget(code, backend)
        for name in set(eval_frame.cached_backends) - backends_before:
            del eval_frame.cached_backends[name]
        del graph_break_reasons[reasons_before:]


@contextlib.contextmanager
def _no_profile() -> Iterator[None]:
    """Hide the sizes that Dynamo has seen, by which it makes sizes dynamic, and drop those that it sees inside."""
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
def _fresh_resumptions() -> Iterator[None]:
    """Give Dynamo an empty cache of the functions that resume after graph breaks."""
    caches = resume_execution.ContinueExecutionCache
    before = caches.cache, caches.generated_code_metadata
    caches.cache, caches.generated_code_metadata = ExactWeakKeyDictionary(), ExactWeakKeyDictionary()
    try:
        yield
    finally:
        caches.cache, caches.generated_code_metadata = before


def _retry_given_up() -> None:
    """Reset the functions that could not be compiled: their code objects hold nothing but that fact."""
    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        if code is not None and not _debug_get_cache_entry_list(code):
            reset_code(code)


def _forget(code: CodeType, backend: Callable[..., Any]) -> None:
    """Remove what ``backend`` has compiled from a code object."""
    entries = _debug_get_cache_entry_list(code)
    ours = [entry for entry in entries if _compiled_by(entry, backend)]
    if len(ours) == len(entries):
        reset_code(code)
        return
    for entry in ours:
        manager: Any = entry.guard_manager
        manager.extra_state.invalidate(entry, _Removed("it was compiled to be explained"))


def _compiled_by(entry: Any, backend: Callable[..., Any]) -> bool:
    """Return whether a cache entry was compiled by ``backend``, which Dynamo may have wrapped."""
    return getattr(entry.backend, "compiler_fn", entry.backend) is backend


class _Removed(DeletedGuardManagerWrapper):
    """The guards of a removed entry. Dynamo counts a recompilation where these objects equal a frame's: none does."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.id_matched_objs = {"": object}  # type: ignore[dict-item]
