"""The op table: one row per ATen or prims overload.

A row says what an op *is* (its kind decides how it may be partitioned) and how it is *made* (an expression, a
reduction, or an index rewrite). Ability and implementation sit in one place: the partitioner asks the table and never
tries an op out. An op without a row, or with a row that names a reason, runs eager.

Worked example, a row as a user would add one at run time::

    import torch, dynafuse.ops as ops
    ops.register(ops.pointwise(torch.ops.mylib.softcap.default, "{1} * lm.tanh({0} / {1})"))

In a pointwise expression ``{0}``, ``{1}`` … are the op's arguments in schema order, already cast to the op's compute
dtype; ``tl`` is ``triton.language`` and ``lm`` is the math library in ``dynafuse/lowering/triton/libm.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch

Index = tuple[sympy.Expr, ...]
"""Where a tensor is asked for: one integer expression per dimension."""


class Kind(enum.Enum):
    """The kind of an op, which decides how it can be fused."""

    POINTWISE = "pointwise"  # output element i needs the (broadcast) operand elements i
    REDUCTION = "reduction"  # closes over some dimensions of its one tensor operand
    SCAN = "scan"  # each element closes over those before it along one dimension of its one tensor operand
    VIEW = "view"  # no data moves; an index rewrite without masks
    INDEX = "index"  # moves data by an index rewrite, perhaps under masks: cat, pad, flip, slice_scatter, pooling
    GATHER = "gather"  # the index holds a loaded value: embedding, gather, index
    SCATTER = "scatter"  # writes values at computed places of a tensor that is there already: index_put, scatter_add
    CREATION = "creation"  # no tensor operand: full, arange
    RANDOM = "random"  # seeds and counters in, random numbers out
    OPAQUE = "opaque"  # runs eager, as a whole

    @property
    def needs_rows(self) -> bool:
        """Return whether a result needs the elements beside its own along some dimensions: of reductions and scans."""
        return self in (Kind.REDUCTION, Kind.SCAN)


class Cast(enum.Enum):
    """Which dtype a pointwise op's tensor operands are cast to before its expression is evaluated."""

    OUTPUT = "output"  # the output's dtype, in its opmath type (float32 for 16-bit floats)
    PROMOTED = "promoted"  # the operands' common dtype by torch.result_type, in its opmath type: comparisons
    NONE = "none"  # each operand in its own opmath type


class View(enum.Enum):
    """How a view changes dimensions, if whole dimensions stay together."""

    RESHAPE = "reshape"  # the same elements in the same order
    EXPAND = "expand"  # dimensions of size 1 repeated, others put in front
    PERMUTE = "permute"  # dimensions in another order


@dataclass(frozen=True)
class Value:
    """A value in a kernel under construction: a variable's name, its dtype, the tile dimensions it varies along."""

    name: str
    dtype: torch.dtype
    tiles: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Context:
    """The dtypes that a pointwise expression may depend on, besides its operands' names."""

    dtype: torch.dtype  # the dtype in which the expression is evaluated (float32 for 16-bit floats)
    out: torch.dtype  # the op's output dtype
    operands: tuple[torch.dtype, ...] = ()  # the tensor operands' own dtypes, before the cast
    is_narrow: bool = False  # of a cast from or to int64, whether integers of 32 bits surely hold its values


