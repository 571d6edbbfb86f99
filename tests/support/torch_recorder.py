"""nvFuser's ops over torch tensors: the second backend of ``replay``, so that a recipe's arithmetic can be checked anywhere.

Every function has the signature of ``fd.ops`` and nvFuser's meaning where that is not torch's: integer ``div`` truncates,
``mod`` is C's, a choice between two numbers is double. Operands that nvFuser would promote are an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynafuse.lowering.nvfuser.recipe import Input, Recipe
from dynafuse.lowering.nvfuser.replay import replay

_SAME_NAME = (
    "abs acos acosh asin asinh atan atan2 atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor fmod lgamma log log10 "
    "log1p log2 maximum minimum nextafter pow reciprocal remainder round rsqrt sigmoid signbit sin sinh sqrt tan tanh trunc "
    "neg add sub mul eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_xor"
)
_KEEPS = "cast broadcast squeeze permute reshape expand slice cat pad index_select take_along_axis segment_set stride_order size"
SAME_NAME, KEEPS_16_BITS = _SAME_NAME.split(), frozenset(_KEEPS.split())


class TorchBackend:
    """Runs a recipe over tensors; ``outputs`` are what it stores."""

    def __init__(self, inputs: Sequence[torch.Tensor], scalars: Sequence[int] = ()) -> None:
        self.inputs, self.scalars = iter(inputs), iter(scalars)
        self.outputs: list[torch.Tensor] = []
        self.overwrites: list[tuple[torch.Tensor, torch.Tensor]] = []

    def tensor(self, description: Input) -> torch.Tensor:
        found = next(self.inputs)
        assert found.dtype is description.dtype and found.dim() == len(description.shape)
        assert all(want in (-1, have) for have, want in zip(found.shape, description.shape, strict=True))
        return found

    def scalar(self) -> int:
        return next(self.scalars)

    def call(self, name: str, args: Sequence[Any]) -> Any:
        if not any(isinstance(a, torch.Tensor) for a in flat(args)) and name in SCALARS:
            return SCALARS[name](*args)
        if name not in KEEPS_16_BITS:
            assert not any(a.dtype in (torch.float16, torch.bfloat16) for a in flat(args) if isinstance(a, torch.Tensor)), name
        return OPS[name](*args)

    def output(self, value: torch.Tensor, into: torch.Tensor | None) -> None:
        if into is None:
            self.outputs.append(value)
        else:
            assert value.dtype is into.dtype and value.shape == into.shape
            self.overwrites.append((into, value))
            self.outputs.append(into)


def run(recipe: Recipe, inputs: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
    """What a recipe stores, with every step's dtype checked; ``sizes`` are the values of the spec's size symbols."""
    backend = TorchBackend(inputs, [sizes[symbol] for _, symbol in recipe.scalars])
    values = replay(recipe, backend)
    for step in recipe.steps:
        for number in step.results:
            kind = values[number].dtype if isinstance(values[number], torch.Tensor) else None
            assert kind is step.dtype, f"{step} is {kind}"
    for into, value in backend.overwrites:
        into.copy_(value)
    return backend.outputs


def flat(args: Sequence[Any]) -> list[Any]:
    return [b for a in args for b in (flat(a) if isinstance(a, (list, tuple)) else [a])]


def one_dtype(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """No promotion: tensors of one dtype, and numbers of its kind."""

    def call(*operands: Any) -> torch.Tensor:
        dtypes = {o.dtype for o in operands if isinstance(o, torch.Tensor)}
        assert len(dtypes) == 1, dtypes
        dtype = dtypes.pop()
        for operand in operands:
            assert isinstance(operand, torch.Tensor) or dtype.is_floating_point or not isinstance(operand, float), operand
        made = [o if isinstance(o, torch.Tensor) else torch.tensor(o, dtype=dtype) for o in operands]
        ranks = {o.dim() for o in operands if isinstance(o, torch.Tensor)}
        assert len(ranks) == 1, ranks
        return function(*made)

    return call


def div(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.div(left, right, rounding_mode=None if left.dtype.is_floating_point else "trunc")


def where(condition: torch.Tensor, left: Any, right: Any) -> torch.Tensor:
    assert condition.dtype is torch.bool
    tensors = [o for o in (left, right) if isinstance(o, torch.Tensor)]
    assert len({t.dtype for t in tensors}) <= 1
    wide = torch.float64 if isinstance(left, float) or isinstance(right, float) else torch.int64
    dtype = tensors[0].dtype if tensors else wide
    if dtype is torch.bool and len(tensors) == 1:
        dtype = torch.int64
    left, right = (o.to(dtype) if isinstance(o, torch.Tensor) else torch.tensor(o, dtype=dtype) for o in (left, right))
    return torch.where(condition, left, right)


def broadcast(tensor: torch.Tensor, new: Sequence[bool]) -> torch.Tensor:
    sizes = iter(tensor.shape)
    assert len(new) - sum(new) == tensor.dim()
    return tensor.reshape([1 if flag else next(sizes) for flag in new])


def squeeze(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    assert all(tensor.shape[d] == 1 for d in dims)
    return tensor.reshape([size for d, size in enumerate(tensor.shape) if d not in dims])


def pad(tensor: torch.Tensor, widths: Sequence[int], value: Any) -> torch.Tensor:
    assert tensor.dtype is not torch.bool and isinstance(value, float) is tensor.dtype.is_floating_point
    return torch.constant_pad_nd(tensor, list(widths), value)


def cut(tensor: torch.Tensor, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int], exact: bool) -> torch.Tensor:
    assert exact and set(steps) == {1}
    assert all(0 <= a <= b <= size for a, b, size in zip(starts, ends, tensor.shape, strict=True)), (starts, ends, tensor.shape)
    return tensor[tuple(slice(a, b) for a, b in zip(starts, ends, strict=True))]


def reduction(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(tensor: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
        assert dims and tensor.dtype is not torch.bool, "dims=[] is an error in nvFuser"
        return function(tensor, list(dims), keepdim)

    return call


def product(tensor: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        tensor = tensor.prod(dim, keepdim=keepdim)
    return tensor


def reorder(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The same values with dimension ``d`` at rank ``order[d]`` in memory."""
    memory = sorted(range(tensor.dim()), key=lambda d: -order[d])
    back = [memory.index(d) for d in range(tensor.dim())]
    return tensor.permute(memory).clone(memory_format=torch.contiguous_format).permute(back)


