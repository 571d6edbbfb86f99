"""Eager with rounding errors of its own: what it changes about a result, any right compiler may change too.

A result that is the same under noise is compared sharply, one that is not (a comparison of two sums that are nearly equal,
the difference of two large numbers, an argmax of near ties) is not compared more sharply than it deserves. Only what was
rounded is disturbed: an op whose result in float64 is the same is exact, so that integers in floats, copies and choices stay
as they are.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CONTRACTIONS = re.compile(
    r"sum|mean|prod|var|std|norm|\bmm|bmm|addmm|dot|\bmv|conv|softmax|softplus_back|pool|scatter_add|scatter_reduce|index_add|"
    r"index_put|embedding_dense|linear|attention|upsample|cdist|loss|trace|baddbmm|cum")
"""Ops that add many numbers up: how far off they may be depends on the numbers, not on the sum."""

AMPLITUDE = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
"""Largest disturbance by dtype, in units in the last place: float32 functions differ between math libraries."""

EXACT = re.compile(
    r"copy|clone|cat$|stack|where|mask|flip|roll|repeat|pad|index_select|^index$|gather|scatter(_$|$)|embedding$|neg|abs|relu|"
    r"clamp|max|min|sort|topk|tril|triu|full|zero|one|fill|slice|select|diag|as_strided|detach|nan_to_num|threshold_backward")
"""Ops that only choose or move, for float64, where no wider dtype tells."""


class Noise(TorchDispatchMode):
    """Disturbs the results of all ops that round, from a seed of its own: random ops draw the same numbers as without.

    Seeds come in pairs, an even one and the next, with opposite disturbances: what is decided by rounding alone is decided the
    other way by one of the two.
    """

    def __init__(self, seed: int, device: str = "cpu") -> None:
        super().__init__()
        self.sign = 1 - 2 * (seed % 2)
        self.generator = torch.Generator(device).manual_seed(seed // 2)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func.is_view or torch.Tag.nondeterministic_seeded in func.tags or not _has_floats((args, kwargs)):
            return func(*args, **kwargs)
        exact = _in_float64(func, args, kwargs)
        mutable = func._schema.is_mutable
        if CONTRACTIONS.search(name) and not mutable:
            result = func(*args, **kwargs)
            other = func(*tree_map(self._disturbed, args), **tree_map(self._disturbed, kwargs))
            return tree_map(_where_rounded, result, other, exact) if _alike(result, other, exact) else other
        result = func(*args, **kwargs)
        if exact is None:
            return result
        for value, truth in zip(tree_leaves(result), tree_leaves(exact), strict=True):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._disturb(value, truth, bool(EXACT.search(name)))
        return result

    def _unit(self, value: torch.Tensor) -> float:
        return torch.finfo(value.dtype).eps * AMPLITUDE.get(value.dtype, 1.0)

    def _random(self, value: torch.Tensor) -> torch.Tensor:
        """Numbers between -1 and 1, in float64, or their opposites."""
        drawn = torch.rand(value.shape, generator=self.generator, device=value.device, dtype=torch.float64)
        return self.sign * (drawn * 2 - 1)

    def _disturbed(self, value: Any) -> Any:
        """A copy of a tensor, with noise."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
            return value
        noisy = value.double() * (1 + self._unit(value) * self._random(value))
        return torch.empty_like(value).copy_(noisy)

    def _disturb(self, value: torch.Tensor, truth: torch.Tensor, moves: bool) -> None:
        """Noise onto the elements of ``value`` that are not exactly ``truth``, in place."""
        plain, truth = value.double(), truth.double()
        off = (plain != truth) & plain.isfinite()
        if value.dtype is torch.float64 and not moves:  # what is not a whole number may be rounded
            off = (plain != plain.round()) & plain.isfinite()
        if not off.any():
            return
        distance = (plain - truth).nan_to_num(0.0, 0.0, 0.0).abs() * 4
        scale = plain.abs() * self._unit(value) + distance
        value.copy_(torch.where(off, plain + scale * self._random(value), plain))


def _has_floats(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in tree_leaves(tree))


def _in_float64(func: Any, args: Any, kwargs: Any) -> Any:
    """The op's result on float64 copies, or None where it has none. Must run before the op itself, which may write."""
    def widened(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.double() if value.is_floating_point() else value.clone()
        return value

    try:
        return func(*tree_map(widened, args), **tree_map(widened, kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None


def _alike(*trees: Any) -> bool:
    return len({len(tree_leaves(tree)) for tree in trees}) == 1 and type(trees[0]) is type(trees[1])


def _where_rounded(plain: Any, noisy: Any, exact: Any) -> Any:
    """``noisy`` where ``plain`` is not exactly the truth."""
    if not isinstance(plain, torch.Tensor) or not plain.is_floating_point() or exact.shape != plain.shape:
        return noisy if not isinstance(plain, torch.Tensor) or plain.is_floating_point() else plain
    same = plain == plain.round() if plain.dtype is torch.float64 else plain.double() == exact.double()
    return plain.copy_(torch.where(same, plain, noisy))
