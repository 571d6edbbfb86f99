"""Statements out of the op table: a new row is fuzzed without a line here."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import torch

from dynafuse import ops
from dynafuse.ops import Kind, Row
from tests.fuzz.grammar import maker, proposed
from tests.fuzz.program import Argument
from tests.fuzz.state import State
from tests.support import samples
from tests.support.samples import Sample

SCALARS = (0, 1, -1, 2, 3, -2, 0.5, -0.5, 1.5, 2.5, -3.25, 0.1, -0.0, 7, 100)
SMALL = re.compile("shift|pow|ldexp")
"""Ops whose number operands stay those of the samples: large ones are undefined or overflow."""

UNUSED = re.compile(r"copy_to|lift_fresh|_\.|empty|_low_memory|float_power|__|fill\.|view_of|nextafter|_unsafe_view|_reshape_alias")
"""Rows that are not called: what is undefined, what writes, and ``_reshape_alias``, which trusts the strides it is given."""

ROUNDED = re.compile("hardsigmoid|hardswish")
"""Ops whose constants eager has in float32 also for float64."""

AT_ZERO = re.compile("logit")
"""Ops whose gradient at -0.0, unless they clamp, is another in eager on a CPU (inf) than on a GPU (-inf)."""


@cache
def rows_of(*kinds: Kind) -> tuple[Row, ...]:
    """The rows of some kinds that users can call: ATen's, not those that write."""
    return tuple(row for row in ops.rows()
                 if row.kind in kinds and row.fusible and row.target.namespace == "aten" and not UNUSED.search(str(row.target)))


def spelled(row: Row) -> str:
    """How a user calls a row's op."""
    name = row.target._schema.name.split("::")[1]
    for space, text in ((torch, "torch"), (torch.nn.functional, "F")):
        if not name.startswith("_") and hasattr(space, name) and "dims" not in str(row.target) and row.kind is not Kind.INDEX:
            return f"{text}.{name}"
    return f"torch.ops.{row.target}"


def shown(value: Any) -> str:
    """A constant as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


# Pointwise ------------------------------------------------------------------------------------------------------------


@maker(14)
def pointwise(state: State) -> bool:
    """A pointwise row over values that can be broadcast."""
    row = state.rng.choice(rows_of(Kind.POINTWISE))
    return proposed(state, call) if (call := pointwise_call(state, row)) else False


@maker(8)
def arithmetic(state: State) -> bool:
    """The everyday ops, as operators."""
    first = state.pick()
    if first is None:
        return False
    other = state.partner(first) if state.rng.random() < 0.7 else shown(state.rng.choice(SCALARS))
    operator = state.rng.choice(["+", "-", "*", "*", "+", "/", "==", "<", ">=", "//", "%", "&"] if state.rng.random() < 0.3 else "+-*")
    return proposed(state, f"{first} {operator} {other}" if state.rng.random() < 0.8 else f"{other} {operator} {first}")


def pointwise_call(state: State, row: Row) -> str | None:
    """A call of a pointwise row, or None where no values fit it."""
    numbers = list(state.rng.choice(samples.numbers_of(row)))
    if AT_ZERO.search(str(row.target)) and numbers == [None]:
        return None
    positional: list[str] = []
    keywords: list[str] = []
    first: str | None = None
    for position, argument in enumerate(row.target._schema.arguments):
        if "Tensor" in str(argument.type):
            made = _tensor_operand(state, row, position, first)
            if made in state.tensors and not settled(state, row, str(made)):
                return None
            first = first or (made if made in state.tensors else None)
        elif not numbers:
            continue
        else:
            made = _number(state, row, argument, numbers.pop(0))
        if made is None:
            return None
        (keywords if argument.kwarg_only else positional).append(f"{argument.name}={made}" if argument.kwarg_only else made)
    return f"{spelled(row)}({', '.join(positional + keywords)})"


def settled(state: State, row: Row, name: str) -> bool:
    """Whether eager's result for a value is the one that there is."""
    text = str(row.target)
    return not (ROUNDED.search(text) and state.dtype(name) is torch.float64)


def _tensor_operand(state: State, row: Row, position: int, first: str | None) -> str | None:
    if position in row.raw:
        return _condition(state, first)
    scalar = position in samples.ZERO_DIMENSIONAL.get(str(row.target), ())
    found = state.partner(first, (lambda t: t.dim() == 0) if scalar else None) if first else state.pick()
    if found and position and SMALL.search(str(row.target)) and not state.dtype(found).is_floating_point:
        return f"({found} % 4)"
    return found


