"""What convolutions that keep channels apart cost by torch's kernels, and written out in one of ours.

A library's kernel takes so many nanoseconds of a processor for an element that it makes, the more the larger its window
is: few where channels lie side by side in memory. Where each channel of the operand has several of the result, and they
lie side by side, it is run group by group.

Source of the times: 16 convolutions in bfloat16, each with channels apart and side by side, on an H200, with cuDNN as torch
2.11 comes with (``bench/depthwise.py``). Of 96 times of the library three in five are within 1.3 of what is predicted; most
others are short, or of sequences that it copies first. Of 72 of our kernels half are within 1.5; most others are short. The
faster one is chosen but for one that is close.

Worked example, on an H200: of 128 images of 144 × 56 × 56 in bfloat16 and 3 × 3 windows the result takes the library 105 µs
where channels lie side by side, its gradient 184; where images are planes 540 and 960. Written out, they take 82 and 110.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dynafuse.cost.device import Device
from dynafuse.cost.model import streaming, work_us
from dynafuse.fx import hint
from dynafuse.ops.windows import per_dim

TERM_FLOPS = 18.0
"""Instructions for an element of a window: its load, its weight's, the product, with bounds and places."""

SHARED_FLOPS = 9.0
"""The same where a lane computes several points of windows that overlap, from what it loads once."""

SHARED_BESIDE_FLOPS = 4.5
"""The same where channels lie side by side, so that a lane loads those of several at once."""

LEAST_SHARED = 1 << 20
"""Elements from which on there are enough points for that."""

MOST_SHARED = 25
"""Elements of a window up to which lanes share those of several points of planes: larger windows are walked row by row."""

MOST_POINTS = 8
"""Points that a lane computes; of larger windows they lie beside each other in rows."""

STEPS_OF_PROCESSOR = 4 * 512
"""Steps of a processor, of a register tile each, from which on it has several programs."""

TIMES_IN_SUMS = 2
"""How many times as long an element of a window takes that becomes part of a sum over all windows."""

GROUP_LAUNCH_US = 1.9
"""Microseconds that a group takes at least which is run by itself."""

GROUP_NS = 0.8
"""Nanoseconds of a processor for an element of a window, in a group that is run by itself."""


class Wanted(StrEnum):
    """What is asked for: the convolution, or a gradient of it."""

    RESULT = "result"
    INPUT = "input"
    WEIGHT = "weight"


@dataclass(frozen=True)
class Depthwise:
    """The sizes of a convolution that keeps channels apart.

    ``inputs`` and ``outputs`` are elements of the operand and of the result, ``taps`` those of a window, and ``overlaps``
    the windows that cover an element of the operand, at most. ``groups`` are the operand's channels, each with ``copies``
    in the result. ``beside`` tells whether channels lie side by side in memory, of images, whose ``rank`` is 2. ``widths``
    are the last sizes of the operand and of the result.
    """

    inputs: int
    outputs: int
    taps: int
    overlaps: int
    groups: int
    copies: int
    itemsize: int
    rank: int
    beside: bool
    widths: tuple[int, int]

    @property
    def bytes(self) -> int:
        """Return the bytes of the operand and of the result."""
        return (self.inputs + self.outputs) * self.itemsize


