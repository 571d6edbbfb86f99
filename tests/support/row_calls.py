"""Calls of rows of the op table: written into a graph, run by eager, and results compared with eager's and float64's.

Worked example: ``compare(found, expected := eager(row, sample), reference(row, sample, expected), "relu")`` passes where what was
``found`` is no further from float64 than eager is, but for rounding.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dynafuse.ops import Kind, Row
from tests.support import graphs
from tests.support.samples import Sample, flat

ROUNDED_CONSTANTS = ("hardsigmoid", "hardswish", "nan_to_num", "nextafter")
"""Eager's own constants or limits depend on the dtype, so that float64 is no reference."""

SLACK = {torch.float64: 1e-11, torch.float32: 4e-6, torch.bfloat16: 1.1 * 2**-7, torch.float16: 0.75 * 2**-10}
"""Relative error that is none, by dtype. Triton's interpreter cuts off when it makes a bfloat16, where a GPU rounds."""


def write(build: graphs.Builder, row: Row, sample: Sample, nodes: Any) -> Any:
    """The call; a view is followed by a copy, since alone it computes nothing."""
    rest = iter(nodes)
    args, kwargs = tree_map(lambda a: next(rest) if isinstance(a, torch.Tensor) else a, (sample.args, sample.kwargs))
    made = build.op(row.target, *args, **kwargs)
    if isinstance(made.meta["val"], tuple):
        made = build.op(operator.getitem, made, 0)
    return build.op("aten.clone.default", made) if row.kind is Kind.VIEW else made


def eager(row: Row, sample: Sample) -> torch.Tensor | None:
    """Eager's result, or None where eager does not take these arguments."""
    args, kwargs = tree_map(copied, (sample.args, sample.kwargs))
    try:
        result = row.target(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
        return None
    result = result[0] if isinstance(result, tuple) else result
    return result.clone() if row.kind is Kind.VIEW else result


def copied(value: Any) -> Any:
    """A tensor of the same values and strides in memory of its own."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((extent,), (1,)).clone().as_strided(value.shape, value.stride(), 0)


def tensors(sample: Sample) -> list[torch.Tensor]:
    return [a for a in flat([*sample.args, *sample.kwargs.values()]) if isinstance(a, torch.Tensor)]


def reference(row: Row, sample: Sample, expected: torch.Tensor) -> torch.Tensor | None:
    """The result in float64, for floating-point results."""
    if not expected.is_floating_point() or any(name in str(row.target) for name in ROUNDED_CONSTANTS):
        return None
    inputs = tensors(sample)
    integers = row.kind is Kind.POINTWISE and not any(t.is_floating_point() for t in inputs)

    def widened(position: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or position in row.raw:
            return value
        return value.double() if value.is_floating_point() or integers else value

    args = [[widened(-1, b) for b in a] if isinstance(a, list) else widened(k, a) for k, a in enumerate(sample.args)]
    kwargs = {k: v for k, v in sample.kwargs.items() if k != "dtype"}
    found = eager(row, Sample(sample.what, args, kwargs))
    return found if found is not None and found.shape == expected.shape and found.is_floating_point() else None


def compare(found: torch.Tensor, expected: torch.Tensor, truth: torch.Tensor | None, what: str) -> None:
    """Equal sizes and dtype; equal integers; floats no further from the truth than twice eager, and a little."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    if not expected.is_floating_point():
        assert torch.equal(found, expected), f"{what}: {found} is not {expected}"
        return
    exact = (expected if truth is None else truth).double()
    finite = expected.isfinite() & exact.isfinite()
    same = (found == expected) | (found.isnan() & expected.isnan())
    assert (finite | same).all(), f"{what}: NaN or Inf differ: {found} is not {expected}"
    ours, theirs = ((t.double() - exact).abs()[finite] for t in (found, expected))
    slack = max(SLACK[expected.dtype], SLACK[torch.float32] if truth is None else 0)
    worst = ours - 2 * theirs - slack * exact.abs()[finite]
    assert (worst <= min(slack, 2e-6)).all(), (
        f"{what}: off by {ours.max()}, eager by {theirs.max()}\n{found}\n{expected}")
