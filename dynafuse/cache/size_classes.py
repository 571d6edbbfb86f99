"""Size classes: where a region's outermost extent only bounds the grid, its kernel takes that extent as an argument.

A class contains the sizes from a power of two to below the next, divided by whether 16 divides them: the extent becomes
``s0``, or ``16*s0``. Strides, reduced extents and all that enters the arithmetic of indices stay numbers. At the value of
``s0`` the spec of the class is the region's own (``Classed.at``), so that regions of one class differ in that value alone.

Worked example: ``relu`` over ``float32[48, 100]`` becomes ``relu`` over ``float32[16*s0, 100]``, with ``s0`` 2 or 3, and the
value ``(3,)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from dynafuse.ir import Classed, Dims, Layout, OpSpec, Ref, Size, Spec, Store, Tensor, references
from dynafuse.ops import Kind, View, lookup
from dynafuse.ops.overloads import overload
from dynafuse.ops.reductions import keepdim, reduced_dims
from dynafuse.ops.symbols import symbol_of
from dynafuse.ops.views import dim_of

ALIGNED = 16  # a divisor of sizes by which compilers specialize kernels
SIZES = frozenset({"size", "shape", "length"})
"""Arguments that repeat the sizes of an op's result."""

Reads: TypeAlias = Iterator[tuple[Ref, "bool | None"]]
"""Tensors, and whether each runs along the axis; None where that is unknown, or the axis is not the outermost."""


def classed(spec: Spec) -> tuple[Spec, tuple[int, ...]]:
    """Return the spec of a region's size class, and its size symbol's value; the spec itself and () without a class."""
    if spec.symbols or spec.nests or any(axis.size < 2 for axis in spec.axes):
        return spec, ()
    axis = _outermost(spec)
    result = None if axis is None else _Class(spec, axis).classed()
    return result or (spec, ())


def _flat(dims: Dims) -> list[int]:
    """Return the axes of a tensor, the outermost first."""
    return [axis for dim in dims for axis in dim]


def _outermost(spec: Spec) -> int | None:
    """Return the outermost axis of the first output that runs along all parallel axes, if that axis is parallel."""
    parallel = {k for k, axis in enumerate(spec.axes) if not axis.reduced}
    firsts = (axes[0] for store in spec.stores if parallel and parallel <= set(axes := _flat(store.dims)))
    return next((axis for axis in firsts if axis in parallel), None)


def leading(shape: Sequence[Size]) -> int | None:
    """Return the outermost dimension of a shape that has more than one element; None if there is none."""
    return next((dim for dim, size in enumerate(shape) if size != 1), None)


def any_size(tensor: Tensor) -> str:
    """Return a tensor as text, with 0 for the size of its outermost dimension."""
    lead = leading(tensor.shape)
    return str(replace(tensor, shape=tuple(0 if dim == lead else size for dim, size in enumerate(tensor.shape))))


def _is_outermost_in_memory(layout: Layout) -> bool:
    """Return whether slices of a tensor's outermost dimension do not overlap in memory: its stride exceeds their extent."""
    lead = leading(layout.shape)
    assert lead is not None
    reach = [(size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True)]
    return bool(layout.stride[lead] > sum(reach) - reach[lead])


