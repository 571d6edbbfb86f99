"""Which executors a graph may use, why not the others, and what to do about it.

Worked example: with ``executors="triton,nvfuser"``, on a GPU with nvFuser, ``usable(Use("cuda", config))`` is
``(("triton", "nvfuser", "eager"), {})``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from dynafuse.errors import DynafuseWarning, ExecutorError
from dynafuse.lowering.base import Use
from dynafuse.lowering.registry import executor, executors

log = logging.getLogger(__name__)

_told: set[str] = set()  # what the user has been told, once per process


def usable(use: Use) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the executors that a graph may use, of those that the options name, and why not the others, by name."""
    names = use.config.executors or _defaults(use)
    reasons = {name: str(answer) for name in names if not (answer := executor(name).available(use)).available}
    return tuple(name for name in names if name not in reasons), reasons


def _defaults(use: Use) -> tuple[str, ...]:
    """Return the executor for a type of device that is used unnamed, and eager: the first available one, else the last."""
    device_type = "cuda" if use.on_gpu else use.device_type
    candidates = [candidate for candidate in executors() if device_type in candidate.default_on]
    chosen = next((candidate for candidate in candidates if candidate.available(use).available), candidates[-1])
    return (chosen.name, *(candidate.name for candidate in executors() if not candidate.fuses))


def fusing(names: Sequence[str]) -> tuple[str, ...]:
    """Return the executors among some that compute several ops at once."""
    return tuple(name for name in names if executor(name).fuses)


def tell(use: Use, enabled: Sequence[str], reasons: Mapping[str, str]) -> None:
    """Say, once per process and cause, which executors of a graph are not there and what to do about it.

    Silence is for those that are for other devices, where another executor fuses or there is such a device: then it is these
    tensors that are elsewhere.

    Args:
        use: Where the graph runs, and with which options.
        enabled: The names of the executors that it may use.
        reasons: Why the others of the options cannot be used, by name.

    Raises:
        ExecutorError: Under ``strict``, one cannot be used, and it is not the options themselves that rule it out.
    """
    if use.config.executors is None:
        for notice in filter(None, (executor(name).notice(use) for name in enabled)):
            _once(notice, log.warning)
    fuses = bool(fusing(enabled))
    for name, reason in reasons.items():
        missing = executor(name)
        if use.device_type not in missing.device_types and (fuses or torch.cuda.is_available()):
            continue
        ruled_out = missing.available(use).ruled_out
        tensors = f"{use.device_type.upper()} tensors"
        rest = f"Plans for {tensors} use {', '.join(enabled)}" if fuses else f"Nothing is fused, {tensors} run eager"
        text = f"executor {name!r} cannot be used: {reason}. {rest}" + ("" if ruled_out else f"; {missing.remedy}")
        if use.config.strict and not ruled_out:
            raise ExecutorError(text)
        _once(text, lambda told: warnings.warn(told, DynafuseWarning, stacklevel=2))


def _once(text: str, say: Callable[[str], None]) -> None:
    if text not in _told:
        _told.add(text)
        say(text)


def reset() -> None:
    """Forget what the user has been told."""
    _told.clear()


def how_to_enable(name: str, use: Use) -> str:
    """Return why an executor is not enabled for a graph, and what enables it.

    Args:
        name: The executor.
        use: Where the graph runs, and with which options.
    """
    answer = executor(name).available(use)
    if not answer.available:
        return f"{name} cannot be enabled here: {answer}"
    named = ",".join(dict.fromkeys((*fusing(usable(use)[0]), name)))
    return f'to enable {name}: options={{"executors": "{named}"}}, or DYNAFUSE_EXECUTORS={named}'
