"""torch's own operator samples (OpInfo's ``op_db``) through the backend, forward and backward, against eager.

Every op that has a row in the op table runs in float32, and every fourth in another dtype too, picked by its name: which dtypes
rows can do is for the tests of rows. Of the other ops every fourth runs, of the families that libraries compute every eighth.
Each runs one sample, the first or the middle one. ``OP_DB=all pytest tests/backend/test_op_db.py`` runs up to twenty, in every
dtype.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from dynafuse import ops
from tests.support.differential import Outcome, compare, compiled, copies, regions, run
from tests.support.graphs import recorded

ALL = os.environ.get("OP_DB") == "all"
SAMPLES = 20  # of an op that is fused, per dtype, where all are run
OTHERS = (torch.bfloat16, torch.int64, torch.float64, torch.bool, torch.float16, torch.uint8, torch.int32)

ROWS = {row.target._schema.name.split("::")[1] for row in ops.rows()}
"""Names of the ops that have rows."""

REAL: dict[str, Callable[..., Any]] = {  # their op is a lambda inside torch.testing, which Dynamo does not trace
    "nn.functional.scaled_dot_product_attention": F.scaled_dot_product_attention,
}
UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Their values are whatever the memory held."""

FAMILIES = ("fft_", "linalg_", "signal_", "special_", "jiterator_")
"""Ops of these that have no row are all alike to the backend: it calls them."""

UNTRACEABLE: dict[str, str] = {
    "masked_select": "its meta function bounds the result by the input's elements, not by those of the broadcast",
}
"""Ops that torch.compile cannot trace, whatever the backend, with the reason."""

INEXACT: dict[str, tuple[float, str]] = {
    "nn_functional_hardsigmoid-float64": (1e-7, "eager's backward multiplies by a sixth in float32"),
    "logcumsumexp-float64": (1e-11, "eager's backward takes exponentials of differences of 10,000 and nearly as much"),
    "nn_functional_interpolate_bilinear-uint8": (1.0, "eager interpolates in fixed point"),
    "nn_functional_upsample_bilinear-uint8": (1.0, "eager interpolates in fixed point"),
}
"""Test id to the absolute tolerance, and the reason, where it is eager that is inexact."""


def sampled_cases() -> list[Any]:
    """One test per op and dtype: float32, and of some ops one other dtype picked by the op's name."""
    found = []
    for info in op_db:
        name = info.formatted_name
        dtypes = info.supported_dtypes("cpu")
        others = [dtype for dtype in OTHERS if dtype in dtypes]
        number = zlib.crc32(name.encode())
        known = info.aten_name in ROWS
        if not (ALL or known) and number % (8 if name.startswith(FAMILIES) else 4):
            continue
        wanted = others and (torch.float32 not in dtypes or (known and number // 8 % 4 == 0))
        picked = others if ALL else [others[number // 32 % len(others)]] if wanted else []
        for dtype in (torch.float32, *picked):
            if dtype in dtypes:
                found.append(pytest.param(info, dtype, id=f"{name}-{str(dtype)[6:]}"))
    return found


@pytest.fixture(autouse=True)
def _samples_are_not_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch notes each sample on the ``unittest`` method up the stack; there is none, and the search takes long."""
    monkeypatch.setattr(common_utils, "extract_test_fn", lambda: None)


@pytest.mark.parametrize(("info", "dtype"), sampled_cases())
def test_op(info: OpInfo, dtype: torch.dtype) -> None:
    if info.formatted_name in UNTRACEABLE:
        pytest.skip(UNTRACEABLE[info.formatted_name])
    differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=differentiable and dtype.is_floating_point))
    for sample in spread(samples, SAMPLES) if ALL else one(samples, info, dtype):
        if not check_sample(info, dtype, sample):
            return  # nothing is fused: one sample is enough


def spread(samples: Sequence[SampleInput], count: int) -> list[SampleInput]:
    """``count`` of the samples, from the first to the last."""
    if len(samples) <= count:
        return list(samples)
    return [samples[k * len(samples) // count] for k in range(count)]


def one(samples: Sequence[SampleInput], info: OpInfo, dtype: torch.dtype) -> Sequence[SampleInput]:
    """The first sample, or for half of the ops in float32 the middle one."""
    middle = dtype is torch.float32 and zlib.crc32(info.formatted_name.encode()) % 2
    return spread(samples, 2)[-1:] if middle else samples[:1]


def check_sample(info: OpInfo, dtype: torch.dtype, sample: SampleInput) -> int:
    """Compare one sample; returns the number of fused regions. Skips what eager itself refuses."""
    target = REAL.get(info.name, info.get_op())
    arguments = (sample.input, sample.args, sample.kwargs)

    def call(first: Any, args: Any, kwargs: Any) -> Any:
        return target(first, *args, **kwargs)

    try:
        eager = run(call, copies(arguments))
    except (RuntimeError, AssertionError) as error:
        pytest.skip(f"eager raises: {error}")
    with recorded() as graphs:
        ours = traced(call, arguments)
    if info.name in UNSET:
        torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.zero_, (ours.result, eager.result))
    key = f"{info.formatted_name}-{str(dtype)[6:]}"
    if key in INEXACT:
        for a, b in ((ours.result, eager.result), (ours.gradients, eager.gradients)):
            torch.testing.assert_close(a, b, rtol=0, atol=INEXACT[key][0])
    else:
        compare(ours, eager, reference(call, arguments))
    return regions(graphs)


def traced(call: Callable[..., Any], arguments: Any) -> Outcome:
    """Run compiled, as one graph if Dynamo can; random numbers are eager's own, so that they can be compared."""
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    torch._dynamo.reset()
    try:
        return run(compiled(call, fallback_random=True), copies(arguments))
    except BackendCompilerFailed:
        raise
    except TorchDynamoException:
        torch._dynamo.reset()
        return run(compiled(call, fullgraph=False, fallback_random=True), copies(arguments))


def reference(call: Callable[..., Any], arguments: Any) -> Outcome | None:
    """The same in float64, where the op has it."""
    try:
        return run(call, copies(arguments, torch.float64))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
