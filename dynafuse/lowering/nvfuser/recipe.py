"""Recipes: fusions as data, with inputs, ops in order, and outputs. They are made, kept and compared without nvFuser.

Worked example, ``relu(x) + 1`` over float32[8, 4]::

    t0 = input(shape=(8, 4), contiguity=(True, True), stride_order=(1, 0), dtype=float32)
    t1 = maximum(t0, 0.0)  # float32, aten.relu.default
    t2 = add(t1, 1.0)  # float32, aten.add.Tensor
    output(t2)

``encode`` and ``decode`` are exact: numbers come back with their type and their last bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True)
class Var:
    """A tensor or scalar of a fusion, named by its number."""

    number: int

    def __str__(self) -> str:
        return f"t{self.number}"

    __repr__ = __str__


Argument: TypeAlias = "Var | bool | int | float | torch.dtype | tuple[Argument, ...] | None"


@dataclass(frozen=True)
class Input:
    """A tensor that the fusion reads; its variable's number is its position."""

    shape: tuple[int, ...]  # -1 for a size that is known at run time
    contiguity: tuple[bool | None, ...]  # outermost in memory first; None for a dimension of size 1, or an expanded one
    stride_order: tuple[int, ...]  # per dimension, its rank in memory: 0 is innermost
    dtype: torch.dtype

    def __str__(self) -> str:
        return (f"input(shape={self.shape}, contiguity={self.contiguity}, stride_order={self.stride_order}, "
                f"dtype={str(self.dtype)[6:]})")


@dataclass(frozen=True)
class Step:
    """One op of nvFuser: ``fd.ops.<name>(*args)`` defines ``results``."""

    name: str
    args: tuple[Argument, ...]
    results: tuple[int, ...]  # numbers of variables
    dtype: torch.dtype | None  # None for scalars, which are sizes
    origin: str = field(default="", compare=False)  # the ATen op that it belongs to

    def __str__(self) -> str:
        left = ", ".join(f"t{number}" for number in self.results)
        notes = ", ".join(filter(None, (str(self.dtype)[6:] if self.dtype else "size", self.origin)))
        return f"{left} = {self.name}({', '.join(map(_argument_text, self.args))})  # {notes}"


@dataclass(frozen=True)
class Output:
    """A stored variable."""

    value: Var
    into: int | None = None  # the input that it overwrites
    copies: bool = False  # whether its elements are an input's, or those of another output

    def __str__(self) -> str:
        return f"output({self.value}{'' if self.into is None else f', into=t{self.into}'})"


@dataclass(frozen=True)
class Recipe:
    """A fusion as data."""

    inputs: tuple[Input, ...]
    scalars: tuple[tuple[Var, int], ...]  # sizes that it takes after its inputs: variable, position among size symbols
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]

    def __str__(self) -> str:
        lines = [f"t{i} = {tensor}" for i, tensor in enumerate(self.inputs)]
        lines += [f"{var} = size(s{symbol})" for var, symbol in self.scalars]
        return "\n".join([*lines, *map(str, self.steps), *map(str, self.outputs)])


def _argument_text(arg: Argument) -> str:
    if isinstance(arg, torch.dtype):
        return str(arg)[6:]
    if isinstance(arg, tuple):
        return f"[{', '.join(map(_argument_text, arg))}]"
    return repr(arg)


# As text --------------------------------------------------------------------------------------------------------------


def encode(recipe: Recipe) -> str:
    """Return a recipe as JSON."""
    return json.dumps({
        "inputs": [[i.shape, i.contiguity, i.stride_order, str(i.dtype)[6:]] for i in recipe.inputs],
        "scalars": [[var.number, symbol] for var, symbol in recipe.scalars],
        "steps": [[s.name, _to_json(s.args), s.results, s.dtype and str(s.dtype)[6:], s.origin] for s in recipe.steps],
        "outputs": [[o.value.number, o.into, o.copies] for o in recipe.outputs],
    })


def decode(text: str) -> Recipe:
    """Return the recipe that :func:`encode` has written."""
    data = json.loads(text)
    return Recipe(
        tuple(Input(tuple(shape), tuple(flags), tuple(order), getattr(torch, dtype))
              for shape, flags, order, dtype in data["inputs"]),
        tuple((Var(number), symbol) for number, symbol in data["scalars"]),
        tuple(Step(name, _from_json(args), tuple(results), dtype and getattr(torch, dtype), origin)
              for name, args, results, dtype, origin in data["steps"]),
        tuple(Output(Var(number), into, copies) for number, into, copies in data["outputs"]),
    )


def _to_json(arg: Argument) -> Any:
    if isinstance(arg, Var):
        return {"var": arg.number}
    if isinstance(arg, torch.dtype):
        return {"dtype": str(arg)[6:]}
    return [_to_json(item) for item in arg] if isinstance(arg, tuple) else arg


def _from_json(arg: Any) -> Any:
    if isinstance(arg, dict):
        return Var(arg["var"]) if "var" in arg else getattr(torch, arg["dtype"])
    return tuple(map(_from_json, arg)) if isinstance(arg, list) else arg