def _condition(state: State, first: str | None) -> str | None:
    masks = state.where(lambda t: t.dtype is torch.bool)
    if masks and state.rng.random() < 0.5:
        return state.rng.choice(masks)
    name = (state.partner(first) if first else None) or state.pick()
    return f"({name} {state.rng.choice(('>', '<=', '!='))} {state.rng.choice((0, 1, -0.3))})" if name else None


def _number(state: State, row: Row, argument: Any, default: Any) -> str:
    plain = isinstance(default, (int, float)) and not isinstance(default, bool) and str(argument.type) in ("number", "float")
    if plain and not SMALL.search(str(row.target)) and state.rng.random() < 0.5:
        return shown(state.rng.choice(SCALARS))
    return shown(default)


# Reductions -----------------------------------------------------------------------------------------------------------


@maker(8)
def reduction(state: State) -> bool:
    """A reduction row over some dimensions of a value, or a scan row along one."""
    name = state.pick(lambda t: t.numel() > 0)
    rows = rows_of(Kind.REDUCTION, Kind.SCAN)
    return proposed(state, call) if name and (call := reduction_call(state, state.rng.choice(rows), name)) else False


def reduction_call(state: State, row: Row, name: str) -> str | None:
    """A call of a reduction or scan row; of one with two results the first or the second."""
    if not settled(state, row, name):
        return None
    rank = state.rank(name)
    positional = [name]
    keywords = []
    for argument in row.target._schema.arguments[1:]:
        if argument.name in ("dim", "dims"):
            made = _dims(state, str(argument.type), rank)
        elif argument.name == "keepdim":
            made = state.rng.choice(("True", "False"))
        elif argument.name == "correction":
            made = state.rng.choice("01")
        else:
            continue
        if made is None:
            return None
        (keywords if argument.kwarg_only else positional).append(f"{argument.name}={made}" if argument.kwarg_only else made)
    several = len(row.target._schema.returns) > 1
    return f"torch.ops.{row.target}({', '.join(positional + keywords)})" + f"[{state.rng.choice('01')}]" * several


def _dims(state: State, kind: str, rank: int) -> str | None:
    if "List" not in kind and "[]" not in kind:
        return str(state.rng.randrange(-rank, rank)) if rank else None
    chosen = state.rng.sample(range(rank), state.rng.randint(min(1, rank), rank))
    return str([dim - rank if state.rng.random() < 0.5 else dim for dim in chosen])


# All the other rows, by their samples ---------------------------------------------------------------------------------


@cache
def sampled(row: Row) -> tuple[Sample, ...]:
    """The calls that the tests of rows make of a row, in float32."""
    return tuple(sample for sample in samples.samples(row)
                 if sample.what in ("same torch.float32", "created", "transposed", "strided"))


@maker(6)
def by_sample(state: State) -> bool:
    """A row called as its tests call it, on values of this program that are brought into the sample's shape."""
    row = state.rng.choice(rows_of(Kind.VIEW, Kind.INDEX, Kind.GATHER, Kind.CREATION))
    found = sampled(row)
    if not found:
        return False
    sample = state.rng.choice(found)
    positional = [_sample_argument(state, value) for value in sample.args]
    keywords = {name: _sample_argument(state, value) for name, value in sample.kwargs.items()}
    if None in positional or None in keywords.values():
        return False
    texts = [str(text) for text in positional] + [f"{name}={text}" for name, text in keywords.items()]
    return proposed(state, f"torch.ops.{row.target}({', '.join(texts)})")


def _sample_argument(state: State, value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return _sample_tensor(state, value)
    if isinstance(value, (list, tuple)):
        texts = [_sample_argument(state, item) for item in value]
        return None if None in texts else f"[{', '.join(map(str, texts))}]"
    if isinstance(value, torch.device):
        return f"{state.tensors[0]}.device" if state.tensors else None
    return shown(value)


def _sample_tensor(state: State, value: torch.Tensor) -> str | None:
    """A value of the sample's shape: one of this program for a float, a literal for indices and masks."""
    if not value.is_floating_point():
        name = f"i{len(state.arguments)}"
        state.argue(Argument(name, (), str(value.dtype)[6:], 0, literal=str(value.tolist())))
        return state.parameters[-1][0]
    shape, count = tuple(value.shape), value.numel()
    known = state.pick(lambda t: t.dtype.is_floating_point and t.numel() >= count)
    if known is None:
        return None
    if all(t.shape == value.shape for t in state.values(known)):
        return known
    return f"{known}.reshape(-1)[:{count}].reshape({shape})"
