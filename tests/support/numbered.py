"""Calls of every row of the op table that takes a float as an argument of its kernel.

Worked example: ``bound(row_of("aten.div.Tensor"), [torch.float32, 0.3], torch.bfloat16)`` is the region of a division by 0.3,
whose kernel multiplies by ``k0``, with the tensor that it divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from dynafuse import ops
from dynafuse.cache.canonical import CanonicalRegion, canonical
from dynafuse.config import resolve
from dynafuse.ops import Row
from dynafuse.ops.overloads import overloads
from tests.support import graphs
from tests.support.samples import values

NUMBER = 0.3
NUMBERS_FOR_TENSORS = frozenset(overloads(
    "aten.add.Tensor aten.sub.Tensor aten.mul.Tensor aten.div.Tensor aten.true_divide.Tensor prims.add.default "
    "prims.sub.default prims.mul.default prims.div.default prims.lt.default prims.ge.default prims.maximum.default"))
"""Ops that graphs call with numbers where their schemas say tensors."""


def calls(row: Row) -> Iterator[list[Any]]:
    """Calls of an op with one number each; a dtype stands for a tensor of it."""
    arguments = row.target._schema.arguments
    for position in (k for k in (*row.hoists, *row.hoists_inverse) if k < len(arguments)):
        scales_number = arguments[position].name == "alpha" and "Tensor" not in str(arguments[1].type)
        if not scales_number and (arguments[position].type.kind() == "NumberType" or row.target in NUMBERS_FOR_TENSORS):
            yield [NUMBER if k == position else _given(argument) for k, argument in enumerate(arguments)]


def _given(argument: Any) -> Any:
    if "Tensor" in str(argument.type):
        return torch.bool if argument.name in ("condition", "mask") else torch.float32
    return argument.default_value if argument.has_default_value() and argument.default_value is not None else 2.0


ROWS = [row for row in ops.rows() if list(calls(row))]


def bound(row: Row, given: list[Any], dtype: torch.dtype) -> tuple[CanonicalRegion, list[torch.Tensor]]:
    """The region of a call, and its inputs."""
    tensors = [values((6, 40), torch.bool if value is torch.bool else dtype, k)
               for k, value in enumerate(given) if isinstance(value, torch.dtype)]

    def write(build: graphs.Builder, *inputs: Node) -> Node:
        rest = iter(inputs)
        args = [next(rest) if isinstance(value, torch.dtype) else value for value in given]
        named = [a.name for a in row.target._schema.arguments if a.kwarg_only]
        split = len(args) - len(named)
        return build.op(row.target, *args[:split], **dict(zip(named, args[split:], strict=True)))

    plan = graphs.planned(graphs.built(write, *tensors))
    (region,) = plan.regions
    made = canonical(plan.annotated, region, resolve(environ={}).key(), "interpreter")
    return made, [tensors[int(node.name.removeprefix("arg"))] for node in made.inputs]


def regions() -> Iterator[CanonicalRegion]:
    """A region per call."""
    for row in ROWS:
        yield from (bound(row, given, torch.bfloat16)[0] for given in calls(row))
