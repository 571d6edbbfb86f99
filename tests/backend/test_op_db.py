"""torch's own operator samples (OpInfo's ``op_db``) through the backend, forward and backward, against eager.

Every op runs once in float32. One whose graph holds a fused region goes on with more samples, and with one or two
further dtypes; which ones is fixed by a hash of its name. ``OP_DB=all pytest tests/backend/test_op_db.py`` runs up to
twenty samples in every dtype.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from differential import Outcome, compare, compiled, copies, recorded, regions, run
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

ALL = os.environ.get("OP_DB") == "all"
SAMPLES = 20 if ALL else 3  # of an op that is fused, per dtype
OTHER_SAMPLES = 20 if ALL else 1  # of another dtype than float32
OTHERS = (torch.bfloat16, torch.int64, torch.float64, torch.bool, torch.float16, torch.uint8, torch.int32)

REAL: dict[str, Callable[..., Any]] = {  # their op is a lambda inside torch.testing, which Dynamo does not trace
    "nn.functional.scaled_dot_product_attention": F.scaled_dot_product_attention,
}
UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Their values are whatever the memory held."""

UNTRACEABLE: dict[str, str] = {}
"""Ops that torch.compile cannot trace, whatever the backend, with the reason."""

KNOWN: dict[str, str] = {}
"""Test id to the reason why it fails: faults of the product that stand."""


def tests() -> list[Any]:
    """One test per op and dtype: float32, and one other dtype picked by the op's name."""
    found = []
    for info in op_db:
        name = info.formatted_name
        dtypes = info.supported_dtypes("cpu")
        others = [dtype for dtype in OTHERS if dtype in dtypes]
        picked = others if ALL else [others[zlib.crc32(name.encode()) % len(others)]] if others else []
        for dtype in (torch.float32, *picked):
            if dtype in dtypes:
                key = f"{name}-{str(dtype)[6:]}"
                marks = [pytest.mark.xfail(strict=True, reason=KNOWN[key])] if key in KNOWN else []
                found.append(pytest.param(info, dtype, id=key, marks=marks))
    return found


@pytest.mark.parametrize(("info", "dtype"), tests())
def test_op(info: OpInfo, dtype: torch.dtype) -> None:
    if info.formatted_name in UNTRACEABLE:
        pytest.skip(UNTRACEABLE[info.formatted_name])
    differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    samples = spread(list(info.sample_inputs("cpu", dtype, requires_grad=differentiable and dtype.is_floating_point)),
                     SAMPLES if dtype is torch.float32 else OTHER_SAMPLES)
    for sample in samples:
        if not check_sample(info, sample):
            return  # nothing is fused: one sample is enough


def spread(samples: Sequence[SampleInput], count: int) -> list[SampleInput]:
    """``count`` of the samples, from the first to the last."""
    if len(samples) <= count:
        return list(samples)
    return [samples[k * len(samples) // count] for k in range(count)]


def check_sample(info: OpInfo, sample: SampleInput) -> int:
    """Compare one sample; returns the number of fused regions."""
    target = REAL.get(info.name, info.get_op())
    arguments = (sample.input, sample.args, sample.kwargs)

    def call(first: Any, args: Any, kwargs: Any) -> Any:
        return target(first, *args, **kwargs)

    eager = run(call, copies(arguments))
    with recorded() as graphs:
        ours = traced(call, arguments)
    if info.name in UNSET:
        torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.zero_, (ours.result, eager.result))
    compare(ours, eager, reference(call, arguments))
    return regions(graphs)


def traced(call: Callable[..., Any], arguments: Any) -> Outcome:
    """Run compiled, as one graph if Dynamo can; random numbers are eager's own, so that they can be compared."""
    from torch._dynamo.exc import TorchDynamoException

    torch._dynamo.reset()
    try:
        return run(compiled(call, fallback_random=True), copies(arguments))
    except TorchDynamoException as error:
        if "dynafuse" in str(error):
            raise
        torch._dynamo.reset()
        return run(compiled(call, fullgraph=False, fallback_random=True), copies(arguments))


def reference(call: Callable[..., Any], arguments: Any) -> Outcome | None:
    """The same in float64, where the op has it."""
    try:
        return run(call, copies(arguments, torch.float64))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
