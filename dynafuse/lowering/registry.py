"""The executors of this process, by name: the shipped ones, those that packages announce, those registered at run time.

A shipped executor is loaded when it is first asked for, and so is one that an installed package announces as an entry point
of the group ``dynafuse.executors``, ``name = "package.module:instance"``.

Worked example: ``executor("triton").takes_arguments`` is True; ``names()`` is ``("triton", "nvfuser", "inductor",
"eager")``.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points

from dynafuse.errors import OptionError
from dynafuse.lowering.base import Executor

SHIPPED = {
    "triton": "dynafuse.lowering.triton.executor:TRITON",
    "nvfuser": "dynafuse.lowering.nvfuser.executor:NVFUSER",
    "inductor": "dynafuse.lowering.inductor.executor:INDUCTOR",
    "eager": "dynafuse.lowering.eager:EAGER",
}
"""In the order of preference, eager last."""

PREFERRED = next(iter(SHIPPED))
"""What regions are planned for where nobody says for which executors."""

EAGER = next(reversed(SHIPPED))
"""What runs everything else."""

GROUP = "dynafuse.executors"

_loaded: dict[str, Executor] = {}


@cache
def _announced() -> dict[str, str]:
    """Return executors of installed packages: ``module:attribute`` by name. Shipped ones cannot be replaced."""
    return {point.name: point.value for point in entry_points(group=GROUP) if point.name not in SHIPPED}


def names() -> tuple[str, ...]:
    """Return the names of all executors, eager last."""
    others = dict.fromkeys((*_announced(), *_loaded))
    return (*(name for name in SHIPPED if name != EAGER), *(name for name in others if name not in SHIPPED), EAGER)


def is_known(name: str) -> bool:
    """Return whether there is an executor of a name. Dynamo can trace it: the costly question is asked last."""
    return name in SHIPPED or name in _loaded or name in names()


def executor(name: str) -> Executor:
    """Return the executor of a name, which is loaded when it is first asked for.

    Raises:
        OptionError: There is none of that name.
    """
    if name not in _loaded:
        place = SHIPPED.get(name) or _announced().get(name)
        if place is None:
            raise OptionError.unknown("executor", name, names())
        module, _, attribute = place.partition(":")
        _loaded[name] = getattr(importlib.import_module(module), attribute)
    return _loaded[name]


def executors() -> tuple[Executor, ...]:
    """Return all executors, in the order of preference, eager last."""
    return tuple(map(executor, names()))


def register_executor(instance: Executor) -> None:
    """Make an executor known to this process: options, forcing, plans, caches and reports name it from now on.

    Args:
        instance: The executor; one of the same name that was registered before is replaced.

    Raises:
        OptionError: Its name is no identifier in lower case, or that of a shipped executor.
    """
    name = instance.name
    if name in SHIPPED or not name.isidentifier() or name != name.lower():
        raise OptionError(f"executor name {name!r}: expected letters and digits in lower case, none of {', '.join(SHIPPED)}")
    _loaded[name] = instance


def unregister_executor(name: str) -> None:
    """Forget an executor that was registered at run time."""
    if name not in SHIPPED:
        _loaded.pop(name, None)
