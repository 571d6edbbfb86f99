"""What holds of ops whatever their operands: used to bring regions into one form, and to find sums that can be reordered.

Worked example: ``mul(x, y)`` and ``mul(y, x)`` are the same bits, so the key of a region does not depend on which it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynafuse.ops.overloads import overloads

EXPONENTIAL = frozenset(overloads("aten.exp.default prims.exp.default"))
DIFFERENCE = frozenset(overloads("aten.sub.Tensor prims.sub.default"))
PRODUCT = frozenset(overloads("aten.mul.Tensor prims.mul.default"))
SUM = frozenset(overloads("aten.sum.dim_IntList aten.sum.default prims.sum.default"))
MAXIMUM = frozenset(overloads("aten.amax.default prims.amax.default"))
COMMUTATIVE = frozenset(overloads(
    "aten.add.Tensor aten.mul.Tensor aten.maximum.default aten.minimum.default aten.fmax.default aten.fmin.default "
    "aten.eq.Tensor aten.ne.Tensor aten.bitwise_and.Tensor aten.bitwise_or.Tensor aten.bitwise_xor.Tensor "
    "aten.logical_and.default aten.logical_or.default aten.logical_xor.default prims.add.default prims.mul.default "
    "prims.eq.default prims.ne.default prims.bitwise_and.default prims.bitwise_or.default prims.bitwise_xor.default"))
DIMENSIONS = frozenset({"dim", "dims"})
"""Names of arguments in which reductions and concatenations count dimensions, from the front or from the end."""
CONCATENATION = frozenset(overloads("aten.cat.default"))


def commutes(target: object, args: Mapping[str, Any]) -> bool:
    """Return whether the first two operands of a call may change places: the result has the same bits."""
    return target in COMMUTATIVE and args.get("alpha", 1) == 1


def counted_from_front(dims: Any, rank: int) -> Any:
    """Return a dimension, or several, with negative ones counted from the front."""
    if isinstance(dims, (list, tuple)):
        return tuple(counted_from_front(d, rank) for d in dims)
    return dims + rank if isinstance(dims, int) and not isinstance(dims, bool) and dims < 0 else dims
