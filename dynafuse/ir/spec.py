"""Specs: regions in canonical form, without names. They are all that a lowering sees, and what kernels are keyed by."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import sympy
import torch

from dynafuse.fx import Size, extent
from dynafuse.ir.graph import ALIGNED, Accuracy, Axis, Dims
from dynafuse.ops.literals import HoistedScalar
from dynafuse.ops.symbols import symbol_of

T = TypeVar("T")

COUNT = "count"
"""The argument of a kernel that says how many terms its fold has."""

INT32_LIMIT = 2**31 - 1 - 2**16
"""What offsets in 32 bits stay below, with room for a block beyond the end."""


@dataclass(frozen=True)
class Ref:
    """A reference inside a spec: to its input or to its op number ``position``."""

    kind: str  # in | op
    position: int

    def __str__(self) -> str:
        return f"in{self.position}" if self.kind == "in" else f"%{self.position}"

    __repr__ = __str__


def references(value: Any) -> Iterator[Ref]:
    """Return the tensors among an op's arguments, in order, those in lists included."""
    return iter_instances(value, Ref)


def iter_instances(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield what of a type is among a call's arguments, in order, those in lists included."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_instances(item, kind)


@dataclass(frozen=True)
class Layout:
    """A tensor as a kernel sees it: what code depends on, without names."""

    dtype: torch.dtype
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    alignment: int = ALIGNED  # bytes that its address is a multiple of

    def __str__(self) -> str:
        shape, stride = (", ".join(map(str, sizes)) for sizes in (self.shape, self.stride))
        return f"{str(self.dtype)[6:]}[{shape}] ({stride})" + (
            "" if self.alignment == ALIGNED else f" at multiples of {self.alignment} bytes")


@dataclass(frozen=True)
class OpSpec:
    """One op of a spec: its overload's name, its arguments by schema name (tensors as ``Ref``), its output.

    A float that does not change code may be there as a ``HoistedScalar``: an argument of the kernel. An op with a ``guard``
    is computed only if the kernel's argument ``count`` is larger; otherwise it is its first operand.
    """

    target: str
    args: tuple[tuple[str, Any], ...]
    shape: tuple[Size, ...]
    dtype: torch.dtype
    guard: int = 0
    accuracy: Accuracy = Accuracy.USUAL

    def __str__(self) -> str:
        args = ", ".join(f"{name}={value}" for name, value in self.args)
        guard = f" if {COUNT} > {self.guard}" if self.guard else ""
        accuracy = f"{self.accuracy} " if self.accuracy is not Accuracy.USUAL else ""
        return f"{accuracy}{self.target}({args}){guard} : {str(self.dtype)[6:]}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Store:
    """One stored op: to a new tensor of a layout, or into input ``into``.

    One that ``scatters`` writes the op's values into its base, at computed places: ``dims`` are those of the values.
    """

    op: int
    layout: Layout
    dims: Dims
    into: int | None = None
    scatters: bool = False

    def __str__(self) -> str:
        into = "" if self.into is None else f" into in{self.into}"
        return f"{'scatter' if self.scatters else 'store'} %{self.op} {self.layout}{into}"


@dataclass(frozen=True)
class Nest:
    """A loop nest that shares a launch with others, and nothing else: its axes and its stores, by position."""

    axes: tuple[int, ...]
    stores: tuple[int, ...]


@dataclass(frozen=True)
class Spec:
    """A region in canonical form. Two regions with equal specs are computed by the same kernel."""

    inputs: tuple[Layout, ...]
    ops: tuple[OpSpec, ...]
    axes: tuple[Axis, ...]
    reductions: tuple[tuple[int, Dims], ...]  # op, its operand's dims; a reduction that is not here is written out
    stores: tuple[Store, ...]
    symbols: tuple[str, ...]  # each an integer argument of the kernel; what is known of its sign is in its name
    options: tuple[tuple[str, Any], ...] = ()
    scans: tuple[tuple[int, Dims], ...] = ()  # op, its operand's dims, which are its own
    examples: tuple[int, ...] = ()  # what the symbols are in the example inputs; nothing where only data tell
    narrow: bool = False  # whether offsets fit in 32 bits wherever it is called, though their sizes are symbols
    nests: tuple[Nest, ...] = ()  # where several share a launch; each axis and each store is of one of them

    @property
    def alignments(self) -> tuple[tuple[str, int], ...]:
        """Return the arguments of its kernels whose address is a multiple of fewer than 16 bytes, each with how many."""
        layouts = [(f"in{i}", layout) for i, layout in enumerate(self.inputs)]
        layouts += [(f"out{i}", store.layout) for i, store in enumerate(self.stores)]
        return tuple((name, layout.alignment) for name, layout in layouts if layout.alignment < ALIGNED)

    @property
    def of_rows(self) -> tuple[tuple[int, Dims], ...]:
        """Return the ops that need whole rows, reductions and scans, with their operands' dims."""
        return (*self.reductions, *self.scans)

    def tensor(self, ref: Ref) -> Layout | OpSpec:
        """Return the input or the op that an argument of an op is: either has a shape and a dtype."""
        return self.inputs[ref.position] if ref.kind == "in" else self.ops[ref.position]

    @property
    def hoisted(self) -> tuple[str, ...]:
        """Return the names of the hoisted scalars: float32 arguments of the kernel, whose values are not in the spec."""
        names = (value.name for op in self.ops for _, value in op.args if isinstance(value, HoistedScalar))
        return tuple(dict.fromkeys(names))

    @property
    def counts(self) -> tuple[str, ...]:
        """Return the kernel's integer arguments besides sizes: ``count``, if an op has a guard."""
        return (COUNT,) if any(op.guard for op in self.ops) else ()

    @property
    def typical(self) -> Spec:
        """Return the spec by whose sizes it is scheduled: of the example inputs', for a class of sizes of its smallest."""
        if not self.examples:
            return self
        typical = self._at(self.examples)
        axes = tuple(replace(axis, is_known=isinstance(own.size, int))
                     for axis, own in zip(typical.axes, self.axes, strict=True))
        return replace(typical, axes=axes)

    def _at(self, sizes: Sequence[int]) -> Spec:
        """Return the spec of some sizes, one for each symbol."""
        known = {symbol_of(name): sympy.Integer(size) for name, size in zip(self.symbols, sizes, strict=True)}
        parts = {part.name: _valued(getattr(self, part.name), known) for part in fields(Spec)}
        return Spec(**parts | {"symbols": (), "examples": ()})

    def smallest(self, size: Size) -> Size:
        """Return a size at the smallest size of a class, for other specs as it is."""
        return size

    @property
    def extents(self) -> Iterator[Size]:
        """Yield what offsets and indices reach: the last element of each tensor, the number of points of axes and of ops."""
        for layout in (*self.inputs, *(s.layout for s in self.stores)):
            yield extent(layout.shape, layout.stride)
        loops = [nest.axes for nest in self.nests] or [tuple(range(len(self.axes)))]
        nests = (tuple(self.axes[axis].size for axis in axes) for axes in loops)
        shapes = (*nests, *(op.shape for op in self.ops))  # indices count their elements
        for shape in shapes:
            yield functools.reduce(operator.mul, shape, 1)

    @functools.cached_property
    def wide(self) -> bool:
        """Return whether some offset may not fit in 32 bits."""
        return not self.narrow and any(not isinstance(extent, int) or extent > INT32_LIMIT for extent in self.extents)

    @functools.cached_property
    def counted(self) -> frozenset[str]:
        """Return the symbols that are no larger than some offset or index reaches: factors of one of its positive terms."""
        terms = [sympy.Add.make_args(sympy.expand(extent)) for extent in self.extents if isinstance(extent, sympy.Expr)]
        rising = (term for sum_ in terms if all(term.is_positive for term in sum_) for term in sum_)
        return frozenset(str(factor) for term in rising for factor in sympy.Mul.make_args(term) if factor.is_Symbol)

    def __str__(self) -> str:
        lines = [f"in{i}: {layout}" for i, layout in enumerate(self.inputs)]
        lines += [f"%{i} = {op}" for i, op in enumerate(self.ops)]
        nests = (", ".join(f"%{self.stores[k].op}" for k in nest.stores) for nest in self.nests)
        return "\n".join([*lines, *map(str, self.stores), *(f"nest of {stored}" for stored in nests)])


@dataclass(frozen=True)
class Classed(Spec):
    """A spec of a class of sizes: its only size symbol is at least ``least`` and below twice that."""

    least: int = 1

    @property
    def most(self) -> int:
        """Return the largest value of the symbol."""
        return 2 * self.least - 1

    @property
    def typical(self) -> Spec:
        """Return the spec of the smallest size: a power of two, as most sizes are."""
        return self.at(self.least)

    def smallest(self, size: Size) -> Size:
        """Return a size at the smallest size of the class."""
        return int(size.xreplace(self._known(self.least))) if isinstance(size, sympy.Expr) else size

    def _known(self, size: int) -> dict[sympy.Symbol, sympy.Integer]:
        return {symbol_of(name): sympy.Integer(size) for name in self.symbols}

    @functools.cached_property
    def wide(self) -> bool:
        """Return whether some offset does not provably fit in 32 bits, whatever the size."""
        return self.at(self.most).wide

    def at(self, size: int) -> Spec:
        """Return the spec of one size."""
        return self._at((size,))

    def __str__(self) -> str:
        return f"{', '.join(self.symbols)}: {self.least} to {self.most}\n{super().__str__()}"


def _valued(value: Any, known: Mapping[sympy.Symbol, sympy.Integer]) -> Any:
    """Return a part of a spec with ints for its sizes."""
    if isinstance(value, tuple):
        return tuple(_valued(part, known) for part in value)
    if isinstance(value, (Layout, OpSpec, Axis, Store)):
        return replace(value, **{part.name: _valued(getattr(value, part.name), known) for part in fields(value)})
    return int(value.xreplace(known)) if isinstance(value, sympy.Expr) else value
