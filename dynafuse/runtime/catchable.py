"""Errors of the backend as what both ``except dynafuse.ForceError`` and ``except BackendCompilerFailed`` catch.

Dynamo puts whatever a backend raises into a ``BackendCompilerFailed``, unless it is one: the user's ``except`` for the
error itself then never matches. So an error leaves the backend as an instance of both classes.

Worked example::

    try:
        torch.compile(model, backend="dynafuse", options={"force": {"head": "nvfuser"}})(x)
    except dynafuse.ForceError as error:
        print(error.violations)          # as of the error itself, which is error.inner_exception

A traceback ends at the backend; ``inner_exception`` has the rest of it, and its cause.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from torch._dynamo.exc import BackendCompilerFailed

from dynafuse.errors import DynafuseError

P = ParamSpec("P")
R = TypeVar("R")


def catchable(backend: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``backend`` so that its errors reach the user as what they are."""
    @functools.wraps(backend)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return backend(*args, **kwargs)
        except DynafuseError as error:
            raise through_dynamo(error, backend, inspect.currentframe()) from None

    return run


def through_dynamo(error: DynafuseError, backend: Callable[..., Any], frame: FrameType | None) -> DynafuseError:
    """Return an error as an instance of its class and of Dynamo's ``BackendCompilerFailed``.

    Args:
        error: The error.
        backend: The function that raised it, which Dynamo names.
        frame: Where the traceback begins.
    """
    kind = _both(type(error))
    through = kind.__new__(kind)
    BackendCompilerFailed.__init__(through, backend, error, frame)
    through.__dict__.update(vars(error))
    return through  # type: ignore[no-any-return]


class _Both:
    """An error of two classes, with the text and the pickle of ours: Dynamo adds words of its own to ``args``."""

    inner_exception: DynafuseError

    def __str__(self) -> str:
        return str(self.inner_exception)

    def __reduce__(self) -> Any:
        return self.inner_exception.__reduce__()


def _both(kind: Any) -> Any:
    """Return a subclass of a class of errors and of Dynamo's, with the name that the user knows."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Both, kind, BackendCompilerFailed), names)
