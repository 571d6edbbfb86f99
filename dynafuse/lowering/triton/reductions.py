"""Reductions as recurrences: states that take in elements, are combined across lanes, and are finished.

Each recurrence serves persistent rows (all elements at once), loops (a state per lane, updated per step) and split rows
(states of several programs combined by a second kernel).

Worked example: ``sum`` has one state that starts at 0, takes in ``v`` as ``state + v``, is combined by ``tl.sum`` and
finished as it is; ``var`` has three (mean, sum of squared deviations, weight), taken in as in Welford (Technometrics 4(3),
1962) and combined as in Chan, Golub, LeVeque (1979).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dynafuse.errors import LoweringError
from dynafuse.ops.literals import opmath, triton_type

Names = Sequence[str]
"""The names of states."""


@dataclass(frozen=True)
class Recurrence:
    """How a reduction is computed, as Triton text: ``v`` names an element, ``i`` its position in the row.

    Loops update each lane with one element per step, so that all lanes have taken in equally many; ``share`` is 1 over
    their number.
    """

    element_dtype: torch.dtype  # the dtype to which an element is converted first
    states: tuple[tuple[torch.dtype, str], ...]  # dtype and initial value of each state
    start: Callable[[str, str], tuple[str, ...]]  # (v, i) -> the states of one element
    update: Callable[[Names, str, str, str], str]  # (states, v, i, share) -> the new states, with commas between several
    # (states of all lanes, how many elements these have taken in) -> the combined states along AXIS, a tuple if several
    combine: Callable[[Names, str], str]
    finish: Callable[[Names, str], str]  # (combined states, number of elements) -> the result
    needs_position: bool = False
    needs_share: bool = False


def _first(states: Names, count: str) -> str:
    return states[0]


def _mean(states: Names, count: str) -> str:
    return f"{states[0]} / {count}"


def _combine_by(function: str) -> Callable[[Names, str], str]:
    """Return a combination of lanes by a function of all states and an axis."""
    return lambda states, count: f"{function}({', '.join(states)}, AXIS)"


def _one_state(dtype: torch.dtype, identity: str, step: str, combine: str,
               finish: Callable[[Names, str], str] = _first) -> Recurrence:
    """Return a recurrence of one state.

    Args:
        dtype: The dtype of the state and of its elements.
        identity: The state before the first element.
        step: The new state, from ``{s}`` and the element ``{v}``.
        combine: The function that combines lanes.
        finish: The result, from the combined state and the number of elements.
    """
    return Recurrence(
        dtype, ((dtype, identity),), lambda v, i: (v,), lambda s, v, i, share: step.format(s=s[0], v=v),
        _combine_by(combine), finish,
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


def _position(operand: torch.dtype, largest: bool) -> Recurrence:
    """Return the recurrence of argmax or argmin: the lowest position of the extreme, which is NaN if there is one."""
    dtype = torch.int32 if operand is torch.bool else opmath(operand)
    name, identity = ("argmax", _lowest(dtype)) if largest else ("argmin", _highest(dtype))
    return Recurrence(
        dtype, ((dtype, identity), (torch.int64, str(torch.iinfo(torch.int64).max))), lambda v, i: (v, i),
        lambda s, v, i, share: f"lm.combine_{name}({s[0]}, {s[1]}, {v}, {i})",
        _combine_by(f"lm.{name}"), lambda s, count: s[1], needs_position=True,
    )


def _variance(dtype: torch.dtype, correction: float, result: str = "{}") -> Recurrence:
    """Return Welford's recurrence, whose divisor is never negative, as in eager; ``result`` is written over the variance."""
    weight = f"({{v}} * 0 + 1).to({triton_type(dtype)})"
    return Recurrence(
        dtype, ((dtype, "0"), (dtype, "0"), (dtype, "0")),
        lambda v, i: (v, f"{v} * 0", weight.format(v=v)),
        lambda s, v, i, share: f"lm.take_welford({s[0]}, {s[1]}, {s[2]}, {v}, {share})",
        lambda s, count: f"lm.welford({s[0]}, {s[1]}, {s[2]}, {count}, AXIS)",
        lambda s, count: result.format(f"{s[1]} / tl.maximum(({count}) - {float(correction)}, 0.0)"), needs_share=True,
    )


def recurrence(name: str, operand: torch.dtype, out: torch.dtype, correction: float = 0.0) -> Recurrence:
    """Return the recurrence of a reduction.

    Args:
        name: Its name in the op table, such as ``sum`` or ``var``.
        operand: The dtype of its operand.
        out: The dtype of its result.
        correction: What the divisor of a variance is less than the number of elements.

    Raises:
        LoweringError: If there is no recurrence of that name.
    """
    acc = opmath(out)
    if name in ("sum", "mean"):
        return _one_state(acc, "0", "{s} + {v}", "tl.sum", _mean if name == "mean" else _first)
    if name == "prod":
        return _one_state(acc, "1", "{s} * {v}", "lm.prod")
    if name in ("max", "min"):
        return _extreme(operand, name == "max")
    if name in ("argmax", "argmin"):
        return _position(operand, name == "argmax")
    if name == "any":
        return _one_state(torch.bool, "False", "{s} | {v}", "lm.any_of")
    if name == "all":
        return _one_state(torch.bool, "True", "{s} & {v}", "lm.all_of")
    if name in ("var", "std"):
        return _variance(acc, correction, "{}" if name == "var" else "lm.sqrt({})")
    raise LoweringError(name, "there is no recurrence of this name")
