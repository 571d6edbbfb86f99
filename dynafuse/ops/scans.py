"""Rows of scans: each element of the result is made of all elements of its row up to there.

Worked example: ``cumsum(x, 1)`` of ``bool[2, 3]`` adds integers of 64 bits along the second dimension. Its row is one of
three elements, and is walked from the first to the last.

The operand is converted to the output's dtype before it is scanned; 16-bit floats are accumulated in float32.
"""

from __future__ import annotations

import torch

from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Call, Kind, Row, register

_SCANS = {  # a recurrence, its arithmetic per element: a tile is combined by steps of which each doubles what is known
    "cumsum": ("aten.cumsum.default", 4.0),
    "cumprod": ("aten.cumprod.default", 4.0),
    "logcumsumexp": ("aten.logcumsumexp.default aten._logcumsumexp.default", 60.0),
}


def _accepts(call: Call) -> str:
    """Return why a scan cannot be fused, or "": eager has none of these dtypes and says so."""
    if call.dtype is torch.bool:
        return "a scan of bools"
    takes_floats = "logcumsumexp" in str(call.target)
    return "logcumsumexp of integers" if takes_floats and not call.dtype.is_floating_point else ""


for _name, (_names, _flops) in _SCANS.items():
    for _target in overloads(_names):
        register(Row(_target, Kind.SCAN, reduction=_name, flops=_flops, accepts=_accepts))