class Builder(Protocol):
    """Builds the value of an index, gather, creation or random row; each lowering implements it."""

    def operand(self, arg: Any, index: Index) -> Value:
        """Return the value of tensor argument ``arg`` at ``index``."""

    def rounded(self, arg: Any, index: Index) -> Value:
        """Return the value of tensor argument ``arg`` at ``index`` as eager has it: 16-bit floats are rounded."""

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        """Return the sizes of tensor argument ``arg``."""

    def dtype(self, arg: Any) -> torch.dtype:
        """Return the dtype of tensor argument ``arg``."""

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Value:
        """Return a literal."""

    def index_value(self, expr: sympy.Expr) -> Value:
        """Return an index expression as an int64 value."""

    def indirect(self, value: Value, size: sympy.Expr) -> sympy.Expr:
        """Return an integer ``value`` that is in ``[0, size)`` as an index into a dimension of ``size`` elements."""

    def loaded_index(self, arg: Any, index: Index, size: sympy.Expr, *, wraps: bool = False,
                     trusted: bool = False) -> Value:
        """Load an element of an index tensor, which a kernel checks to be an index into a dimension of ``size`` elements.

        Args:
            arg: The tensor argument.
            index: The element's index in that tensor.
            size: The dimension's size; the element has to be in ``[0, size)``.
            wraps: Whether negative elements count from the end.
            trusted: Whether the op promises that all elements are in range, so that nothing is checked.
        """

    def compare(self, left: sympy.Expr, op: str, right: sympy.Expr) -> Value:
        """Return the outcome of a comparison of index expressions, a bool.

        Args:
            left, right: The index expressions.
            op: One of ``< <= > >= ==``.
        """

    def masked(self, condition: Value, body: Callable[[], Value], other: bool | int | float) -> Value:
        """Return ``body()`` where a condition holds, else a number.

        Args:
            condition: A bool.
            body: Makes the value; what it loads is masked by the condition.
            other: The number, in the dtype of that value.
        """

    def choose(self, condition: Value, if_true: Callable[[], Value], if_false: Callable[[], Value]) -> Value:
        """Return ``if_true()`` where a condition holds, else ``if_false()``.

        Args:
            condition: A bool.
            if_true, if_false: Make the values; each loads only where it is needed.
        """

    def expression(self, text: str, dtype: torch.dtype, *operands: Value) -> Value:
        """Return a new value from a Triton expression.

        Args:
            text: The expression, with ``{0}``, ``{1}`` … for the operands.
            dtype: The dtype of the value.
            *operands: The operands.
        """

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Return ``value`` converted to ``dtype``, kept in its opmath type."""

    def drawn(self, mode: str, seed: Value, position: sympy.Expr) -> Value:
        """Return the random float32 at a position of a tensor in row-major order.

        Args:
            mode: ``"rand"`` for numbers from [0, 1), ``"randn"`` for standard normal ones.
            seed: An integer.
            position: The position.
        """


@dataclass(frozen=True)
class Call:
    """One call of an op: its arguments by schema name with defaults filled in; its output's sizes and dtype."""

    target: torch._ops.OpOverload
    args: dict[str, Any]
    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype

    def __getitem__(self, name: str) -> Any:
        return self.args[name]


COMPARISONS: Mapping[str, str] = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
"""The operators of ops that compare, by their names without the overload."""


def op_name(call: Call) -> str:
    """Return the name of an op of torch without its overload; "" for any other op."""
    namespace, _, name = call.target.name().partition("::")
    return name.partition(".")[0] if namespace in ("aten", "prims") else ""


Indexed = tuple[Any, Any, Any]
"""An index tensor, the tensor that it indexes, and the dimension: arguments of a call."""

Order = Callable[[Mapping[str, Any], int], tuple[int, ...]]
"""From a call's arguments and its operand's rank to the operand's dimensions in the order of the result's."""

@dataclass(frozen=True)
class Write:
    """What a scatter does at a point of its iteration space: where in its base it writes which value, and if at all."""

    index: Index
    value: Value
    condition: Value | None = None  # a bool; None: it always writes


class Combine(enum.Enum):
    """What becomes of an element that a scatter writes to."""

    STORE = "store"  # it is replaced, by one of the values if there are several
    ADD = "add"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True)
class Scatter:
    """What a scatter writes: ``points`` are the sizes of its iteration space, a point a value.

    ``base`` names the argument that the result equals wherever nothing is written; its memory becomes the result's.
    """

    base: str
    points: Callable[[Call], tuple[sympy.Expr, ...]]
    write: Callable[[Builder, Call, Index], Write]
    combine: Callable[[Mapping[str, Any]], Combine]


