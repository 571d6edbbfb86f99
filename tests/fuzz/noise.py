"""Eager with rounding errors of its own: what it changes about a result, any right compiler may change too.

A result that is the same under noise is compared sharply, one that is not (a comparison of two sums that are nearly equal,
the difference of two large numbers, an argmax of near ties) is not compared more sharply than it deserves. Only what was
rounded is disturbed: an op whose result in float64 is the same is exact, so that integers in floats, copies and choices stay
as they are.

A compiler need not round what it does not store: where one op's result goes into another, a product may go into a sum as it
was before it was rounded (GPUs do both in one instruction), and a 16-bit value may be held in 32 bits. So each use of a rounded
value sees a disturbance of its own: ``p * p - p * p`` is 0 in eager, and up to a unit in the last place of ``p * p`` elsewhere.

Worked example::

    with Noise(0):
        assert (x * x - x * x).abs().max() > 0
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CONTRACTIONS = re.compile(
    r"sum|mean|prod|var|std|norm|\bmm|bmm|addmm|dot|\bmv|conv|softmax|softplus_back|pool|scatter_add|scatter_reduce|index_add|"
    r"index_put|embedding_dense|linear|attention|upsample|cdist|loss|trace|baddbmm|cum")
"""Ops that add many numbers up: how far off they may be depends on the numbers, not on the sum."""

DIVIDING = re.compile(r"mean|var|std|norm|softmax|avg_pool|loss|attention")
"""Those of them that divide by a count or a sum: a compiler multiplies by a rounded reciprocal, so that nothing about them is
exact, not even the mean of equal numbers, and what is subtracted from it leaves a rest."""

BY_PIECES = re.compile(r"^(native_(layer|group|batch)_norm|_log_softmax|logsumexp|adaptive_max_pool[23]d)$")
"""Ops that take from values what comes of the same values, or a logarithm of a sum that may be nearly 1: a compiler may use
either before or after it is rounded. And one whose pieces take the first of several NaN (docs/differences.md)."""

AMPLITUDE = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
"""Largest disturbance by dtype, in units in the last place: float32 functions differ between math libraries."""

FEW_PLACES = 1024
"""A number that times this is whole has not been rounded."""

FLOAT32 = torch.finfo(torch.float32).eps

EXACT = re.compile(
    r"copy|^to$|clone|cat$|stack|where|mask|flip|roll|repeat|pad|index_select|^index$|gather|scatter(_$|$)|embedding$|neg|abs|relu|"
    r"clamp|max|min|sort|topk|tril|triu|full|zero|one|fill|slice|select|diag|as_strided|detach|nan_to_num|threshold_backward")
"""Ops that only choose or move, for float64, where no wider dtype tells."""


BY_LOOP = re.compile(r"^(elu_backward|hardtanh_backward|hardswish_backward|hardshrink|hardshrink_backward|softshrink_backward)$")
"""Ops that treat NaN in one way in eager's vectors and in another in the rest of a tensor and between gaps."""

BY_ORDER = re.compile(r"^(var|std)_mean$")
"""Ops whose mean of infinities eager leaves to the order in which it adds: infinite if the last is, else not a number."""

IN_FLOAT32 = re.compile(r"^(hardswish_?|hardsigmoid(_|_backward)?)$")
"""Ops whose sixth eager's kernels for GPUs have in float32, whatever the dtype."""

BY_WEIGHT = re.compile(r"^upsample_.*_backward$")
"""Ops that multiply gradients by weights of 0 in eager, which makes NaN of infinite ones (docs/differences.md)."""

BY_ZERO = re.compile(r"^(relu_?|clamp(_min|_max)?_?|hardtanh_?|maximum|minimum|fmax|fmin)$")
"""Ops that return the larger of two numbers, or the smaller: of two zeros IEEE 754 leaves open which one."""

BY_SIGN = re.compile(r"^(signbit|copysign)$")
"""Ops that read the sign of NaN, of which IEEE 754 says nothing."""


