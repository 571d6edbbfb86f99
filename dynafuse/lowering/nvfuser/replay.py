"""Replays a recipe over whatever has nvFuser's ops: a FusionDefinition, or (in tests) torch itself.

Worked example::

    fd = define(lower(spec))          # records the fusion; compiles nothing
    fd.execute([x, y])                # on a GPU
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dynafuse.lowering.nvfuser.recipe import Input, Output, Recipe, Step, Var


class Backend(Protocol):
    """What a recipe is replayed over."""

    def tensor(self, given: Input) -> Any:
        """An input."""

    def scalar(self) -> Any:
        """A run-time size."""

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """One op; a tuple of results if it has several."""

    def output(self, value: Any, into: Any) -> None:
        """Store a value, into an input unless ``into`` is None."""


def replay(recipe: Recipe, backend: Backend) -> Mapping[int, Any]:
    """Run a recipe over a backend; the value of every variable."""
    values: dict[int, Any] = {i: backend.tensor(given) for i, given in enumerate(recipe.inputs)}
    for var, _ in recipe.scalars:
        values[var.number] = backend.scalar()
    for step in recipe.steps:
        _run(step, backend, values)
    for output in recipe.outputs:
        _store(output, backend, values)
    return values


def _run(step: Step, backend: Backend, values: dict[int, Any]) -> None:
    made = backend.call(step.name, [_value(arg, values) for arg in step.args])
    values.update(zip(step.results, made if len(step.results) > 1 else (made,), strict=True))


def _store(output: Output, backend: Backend, values: Mapping[int, Any]) -> None:
    backend.output(values[output.value.number], None if output.into is None else values[output.into])


def _value(arg: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(arg, Var):
        return values[arg.number]
    return [_value(part, values) for part in arg] if isinstance(arg, tuple) else arg


class Recording:
    """The backend that records a FusionDefinition."""

    def __init__(self, nvfuser: Any, fd: Any) -> None:
        self.fd = fd
        self.types = _types(nvfuser.DataType)

    def tensor(self, given: Input) -> Any:
        """An input of the definition."""
        return self.fd.define_tensor(shape=list(given.shape), contiguity=list(given.contiguity),
                                     dtype=self.types[given.dtype], stride_order=list(given.stride_order))

    def scalar(self) -> Any:
        """An int64 argument."""
        return self.fd.define_scalar(self.types[torch.int64])

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """An op of that name."""
        given = [self.types[arg] if isinstance(arg, torch.dtype) else arg for arg in args]
        return getattr(self.fd.ops, name)(*given)

    def output(self, value: Any, into: Any) -> None:
        """An output, or what overwrites an input."""
        self.fd.add_output(*((value,) if into is None else (value, into)))


def _types(kinds: Any) -> dict[torch.dtype, Any]:
    return {torch.float16: kinds.Half, torch.bfloat16: kinds.BFloat16, torch.float32: kinds.Float,
            torch.float64: kinds.Double, torch.int32: kinds.Int32, torch.int64: kinds.Int, torch.bool: kinds.Bool}


def define(recipe: Recipe) -> Any:
    """The FusionDefinition of a recipe. Imports nvFuser; call it only where :func:`availability.find` says it is there.

    nvFuser sorts strides with tensors of its own: no mode of a trace around us may see them.
    """
    from dynafuse.lowering.nvfuser.availability import load

    nvfuser = load()
    fd = nvfuser.FusionDefinition()
    with _disable_current_modes(), fd:
        replay(recipe, Recording(nvfuser, fd))
    return fd
