"""Regions whose values are computed from one another thousands of times over: lowering does not depend on the depth."""

from __future__ import annotations

import sys

import torch

from dynafuse.ir import Axis, Layout, OpSpec, Ref, Spec, Store
from dynafuse.lowering.triton.lower import lower

FLOATS = Layout(torch.float32, (8,), (1,))


def test_a_chain_of_thousands_of_ops() -> None:
    """It is lowered, and the interpreter's limit is then what it was."""
    length, limit = 3000, sys.getrecursionlimit()
    ops = tuple(OpSpec("aten.cos.default", (("self", Ref("op", k - 1) if k else Ref("in", 0)),), (8,), torch.float32)
                for k in range(length))
    lowered = lower(Spec((FLOATS,), ops, (Axis(8),), (), (Store(length - 1, FLOATS, ((0,),)),), ()))
    assert lowered.source.count("cos(") >= length
    assert sys.getrecursionlimit() == limit
