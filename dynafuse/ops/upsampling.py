"""Rows of the gradients of upsampling: an element of the result is made of the gradients of the outputs that read it.

Sizes are known, so that which outputs read which element, and with which weight, is known as well: it is computed here,
for every output of a dimension. An element ``i`` is read by the outputs of a window, whose first one is an affine
function of ``i``, rounded down. Of a window's places, those that always have the same weight get it as a literal; the
others compute position and weight as the forward does, and give nothing where they do not read the element.

Worked example: ``linear`` from 4 elements to 8. Element ``i`` is read by the outputs ``2i - 1 … 2i + 2``, with weights
1/4, 3/4, 3/4 and 1/4; at the ends, where positions are cut off, a weight of 3/4 is 1.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from sympy import S

from dynafuse.ops.indexing import inside, under
from dynafuse.ops.indexing_math import as_expr, floordiv
from dynafuse.ops.literals import literal, opmath, triton_type
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Builder, Call, Index, Kind, Value, register, rewrite

MAX_WINDOW = 64
"""The most outputs that read an element: they are written out one by one."""

MAX_AT_ONCE = 25
"""The most outputs that are added for all dimensions at once: of more, the sums of one dimension are shared by many."""

MAX_OUTPUTS = 1 << 14
"""The most outputs of a dimension that are looked at one by one."""

NEGLIGIBLE = 1e-9
"""The weight below which an output does not read an element, and by which equal weights may differ: of rounding alone."""

CUBIC = -0.75
"""The parameter of cubic convolution that torch has."""

Tap = tuple[int, float]
"""An element that an output reads, and with which weight."""


# Which outputs read an element ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """Where the outputs of one dimension read its elements.

    Attributes:
        mode: ``nearest``, ``nearest-exact``, ``linear`` or ``cubic``.
        size: The elements that are read.
        count: The outputs.
        scale: The distance of neighbouring outputs, in elements.
        aligned: Whether the first and the last output are at the first and at the last element.
    """

    mode: str
    size: int
    count: int
    scale: float
    aligned: bool = False

    def taps(self, output: int) -> Iterable[Tap]:
        """Return what an output reads, in exact arithmetic but for ``nearest``: that jumps where float32 does."""
        if self.mode.startswith("nearest"):
            centre = output + 0.5 if self.mode == "nearest-exact" else float(output)
            return [(min(int(_float32(centre * _float32(self.scale))), self.size - 1), 1.0)]
        at = self.scale * output if self.aligned else self.scale * (output + 0.5) - 0.5
        if self.mode == "linear":
            low = min(int(max(at, 0.0)), self.size - 1)
            part = min(max(max(at, 0.0) - low, 0.0), 1.0)
            return [(low, 1 - part), (min(low + 1, self.size - 1), part)]
        low = math.floor(at)
        weights = _cubic_weights(at - low)
        return [(min(max(low + k - 1, 0), self.size - 1), weight) for k, weight in enumerate(weights)]

    def readers(self) -> list[dict[int, float]]:
        """Return for each element the outputs that read it, with their weights."""
        weights: list[dict[int, float]] = [{} for _ in range(self.size)]
        for output in range(self.count):
            for element, weight in self.taps(output):
                weights[element][output] = weights[element].get(output, 0.0) + weight
        return [{output: weight for output, weight in given.items() if abs(weight) > NEGLIGIBLE} for given in weights]


@dataclass(frozen=True)
class Place:
    """One place of all windows: how far it is from the first one, and what its output gives to the window's element.

    Attributes:
        offset: Its distance from the window's first place.
        weight: The weight at each element but the first and the last one; None if it is to be computed.
        ends: The weights at the first and the last element, where they are others.
    """

    offset: int
    weight: float | None
    ends: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Windows:
    """The windows of a dimension: element ``i``'s begins at output ``(step * i + shift) // divisor``."""

    step: int
    shift: int
    divisor: int
    places: tuple[Place, ...]

    def start(self, at: sympy.Expr) -> sympy.Expr:
        """Return the first place of the window of an element."""
        return floordiv(self.step * at + self.shift, self.divisor)


