"""``force_backend``: which executor runs the ops of a module, a method, a function or a block, said in the user's code.

Worked example::

    @force_backend("triton")                      # every instance of the class
    class Norm(nn.Module): ...

    force_backend("eager")(model.head)            # this instance, its copies and its pickles

    @force_backend("triton", strict=False)        # a function or a method; what Triton cannot run falls back
    def gate(x): ...

    def forward(self, x):
        with force_backend("eager"):              # the ops of a block; built where it is entered
            x = x.softmax(-1)
        return self.mlp(x)

Where several apply, the innermost wins. It only leaves a mark that Dynamo copies onto the nodes of a graph, those of the
backward included (``dynafuse/partition/forcing.py`` reads it): code that is not compiled runs as it would without.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.fx.traceback import annotate

from dynafuse.config import FORCE_MARK
from dynafuse.errors import OptionError
from dynafuse.lowering.registry import is_known, names

T = TypeVar("T")
Mark = dict[str, tuple[str, bool, str]]


class force_backend:
    """Force an executor onto ops: ``"triton"``, ``"nvfuser"``, ``"inductor"``, ``"eager"``, or one that was registered.

    A decorator of ``nn.Module`` classes and instances (changed in place and returned), of functions and methods, and a
    context manager for use inside compiled code.

    Args:
        executor: The executor's name.
        strict: Whether an op that it cannot run raises ``ForceError`` when the graph is compiled; otherwise it falls back,
            and the report says so.

    Raises:
        OptionError: There is no executor of that name, ``strict`` is no bool, or what is decorated is none of the above.
    """

    def __init__(self, executor: str, *, strict: bool = True) -> None:
        if not is_known(executor):
            raise OptionError.unknown("executor", executor, names())
        if strict is not True and strict is not False:
            raise OptionError.ill_typed("force_backend's `strict`", strict, "true or false")
        self._executor = executor
        self._strict = strict
        self._entered: list[Any] = []

    def _mark(self, owner: str = "") -> Mark:
        return {FORCE_MARK: (self._executor, self._strict, owner)}

    def __call__(self, target: T) -> T:
        """Decorate ``target``.

        Args:
            target: An ``nn.Module`` class or instance, which is returned; or a function, a method, a ``staticmethod`` or a
                ``classmethod``, of which a wrapper is returned.

        Raises:
            OptionError: It is anything else, such as another class, a coroutine or a generator function.
        """
        forced: Any = target
        if isinstance(forced, torch.nn.Module):
            _force_instance(getattr(forced, "_orig_mod", forced), self._mark)
        elif inspect.isclass(forced) and issubclass(forced, torch.nn.Module):
            forced.forward = _wrapped(forced.forward, self._mark(_name(forced)))
        elif isinstance(forced, (staticmethod, classmethod)):
            forced = type(forced)(_wrapped(forced.__func__, self._mark()))
        elif inspect.isclass(forced) or not callable(forced) or _runs_later(forced):
            raise OptionError.ill_typed("what force_backend decorates", forced, _DECORATES)
        else:
            forced = _wrapped(forced, self._mark())
        return forced  # type: ignore[no-any-return]

    def __enter__(self) -> force_backend:
        entered = _marked(self._mark())
        entered.__enter__()
        self._entered.append(entered)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


_DECORATES = "an nn.Module class or instance, a function or a method (no coroutine, no generator)"


@contextlib.contextmanager
def _marked(mark: Mark) -> Iterator[None]:
    """Mark the ops inside: Dynamo follows a generator into ``annotate``, but not an ``annotate`` that is entered by hand."""
    with annotate(mark):
        yield


def _wrapped(function: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
    @functools.wraps(function)
    def forced(*args: Any, **kwargs: Any) -> Any:
        with annotate(mark):
            return function(*args, **kwargs)

    return forced


def _runs_later(function: Any) -> bool:
    """Return whether calling it runs none of its ops yet."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(function) for kind in kinds)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _force_instance(module: torch.nn.Module, mark: Callable[[str], Mark]) -> None:
    inner = module.__dict__.get("forward")
    module.forward = Forward(module, inner, mark(_name(type(module))))


class Forward:
    """The ``forward`` of a forced instance.

    It holds the module rather than a bound method: a copy or a pickle of the module then has one that holds the copy.
    """

    def __init__(self, module: torch.nn.Module, inner: Callable[..., Any] | None, mark: Mark) -> None:
        self._dynafuse_module = module
        self.inner = inner
        self.mark = mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with annotate(self.mark):
            if self.inner is None:
                return type(self._dynafuse_module).forward(self._dynafuse_module, *args, **kwargs)
            return self.inner(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner or type(self._dynafuse_module).forward.__get__(self._dynafuse_module))
