"""A fusion as data: its inputs, its ops in order, its outputs. No nvFuser is needed to make, keep or compare one.

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
    """A tensor or scalar of a fusion, by its number."""

    number: int

    def __str__(self) -> str:
        return f"t{self.number}"

    __repr__ = __str__


Argument: TypeAlias = "Var | bool | int | float | torch.dtype | tuple[Argument, ...] | None"


@dataclass(frozen=True)
class Input:
    """A tensor that the fusion reads; its variable's number is its position. ``-1`` is a size known at run time."""

    shape: tuple[int, ...]
    contiguity: tuple[bool | None, ...]  # outermost in memory first; None: of size 1, or expanded
    stride_order: tuple[int, ...]  # per dimension, its rank in memory: 0 is innermost
    dtype: torch.dtype

    def __str__(self) -> str:
        return (f"input(shape={self.shape}, contiguity={self.contiguity}, stride_order={self.stride_order}, "
                f"dtype={str(self.dtype)[6:]})")


@dataclass(frozen=True)
class Step:
    """One op of nvFuser: ``fd.ops.<name>(*args)`` defines ``results``. ``dtype`` is None for scalars (sizes)."""

    name: str
    args: tuple[Argument, ...]
    results: tuple[int, ...]
    dtype: torch.dtype | None
    origin: str = field(default="", compare=False)  # the ATen op that it belongs to

    def __str__(self) -> str:
        left = ", ".join(f"t{number}" for number in self.results)
        notes = ", ".join(filter(None, (str(self.dtype)[6:] if self.dtype else "size", self.origin)))
        return f"{left} = {self.name}({', '.join(map(_shown, self.args))})  # {notes}"


@dataclass(frozen=True)
class Output:
    """A stored variable. ``into`` is the input that it overwrites; ``copies`` says that it only moves inputs' elements."""

    value: Var
    into: int | None = None
    copies: bool = False

    def __str__(self) -> str:
        return f"output({self.value}{'' if self.into is None else f', into=t{self.into}'})"


@dataclass(frozen=True)
class Recipe:
    """A fusion. ``scalars`` are run-time sizes: variable and position among the spec's size symbols, in argument order."""

    inputs: tuple[Input, ...]
    scalars: tuple[tuple[Var, int], ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]

    def __str__(self) -> str:
        lines = [f"t{i} = {given}" for i, given in enumerate(self.inputs)]
        lines += [f"{var} = size(s{symbol})" for var, symbol in self.scalars]
        return "\n".join([*lines, *map(str, self.steps), *map(str, self.outputs)])


def _shown(arg: Argument) -> str:
    if isinstance(arg, torch.dtype):
        return str(arg)[6:]
    if isinstance(arg, tuple):
        return f"[{', '.join(map(_shown, arg))}]"
    return repr(arg)


# As text --------------------------------------------------------------------------------------------------------------


def encode(recipe: Recipe) -> str:
    """A recipe as JSON."""
    return json.dumps({
        "inputs": [[i.shape, i.contiguity, i.stride_order, str(i.dtype)[6:]] for i in recipe.inputs],
        "scalars": [[var.number, symbol] for var, symbol in recipe.scalars],
        "steps": [[s.name, _plain(s.args), s.results, s.dtype and str(s.dtype)[6:], s.origin] for s in recipe.steps],
        "outputs": [[o.value.number, o.into, o.copies] for o in recipe.outputs],
    })


def decode(text: str) -> Recipe:
    """The recipe of a JSON text."""
    held = json.loads(text)
    return Recipe(
        tuple(Input(tuple(shape), tuple(flags), tuple(order), getattr(torch, dtype))
              for shape, flags, order, dtype in held["inputs"]),
        tuple((Var(number), symbol) for number, symbol in held["scalars"]),
        tuple(Step(name, _rich(args), tuple(results), dtype and getattr(torch, dtype), origin)
              for name, args, results, dtype, origin in held["steps"]),
        tuple(Output(Var(number), into, copies) for number, into, copies in held["outputs"]),
    )


def _plain(arg: Argument) -> Any:
    if isinstance(arg, Var):
        return {"var": arg.number}
    if isinstance(arg, torch.dtype):
        return {"dtype": str(arg)[6:]}
    return [_plain(part) for part in arg] if isinstance(arg, tuple) else arg


def _rich(arg: Any) -> Any:
    if isinstance(arg, dict):
        return Var(arg["var"]) if "var" in arg else getattr(torch, arg["dtype"])
    return tuple(map(_rich, arg)) if isinstance(arg, list) else arg
