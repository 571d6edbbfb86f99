"""Random numbers by their positions in a tensor, for :mod:`dynafuse.lowering.triton.libm`.

Philox 4×32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), ten rounds, makes four words at a time.
Four neighbours share them: the number at a position is made of words ``position % 4`` of block ``position // 4``. The
functions that end in ``_of_fours`` compute each block once, for positions of which every four neighbours along the last
dimension count up from a multiple of four; the others compute the block of every position, which takes three times as long.
:mod:`dynafuse.runtime.random` draws the same numbers in eager.

Worked example: ``rand(seed, 5)`` and ``rand_of_fours(seed, tl.arange(0, 8))[5]`` are both word 1 of block 1, as a float.
"""

# Device functions have no types that mypy could know: the same source is traced by Triton and run by its interpreter.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl
from triton.language.random import pair_uniform_to_normal, uint_to_uniform_float

from dynafuse.lowering.triton.device_functions import jit


@jit
def _tensor(position):
    """Return a position as a tensor: it may be a literal, as that of a single element is."""
    return tl.full([], 0, tl.int32) + position


@jit
def _wide(number):
    """Return an integer as an int64 tensor."""
    return tl.full([], 0, tl.int64) + number


@jit
def _blocks_of_fours(position):
    """Return the block that each four neighbours share."""
    evens, _ = tl.split(tl.reshape(position, [position.numel // 4, 2, 2]))
    first, _ = tl.split(evens)
    return first >> 2


@jit
def _beside_one_another(first, second, third, fourth, shape: tl.constexpr):
    """Return a tensor whose neighbours take turns in being of four tensors."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), shape)


@jit
def rand(seed, position):
    """Return a uniform float32 in [0, 1) per position."""
    place = _tensor(position)
    first, second, third, fourth = tl.randint4x(seed, place >> 2)
    lower, upper = tl.where(place & 1 == 0, first, second), tl.where(place & 1 == 0, third, fourth)
    return uint_to_uniform_float(tl.where(place & 2 == 0, lower, upper))


@jit
def rand_of_fours(seed, position):
    """Return what ``rand`` does, for positions that neighbours count up from multiples of four."""
    first, second, third, fourth = tl.rand4x(seed, _blocks_of_fours(position))
    return _beside_one_another(first, second, third, fourth, position.shape)


@jit
def randn(seed, position):
    """Return a standard normal float32 per position (Box and Muller, "A note on the generation …", 1958)."""
    place = _tensor(position)
    first, second, third, fourth = tl.rand4x(seed, place >> 2)
    radius, angle = tl.where(place & 2 == 0, first, third), tl.where(place & 2 == 0, second, fourth)
    left, right = pair_uniform_to_normal(radius, angle)
    return tl.where(place & 1 == 0, left, right)


@jit
def randn_of_fours(seed, position):
    """Return what ``randn`` does, for positions that neighbours count up from multiples of four."""
    first, second, third, fourth = tl.randn4x(seed, _blocks_of_fours(position))
    return _beside_one_another(first, second, third, fourth, position.shape)


@jit
def randint64(seed, position, low, high):
    """Return a uniform int64 in [low, high) per position, of the first two words of a block of its own.

    Args:
        seed, position, low, high: Integers; equal ones give equal numbers.
    """
    low_word, high_word, _, _ = tl.randint4x(seed, _tensor(position))
    word = low_word.to(tl.uint32, bitcast=True).to(tl.uint64) | (high_word.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    first, last = _wide(low), _wide(high)
    span = (last - first).to(tl.uint64)  # wraps around where it is more than int64 holds
    return (word % span).to(tl.int64) + first
