"""Reductions as recurrences: a state that takes in elements, is combined across lanes, and is finished.

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


@dataclass(frozen=True)
class Recurrence:
    """How a reduction is computed. All members are Triton text; ``v`` is an element, ``i`` its position in the row.

    Loops update each lane with one element per step, so all lanes have taken in equally many; ``share`` is 1 over that.
    """

    element: torch.dtype  # what an element is converted to first
    states: tuple[tuple[torch.dtype, str], ...]  # dtype and initial value of each state
    start: Callable[[str, str], tuple[str, ...]]  # (v, i) -> the states of one element
    update: Callable[[Names, str, str, str], tuple[str, ...] | str]  # (states, v, i, share) -> new states
    combine: Callable[[Names], str]  # states of all lanes -> text of the combined states (a tuple if several)
    finish: Callable[[Names, str], str]  # (combined states, number of elements) -> the result
    indexed: bool = False  # whether it needs positions
    shared: bool = False  # whether it needs the share


def _first(states: Names, count: str) -> str:
    return states[0]


def _mean(states: Names, count: str) -> str:
    return f"{states[0]} / {count}"


def _across(states: Names, function: str) -> str:
    return f"{function}({', '.join(states)}, AXIS)"


def _simple(dtype: torch.dtype, identity: str, step: str, across: str,
            finish: Callable[[Names, str], str] = _first) -> Recurrence:
    """One state; ``step`` takes ``{s}`` and ``{v}``, ``across`` combines lanes."""
    return Recurrence(
        dtype, ((dtype, identity),), lambda v, i: (v,), lambda s, v, i, share: (step.format(s=s[0], v=v),),
        lambda s: _across(s, across), finish,
    )


def _lowest(dtype: torch.dtype) -> str:
    return 'float("-inf")' if dtype.is_floating_point else str(_range(dtype).min)


def _highest(dtype: torch.dtype) -> str:
    return 'float("inf")' if dtype.is_floating_point else str(_range(dtype).max)


def _range(dtype: torch.dtype) -> torch.iinfo:
    return torch.iinfo(torch.uint8 if dtype is torch.bool else dtype)


def _extreme(operand: torch.dtype, largest: bool) -> Recurrence:
    """amax and amin: NaN wins, as in eager."""
    dtype = torch.int32 if operand is torch.bool else opmath(operand)
    name, identity = ("max", _lowest(dtype)) if largest else ("min", _highest(dtype))
    return _simple(dtype, identity, f"lm.{name}imum({{s}}, {{v}})", f"lm.a{name}")


def _position(operand: torch.dtype, largest: bool) -> Recurrence:
    """argmax and argmin: the lowest position of the extreme; NaN is the extreme."""
    dtype = torch.int32 if operand is torch.bool else opmath(operand)
    name, identity = ("argmax", _lowest(dtype)) if largest else ("argmin", _highest(dtype))
    return Recurrence(
        dtype, ((dtype, identity), (torch.int64, str(torch.iinfo(torch.int64).max))), lambda v, i: (v, i),
        lambda s, v, i, share: f"lm.combine_{name}({s[0]}, {s[1]}, {v}, {i})",
        lambda s: _across(s, f"lm.{name}"), lambda s, count: s[1], indexed=True,
    )


def _variance(dtype: torch.dtype, correction: float, result: str = "{}") -> Recurrence:
    """Welford's recurrence; the divisor is never negative, as in eager. ``result`` is made from the variance."""
    one = f"({{v}} * 0 + 1).to({triton_type(dtype)})"
    return Recurrence(
        dtype, ((dtype, "0"), (dtype, "0"), (dtype, "0")),
        lambda v, i: (v, f"{v} * 0", one.format(v=v)),
        lambda s, v, i, share: f"lm.take_welford({s[0]}, {s[1]}, {s[2]}, {v}, {share})",
        lambda s: _across(s, "lm.welford"),
        lambda s, count: result.format(f"{s[1]} / tl.maximum(({count}) - {float(correction)}, 0.0)"), shared=True,
    )


def recurrence(name: str, operand: torch.dtype, out: torch.dtype, correction: float = 0.0) -> Recurrence:
    """The recurrence of a reduction over elements of ``operand`` into ``out``."""
    acc = opmath(out)
    if name in ("sum", "mean"):
        return _simple(acc, "0", "{s} + {v}", "tl.sum", _mean if name == "mean" else _first)
    if name == "prod":
        return _simple(acc, "1", "{s} * {v}", "lm.prod")
    if name in ("max", "min"):
        return _extreme(operand, name == "max")
    if name in ("argmax", "argmin"):
        return _position(operand, name == "argmax")
    if name == "any":
        return _simple(torch.bool, "False", "{s} | {v}", "lm.any_of")
    if name == "all":
        return _simple(torch.bool, "True", "{s} & {v}", "lm.all_of")
    if name in ("var", "std"):
        return _variance(acc, correction, "{}" if name == "var" else "lm.sqrt({})")
    raise LoweringError(name, "there is no recurrence of this name")
