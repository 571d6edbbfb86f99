"""Reductions as recurrences: states that take in elements, are combined across lanes, and are finished.

Each recurrence serves persistent rows (all elements at once), loops (a state per lane, updated per step) and split rows
(states of several programs combined by a second kernel).

Worked example: ``sum`` has one state that starts at 0, takes in ``v`` as ``state + v``, is combined by ``tl.sum`` and
finished as it is; ``var`` has two (sum, sum of squared deviations from the mean), taken in as in Youngs, Cramer
(Technometrics, 1971) and combined as in Chan, Golub, LeVeque (1979). A ``mean`` beside it needs no state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dynafuse.errors import LoweringError
from dynafuse.ops.literals import opmath

Names = Sequence[str]
"""The names of states."""


@dataclass(frozen=True)
class Recurrence:
    """How a reduction is computed, as Triton text: ``v`` names an element, ``i`` its position in the row.

    Loops update each lane with one element per step. A recurrence that ``counts`` is told in ``steps`` which step this is,
    from 1 on, and in ``share`` 1 over the product of that and the one before.
    """

    element_dtype: torch.dtype  # the dtype to which an element is converted first
    states: tuple[tuple[torch.dtype, str], ...]  # dtype and initial value of each state
    start: Callable[[str, str], tuple[str, ...]]  # (v, i) -> the states of one element
    update: Callable[[Names, str, str, str, str], str]  # (states, v, i, steps, share) -> the new states, with commas between
    # (states of all lanes, how many elements each has taken in, and all of them) -> the combined states along AXIS
    combine: Callable[[Names, str, str], str]
    finish: Callable[[Names, str], str]  # (combined states, number of elements) -> the result
    needs_position: bool = False
    counts: bool = False
    begins_with_sum: bool = False  # whether the first state is the sum of the elements


def _first(states: Names, count: str) -> str:
    return states[0]


def _mean(states: Names, count: str) -> str:
    return f"{states[0]} / {count}"


def _combine_by(function: str) -> Callable[[Names, str, str], str]:
    """Return a combination of lanes by a function of all states and an axis."""
    return lambda states, weight, count: f"{function}({', '.join(states)}, AXIS)"


def _one_state(dtype: torch.dtype, identity: str, step: str, combine: str,
               finish: Callable[[Names, str], str] = _first, begins_with_sum: bool = False) -> Recurrence:
    """Return a recurrence of one state.

    Args:
        dtype: The dtype of the state and of its elements.
        identity: The state before the first element.
        step: The new state, from ``{s}`` and the element ``{v}``.
        combine: The function that combines lanes.
        finish: The result, from the combined state and the number of elements.
        begins_with_sum: Whether the state is the sum of the elements.
    """
    return Recurrence(
        dtype, ((dtype, identity),), lambda v, i: (v,), lambda s, v, *_: step.format(s=s[0], v=v),
        _combine_by(combine), finish, begins_with_sum=begins_with_sum,
    )


def _lowest(dtype: torch.dtype) -> str:
    return 'float("-inf")' if dtype.is_floating_point else str(torch.iinfo(dtype).min)


def _highest(dtype: torch.dtype) -> str:
    return 'float("inf")' if dtype.is_floating_point else str(torch.iinfo(dtype).max)


def _extreme(operand: torch.dtype, largest: bool) -> Recurrence:
    """Return the recurrence of amax or amin, in which NaN wins as in eager."""
    dtype = torch.int32 if operand is torch.bool else opmath(operand)
    name, identity = ("max", _lowest(dtype)) if largest else ("min", _highest(dtype))
    return _one_state(dtype, identity, f"lm.{name}imum({{s}}, {{v}})", f"lm.a{name}")


SCANS = {"cumsum": ("0", "{s} + {v}"), "cumprod": ("1", "{s} * {v}"),
         "logcumsumexp": ('float("-inf")', "lm.logaddexp({s}, {v})")}
"""The recurrences of scans: the state before the first element, and with one element more, or with the state of more."""


def _scan(name: str, dtype: torch.dtype) -> Recurrence:
    """Return the recurrence of a scan: its combination of lanes leaves in each the state of all up to it."""
    return _one_state(dtype, *SCANS[name], f"ls.{name}")


def _position(operand: torch.dtype, largest: bool) -> Recurrence:
    """Return the recurrence of argmax or argmin: the lowest position of the extreme, which is NaN if there is one."""
    dtype = torch.int32 if operand is torch.bool else opmath(operand)
    name, identity = ("argmax", _lowest(dtype)) if largest else ("argmin", _highest(dtype))
    return Recurrence(
        dtype, ((dtype, identity), (torch.int64, str(torch.iinfo(torch.int64).max))), lambda v, i: (v, i),
        lambda s, v, i, *_: f"lm.combine_{name}({s[0]}, {s[1]}, {v}, {i})",
        _combine_by(f"lm.{name}"), lambda s, count: s[1], needs_position=True,
    )


def _variance(dtype: torch.dtype, correction: float, result: str = "{}") -> Recurrence:
    """Return a variance's recurrence, whose divisor is never negative, as in eager; ``result`` is made of the variance."""
    return Recurrence(
        dtype, ((dtype, "0"), (dtype, "0")), lambda v, i: (v, f"{v} * 0"),
        lambda s, v, i, steps, share: f"lm.take_deviation({s[0]}, {s[1]}, {v}, {steps}, {share})",
        lambda s, weight, count: f"lm.deviations({s[0]}, {s[1]}, {weight}, {count}, AXIS)",
        lambda s, count: result.format(f"{s[1]} / tl.maximum(({count}) - {float(correction)}, 0.0)"),
        counts=True, begins_with_sum=True,
    )


def recurrence(name: str, operand: torch.dtype, out: torch.dtype, correction: float = 0.0,
               length: int | None = None) -> Recurrence:
    """Return the recurrence of a reduction.

    Args:
        name: Its name in the op table, such as ``sum`` or ``var``.
        operand: The dtype of its operand.
        out: The dtype of its result.
        correction: What the divisor of a variance is less than the number of elements.
        length: That number; None if it is not known.

    Raises:
        LoweringError: If there is no recurrence of that name.
    """
    acc = opmath(out)
    if name == "sum" and operand is torch.bool and length is not None and length <= torch.iinfo(torch.int32).max:
        acc = torch.int32  # holds how many are true, in half of the instructions
    if name in ("sum", "mean"):
        return _one_state(acc, "0", "{s} + {v}", "tl.sum", _mean if name == "mean" else _first, begins_with_sum=True)
    if name == "prod":
        return _one_state(acc, "1", "{s} * {v}", "lm.prod")
    if name in ("max", "min"):
        return _extreme(operand, name == "max")
    if name in ("argmax", "argmin"):
        return _position(operand, name == "argmax")
    if name in SCANS:
        return _scan(name, acc)
    if name == "any":
        return _one_state(torch.bool, "False", "{s} | {v}", "lm.any_of")
    if name == "all":
        return _one_state(torch.bool, "True", "{s} & {v}", "lm.all_of")
    if name in ("var", "std"):
        return _variance(acc, correction, "{}" if name == "var" else "lm.sqrt({})")
    raise LoweringError(name, "there is no recurrence of this name")
