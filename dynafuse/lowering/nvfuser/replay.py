"""Replays a recipe over a backend with nvFuser's ops: a FusionDefinition, or in tests torch itself.

Worked example::

    fd = define(lower(spec))          # records the fusion; compiles nothing
    fd.execute([x, y])                # on a GPU
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dynafuse.lowering.nvfuser.availability import load
from dynafuse.lowering.nvfuser.recipe import Input, Output, Recipe, Step, Var


class Backend(Protocol):
    """The ops that a recipe is replayed over."""

    def tensor(self, description: Input) -> Any:
        """Return the next tensor argument."""

    def scalar(self) -> Any:
        """Return the next integer argument, a size."""

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """Return the result of an op; a tuple if it has several."""

    def output(self, value: Any, into: Any) -> None:
        """Store a value: in input ``into``, or in a new tensor if that is None."""


def replay(recipe: Recipe, backend: Backend) -> Mapping[int, Any]:
    """Run a recipe over a backend; returns the value of every variable, by its number."""
    values: dict[int, Any] = {i: backend.tensor(description) for i, description in enumerate(recipe.inputs)}
    for var, _ in recipe.scalars:
        values[var.number] = backend.scalar()
    for step in recipe.steps:
        _run(step, backend, values)
    for output in recipe.outputs:
        _store(output, backend, values)
    return values


def _run(step: Step, backend: Backend, values: dict[int, Any]) -> None:
    result = backend.call(step.name, [_value(arg, values) for arg in step.args])
    values.update(zip(step.results, result if len(step.results) > 1 else (result,), strict=True))


def _store(output: Output, backend: Backend, values: Mapping[int, Any]) -> None:
    backend.output(values[output.value.number], None if output.into is None else values[output.into])


def _value(arg: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(arg, Var):
        return values[arg.number]
    return [_value(item, values) for item in arg] if isinstance(arg, tuple) else arg


class FusionBackend:
    """Adds the ops of a recipe to a FusionDefinition.

    Args:
        nvfuser: The module.
        fd: The definition.
    """

    def __init__(self, nvfuser: Any, fd: Any) -> None:
        self.fd = fd
        self.types = _types(nvfuser.DataType)

    def tensor(self, description: Input) -> Any:
        """Define an input."""
        return self.fd.define_tensor(shape=list(description.shape), contiguity=list(description.contiguity),
                                     dtype=self.types[description.dtype], stride_order=list(description.stride_order))

    def scalar(self) -> Any:
        """Define an int64 argument."""
        return self.fd.define_scalar(self.types[torch.int64])

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """Add the op of that name."""
        return getattr(self.fd.ops, name)(*(self.types[arg] if isinstance(arg, torch.dtype) else arg for arg in args))

    def output(self, value: Any, into: Any) -> None:
        """Add an output, or overwrite an input."""
        self.fd.add_output(*((value,) if into is None else (value, into)))


def _types(types: Any) -> dict[torch.dtype, Any]:
    return {torch.float16: types.Half, torch.bfloat16: types.BFloat16, torch.float32: types.Float,
            torch.float64: types.Double, torch.int32: types.Int32, torch.int64: types.Int, torch.bool: types.Bool}


def define(recipe: Recipe) -> Any:
    """Return the FusionDefinition of a recipe, without compiling it.

    It imports nvFuser: call it only where :func:`availability.find` says that nvFuser is available.
    """
    nvfuser = load()
    fd = nvfuser.FusionDefinition()
    with _disable_current_modes(), fd:  # nvFuser sorts strides with tensors, which no tracing mode around us may see
        replay(recipe, FusionBackend(nvfuser, fd))
    return fd
