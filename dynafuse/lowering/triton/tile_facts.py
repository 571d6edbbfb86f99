"""What a pointwise spec reads and computes, as far as the prices of its tiles depend on it (``tile_cost.py``).

Of every access: how far apart neighbours along an axis are, at how many of the points it is made, how many elements a lane
may move at once. Of axes: which of them all accesses treat as one, where pieces of a concatenation begin.

Worked example: of ``x + y.t()`` over ``float32[4096, 4096]`` the strides of the load of ``x`` are 4096 and 1, those of the
load of ``y`` 1 and 4096; no two axes are one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy

from dynafuse.fx import UNKNOWN_SIZE
from dynafuse.ir import Spec
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.probe import DIVISION, WIDE_DIVISION, Probe
from dynafuse.lowering.triton.scopes import Line
from dynafuse.lowering.triton.tiles import stride_along
from dynafuse.ops.symbols import with_symbols_at
from dynafuse.partition.kernel_class import LANES, REGISTER, estimate

ELSEWHERE = 32.0  # bytes between neighbours along an axis that a loaded index follows: somewhere, but often near
MOST_CUTS = 15  # of a tile dimension at which its tiles begin anew
PROBED = 16  # points over which the stride of an index that is not linear is averaged
LEAST_PLACES = 4  # at which a tensor is read for a point, from which on these are a window


@dataclass(frozen=True)
class Walk:
    """How an access walks the axes: bytes of an element, strides by axis in elements (None: anywhere).

    ``linear`` are the axes along which neighbours are exactly as far apart as the stride says, ``blurred`` those with an
    index that comes of floats, of which Triton does not know that it is the same for neighbours. ``bounds`` are axes of
    which some are walked element by element, with a number at which a mask ends or begins there.
    """

    itemsize: int
    strides: tuple[float | None, ...]
    linear: frozenset[int]
    blurred: frozenset[int]
    vector: int  # the most elements that a lane may move at once, by alignment and masks
    jump: int  # of what elements an offset is a multiple, but for the axes with strides; 0 if nothing is added to these
    bounds: tuple[tuple[frozenset[int], int], ...]
    is_store: bool


@dataclass(frozen=True)
class TileAccess:
    """An access with its numbers."""

    tensor: str
    walk: Walk
    axes: frozenset[int]
    share: float  # of the points at which it is made, times how often
    masks: tuple[str, ...]
    numel: int


@dataclass(frozen=True)
class Group:
    """Neighbouring axes of a tile dimension that all indices treat as one: how many points, and the innermost axis."""

    size: int
    axis: int


class TileFacts:
    """What a spec reads and computes, by axes and masks, as far as prices of its tiles depend on it."""

    def __init__(self, spec: Spec, probed: Probe) -> None:
        self.spec = spec
        self.sizes = [estimate(axis.size) for axis in spec.axes]
        self.points = math.prod(self.sizes)
        self.wide = spec.wide
        self.division = WIDE_DIVISION if spec.wide else DIVISION  # instructions of one
        self._probed = probed
        self.conditions = probed.conditions()
        self.places = probed.places
        self.accesses = [self._access(access) for access in probed.accesses]
        self.walks = list(dict.fromkeys(access.walk for access in self.accesses))
        self.work: dict[tuple[frozenset[int], tuple[str, ...], bool], float] = defaultdict(float)  # by what it depends on
        for work in probed.work:
            self.work[work.axes, work.masks, work.is_apart] += work.times * work.instructions
        self._merged: dict[tuple[int, int], bool] = {}

    def _access(self, access: Access) -> TileAccess:
        axes = self._probed.axes_along(access.offset)
        strides = tuple(self._stride(access.offset, k, k in axes) for k in range(len(self.sizes)))
        numel = math.prod(map(estimate, access.layout.shape))
        vector = max(1, access.layout.alignment // access.layout.dtype.itemsize)
        share = min(1.0, numel / self._reached(strides), self.share_under(access.masks)) if access.masks else 1.0
        linear = frozenset(k for k, axis in enumerate(self._probed.axes) if k not in axes or access.offset.has(axis))
        by_floats = (symbol for symbol in access.offset.free_symbols if symbol.name in self._probed.by_floats)
        blurred = frozenset[int]().union(*map(self._probed.axes_along, by_floats))
        walk = Walk(access.layout.dtype.itemsize, strides, linear, blurred, vector, self._jump(access.offset),
                    self._bounds(access.masks, strides), access.is_store)
        return TileAccess(access.tensor, walk, axes, access.times * share, access.masks, numel)

    def _bounds(self, masks: Sequence[str], strides: Sequence[float | None]) -> tuple[tuple[frozenset[int], int], ...]:
        """Return the bounds of masks along axes that are walked element by element; 1 for one that is not known."""
        conditions = (self.conditions[mask] for mask in masks if mask in self.conditions)
        bounds = ((axes, bound or 1) for axes, bound, _ in conditions if any(strides[k] == 1 for k in axes))
        return tuple(dict.fromkeys(bounds))

    def share_under(self, masks: Sequence[str]) -> float:
        """Return the share of the points at which masks let something through, as far as they are bounds of single axes."""
        lows, highs = [0] * len(self.sizes), list(self.sizes)
        for axes, bound, is_below in (self.conditions[mask] for mask in masks if mask in self.conditions):
            if bound is None:
                continue
            (axis,) = axes
            if is_below:
                highs[axis] = min(highs[axis], bound)
            else:
                lows[axis] = max(lows[axis], bound)
        return math.prod(max(high - low, 0) / max(size, 1) for low, high, size in zip(lows, highs, self.sizes, strict=True))

    def _jump(self, offset: sympy.Expr) -> int:
        """Return of how many elements the part of an offset is a multiple that follows loaded indices; 0 without such."""
        loaded = [symbol for symbol in offset.free_symbols - set(self._probed.axes) if str(symbol) not in self.spec.symbols]
        factors = [offset.coeff(symbol) for symbol in loaded]
        return math.gcd(*(int(factor) if factor.is_Integer and factor else 1 for factor in factors)) if factors else 0

    def _reached(self, strides: Sequence[float | None]) -> float:
        """Return how many elements indices reach that have these strides by axis, but for masks; each counts once."""
        along = [(stride, size) for stride, size in zip(strides, self.sizes, strict=True) if stride != 0]
        span = sum(abs(stride) * (size - 1) for stride, size in along if stride is not None) + 1
        return min(span, math.prod(size for _, size in along)) if all(stride is not None for stride, _ in along) else 1.0

    def _stride(self, offset: sympy.Expr, axis: int, varies: bool) -> float | None:
        """Return how far apart neighbours along an axis are, on average over the first few; None if that is not known."""
        if not varies:
            return 0.0
        variable = self._probed.axes[axis]
        if variable not in offset.free_symbols:
            return self._stride_of_computed(offset, axis)
        stride = stride_along(offset, variable)
        if stride is not None:
            return float(stride)
        steps = min(PROBED, self.sizes[axis] - 1)
        ends = [self._valued(offset, {variable: sympy.Integer(at)}) for at in (0, steps)]
        return float(ends[1] - ends[0]) / steps if steps and all(end.is_finite for end in ends) else None

    def _stride_of_computed(self, offset: sympy.Expr, axis: int) -> float | None:
        """Return the same of an index that is computed, as that of an image's resized one: it walks its range evenly."""
        indices = [symbol for symbol in offset.free_symbols if axis in self._probed.axes_along(symbol)]
        if any(symbol.name in self._probed.from_memory for symbol in indices):
            return None
        walked = sum((offset.coeff(symbol) * symbol.size for symbol in indices), sympy.S.Zero)
        return float(with_symbols_at(walked, UNKNOWN_SIZE)) / self.sizes[axis]

    def _valued(self, offset: sympy.Expr, known: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
        """Return an offset at given values of axes, the others being 0; NaN where it has no value at what is assumed."""
        zeros = {symbol: sympy.S.Zero for symbol in offset.free_symbols if str(symbol) not in self.spec.symbols}
        try:
            at = offset.xreplace(zeros | dict(known))
            return at.xreplace({symbol: sympy.Integer(UNKNOWN_SIZE) for symbol in at.free_symbols})
        except (ZeroDivisionError, AssertionError):  # a divisor is 0, or torch's Mod negative
            return sympy.nan

    def apart(self, number: int, axis: int) -> float:
        """Return how many bytes apart neighbours along an axis are in an access of the probe, by its number."""
        walk = self.accesses[number].walk
        stride = walk.strides[axis]
        return ELSEWHERE if stride is None else abs(stride) * walk.itemsize

    # ------------------------------------------------------------------ axes

    def merges(self, outer: int, inner: int) -> bool:
        """Return whether every index treats two axes as one, ``inner`` being the inner one."""
        if (outer, inner) not in self._merged:
            self._merged[outer, inner] = all(_merges(expr, *self._axes(outer, inner)) for expr in self._exprs)
        return self._merged[outer, inner]

    def _axes(self, outer: int, inner: int) -> tuple[sympy.Symbol, sympy.Symbol]:
        return self._probed.axes[outer], self._probed.axes[inner]

    @cached_property
    def _exprs(self) -> list[sympy.Expr]:
        lines = (line for line in self._probed.top.lines if isinstance(line, Line))  # a probe has neither loops nor branches
        return list(dict.fromkeys(expr for line in lines for expr in line.exprs))

    def groups(self, axes: Sequence[int]) -> list[Group]:
        """Return axes with those merged that every index treats as one, without axes of one point."""
        groups: list[Group] = []
        for axis in axes:
            if groups and self.merges(groups[-1].axis, axis):
                groups[-1] = Group(groups[-1].size * self.sizes[axis], axis)
            else:
                groups.append(Group(self.sizes[axis], axis))
        return [group for group in groups if group.size > 1]

    def cuts(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Return where pieces begin along axes that are one, if all are long enough for a warp; nothing without such."""
        if len(axes) != 1 or not self.spec.axes[axes[0]].is_known:
            return ()
        size = self.sizes[axes[0]]
        cuts = sorted({bound for along, bound, _ in self.conditions.values()
                       if along == {*axes} and bound is not None and 0 < bound < size})
        lengths = [end - begin for begin, end in itertools.pairwise((0, *cuts, size))]
        return tuple(cuts) if cuts and len(cuts) <= MOST_CUTS and min(lengths) >= LANES else ()

    def is_contiguous(self, axes: Sequence[int]) -> bool:
        """Return whether some access walks axes, given outermost first, as one run of neighbouring elements."""
        inner = [math.prod(self.sizes[axis] for axis in axes[k + 1:]) for k in range(len(axes))]
        return any([walk.strides[axis] for axis in axes] == inner for walk in self.walks)

    # ------------------------------------------------------------------ price

    @cached_property
    def bytes_read(self) -> int:
        """Return the bytes that a point takes of the reads that vary along all axes."""
        whole = [access.walk for access in self.accesses if len(access.axes) == len(self.sizes)]
        return sum(walk.itemsize for walk in whole if not walk.is_store)

    @property
    def has_windows(self) -> bool:
        """Return whether a tensor is read at many places around each point, of which a lane moves one at a time."""
        return bool(self._windows)

    @property
    def has_windows_apart(self) -> bool:
        """Return whether those of neighbouring points begin at elements that are no neighbours."""
        return any(1 not in map(abs, filter(None, strides)) for strides, _ in self._windows)

    @property
    def has_wide_windows(self) -> bool:
        """Return whether elements of one take a whole register or more."""
        return any(itemsize >= REGISTER for _, itemsize in self._windows)

    @cached_property
    def _windows(self) -> list[tuple[tuple[float | None, ...], int]]:
        """Return the strides and the bytes of an element of tensors that are read at many places around each point."""
        pairs = zip(self.accesses, self._probed.accesses, strict=True)
        places = Counter((access.tensor, access.walk.strides, access.walk.itemsize) for access, noted in pairs
                         if not access.walk.is_store and self._is_torn(access.walk, noted.offset))
        return [(strides, itemsize) for (_, strides, itemsize), count in places.items() if count >= LEAST_PLACES]

    def _is_torn(self, walk: Walk, offset: sympy.Expr) -> bool:
        """Return whether neighbours in memory, which several points read, are not where a lane may move them at once."""
        strides = ((axis, stride) for axis, stride in enumerate(walk.strides) if stride is not None)
        near = {axis: abs(stride) for axis, stride in strides if 0 < abs(stride) <= 2}
        start = self._valued(offset, {})
        is_shifted = start.is_Integer and int(start) % walk.vector
        return any(stride != 1 or is_shifted or axis not in walk.linear for axis, stride in near.items())

    @cached_property
    def bytes_moved(self) -> float:
        """Return the bytes that go to or from memory: what accesses walk of a tensor together, but all of it at most."""
        moved: dict[str, float] = {}
        for access in self.accesses:
            walked = access.share * math.prod(self.sizes[k] for k in access.axes) * access.walk.itemsize
            moved[access.tensor] = min(moved.get(access.tensor, 0.0) + walked, access.numel * access.walk.itemsize)
        return sum(moved.values())


def _merges(expr: sympy.Expr, outer: sympy.Symbol, inner: sympy.Symbol) -> bool:
    """Return whether an index expression treats two axes as one."""
    if not (expr.has(outer) or expr.has(inner)):
        return True
    factor = expr.coeff(inner)
    rest = sympy.expand(expr - factor * inner - factor * inner.size * outer)
    return bool(factor != 0 and not rest.has(outer) and not rest.has(inner))
