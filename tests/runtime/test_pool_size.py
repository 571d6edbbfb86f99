"""How large a pool grows: by hand, and beside torch's allocator on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from dynafuse.runtime.capture.pool_size import ONES, SMALL, Life, best_pieces, most_in_use, pool_bytes

MB = 1 << 20


@pytest.mark.parametrize(("lives", "piece", "expected"), [
    ([], 0, 0),
    ([Life(1, 0, 1)], 0, 2 * MB),  # small ones share a segment of 2 MB
    ([Life(1000, 0, 3), Life(MB, 0, 3), Life(MB, 0, 3)], 0, 4 * MB),
    ([Life(3 * MB, 0, 9), Life(4 * MB, 0, 9)], 0, 20 * MB),  # others one of 20
    ([Life(11 * MB, 0, 9)], 0, 12 * MB),  # and from 10 MB on each has its own, of whole pairs of MB
    ([Life(12 * MB, 0, 1), Life(12 * MB, 1, 2)], 0, 12 * MB),  # what is gone makes room at once
    ([Life(12 * MB, 0, 2), Life(12 * MB, 1, 2)], 0, 24 * MB),
    ([Life(24 * MB, 0, 1), Life(12 * MB, 1, 3), Life(12 * MB, 2, 3)], 0, 24 * MB),  # what is left of a block is used
    ([Life(12 * MB, 0, 1), Life(12 * MB, 0, 1), Life(24 * MB, 1, 2)], 0, 48 * MB),  # segments do not grow together
    ([Life(12 * MB, 0, 1), Life(12 * MB, 0, 1), Life(24 * MB, 1, 2)], 24 * MB, 24 * MB),  # but parts of one do
])
def test_by_hand(lives: Sequence[Life], piece: int, expected: int) -> None:
    assert pool_bytes(lives, [piece] if piece else []) == expected


def test_the_best_piece_spares_most() -> None:
    lives = [Life(12 * MB, 0, 1), Life(12 * MB, 0, 1), Life(24 * MB, 1, 2)]
    assert most_in_use(lives) == 24 * MB and pool_bytes(lives, best_pieces(lives)) == 24 * MB
    assert not any(map(best_pieces, ([Life(12 * MB, 0, 2)], [Life(SMALL, 0, 2)], []))), "there are no gaps"


def random_lives(seed: int) -> list[Life]:
    draw = random.Random(seed)
    sizes = [draw.choice([1 << 10, 1 << 18, 3 * MB, 9 * MB, 20 * MB, 38 * MB]) + draw.randrange(1 << 20) for _ in range(6)]
    begins = [draw.randrange(40) for _ in range(60)]
    return [Life(draw.choice(sizes), begin, begin + 1 + draw.randrange(8)) for begin in begins]


def test_two_pieces_may_spare_more() -> None:
    chosen = [(lives, best_pieces(lives)) for lives in map(random_lives, range(20))]
    assert {len(pieces) for _, pieces in chosen} >= {1, 2}
    for lives, pieces in chosen:
        assert pool_bytes(lives, pieces) <= min(pool_bytes(lives, [int(share * most_in_use(lives))]) for share, in ONES)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shares", [(), (0.7,), (1.1,), (0.6, 0.4)])
def test_beside_torchs_allocator(seed: int, shares: Sequence[float]) -> None:
    lives = random_lives(seed)
    sizes = [int(share * most_in_use(lives)) for share in shares]
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pieces = [torch.empty(piece, dtype=torch.uint8, device="cuda") for piece in sizes]
        pieces.clear()
        kept: dict[int, torch.Tensor] = {}
        for step in range(60):
            for i, life in enumerate(lives):
                if life.end == step:
                    del kept[i]
            for i, life in enumerate(lives):
                if life.begin == step:
                    kept[i] = torch.empty(life.bytes, dtype=torch.uint8, device="cuda")
        found = sum(segment["total_size"] for segment in pool.snapshot())
    assert found == pool_bytes(lives, sizes)
