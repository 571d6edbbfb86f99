"""Rules for the values of a spec's index inputs, so that no kernel reads out of bounds on made-up data.

An input that indexes directly (through views and casts at most) has to be below the size that it indexes. An index that is
computed from integer inputs is evaluated on the data beforehand. One that is computed from floats, or from an input that the
kernel overwrites, rules the region out. An index that depends on no input is right or wrong whatever the data are.

Worked example: for ``embedding(weight[32000, 4096], tokens)`` the rules are ``limits={1: 32000}`` and nothing to check;
for ``gather(x, 1, where(target == -100, 0, target))`` ``target`` is limited, and the ``where`` is to be checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dynafuse.ir import Ref, Spec
from dynafuse.lowering.interpret import Interpreter, inputs_of, operands_of, size_at, sizes_at
from dynafuse.ops import Kind, lookup
from dynafuse.ops.overloads import overload

KEPT_BY_CAST = frozenset({torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True)
class Use:
    """A tensor that is used as an index into a dimension of ``size`` elements."""

    index: Ref
    size: int


@dataclass(frozen=True)
class Rules:
    """Rules for a spec's inputs: per integer input that indexes, the number it has to stay below (``limits``), and the
    computed indices in the order of the ops (``checks``). ``reason`` says why no data can be made up, or is ""."""

    limits: Mapping[int, int]
    checks: tuple[Use, ...] = ()
    reason: str = ""


def rules(spec: Spec, hints: Mapping[str, int]) -> Rules:
    """Return the rules for a spec's inputs. ``hints`` are the values of its size symbols."""
    limits: dict[int, int] = {}
    checks: list[Use] = []
    for position, op in enumerate(spec.ops):
        op_uses = list(uses(spec, position, hints))
        row = lookup(overload(op.target))
        if row is not None and row.kind in (Kind.GATHER, Kind.SCATTER) and not op_uses:
            return Rules({}, reason=f"{op.target}: what its indices may be is not known")
        for use in op_uses:
            inputs = inputs_of(spec, use.index)
            reason = _distrusted(spec, use, inputs)
            if reason:
                return Rules({}, reason=f"{op.target}: {reason}")
            for i in inputs:
                limits[i] = min(limits.get(i, use.size), use.size)
            if inputs and not _direct(spec, use.index):
                checks.append(use)
    return Rules(limits, tuple(checks))


def uses(spec: Spec, position: int, hints: Mapping[str, int]) -> Iterator[Use]:
    """Yield the indices that an op takes, with the sizes that they index.

    Args:
        spec: The region.
        position: The op's, in ``spec.ops``.
        hints: The values of the spec's size symbols, by name.
    """
    op = spec.ops[position]
    row = lookup(overload(op.target))
    if row is None or row.indices is None:
        return
    for index, operand, dim in row.indices(dict(op.args)):
        sizes = _sizes(spec, operand, hints) or (1,)
        yield Use(index, sizes[size_at(dim, hints)])


def _sizes(spec: Spec, ref: Ref, hints: Mapping[str, int]) -> tuple[int, ...]:
    return sizes_at(spec.tensor(ref).shape, hints)


def _distrusted(spec: Spec, use: Use, inputs: frozenset[int]) -> str:
    """Return why made-up data cannot be kept from leading an index out of bounds, or ""."""
    if inputs and use.size < 1:
        return "indexes a dimension without elements"
    floats = [i for i in inputs if spec.inputs[i].dtype.is_floating_point or spec.inputs[i].dtype.is_complex]
    if floats:
        return f"its index is computed from in{min(floats)}, which is not of integers"
    overwritten = {store.into for store in spec.stores} & inputs
    if overwritten:
        return f"its index depends on in{min(i for i in overwritten if i is not None)}, which is overwritten"
    rows = (lookup(overload(spec.ops[i].target)) for i in operands_of(spec, use.index))
    random = any(row is not None and row.kind is Kind.RANDOM for row in rows)
    return "its index is random" if random else ""


def _direct(spec: Spec, ref: Ref) -> bool:
    """Return whether a value is an input seen through views, and through casts that keep values that are not negative."""
    while ref.kind == "op":
        op = spec.ops[ref.position]
        row = lookup(overload(op.target))
        if row is None or not (row.kind is Kind.VIEW or (row.casts and op.dtype in KEPT_BY_CAST)):
            return False
        operand = op.args[0][1]
        if not isinstance(operand, Ref) or _narrows(spec, operand, op.dtype):
            return False
        ref = operand
    return not spec.inputs[ref.position].dtype.is_floating_point


def _narrows(spec: Spec, operand: Ref, dtype: torch.dtype) -> bool:
    """Return whether a dtype may hold less than the operand's, or reinterprets it."""
    return dtype.itemsize < spec.tensor(operand).dtype.itemsize


def violation(spec: Spec, hints: Mapping[str, int], checks: Sequence[Use], inputs: Sequence[torch.Tensor],
              device: torch.device) -> str:
    """Return the first computed index that leaves its bounds on some inputs, as a message; "" if none does.

    Indices are evaluated in the order of the ops, so that one that indexes for a later one has been checked before.

    Args:
        spec: The region.
        hints: The values of its size symbols, by name.
        checks: The indices, in the order of the ops.
        inputs: A tensor per input of the spec.
        device: Where tensors are made that no input goes into.
    """
    values = Interpreter(spec, hints, inputs, device)
    for use in checks:
        try:
            index = values.value(use.index)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return f"{use.index} as an index cannot be evaluated: {error}"
        if index.numel() == 0:
            continue
        low, high = (int(bound) for bound in torch.aminmax(index.to(torch.int64)))
        if low < 0 or high >= use.size:
            return f"{use.index} as an index is from {low} to {high}, not within {use.size} elements"
    return ""
