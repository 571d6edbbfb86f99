"""Says whether what a compiled program leaves is what eager leaves, as far as rounding lets anybody say.

Eager runs once as it is, a few times with noise (``noise.py``), and in float64. How far these are apart, element by element, is what
a compiler may be off; where they do not even agree on NaN, infinity, an integer or a bool, the element is not compared. Everything
else is: dtypes, sizes, strides, what requires a gradient, what shares memory with what, what was written to arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.support.differential import Outcome, aliases
from tests.support.differential import significant as significant_strides

ULPS = {torch.float64: 64.0, torch.float32: 12.0, torch.bfloat16: 1.5, torch.float16: 1.5}
"""Units in the last place that are no error, by dtype."""

SPREAD, TYPICAL = 10.0, 3.0
"""How many times the differences between the references an element may be off: its own, and the typical one."""


def significant(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that say where elements are."""
    return tuple(significant_strides(tensor))


class Different(AssertionError):
    """What differs, and (``kind``) in which respect."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True)
class References:
    """Eager's outcome, and others that a right compiler could have had."""

    eager: Outcome
    others: tuple[Outcome, ...]
    drawn: bool = False  # whether random numbers differ, so that only the form is compared
    promised: Any = None  # the result by torch's shape functions, whose strides, all that a compiler sees, may not be eager's


def require(condition: bool, kind: str, message: str) -> None:
    """Raise what differs."""
    if not condition:
        raise Different(kind, message)


def differences(ours: Outcome, references: References) -> Iterator[Different]:
    """Yield all in which ``ours`` is wrong, in order."""
    eager = references.eager
    for part in ("result", "arguments", "gradients"):
        mine, theirs = tree_leaves(getattr(ours, part)), tree_leaves(getattr(eager, part))
        if len(mine) != len(theirs):
            yield Different("structure", f"{part}: {len(mine)} values, in eager {len(theirs)}")
            return
        others = [tree_leaves(getattr(other, part)) for other in references.others]
        promised = tree_leaves(references.promised) if part == "result" else []
        for k, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            strides = {significant(t) for t in (y, *promised[k:k + 1]) if isinstance(t, torch.Tensor)}
            try:
                compare(x, y, [other[k] for other in others if len(other) == len(theirs)], f"{part}[{k}]",
                        None if part == "gradients" else strides, references.drawn)
            except Different as different:
                yield different
    if aliases(ours) != aliases(eager):
        yield Different("aliases", f"memory shared by {aliases(ours)}, in eager by {aliases(eager)}")


def compare(x: Any, y: Any, others: Sequence[Any], what: str, strides: Collection[Sequence[int]] | None, drawn: bool) -> None:
    """One value with eager's; ``strides`` are those that it may have (None: any, and it may require a gradient or not)."""
    if not isinstance(y, torch.Tensor):
        require(type(x) is type(y) and (x == y or x != x), "value", f"{what}: {x!r} is not {y!r}")
        return
    require(isinstance(x, torch.Tensor), "structure", f"{what}: {x!r} is no tensor")
    facts = ("dtype", "shape", "device") + (strides is not None) * ("requires_grad",)
    mine, theirs = ({fact: getattr(t, fact) for fact in facts} for t in (x, y))
    require(mine == theirs, "form", f"{what}: {mine} is not {theirs}")
    right = strides is None or x.layout is not torch.strided or significant(x) in strides
    require(right, "strides", f"{what}: strides {x.stride()}, in eager {y.stride()}")
    if y.numel() and not drawn:
        found = [other.detach() for other in others if isinstance(other, torch.Tensor) and other.shape == y.shape]
        _compare_values(x.detach(), y.detach(), found, what)


def _compare_values(x: torch.Tensor, y: torch.Tensor, others: Sequence[torch.Tensor], what: str) -> None:
    if not y.is_floating_point():
        wrong = x != y
        for other in others:
            wrong &= other == y
        require(not bool(wrong.any()), "value", f"{what}: {_shown(x, wrong)} is not {_shown(y, wrong)} ({int(wrong.sum())} elements)")
        return
    sure = torch.ones_like(y, dtype=torch.bool)
    for other in others:
        narrow = other.to(y.dtype)
        sure &= (narrow.isfinite() & y.isfinite()) | (narrow.isnan() & y.isnan()) | (narrow == y)
    special = ~y.isfinite()
    wrong = sure & special & ~((x == y) | (x.isnan() & y.isnan()))
    wrong |= sure & ~special & ~x.isfinite()
    require(not bool(wrong.any()), "value", f"{what}: {_shown(x, wrong)} is not {_shown(y, wrong)} ({int(wrong.sum())} elements)")
    _compare_finite(x, y, others, sure & ~special, what)


def _compare_finite(x: torch.Tensor, y: torch.Tensor, others: Sequence[torch.Tensor], where: torch.Tensor, what: str) -> None:
    if not bool(where.any()):
        return
    plain, truth = x[where].double(), y[where].double()
    spread = torch.zeros_like(truth)
    for other in others:
        spread = torch.maximum(spread, (other[where].double() - truth).abs())
    limits = torch.finfo(y.dtype)
    typical = spread.square().mean().sqrt()
    tiny = limits.smallest_normal * (1 if y.dtype is not torch.float16 else limits.eps * 2)
    allowed = SPREAD * spread + TYPICAL * typical + ULPS[y.dtype] * limits.eps * truth.abs() + tiny
    off = (plain - truth).abs() > allowed
    if bool(off.any()):
        worst = int(((plain - truth).abs() / allowed).argmax())
        raise Different("value", f"{what}: {_shown(plain, off)} is not {_shown(truth, off)} ({int(off.sum())} of {truth.numel()} "
                        f"elements; off by {float((plain - truth).abs()[worst]):.3g}, allowed {float(allowed[worst]):.3g})")


def _shown(values: torch.Tensor, where: torch.Tensor) -> list[Any]:
    return [round(v, 6) if isinstance(v, float) else v for v in values[where][:3].tolist()]


def same_bits(first: Outcome, second: Outcome, what: str) -> None:
    """Two outcomes are equal to the last bit."""
    for part in ("result", "arguments", "gradients"):
        a, b = tree_leaves(getattr(first, part)), tree_leaves(getattr(second, part))
        require(len(a) == len(b), what, f"{part}: {len(a)} values and {len(b)}")
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            equal = torch.equal(_bits(x), _bits(y)) if isinstance(x, torch.Tensor) else x == y
            require(equal, what, f"{part}[{k}] is not the same twice")


def _bits(value: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
    return flat.copy_(value.detach().reshape(-1)).view(torch.uint8)