class Noise(TorchDispatchMode):
    """Disturbs the results of all ops that round, from a seed of its own: random ops draw the same numbers as without.

    Seeds come in pairs, an even one and the next, with opposite disturbances: what is decided by rounding alone is decided the
    other way by one of the two.
    """

    def __init__(self, seed: int, device: str = "cpu") -> None:
        super().__init__()
        self.sign = 1 - 2 * (seed % 2)
        self.generator = torch.Generator(device).manual_seed(seed // 2)
        self.rounded: dict[int, torch.UntypedStorage] = {}  # by address; held, so that no other memory gets the address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if (func.is_view and name != "to") or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        if not _has_floats((args, kwargs)):
            return tree_map(self._of_integers, func(*args, **kwargs)) if _has_tensors((args, kwargs)) else func(*args, **kwargs)
        if BY_PIECES.search(name):
            with self:
                result = decomposition_table.get(func, _undecomposed)(*args, **kwargs)
            if result is not NotImplemented:
                return result
        moves, mutable = bool(EXACT.search(name)), func._schema.is_mutable
        if BY_LOOP.search(name):
            args, kwargs = tree_map(_with_gaps, args), tree_map(_with_gaps, kwargs)
        if BY_WEIGHT.search(name):
            args, kwargs = tree_map(_finite, args), tree_map(_finite, kwargs)
        if BY_SIGN.search(name):
            args, kwargs = tree_map(self._signed, args), tree_map(self._signed, kwargs)
        exact = _in_float64(func, args, kwargs)
        if not moves and not mutable and _has_floats(exact) and any(map(self._is_rounded, tree_leaves((args, kwargs)))):
            args, kwargs = tree_map(self._used, args), tree_map(self._used, kwargs)
            exact = _in_float64(func, args, kwargs)
        if CONTRACTIONS.search(name) and not mutable:
            return self._contracted(func, args, kwargs, None if DIVIDING.search(name) else exact)
        zeros = args[0] == 0 if BY_ZERO.search(name) else None
        result = func(*args, **kwargs)
        if zeros is not None:
            self._choose_zeros(result, zeros)
        if exact is None:
            return result
        for value, truth in zip(tree_leaves(result), tree_leaves(exact), strict=True):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._disturb(value, truth, moves, FLOAT32 if value.is_cuda and IN_FLOAT32.search(name) else self._unit(value))
        if moves and any(map(self._is_rounded, tree_leaves((args, kwargs)))):
            tree_map(self._note, result)
        return result

    def _contracted(self, func: Any, args: Any, kwargs: Any, exact: Any) -> Any:
        """An op that adds many numbers up, of disturbed numbers where its result is not ``exact``."""
        result = func(*args, **kwargs)
        other = func(*tree_map(self._disturbed, args), **tree_map(self._disturbed, kwargs))
        if BY_ORDER.search(func._schema.name.split("::")[1]):
            other = (other[0], torch.where(other[1].isfinite(), other[1], _mean(*args, **kwargs)))
        if exact is None or not _alike(result, other, exact):
            return tree_map(lambda value: self._note(self._disturbed(value, 1.0)), other)
        return tree_map(self._where_rounded, result, other, exact)

    def _note(self, value: Any) -> Any:
        """The same value, known to be rounded: it and all its views."""
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            storage = value.untyped_storage()
            self.rounded[storage.data_ptr()] = storage
        return value

    def _is_rounded(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.untyped_storage().data_ptr() in self.rounded

    def _used(self, value: Any) -> Any:
        """What one use of a value sees: a rounded one within a unit in the last place, any other as it is."""
        return self._disturbed(value, 1.0) if self._is_rounded(value) else value

    def _unit(self, value: torch.Tensor, amplitude: float | None = None) -> float:
        return torch.finfo(value.dtype).eps * (amplitude or AMPLITUDE.get(value.dtype, 1.0))

    def _random(self, value: torch.Tensor) -> torch.Tensor:
        """Numbers between -1 and 1, in float64, or their opposites."""
        drawn = torch.rand(value.shape, generator=self.generator, device=value.device, dtype=torch.float64)
        return self.sign * (drawn * 2 - 1)

    def _disturbed(self, value: Any, amplitude: float | None = None) -> Any:
        """A copy of a tensor, with noise of so many units in the last place, or those of its dtype."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
            return value
        noisy = value.double() * (1 + self._unit(value, amplitude) * self._random(value))
        return torch.empty_like(value).copy_(noisy)

    def _of_integers(self, value: Any) -> Any:
        """A result of integers, with noise where it has many binary places, so that it may have been rounded."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
            return value
        shifted = value * FEW_PLACES
        return self._note(value.copy_(torch.where(shifted == shifted.round(), value, self._disturbed(value))))

    def _disturb(self, value: torch.Tensor, truth: torch.Tensor, moves: bool, unit: float) -> None:
        """Noise onto the elements of ``value`` that are not exactly ``truth``, in place: relative to them, of so much."""
        plain, truth = value.double(), truth.double()
        off = (plain != truth) & plain.isfinite()
        if value.dtype is torch.float64 and not moves:  # what is not a whole number may be rounded
            off = (plain != plain.round()) & plain.isfinite()
        if not off.any():
            return
        distance = (plain - truth).nan_to_num(0.0, 0.0, 0.0).abs() * 4
        scale = plain.abs() * unit + distance
        self._note(value.copy_(torch.where(off, plain + scale * self._random(value), plain)))

    def _choose_zeros(self, result: torch.Tensor, zeros: torch.Tensor) -> None:
        """Gives the zeros of a result, in place, where an operand was zero, the sign of the seed."""
        if result.is_floating_point():
            chosen = torch.full_like(result, math.copysign(0.0, self.sign))
            result.copy_(torch.where((result == 0) & zeros, chosen, result))

    def _signed(self, value: Any) -> Any:
        """The same value, each NaN with the sign of the seed."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        nan = torch.full_like(value, math.nan).copysign(torch.full_like(value, self.sign))
        return torch.where(value.isnan(), nan, value)

    def _where_rounded(self, plain: Any, noisy: Any, exact: Any) -> Any:
        """``noisy`` where ``plain`` is not exactly the truth."""
        if not isinstance(plain, torch.Tensor) or not plain.is_floating_point() or exact.shape != plain.shape:
            return noisy if not isinstance(plain, torch.Tensor) or plain.is_floating_point() else plain
        same = plain == plain.round() if plain.dtype is torch.float64 else plain.double() == exact.double()
        if not bool(same.all()):
            self._note(plain)
        return plain.copy_(torch.where(same, plain, noisy))


class WithoutMasks(TorchFunctionMode):
    """Attention without masks that keep all, and causal instead of under a triangle: rows that a mask leaves out are not read,
    so that what is no number in them stays there (docs/differences.md)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        mask = kwargs.get("attn_mask")
        if func is torch.nn.functional.scaled_dot_product_attention and mask is not None and mask.dtype is torch.bool:
            is_causal = mask.shape[-2:] == mask.shape[-2:][::-1] and bool((mask == torch.ones_like(mask).tril()).all())
            if is_causal or bool(mask.all()):
                kwargs |= {"attn_mask": None, "is_causal": is_causal}
        return func(*args, **kwargs)


def _undecomposed(*_: Any, **__: Any) -> Any:
    """What a decomposition answers that does not apply: older torch lacks some."""
    return NotImplemented


def _with_gaps(value: Any) -> Any:
    """The same tensor, every second element of its memory."""
    return torch.stack([value, value], -1)[..., 0] if isinstance(value, torch.Tensor) else value


def _finite(value: Any) -> Any:
    """The same tensor with numbers for what is none: what comes of those differs from what eager makes of them."""
    return value.nan_to_num(1.0, 2.0, -2.0) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _mean(value: torch.Tensor, dim: Any = None, _unbiased: bool = True, keepdim: bool = False, **_: Any) -> torch.Tensor:
    """The sum over the count, for the arguments of a ``std_mean``."""
    return torch.ops.aten.mean.dim(value, dim, keepdim)  # type: ignore[no-any-return]


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(tree))


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
