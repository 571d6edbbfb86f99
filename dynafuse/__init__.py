"""dynafuse: a torch.compile backend that plans by cost and reuses compiled fusions by structure.

    >>> import torch
    >>> f = torch.compile(lambda x: torch.softmax(x, -1) * 2, backend="dynafuse")  # doctest: +SKIP
    >>> f(torch.randn(4, 8))  # doctest: +SKIP

Importing this package imports neither torch nor Triton: torch looks installed packages up by name while it is itself
being imported, and the command line has to answer at once. Public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynafuse.backend import stats
    from dynafuse.errors import (
        CompileError,
        DynafuseError,
        DynafuseWarning,
        ExecutorError,
        ForceError,
        LoweringError,
        OptionError,
    )
    from dynafuse.force import force_backend
    from dynafuse.lowering.base import Executor
    from dynafuse.lowering.registry import register_executor
    from dynafuse.report import Report, explain
    from dynafuse.report.history import process_report

__version__ = "0.1.0"

_HOME = {
    "CompileError": "errors",
    "DynafuseError": "errors",
    "DynafuseWarning": "errors",
    "Executor": "lowering.base",
    "ExecutorError": "errors",
    "ForceError": "errors",
    "LoweringError": "errors",
    "OptionError": "errors",
    "Report": "report",
    "explain": "report",
    "force_backend": "force",
    "process_report": "report.history",
    "register_executor": "lowering.registry",
    "stats": "backend",
}

__all__ = [
    "CompileError",
    "DynafuseError",
    "DynafuseWarning",
    "Executor",
    "ExecutorError",
    "ForceError",
    "LoweringError",
    "OptionError",
    "Report",
    "__version__",
    "explain",
    "force_backend",
    "process_report",
    "register_executor",
    "stats",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dynafuse' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"dynafuse.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
