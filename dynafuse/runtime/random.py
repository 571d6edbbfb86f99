"""Random numbers as kernels draw them from a seed, for ops that run eager: Philox 4×32, ten rounds, in torch's integers.

Torch's own eager functions of these ops ignore their seed, so a backward that draws a mask again would get another one.

Worked example: ``EAGER[prims.inductor_random.default]([3], seed, "rand")`` are the three numbers that a kernel draws, made
of the first three words of block 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor import inductor_prims

from dynafuse.lowering.triton.draws import FOUR

ROUNDS = 10
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
SCALE = 4.6566127342e-10  # takes 31 bits to [0, 1)
LEAST = 1.0e-7  # the least number of which a logarithm is taken


def floats(size: Sequence[int], seed: torch.Tensor, mode: str, *, align_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Draw float32 numbers by their positions.

    Args:
        size: The result's sizes.
        seed: A tensor of one integer.
        mode: "rand" for numbers from [0, 1), "randn" for standard normal ones; any other is left to torch.
        align_dtype: Torch's own option; with one, torch draws the numbers.
    """
    if align_dtype is not None or mode not in ("rand", "randn"):
        other: torch.Tensor = inductor_prims.random(size, seed, mode, align_dtype=align_dtype)
        return other
    count = math.prod(size)
    words = _philox(seed, torch.arange(-(-count // FOUR), device=seed.device))
    numbers = torch.stack([_uniform(word) for word in words], -1)
    if mode == "randn":
        radius = torch.sqrt(-2.0 * torch.log(numbers[:, 0::2].clamp(min=LEAST)))
        angle = 2 * math.pi * numbers[:, 1::2]
        numbers = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1)
    return numbers.flatten()[:count].reshape(*size)


def integers(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    """Draw int64 numbers from [low, high), by their positions.

    Args:
        low: The least number.
        high: What they stay below.
        size: The result's sizes.
        seed: A tensor of one integer.
    """
    first, second, *_ = _philox(seed, torch.arange(math.prod(size), device=seed.device).reshape(*size))
    return _remainder(first | (second << 32), high - low) + low


EAGER: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.prims.inductor_random.default: floats,
    torch.ops.prims.inductor_randint.default: integers,
}
"""The functions that run in place of torch's own, by op."""


def _philox(seed: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return four random words, integers from [0, 2**32), for each block's number."""
    words = [block & WORD, block >> 32, torch.zeros_like(block), torch.zeros_like(block)]
    low, high = seed & WORD, (seed >> 32) & WORD
    for _ in range(ROUNDS):
        first, second, third, fourth = words
        words = [_upper(third, ROUND_B) ^ second ^ low, third * ROUND_B & WORD,
                 _upper(first, ROUND_A) ^ fourth ^ high, first * ROUND_A & WORD]
        low, high = (low + KEY_A) & WORD, (high + KEY_B) & WORD
    return tuple(words)


def _upper(word: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the upper 32 bits of the 64-bit product of two words."""
    return (word * (factor >> 16) + (word * (factor & 0xFFFF) >> 16)) >> 16


def _uniform(word: torch.Tensor) -> torch.Tensor:
    signed = word.to(torch.int32)  # two's complement
    return torch.where(signed < 0, -signed - 1, signed).to(torch.float32) * SCALE


def _remainder(word: torch.Tensor, span: int) -> torch.Tensor:
    """Return the remainder of an unsigned 64-bit number.

    Torch's integers are signed: the remainder of the upper 63 bits is doubled, and the last bit added.
    """
    half = ((word >> 1) & 0x7FFF_FFFF_FFFF_FFFF) % span
    twice = torch.where(half >= span - half, half - (span - half), half + half)
    odd = (word & 1) == 1
    return torch.where(odd, torch.where(twice == span - 1, 0, twice + 1), twice)
