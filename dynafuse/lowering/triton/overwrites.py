"""Tells which results a kernel may write over which of its operands: those that each point reads before it writes there.

Worked example: of ``tanh(x + y.t())`` over contiguous ``x`` and ``y`` the result may be written over ``x``, which is loaded
at ``8*i + j``, where the result is stored. ``y`` is loaded at ``i + 8*j``: another program may still have to read what is
there. If ``x`` has gaps between its rows, in which the result has elements, it may be, too, if the memory behind ``x`` turns
out to be as long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from dynafuse.fx import extent
from dynafuse.ir import Layout, Spec, Store, references
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.scopes import Scope
from dynafuse.partition.kernel_class import LANES

ACCESS = re.compile(r"tl\.(?:load|store|atomic_\w+)\((\w+) \+ \((\{0\})?")
"""A line that touches a tensor of the spec: at the first of its index expressions, or at one of two places."""


@dataclass(frozen=True)
class Access:
    """A line that loads or stores: the tensor, and the offset in elements; NaN if it depends on a condition."""

    tensor: str
    offset: sympy.Expr


def overwrites(spec: Spec, emitter: Emitter, block: Mapping[str, int], warps: int) -> tuple[tuple[str, str], ...]:
    """Return the pairs of an output and an input of a kernel that may be one tensor.

    Args:
        spec: The region.
        emitter: What the kernel computes, complete.
        block: The points of a tile along each tile dimension.
        warps: Warps per program.
    """
    accesses = list(_accesses(emitter.top))
    stores = [(f"out{number}", store) for number, store in enumerate(spec.stores) if store.into is None]
    overwritten = {f"in{store.into}" for store in spec.stores}
    inputs = [(f"in{i}", layout) for i, layout in enumerate(spec.inputs) if f"in{i}" not in overwritten]
    return tuple((out, name) for out, store in stores if not store.scatters and _visits_all(spec, store)
                 for name, layout in inputs if _same_memory(layout, store.layout) and _needs(spec, store.op, name)
                 and _reads_before(accesses, out, name, lambda offset: _owns_points(emitter, offset, block, warps)))


def _accesses(scope: Scope) -> Iterator[Access]:
    """Yield the loads and stores of a kernel's lines, in the order in which they run."""
    for line in scope.lines:
        if isinstance(line, Scope):
            if not line.part:  # each part of a row touches elements of its own, as the first does
                yield from _accesses(line)
        elif access := ACCESS.search(line.text):
            yield Access(access[1], line.exprs[0] if access[2] else sympy.nan)


def _visits_all(spec: Spec, store: Store) -> bool:
    """Return whether each point of the region stores an element of its own."""
    axes = [axis for dim in store.dims for axis in dim]
    long = {k for k, axis in enumerate(spec.axes) if axis.size != 1}
    return long <= set(axes) and len(set(axes)) == len(axes)


def _needs(spec: Spec, op: int, name: str) -> bool:
    """Return whether an op is computed from an input.

    One thread may load an element that another one stores: it has loaded before that only if what is stored needs it.
    """
    needed, position = {op}, int(name.removeprefix("in"))
    for place in range(op, -1, -1):
        if place in needed:
            refs = list(references(spec.ops[place].args))
            if any(ref.kind == "in" and ref.position == position for ref in refs):
                return True
            needed.update(ref.position for ref in refs if ref.kind == "op")
    return False


def _same_memory(loaded: Layout, stored: Layout) -> bool:
    """Return whether two tensors have equally many elements of a dtype, without gaps: what kernels store is dense.

    What is loaded may have gaps where what is stored has elements.
    """
    if loaded.dtype is stored.dtype and loaded.stride == stored.stride:
        pairs = zip(loaded.shape, stored.shape, strict=True)
        return all(a == b or (isinstance(a, int) and isinstance(b, int) and a < b) for a, b in pairs)
    counts = [math.prod(map(sympy.sympify, layout.shape)) for layout in (loaded, stored)]
    extents = [sympy.sympify(extent(layout.shape, layout.stride)) for layout in (loaded, stored)]
    return loaded.dtype is stored.dtype and all(sympy.expand(left - right) == 0 for left, right in (counts, extents))


def _reads_before(accesses: Sequence[Access], out: str, name: str, owns_points: Callable[[sympy.Expr], bool]) -> bool:
    """Return whether an input is read where an output is stored and nowhere else, and not after that.

    What a loop over tiles does later is at other elements, as each point stores one of its own.
    """
    stored = [place for place, access in enumerate(accesses) if access.tensor == out]
    loaded = [place for place, access in enumerate(accesses) if access.tensor == name]
    if len(stored) != 1 or not loaded or loaded[-1] > stored[0]:
        return False
    offset = accesses[stored[0]].offset
    return all(accesses[place].offset == offset for place in loaded) and owns_points(offset)


def _owns_points(emitter: Emitter, offset: sympy.Expr, block: Mapping[str, int], warps: int) -> bool:
    """Return whether no two threads of a program hold the same element of a tile that is accessed at an offset.

    Of two warps that do, one might load what the other has stored already (triton-lang/triton#1615).
    """
    tiles = emitter.tiles(offset)
    return (math.prod(size for tile, size in block.items() if tile in tiles) >= LANES * warps
            and all(size == 1 for tile, size in block.items() if tile not in tiles))