class _Class:
    """Follows an axis from a spec's outputs to its inputs."""

    def __init__(self, spec: Spec, axis: int) -> None:
        self.spec = spec
        self.axis = axis
        self.extent = int(spec.axes[axis].size)
        self.runs: dict[Ref, bool] = {}  # whether an input or op runs along the axis
        symbol = symbol_of("s0")
        self.factor = ALIGNED if self.extent % ALIGNED == 0 else 1
        self.size = self.factor * symbol

    def classed(self) -> tuple[Classed, tuple[int, ...]] | None:
        """Return the spec with a symbol for the axis, and its value; None if the axis has to stay a number."""
        if not all(self._agrees(ref, runs) for ref, runs in self._reads()):
            return None
        value = self.extent // self.factor
        spec = self._rewrite(1 << (value.bit_length() - 1))
        return (spec, (value,)) if spec.wide == self.spec.wide else None

    # ------------------------------------------------------------------ what runs along the axis

    def _agrees(self, ref: Ref, runs: bool | None) -> bool:
        """Note whether a tensor runs along the axis; return whether that agrees with its other readers, and is possible."""
        if runs is None or self.runs.setdefault(ref, runs) != runs:
            return False
        return not runs or self._begins(self.spec.tensor(ref))

    def _begins(self, tensor: Layout | OpSpec) -> bool:
        """Return whether the axis can be the outermost part of a tensor's outermost dimension, and of its memory."""
        lead = leading(tensor.shape)
        if lead is None or tensor.shape[lead] % self.extent:
            return False
        return isinstance(tensor, OpSpec) or _is_outermost_in_memory(tensor)

    def _reads(self) -> Reads:
        """Yield per read of a tensor whether it runs along the axis: of stores, whole rows, then ops, the last first."""
        for store in self.spec.stores:
            yield from self._stored(store)
        for position, dims in self.spec.of_rows:
            yield next(references(self.spec.ops[position].args)), self._along(dims)
        for position in reversed(range(len(self.spec.ops))):
            op = self.spec.ops[position]
            if self.runs.get(Ref("op", position)):
                yield from _rule(op)(ReadingOp(self.spec, op))
            else:
                yield from ((ref, False) for ref in references(op.args))

    def _along(self, dims: Dims) -> bool | None:
        """Return whether a tensor over ``dims`` runs along the axis."""
        axes = _flat(dims)
        if self.axis not in axes:
            return False
        return True if axes[0] == self.axis and axes.count(self.axis) == 1 else None

    def _stored(self, store: Store) -> Reads:
        runs = self._along(store.dims)
        if runs and not self._begins(store.layout):
            runs = None
        ref = Ref("op", store.op)
        if store.scatters:  # where its values go is not known
            runs = None
        yield ref, runs and aligned(store.layout.shape, self.spec.tensor(ref).shape)
        if store.into is not None:
            yield Ref("in", store.into), runs

    # ------------------------------------------------------------------ the spec with the symbol

    def _rewrite(self, least: int) -> Classed:
        """Return the spec with the symbol, whose least value is ``least``."""
        spec = self.spec
        axis = replace(spec.axes[self.axis], size=self.size)
        values = {field.name: getattr(spec, field.name) for field in fields(Spec)} | {
            "inputs": tuple(self._sized(layout) if self.runs.get(Ref("in", i)) else layout
                            for i, layout in enumerate(spec.inputs)),
            "ops": tuple(self._op(op) if self.runs.get(Ref("op", i)) else op for i, op in enumerate(spec.ops)),
            "axes": (*spec.axes[:self.axis], axis, *spec.axes[self.axis + 1:]),
            "stores": tuple(replace(s, layout=self._sized(s.layout)) if self._along(s.dims) else s for s in spec.stores),
            "symbols": (str(next(iter(self.size.free_symbols))),),
        }
        return Classed(**values, least=least)

    def _sized(self, layout: Layout) -> Layout:
        """Return a layout with the symbol. Strides of dimensions before it, which have one element, become 0."""
        lead = leading(layout.shape) or 0
        return replace(layout, shape=self._shape(layout.shape), stride=(0,) * lead + layout.stride[lead:])

    def _shape(self, shape: tuple[Size, ...]) -> tuple[Size, ...]:
        lead = leading(shape)
        assert lead is not None
        return (*shape[:lead], shape[lead] // self.extent * self.size, *shape[lead + 1:])

    def _op(self, op: OpSpec) -> OpSpec:
        sizes = list(zip(op.shape, self._shape(op.shape), strict=True))
        args = tuple((name, _repeated(value, sizes) if name in SIZES else value) for name, value in op.args)
        return replace(op, args=args, shape=tuple(new for _, new in sizes))


def _repeated(value: Any, sizes: Sequence[tuple[Size, Size]]) -> Any:
    """Return an argument that repeats the sizes of the result (one, or all with perhaps a -1), with new sizes for old."""
    if not isinstance(value, tuple) or len(value) != len(sizes):
        return dict(sizes).get(value, value)
    return tuple(new if size == old else size for size, (old, new) in zip(value, sizes, strict=True))


# Rules: what ops that run along the axis read -----------------------------------------------------------------------------


def aligned(shape: Sequence[Size], operand: Sequence[Size]) -> bool | None:
    """Return whether an operand runs along the outermost dimension of the ``shape`` it is broadcast to; None if unknown."""
    lead = leading(shape)
    assert lead is not None
    at = lead - (len(shape) - len(operand))
    if at < 0 or operand[at] == 1:
        return False
    return True if operand[at] == shape[lead] else None


@dataclass(frozen=True)
class ReadingOp:
    """An op whose result runs along the axis with its outermost dimension, and which reads tensors."""

    spec: Spec
    op: OpSpec

    @property
    def args(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return dict(self.op.args)

    @property
    def refs(self) -> tuple[Ref, ...]:
        """Return the operands that are tensors."""
        return tuple(references(self.op.args))

    @property
    def lead(self) -> int:
        """Return the dimension of the result that runs along the axis."""
        lead = leading(self.op.shape)
        assert lead is not None
        return lead

    def shape(self, ref: Ref) -> tuple[Size, ...]:
        """Return the sizes of a tensor."""
        return self.spec.tensor(ref).shape

    def at(self, ref: Ref, dim: int | None) -> tuple[Ref, bool | None]:
        """Return the read of a tensor along its dimension ``dim``, which has to be its outermost, and as large."""
        shape = self.shape(ref)
        same = dim is not None and leading(shape) == dim and shape[dim] == self.op.shape[self.lead]
        return ref, True if same else None

    def dim(self, name: str = "dim", more: int = 0) -> int:
        """Return an argument that is a dimension, counted from the front of ``more`` dimensions than the result has."""
        return dim_of(self.args[name], len(self.op.shape) + more)


Rule: TypeAlias = Callable[[ReadingOp], Reads]


def _rule(op: OpSpec) -> Rule:
    row = lookup(overload(op.target))
    if row is None:
        return _unknown
    by_kind = {Kind.POINTWISE: _broadcast, Kind.REDUCTION: _reduced, Kind.SCAN: _along_others}
    by_view = {View.RESHAPE: _reshaped, View.EXPAND: _broadcast, View.PERMUTE: _permuted}
    return _RULES.get(op.target) or (by_view[row.view] if row.view else by_kind.get(row.kind, _unknown))


def _unknown(reading: ReadingOp) -> Reads:
    yield Ref("op", -1), None


def _broadcast(reading: ReadingOp) -> Reads:
    return ((ref, aligned(reading.op.shape, reading.shape(ref))) for ref in reading.refs)


def _created(reading: ReadingOp) -> Reads:
    return ((ref, False) for ref in reading.refs)  # of random numbers the seed


def _reshaped(reading: ReadingOp) -> Reads:
    """Read the same elements in the same order: the outermost dimension stays outermost."""
    return ((ref, True) for ref in reading.refs)


def _reduced(reading: ReadingOp) -> Reads:
    (ref,) = reading.refs
    rank = len(reading.shape(ref))
    reduced = reduced_dims(reading.args, rank)
    dims = range(rank) if keepdim(reading.args) else [dim for dim in range(rank) if dim not in reduced]
    yield reading.at(ref, dims[reading.lead])


def _permuted(reading: ReadingOp) -> Reads:
    (ref,), row = reading.refs, lookup(overload(reading.op.target))
    assert row is not None and row.order is not None
    yield reading.at(ref, row.order(reading.args, len(reading.op.shape))[reading.lead])


def _along_others(reading: ReadingOp) -> Reads:
    """Read along all dimensions but ``dim`` without change."""
    return (reading.at(ref, None if reading.dim() == reading.lead else reading.lead) for ref in reading.refs)


def _selected(reading: ReadingOp) -> Reads:
    (ref,) = reading.refs
    yield reading.at(ref, reading.lead + (reading.lead >= reading.dim(more=1)))


def _stacked(reading: ReadingOp) -> Reads:
    dim, lead = reading.dim(), reading.lead
    return (reading.at(ref, None if dim == lead else lead - (dim < lead)) for ref in reading.refs)


def _embedded(reading: ReadingOp) -> Reads:
    yield reading.args["weight"], False
    yield reading.at(reading.args["indices"], reading.lead)


_RULES: Mapping[str, Rule] = {target: rule for targets, rule in {
    "aten.full_like.default aten.zeros_like.default aten.ones_like.default": _broadcast,
    "aten.full.default aten.zeros.default aten.ones.default prims.iota.default prims.inductor_random.default "
    "prims.inductor_randint.default": _created,
    "aten.slice.Tensor aten.cat.default aten.slice_scatter.default aten.glu.default aten.gather.default aten.scatter.src "
    "aten.scatter.value": _along_others,
    "aten.select.int": _selected,
    "aten.stack.default": _stacked,
    "aten.embedding.default": _embedded,
}.items() for target in targets.split()}
