"""Which numbers of a call do not change its code, so that kernels take them as arguments: floats, and which seed it takes.

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

_RANGE = torch.finfo(torch.float32)
_MOST_EXACT = 2**24  # integers up to it are float32's own


@dataclass(frozen=True)
class Lifted:
    """What a kernel is handed for an argument: its float, or the reciprocal of that."""

    value: float
    inverse: bool


def lifted(row: Row | None, args: Mapping[str, Any], out: torch.dtype, operands: Iterable[torch.dtype]) -> dict[str, Lifted]:
    """Of a call's arguments by name, those that kernels are handed; ``operands`` are the dtypes of its tensors."""
    if row is None or not (row.lifts or row.inverts):
        return {}
    if row.kind is Kind.RANDOM:
        return dict(_seeds(row, args))
    dtypes = tuple(operands)
    return dict(_lifted(row, comparands(row, args, dtypes))) if _in_float32(row, out, dtypes) else {}


def _seeds(row: Row, args: Mapping[str, Any]) -> Iterator[tuple[str, Lifted]]:
    for position, (name, value) in enumerate(args.items()):
        if position in row.lifts and isinstance(value, int) and 0 <= value <= _MOST_EXACT:
            yield name, Lifted(float(value), False)


def _in_float32(row: Row, out: torch.dtype, operands: Collection[torch.dtype]) -> bool:
    """Whether the call's expression is evaluated in float32."""
    if row.cast is Cast.OUTPUT:
        return opmath(out) is torch.float32
    return row.cast is Cast.PROMOTED and {opmath(dtype) for dtype in operands} == {torch.float32}


def _lifted(row: Row, args: Mapping[str, Any]) -> Iterator[tuple[str, Lifted]]:
    for position, (name, value) in enumerate(args.items()):
        if not isinstance(value, float) or not _unremarkable(value) or _is_factor_of_number(name, args):
            continue
        if position in row.lifts:
            yield name, Lifted(value, False)
        elif position in row.inverts and _unremarkable(1 / value):
            yield name, Lifted(1 / value, True)


def _unremarkable(value: float) -> bool:
    """Whether compilers make nothing of a value: an ordinary float32, no integer and no power of two."""
    return _RANGE.tiny <= abs(value) <= _RANGE.max and not value.is_integer() and math.frexp(abs(value))[0] != 0.5


def _is_factor_of_number(name: str, args: Mapping[str, Any]) -> bool:
    """Whether a float scales another number: the product of the two is taken in float64, before there is a kernel."""
    return name == "alpha" and isinstance(args.get("other"), (bool, int, float))