def depthwise_of(given: Mapping[str, Any], result: Any) -> Depthwise | None:
    """Return the sizes of a convolution or of its gradients; None if it is none that keeps several channels apart.

    Args:
        given: The call's arguments by name.
        result: What it returns.
    """
    x, weight, output = given["input"], given["weight"], given.get("grad_output", result)
    groups, lengths = hint(x.shape[1]), [hint(size) for size in weight.shape[2:]]
    if given["transposed"] or weight.dim() != x.dim() or hint(weight.shape[1]) != 1 or not given["groups"] == groups > 1:
        return None
    dilations, strides = (per_dim(given[name], len(lengths)) for name in ("dilation", "stride"))
    spans = (apart * (length - 1) + 1 for apart, length in zip(dilations, lengths, strict=True))
    overlaps = math.prod(-(-span // max(stride, 1)) for span, stride in zip(spans, strides, strict=True))
    inputs, outputs = (math.prod(map(hint, tensor.shape)) for tensor in (x, output))
    return Depthwise(inputs, outputs, math.prod(lengths), overlaps, groups, hint(weight.shape[0]) // groups,
                     x.dtype.itemsize, len(lengths), x.dim() == 4 and hint(output.stride(1)) == 1,
                     (hint(x.shape[-1]), hint(output.shape[-1])))


def library_us(convolution: Depthwise, wanted: Wanted, device: Device) -> float:
    """Predict the microseconds that a library's kernel takes.

    Args:
        convolution: The sizes.
        wanted: What is asked for.
        device: The device that is priced.
    """
    moving = work_us(streaming(convolution.bytes), device)
    if convolution.beside and convolution.copies > 1:
        terms = convolution.outputs * convolution.taps / convolution.groups
        return max(moving, convolution.groups * max(GROUP_LAUNCH_US, _spread(terms * GROUP_NS, device)))
    elements: float = convolution.inputs if wanted is Wanted.INPUT else convolution.outputs
    if convolution.beside and wanted is Wanted.RESULT:
        elements = max(elements, convolution.inputs / 2)
    times = _beside_ns if convolution.beside else _planes_ns
    return max(moving, _spread(elements * times(convolution.taps, wanted), device))


def written_us(convolution: Depthwise, wanted: Wanted, device: Device) -> float:
    """Predict the microseconds that a kernel of ours takes which has nothing else to do.

    Windows of one make it a multiplication, which takes nothing beside what it is fused with.

    Args:
        convolution: The sizes.
        wanted: What is asked for.
        device: The device that is priced.
    """
    if convolution.taps == 1:
        return 0.0
    terms = {Wanted.RESULT: convolution.outputs * convolution.taps,
             Wanted.INPUT: convolution.inputs * convolution.overlaps * convolution.copies,
             Wanted.WEIGHT: TIMES_IN_SUMS * convolution.outputs * convolution.taps}[wanted]
    return work_us(streaming(convolution.bytes, _flops_of_term(convolution, wanted, device) * terms), device)


def _flops_of_term(convolution: Depthwise, wanted: Wanted, device: Device) -> float:
    """Return the instructions for an element of a window: fewer where a lane computes several points of an image.

    That takes windows that overlap; where channels are planes, those of neighbours, which are side by side. Large ones gain
    nothing by lanes beside each other: in few images of 7 × 7, of which lanes would take seven points, those of 7 × 7 take
    an H200 more than 100 µs for 1.2 million elements, a library 11 by its other times.
    """
    elements, beside = convolution.inputs if wanted is Wanted.INPUT else convolution.outputs, convolution.beside
    overlap = convolution.overlaps > 1 if beside else convolution.overlaps == convolution.taps
    fits = convolution.taps <= MOST_SHARED or (beside and _has_tile(convolution, wanted, device))
    is_image = convolution.rank == 2 and convolution.copies == 1
    is_shared = is_image and wanted is not Wanted.WEIGHT and elements >= LEAST_SHARED and overlap and fits
    return (SHARED_BESIDE_FLOPS if beside else SHARED_FLOPS) if is_shared else TERM_FLOPS


def _has_tile(convolution: Depthwise, wanted: Wanted, device: Device) -> bool:
    """Return whether lanes can compute several points of a row, and are enough."""
    elements, width = ((convolution.inputs, convolution.widths[0]) if wanted is Wanted.INPUT else
                       (convolution.outputs, convolution.widths[1]))
    most = elements / max(STEPS_OF_PROCESSOR * device.processors, 1.0)
    return any(width % points == 0 for points in range(2, MOST_POINTS + 1) if points <= most)


def _planes_ns(taps: int, wanted: Wanted) -> float:
    """Return a processor's nanoseconds for an element where each channel is a plane by itself."""
    return {Wanted.RESULT: max(1.3, 0.09 * taps), Wanted.INPUT: max(0.24 * min(taps, 9), 0.12 * taps),
            Wanted.WEIGHT: 0.2 * taps}[wanted]


def _beside_ns(taps: int, wanted: Wanted) -> float:
    """Return a processor's nanoseconds for an element where channels lie side by side."""
    return {Wanted.RESULT: 0.024 * taps, Wanted.INPUT: 0.045 * taps, Wanted.WEIGHT: 0.15 + 0.012 * taps}[wanted]


def _spread(ns: float, device: Device) -> float:
    """Return the microseconds in which all processors do what one does in so many nanoseconds."""
    return ns / max(device.processors, 1.0) / 1e3