def take(tensor: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    assert all(a == b for d, (a, b) in enumerate(zip(tensor.shape, index.shape, strict=True)) if d != dim)
    return torch.take_along_dim(tensor, index.long(), dim)


OPS: dict[str, Callable[..., Any]] = {
    **{name: one_dtype(getattr(torch, name)) for name in SAME_NAME},
    "div": one_dtype(div), "mod": one_dtype(torch.fmod), "where": where,
    "cast": lambda t, dtype: t.to(dtype),
    "sum": reduction(lambda t, dims, keep: t.sum(dims, keepdim=keep)), "prod": reduction(product),
    "max": reduction(lambda t, dims, keep: t.amax(dims, keepdim=keep)),
    "min": reduction(lambda t, dims, keep: t.amin(dims, keepdim=keep)),
    "broadcast": broadcast, "squeeze": squeeze, "slice": cut, "pad": pad,
    "permute": lambda t, dims: t.permute(dims),
    "reshape": lambda t, shape: t.reshape(shape),
    "expand": lambda t, shape: t.expand(shape),
    "cat": lambda tensors, dim: torch.cat(tensors, dim),
    "full": lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    "iota": lambda length, start, step, dtype: start + step * torch.arange(length, dtype=dtype),
    "index_select": lambda t, index, dim: t.index_select(dim, index),
    "take_along_axis": take,
    "segment_set": lambda t: t.clone(),
    "stride_order": reorder,
    "size": lambda t, dim: t.shape[dim],
}
SCALARS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "div": lambda a, b: a // b, "mod": lambda a, b: a % b,
}