Lower = Callable[[Builder, Call, Index], Value]
Shape = Callable[[Any], Sequence[Any]]
"""Returns the sizes of a tensor argument."""


@dataclass(frozen=True)
class Loop:
    """How a kernel's text adds a value up in a loop, where the terms of it would be too many to write out.

    ``count`` returns the steps of a call, given the sizes of its arguments; 1 for one that is written out. ``step`` returns
    the sum after a step, of which the number is an index expression, given the sum before. A step moves along the dimension
    ``dim`` of what is read.
    """

    count: Callable[[Call, Shape], int]
    step: Callable[[Builder, Call, Index, sympy.Expr, Value], Value]
    dim: int


Emit = str | Callable[..., str]


@dataclass(frozen=True)
class NvfuserRow:
    """An op's entry for nvFuser: ``build(fusion, call)`` records it (see :mod:`dynafuse.ops.nvfuser_fusion`)."""

    build: Callable[[Any, Call], Any]
    accepts: Callable[[Call, Sequence[Any]], str] | None = None  # why a call of these tensors cannot be, or ""


@dataclass(frozen=True)
class Row:
    """One op. ``reason`` is non-empty exactly when the op runs eager although it has a row."""

    target: torch._ops.OpOverload
    kind: Kind
    emit: Emit | None = None  # pointwise: the expression, a template or ``f(context, *arguments) -> str``
    cast: Cast = Cast.OUTPUT
    raw: tuple[int, ...] = ()  # pointwise: argument positions that are not cast (the condition of where)
    hoists: tuple[int, ...] = ()  # pointwise, random: arguments whose numbers do not change code (see hoisted.py)
    hoists_inverse: tuple[int, ...] = ()  # pointwise: arguments whose reciprocals do not
    steps: tuple[int, ...] = ()  # pointwise: operands where it steps from one float to another: they are rounded first
    casts: bool = False  # pointwise: whether it computes its operand in another dtype
    picks: bool = False  # whether each element is one of its operands' or 0, or that with another sign
    smooth: bool = False  # pointwise: whether quicker functions serve it where its result only becomes 16-bit floats
    rounds: bool = False  # pointwise: whether it casts what the user casts: its operand and its result are rounded
    lower: Lower | None = None  # view, index, gather, creation, random: the value at an index
    terms: Callable[[Call, Shape], int] | None = None  # index: of how many terms the code for an element is, if of many
    loop: Loop | None = None  # index: what adds it up, if it is not written out
    view: View | None = None  # view, index: what it does to dimensions; None where it takes parts of them
    order: Order | None = None  # view, index: of one that permutes, the order
    indices: Callable[[Mapping[str, Any]], Iterable[Indexed]] | None = None  # gather: its index tensors, by its arguments
    reduction: str | None = None  # reduction, scan: the name of its recurrence in lowering/triton/reductions.py
    states: int = 1  # reduction: how many values its recurrence keeps
    aligned: tuple[str, ...] = ()  # arguments that are read at the output's (of a scatter: the point's) broadcast index
    scatter: Scatter | None = None  # scatter: what it writes and where
    otherwise: Row | None = None  # what the op is in calls that this row does not accept
    accepts: Callable[[Call], str] | None = None  # why this call cannot be fused although the op can, or ""
    flops: float = 1.0  # instructions per output element (of a reduction or a window, per element read)
    flops_of: Callable[[Call], float] | None = None  # the same where a call's arguments decide
    reason: str = ""
    library: str = ""  # opaque: what a library computes, whatever else is fused: contraction, convolution, attention, FFT
    unfilled: bool = False  # opaque: whether it returns memory that nobody has written to
    by_strides: bool = False  # opaque: whether it places elements in its operand's memory, whatever the operand's strides
    nvfuser: NvfuserRow | None = None  # None: a pointwise op's own expression serves nvFuser; any other op is beyond it

    @property
    def fusible(self) -> bool:
        """Return whether the op may be part of a fused region."""
        return self.kind is not Kind.OPAQUE and not self.reason

    def flops_in(self, call: Call | None) -> float:
        """Return the instructions per output element of a call; None for any call."""
        return self.flops if self.flops_of is None or call is None else self.flops_of(call)

    def uses(self, position: int) -> bool:
        """Return whether a pointwise expression uses the argument at a position (all of them, if it is a function)."""
        return not isinstance(self.emit, str) or f"{{{position}}}" in self.emit


