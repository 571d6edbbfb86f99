"""Hoisted scalars: the numbers of a call that do not change its code, so that kernels take them as arguments.

These are floats that compilers make nothing of, and the numbers of seeds.

Worked example: layers that add 1e-5 and 1e-6 to a variance have one kernel, which computes ``v3 + k0``. A layer that adds
1.0 has another, and so has one that computes in float64, which a float32 argument would not serve. Layers that drop out
draw from one seed after another of their graph: ``k0`` is the seed's number, as a float32 like all such arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dynafuse.ops.literals import opmath
from dynafuse.ops.promotion import comparands
from dynafuse.ops.table import Cast, Kind, Row

_FLOAT32 = torch.finfo(torch.float32)
_MOST_EXACT = 2**24
"""Float32 holds every integer up to it."""


@dataclass(frozen=True)
class Hoisted:
    """The number that a kernel is handed for an argument: its value, or the reciprocal of that."""

    value: float
    inverse: bool


def hoisted_scalars(
    row: Row | None, args: Mapping[str, Any], out: torch.dtype, operands: Iterable[torch.dtype]
) -> dict[str, Hoisted]:
    """Return the arguments of a call that kernels are handed, by name.

    Args:
        row: The op's row, if it has one.
        args: The call's arguments by name.
        out: The dtype of its result.
        operands: The dtypes of its tensors.
    """
    if row is None or not (row.hoists or row.hoists_inverse):
        return {}
    if row.kind is Kind.RANDOM:
        return dict(_seed_numbers(row, args))
    dtypes = tuple(operands)
    return dict(_floats(row, comparands(row, args, dtypes))) if _is_float32(row, out, dtypes) else {}


def _seed_numbers(row: Row, args: Mapping[str, Any]) -> Iterator[tuple[str, Hoisted]]:
    for position, (name, value) in enumerate(args.items()):
        if position in row.hoists and isinstance(value, int) and 0 <= value <= _MOST_EXACT:
            yield name, Hoisted(float(value), False)


def _is_float32(row: Row, out: torch.dtype, operands: Collection[torch.dtype]) -> bool:
    """Return whether the call's expression is evaluated in float32."""
    if row.cast is Cast.OUTPUT:
        return opmath(out) is torch.float32
    return row.cast is Cast.PROMOTED and {opmath(dtype) for dtype in operands} == {torch.float32}


def _floats(row: Row, args: Mapping[str, Any]) -> Iterator[tuple[str, Hoisted]]:
    for position, (name, value) in enumerate(args.items()):
        if not isinstance(value, float) or not _is_ordinary(value) or _is_factor_of_number(name, args):
            continue
        if position in row.hoists:
            yield name, Hoisted(value, False)
        elif position in row.hoists_inverse and _is_ordinary(1 / value):
            yield name, Hoisted(1 / value, True)


def _is_ordinary(value: float) -> bool:
    """Return whether compilers make nothing of a value: a normal float32 that is no integer and no power of two."""
    return _FLOAT32.tiny <= abs(value) <= _FLOAT32.max and not value.is_integer() and math.frexp(abs(value))[0] != 0.5


def _is_factor_of_number(name: str, args: Mapping[str, Any]) -> bool:
    """Return whether a float scales another number: their product is taken in float64, before there is a kernel."""
    return name == "alpha" and isinstance(args.get("other"), (bool, int, float))
