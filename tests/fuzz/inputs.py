"""The tensors that programs are called with: made from a seed, in any dtype, layout and kind of values.

    >>> tensor((2, 3), "float16", seed=1, layout="transposed").stride()
    (1, 2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int64", "int32", "uint8", "int8", "int16")
LAYOUTS = ("contiguous", "transposed", "channels_last", "strided", "offset", "expanded")
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.0, -1.0)


@dataclass
class Place:
    """Where tensors are made, and whether floats are widened to float64 after they were rounded."""

    device: str = "cpu"
    wide: bool = False


PLACE = Place()


@contextmanager
def place(device: str, wide: bool = False) -> Iterator[None]:
    """Make tensors on ``device``, in float64 if ``wide``."""
    before = PLACE.device, PLACE.wide
    PLACE.device, PLACE.wide = device, wide
    try:
        yield
    finally:
        PLACE.device, PLACE.wide = before


def tensor(shape: Sequence[int], dtype: str, seed: int, values: str = "normal", layout: str = "contiguous",
           grad: bool = False) -> torch.Tensor:
    """A tensor of random values, a leaf."""
    made = valued(tuple(shape), getattr(torch, dtype), values, torch.Generator().manual_seed(seed))
    if PLACE.wide and made.is_floating_point():
        made = made.double()
    return laid_out(made.to(PLACE.device), layout).requires_grad_(grad)


def literal(elements: Any, dtype: str) -> torch.Tensor:
    """A tensor of the given elements."""
    made = torch.tensor(elements, dtype=getattr(torch, dtype))
    return (made.double() if PLACE.wide and made.is_floating_point() else made).to(PLACE.device)


def valued(shape: tuple[int, ...], dtype: torch.dtype, values: str, generator: torch.Generator) -> torch.Tensor:
    """Random values: normal, exact (multiples of a half), positive, special (NaN, infinities, signed zeros), index."""
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.6
    if not dtype.is_floating_point:
        low = 0 if values == "index" or dtype is torch.uint8 else 1 if values == "positive" else -7
        return torch.randint(low, 8, shape, generator=generator).to(dtype)
    if values == "exact":
        return torch.randint(-8, 9, shape, generator=generator).to(dtype) / 2
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if values == "positive":
        return (normal.abs() + 0.1).to(dtype)
    if values == "special":
        chosen = torch.tensor(SPECIAL, dtype=dtype)[torch.randint(0, len(SPECIAL), shape, generator=generator)]
        return torch.where(torch.rand(shape, generator=generator) < 0.3, chosen, (normal * 2).round().to(dtype) / 2)
    return (normal * 1.5).to(dtype)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values (or with ``expanded`` those of the first row, over and over) in another memory layout."""
    if layout == "channels_last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout in ("transposed", "channels_last") and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and values.dim():
        wide = values.new_zeros((*values.shape[:-1], 2 * values.shape[-1]))
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "offset":
        flat = values.new_zeros(values.numel() + 3)
        flat[3:] = values.reshape(-1)
        return flat[3:].view(values.shape)
    if layout == "expanded" and values.dim() and values.shape[0]:
        return values[:1].clone().expand(values.shape)
    return values