_TABLE: dict[torch._ops.OpOverload, Row] = {}


def register(row: Row) -> Row:
    """Add ``row`` to the table, or replace the row that its op has."""
    _TABLE[row.target] = row
    return row


def lookup(target: object) -> Row | None:
    """Return the row of an overload, or None: the op runs eager."""
    return _TABLE.get(target)  # type: ignore[call-overload, no-any-return]


def rows() -> Sequence[Row]:
    """Return all rows, in the order in which they were added."""
    return tuple(_TABLE.values())


def is_library(target: object) -> bool:
    """Return whether an op is a library's call whatever else is fused: a contraction, a convolution, attention, an FFT."""
    row = lookup(target)
    return row is not None and bool(row.library)


def is_unfilled(target: object) -> bool:
    """Return whether an op returns memory that nobody has written to."""
    row = lookup(target)
    return row is not None and row.unfilled


def pointwise(target: torch._ops.OpOverload, emit: Emit, *, cast: Cast = Cast.OUTPUT, raw: tuple[int, ...] = (),
              flops: float = 1.0) -> Row:
    """Return a pointwise row.

    Args:
        target: The op.
        emit: A Triton expression over ``{0}``, ``{1}`` …, or a function of a :class:`Context` and the operands that returns
            one.
        cast: Which dtype tensor operands are cast to first.
        raw: Positions of arguments that are not cast.
        flops: Operations per element of the output.
    """
    return Row(target, Kind.POINTWISE, emit=emit, cast=cast, raw=raw, flops=flops)


def row_of(row: Row, call: Call) -> Row:
    """Return the row of one call: ``row``, or the one behind it if only that accepts the call.

    Args:
        row: The op's row.
        call: The op with its arguments.
    """
    if row.otherwise is None or not refusal(row, call) or refusal(row.otherwise, call):
        return row
    return row.otherwise


def refusal(row: Row, call: Call) -> str:
    """Return why ``call`` cannot be fused, or "": the row's own reason, else what the row says of this call.

    Args:
        row: The op's row.
        call: The op with its arguments.
    """
    return row.reason or (row.accepts(call) if row.accepts else "")


def reduction(target: torch._ops.OpOverload, name: str, *, flops: float = 1.0, states: int = 1) -> Row:
    """Return a row of a reduction.

    Args:
        target: The op.
        name: A recurrence of ``lowering/triton/reductions.py``.
        flops: Operations per element that is read.
        states: How many values the recurrence keeps for each result.
    """
    return Row(target, Kind.REDUCTION, reduction=name, flops=flops, states=states)


def rewrite(target: torch._ops.OpOverload, kind: Kind, lower: Lower, *, flops: float = 1.0,
            accepts: Callable[[Call], str] | None = None) -> Row:
    """Return a row whose value at an index is made from its operands at other indices.

    Args:
        target: The op.
        kind: View, index, gather, creation or random.
        lower: Makes the value at an index.
        flops: Operations per element of the output.
        accepts: Returns why a call cannot be fused although the op can, or ""; None: every call can.
    """
    return Row(target, kind, lower=lower, accepts=accepts, flops=flops)


def eager(target: torch._ops.OpOverload, reason: str) -> Row:
    """Return a row of an op that runs eager.

    Args:
        target: The op.
        reason: Why it does, for reports; not empty.
    """
    return Row(target, Kind.OPAQUE, reason=reason)


def by_strides(target: torch._ops.OpOverload) -> Row:
    """Return a row of an op that places elements in its operand's memory, whatever the operand's strides; it runs eager."""
    return Row(target, Kind.OPAQUE, reason="as_strided: strides over the storage", by_strides=True)