@functools.cache
def windows_of(sampling: Sampling) -> Windows:
    """Return the windows of a dimension: of those that begin at an affine function of the element, the shortest."""
    readers = sampling.readers()
    ratios = {(sampling.count, sampling.size), (max(sampling.count - 1, 1), max(sampling.size - 1, 1))}
    starts = [_start(readers, step // (common := math.gcd(step, divisor)), divisor // common)
              for step, divisor in sorted(ratios, reverse=True)]
    step, shift, divisor, length = min(starts, key=lambda start: (start[3], start[2]))
    places = (_place(readers, [(step * i + shift) // divisor + k for i in range(sampling.size)], k, sampling.count)
              for k in range(length))
    return Windows(step, shift, divisor, tuple(places))


def _start(readers: Sequence[Mapping[int, float]], step: int, divisor: int) -> tuple[int, int, int, int]:
    """Return where windows begin of which each has all readers of its element, and how long they are."""
    read = [(i, min(outputs), max(outputs)) for i, outputs in enumerate(readers) if outputs]
    shift = min(divisor * first + divisor - 1 - step * i for i, first, _ in read)
    return step, shift, divisor, max(last - (step * i + shift) // divisor + 1 for i, _, last in read)


def _place(readers: Sequence[Mapping[int, float]], outputs: Sequence[int], offset: int, count: int) -> Place:
    """Return the place whose outputs, one for each element, are given: those that there are have weights."""
    weights = [(i, readers[i].get(output)) for i, output in enumerate(outputs) if 0 <= output < count]
    if any(weight is None for _, weight in weights):
        return Place(offset, None)
    last = len(readers) - 1
    inner = [weight for i, weight in weights if weight is not None and 0 < i < last]
    common = (inner or [0.0 if weight is None else weight for _, weight in weights] or [0.0])[0]
    if not _equal(inner, common):
        return Place(offset, None)
    return Place(offset, common, tuple((i, w) for i, w in weights if w is not None and not _equal([w], common)))


def _equal(weights: Iterable[float], common: float) -> bool:
    return all(abs(weight - common) <= NEGLIGIBLE for weight in weights)


def _cubic_weights(part: float) -> tuple[float, float, float, float]:
    """Return the weights of the four elements around a position, of which the second is ``part`` below it."""
    near, far = ((CUBIC + 2, -(CUBIC + 3), 0.0, 1.0), (CUBIC, -5 * CUBIC, 8 * CUBIC, -4 * CUBIC))
    return _cubic(part + 1, far), _cubic(part, near), _cubic(1 - part, near), _cubic(2 - part, far)


def _cubic(x: float, factors: Sequence[float]) -> float:
    return functools.reduce(lambda total, factor: total * x + factor, factors)


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


# Calls ----------------------------------------------------------------------------------------------------------------


def _rank(call: Call) -> int:
    return next(rank for rank in (1, 2, 3) if f"{rank}d" in call.target.name())


def _mode(call: Call) -> str:
    name = call.target.name()
    modes = {"nearest_exact": "nearest-exact", "nearest": "nearest", "linear": "linear", "cubic": "cubic"}
    return next(mode for part, mode in modes.items() if part in name)


def _sizes(call: Call) -> list[tuple[sympy.Expr, sympy.Expr]]:
    """Return per dimension how many elements were read, and how many outputs there are."""
    rank = _rank(call)
    return [(as_expr(size), as_expr(count))
            for size, count in zip(call["input_size"][-rank:], call["output_size"], strict=True)]


def samplings(call: Call) -> list[Sampling]:
    """Return where outputs read, a dimension each, of a call whose sizes are known."""
    aligned = bool(call.args.get("align_corners", False))
    scales = [value for name, value in call.args.items() if name.startswith("scales")]
    return [Sampling(_mode(call), int(size), int(count), _distance(int(size), int(count), scale, aligned), aligned)
            for (size, count), scale in zip(_sizes(call), scales, strict=True)]


def _distance(size: int, count: int, scale: float | None, aligned: bool) -> float:
    """Return how far apart neighbouring outputs are, as torch computes it of sizes or of the user's factor."""
    if aligned:
        return (size - 1) / (count - 1) if count > 1 else 0.0
    return 1.0 / scale if scale is not None and scale > 0 else size / count


def accepts(call: Call) -> str:
    """Return why the windows of a call cannot be written out, or ""."""
    if reason := _unknown(call):
        return reason
    readers = math.prod(_lengths(call))
    return "" if readers <= MAX_WINDOW else f"elements that {readers} outputs read, more than {MAX_WINDOW}"


def by_dimension(call: Call) -> bool:
    """Return whether the gradient is to be made dimension by dimension, because of windows that are large in several."""
    if _unknown(call):
        return False
    lengths = _lengths(call)
    several = sum(length > 1 for length in lengths) > 1
    return several and math.prod(lengths) > MAX_AT_ONCE and max(lengths) <= MAX_WINDOW


def _unknown(call: Call) -> str:
    """Return why it cannot be said which outputs read an element, or ""."""
    if not call.dtype.is_floating_point:
        return f"upsampling of {str(call.dtype)[6:]}"
    if not all(size.is_Integer and count.is_Integer for size, count in _sizes(call)):
        return "upsampling of symbolic sizes"
    too_many = any(count > MAX_OUTPUTS for _, count in _sizes(call))
    return f"upsampling to more than {MAX_OUTPUTS} elements in a row" if too_many else ""


def _lengths(call: Call) -> list[int]:
    return [len(windows_of(sampling).places) for sampling in samplings(call)]


# Code -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Share:
    """What one place of a window gives: the output, what is to be checked, and its weight.

    ``reads`` tells whether the output reads the element, where that depends; ``weight`` is None for 1.
    """

    output: sympy.Expr
    count: int
    reads: Value | None
    weight: Value | None

    def of(self, build: Builder, body: Callable[[], Value], dtype: torch.dtype) -> Value:
        """Return the share of what ``body`` makes; 0 where there is no such output, or where it does not read."""
        def weighted() -> Value:
            value = body()
            return value if self.weight is None else build.expression("{0} * {1}", dtype, value, self.weight)

        def read() -> Value:
            return weighted() if self.reads is None else build.masked(self.reads, weighted, 0)

        return under(build, list(inside(self.output, S.Zero, sympy.Integer(self.count))), read, 0)


def _gradient(build: Builder, call: Call, index: Index) -> Value:
    """Return the sum of the gradients of the outputs that read an element, times their weights."""
    rank, wide = _rank(call), opmath(call.dtype)
    shares = [list(_shares(build, sampling, at, wide)) for sampling, at in zip(samplings(call), index[-rank:], strict=True)]

    def total(outputs: Index) -> Value:
        if len(outputs) == rank:
            return build.operand(call["grad_output"], (*index[:-rank], *outputs))
        parts = [share.of(build, functools.partial(total, (*outputs, share.output)), wide) for share in shares[len(outputs)]]
        return functools.reduce(lambda left, right: build.expression("{0} + {1}", wide, left, right), parts)

    return build.cast(total(()), call.dtype)


def _shares(build: Builder, sampling: Sampling, at: sympy.Expr, dtype: torch.dtype) -> Iterator[_Share]:
    """Yield what each place of an element's window gives."""
    windows = windows_of(sampling)
    for place in windows.places:
        output = windows.start(at) + place.offset
        if place.weight is None:
            yield _Share(output, sampling.count, *_FORWARD[sampling.mode](build, sampling, output, at, dtype))
        else:
            yield _Share(output, sampling.count, None, _known_weight(build, place, at, dtype))


def _known_weight(build: Builder, place: Place, at: sympy.Expr, dtype: torch.dtype) -> Value | None:
    """Return a weight that is the same at all elements but the first or the last one; None for 1."""
    if place.weight == 1 and not place.ends:
        return None
    assert place.weight is not None
    weight = _constant(build, place.weight, dtype)
    for end, other in place.ends:
        here = build.compare(at, "==", sympy.Integer(end))
        weight = build.expression("tl.where({0}, {1}, {2})", dtype, here, _constant(build, other, dtype), weight)
    return weight


def _constant(build: Builder, value: float, dtype: torch.dtype) -> Value:
    """Return a number that may be chosen beside another one: of two literals Triton makes float32."""
    if dtype is not torch.float64:
        return build.constant(value, dtype)
    return build.expression(f"tl.full([], {literal(value, dtype)}, {triton_type(dtype)})", dtype)


# Positions as the forward computes them -------------------------------------------------------------------------------

Reading = tuple[Value, "Value | None"]
"""Whether an output reads an element, and with which weight; None for 1."""


def _nearest(build: Builder, sampling: Sampling, output: sympy.Expr, at: sympy.Expr, _: torch.dtype) -> Reading:
    centre = "({0} + 0.5)" if sampling.mode == "nearest-exact" else "{0}"
    scale = literal(sampling.scale, torch.float32)
    position = build.expression(f"{centre} * {scale}", torch.float32, _number(build, output, torch.float32))
    return build.expression("{0} == {1}", torch.bool, _element(build, sampling, position), _int32(build, at)), None


def _linear(build: Builder, sampling: Sampling, output: sympy.Expr, at: sympy.Expr, dtype: torch.dtype) -> Reading:
    position = build.expression("tl.maximum({0}, 0.0)", dtype, _position(build, sampling, output, dtype))
    low = _element(build, sampling, position)
    part = build.expression("tl.minimum({0} - {1}, 1.0)", dtype, position, low)
    high = build.expression(f"tl.minimum({{0}} + 1, {sampling.size - 1})", torch.int32, low)
    rest = build.expression("1.0 - {0}", dtype, part)
    return _sum(build, [(low, rest), (high, part)], at, dtype)


def _cubic_reading(build: Builder, sampling: Sampling, output: sympy.Expr, at: sympy.Expr, dtype: torch.dtype) -> Reading:
    position = _position(build, sampling, output, dtype)
    floor = build.expression("tl.floor({0})", dtype, position)
    part = build.expression("{0} - {1}", dtype, position, floor)
    low = build.cast(floor, torch.int32)
    near = f"(({CUBIC + 2} * {{0}} - {CUBIC + 3}) * {{0}} * {{0}} + 1)"
    far = f"((({CUBIC} * {{0}} - {5 * CUBIC}) * {{0}} + {8 * CUBIC}) * {{0}} - {4 * CUBIC})"
    taps, distances = [], ("{0} + 1.0", "{0}", "1.0 - {0}", "2.0 - {0}")
    for k, (text, distance) in enumerate(zip((far, near, near, far), distances, strict=True)):
        weight = build.expression(text, dtype, build.expression(distance, dtype, part))
        element = build.expression(f"tl.minimum(tl.maximum({{0}} + {k - 1}, 0), {sampling.size - 1})", torch.int32, low)
        taps.append((element, weight))
    return _sum(build, taps, at, dtype)


_FORWARD: dict[str, Callable[[Builder, Sampling, sympy.Expr, sympy.Expr, torch.dtype], Reading]] = {
    "nearest": _nearest, "nearest-exact": _nearest, "linear": _linear, "cubic": _cubic_reading,
}


def _sum(build: Builder, taps: Sequence[tuple[Value, Value]], at: sympy.Expr, dtype: torch.dtype) -> Reading:
    """Return whether an output reads an element at all, and the sum of the weights with which it does."""
    here = _int32(build, at)
    hits = [build.expression("{0} == {1}", torch.bool, element, here) for element, _ in taps]
    weights = [build.expression("tl.where({0}, {1}, 0.0)", dtype, hit, weight)
               for hit, (_, weight) in zip(hits, taps, strict=True)]
    return (functools.reduce(lambda left, right: build.expression("{0} | {1}", torch.bool, left, right), hits),
            functools.reduce(lambda left, right: build.expression("{0} + {1}", dtype, left, right), weights))


def _position(build: Builder, sampling: Sampling, output: sympy.Expr, dtype: torch.dtype) -> Value:
    """Return where an output reads, between elements."""
    scale = literal(sampling.scale, dtype)
    text = f"{{0}} * {scale}" if sampling.aligned else f"({{0}} + 0.5) * {scale} - 0.5"
    return build.expression(text, dtype, _number(build, output, dtype))


def _element(build: Builder, sampling: Sampling, position: Value) -> Value:
    """Return the element at or below a position that is not negative."""
    return build.expression(f"tl.minimum({{0}}, {sampling.size - 1})", torch.int32, build.cast(position, torch.int32))


def _number(build: Builder, at: sympy.Expr, dtype: torch.dtype) -> Value:
    return build.cast(_int32(build, at), dtype)


def _int32(build: Builder, at: sympy.Expr) -> Value:
    return build.cast(build.index_value(at), torch.int32)


# The table ------------------------------------------------------------------------------------------------------------

BACKWARD = tuple(overloads(
    "aten.upsample_nearest1d_backward.default aten.upsample_nearest2d_backward.default "
    "aten.upsample_nearest3d_backward.default aten._upsample_nearest_exact1d_backward.default "
    "aten._upsample_nearest_exact2d_backward.default aten._upsample_nearest_exact3d_backward.default "
    "aten.upsample_linear1d_backward.default aten.upsample_bilinear2d_backward.default "
    "aten.upsample_trilinear3d_backward.default aten.upsample_bicubic2d_backward.default"))

for _target in BACKWARD:
    register(rewrite(_target, Kind.INDEX, _gradient, accepts=accepts))
