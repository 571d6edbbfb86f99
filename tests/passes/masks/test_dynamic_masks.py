"""Attention masks of dynamic sizes: which are recognised for all sizes, which up to one, and that attention stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.fx import GraphModule

from dynafuse.passes.early import rewrite
from tests.passes.masks.test_recovery import attention, attentions, meaning

N = 9
OTHER_SIZES = (2, 3, 8, 17)

Mask = Callable[[int], Tensor]


class Compiled:
    """Attention under a mask of the sequence's length, compiled for any length, and what is left of masks."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.meanings: list[str] = []
        torch._dynamo.reset()
        self.run = torch.compile(self.eager, backend=self._backend, dynamic=True, fullgraph=True)

    def eager(self, q: Tensor) -> Tensor:
        return attention(q, self.mask(q.size(2))).mul(2)

    def _backend(self, module: GraphModule, inputs: Any) -> Any:
        rewrite(module)
        self.meanings += map(meaning, attentions(module))
        return module.forward

    def check(self, sizes: tuple[int, ...] = (N, *OTHER_SIZES)) -> list[str]:
        """What became of the masks of the graphs that some sizes needed; all results are eager's."""
        for n in sizes:
            q = torch.randn(2, 3, n, 4)
            torch.testing.assert_close(self.run(q), self.eager(q))
        return self.meanings


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def places(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n)[:, None], torch.arange(n)[None]


def kept(n: int, **how: Any) -> Tensor:
    return torch.ones(n, n, **{"dtype": torch.bool, **how})


def of_one_sequence(positions: Tensor) -> Tensor:
    """The mask of a causal decoder whose batch may hold several sequences one behind the other, told apart by positions."""
    begins = positions - 1
    jumps = torch.diff(positions, prepend=begins[:, :1], dim=-1) != 1
    sequence = jumps.cumsum(-1)
    batch, place = torch.arange(2)[:, None, None, None], torch.arange(positions.size(1))
    row, column = place[None, None, :, None], place[None, None, None]
    causal = positions[batch, column] <= positions[batch, row]
    return causal & (sequence[batch, row] == sequence[batch, column])


def in_sequence(n: int) -> Tensor:
    return of_one_sequence(torch.arange(n)[None].expand(2, -1))


MASKS: dict[str, tuple[Mask, str]] = {
    "compared places": (lambda n: places(n)[1] <= places(n)[0], "causal"),
    "the other way": (lambda n: ~(places(n)[0] < places(n)[1]), "causal"),
    "lower triangle": (lambda n: kept(n).tril(), "causal"),
    "not the upper triangle": (lambda n: ~kept(n, dtype=torch.float32).triu(1).bool(), "causal"),
    "for every head": (lambda n: kept(n).tril().expand(2, 3, n, n), "causal"),
    "one sequence in a batch": (in_sequence, "causal"),
    "places from one on": (lambda n: torch.arange(1, n + 1)[None] <= torch.arange(1, n + 1)[:, None], "causal"),
    "places counted by twos": (lambda n: torch.arange(0, 2 * n, 2)[None] <= 2 * torch.arange(n)[:, None], "causal"),
    "counted by a sum": (lambda n: torch.ones(n, dtype=torch.int64).cumsum(0)[None] - 1 <= places(n)[0], "causal"),
    "both halves": (lambda n: (places(n)[1] < places(n)[0]) | (places(n)[1] == places(n)[0]), "causal"),
    "chosen": (lambda n: torch.where(places(n)[1] > places(n)[0], False, True), "causal"),
    "places put together": (lambda n: torch.cat([torch.arange(1), torch.arange(n - 1) + 1])[None] <= places(n)[0], "causal"),
    "flipped twice": (lambda n: places(n)[1].flip(-1).flip(-1) <= places(n)[0], "causal"),
    "all": (kept, "full"),
    "all, of numbers": (lambda n: kept(n, dtype=torch.int64) == 1, "full"),
    "not before the first": (lambda n: (torch.arange(n)[None] >= 0).expand(n, n), "full"),
    "window as long as the row": (lambda n: (places(n)[0] - places(n)[1]).abs() < n, "full"),
    "up to the last": (lambda n: places(n)[1] <= places(n)[0] + n, "full"),
    "nothing": (lambda n: kept(n) ^ True, "mask"),
    "window": (lambda n: (places(n)[0] - places(n)[1]).abs() < 2, "mask"),
    "upper triangle": (lambda n: kept(n).triu(), "mask"),
    "one more": (lambda n: kept(n).tril(1), "mask"),
    "without the diagonal": (lambda n: places(n)[1] < places(n)[0] + (places(n)[0] == 0), "mask"),
    "places that were rolled": (lambda n: torch.arange(n).roll(1)[None] <= places(n)[0], "mask"),
    "two sequences": (lambda n: of_one_sequence((torch.arange(n) % 4)[None].expand(2, -1)), "mask"),
    "from the middle on": (lambda n: (torch.arange(n)[None] >= n // 2).expand(n, n), "mask"),
    "random": (lambda n: torch.rand(n, n) < 2, "mask"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_all_sizes(name: str) -> None:
    mask, expected = MASKS[name]
    assert set(Compiled(mask).check()) == {expected}  # torch makes another graph of some for a length of 2


@pytest.mark.parametrize("width", [N, 12])
def test_a_window_counts_where_it_ends(width: int) -> None:
    """Up to its width a window is the causal triangle; beyond, another graph has the mask."""
    def window(n: int) -> Tensor:
        rows, columns = places(n)
        return (columns <= rows) & (columns > rows - width)

    compiled = Compiled(window)
    assert compiled.check((N, 3, width)) == ["causal"]
    assert compiled.check((width + 1, width + 5)) == ["causal", "mask"]


def test_what_is_checked_in_vain_is_not_checked() -> None:
    """A mask that stays asks nothing of sizes, although a part of it would hold up to some."""
    def mask(n: int) -> Tensor:
        rows, columns = places(n)
        return (columns > rows - 12) & (columns != 1)

    assert Compiled(mask).check((N, 17)) == ["mask"]


def test_fewer_queries_than_keys() -> None:
    """One query at the end sees all keys; several do not, and ``is_causal`` would mean another triangle."""
    def function(q: Tensor, k: Tensor) -> Tensor:
        rows = torch.arange(q.size(2))[:, None] + (k.size(2) - q.size(2))
        return attention(q, torch.arange(k.size(2))[None] <= rows, k).mul(2)

    for queries, expected in ((1, "full"), (4, "mask")):
        torch._dynamo.reset()
        compiled, meanings = function, list[str]()

        def backend(module: GraphModule, inputs: Any, meanings: list[str] = meanings) -> Any:
            meanings += map(meaning, attentions(rewrite(module)))
            return module.forward

        compiled = torch.compile(function, backend=backend, dynamic=True)
        for keys in (7, 8, 13):
            q, k = torch.randn(2, 3, queries, 4), torch.randn(2, 3, keys, 4)
            torch.testing.assert_close(compiled(q, k), function(q, k))
        assert meanings == [expected]


def test_what_somebody_writes_to_stays() -> None:
    def mask(n: int) -> Tensor:
        triangle = kept(n).tril()
        triangle[0] = True
        return triangle

    assert Compiled(mask).check() == ["mask"]


def test_what_made_the_mask_goes() -> None:
    found: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        found.append(rewrite(module))
        return module.forward

    torch.compile(lambda q: attention(q, kept(q.size(2)).tril()).mul(2), backend=backend, dynamic=True)(torch.randn(2, 3, N, 4))
    assert {node.op for node in found[0].graph.nodes if node not in attentions(found[0])} == {
        "placeholder", "call_method", "output"}
    assert not any(node.name.startswith("ones") for node in found[0].graph.nodes)


# Any mask -------------------------------------------------------------------------------------------------------------

Place = Callable[[int], Tensor]

POSITIONS: dict[str, Place] = {
    "arange": torch.arange,
    "from the end": lambda n: n - 1 - torch.arange(n),
    "rolled": lambda n: torch.arange(n).roll(1),
    "flipped": lambda n: torch.arange(n).flip(0),
    "put together": lambda n: torch.cat([torch.arange(2), torch.arange(n)])[:n],
    "padded": lambda n: torch.nn.functional.pad(torch.arange(n - 1), (1, 0)),
    "differences": lambda n: torch.diff(torch.arange(n), prepend=torch.zeros(1, dtype=torch.int64)),
    "sums": lambda n: torch.ones(n, dtype=torch.int64).cumsum(0),
    "distances": lambda n: (torch.arange(n) - 3).abs(),
    "gathered": lambda n: torch.arange(n)[torch.arange(n).flip(0)],
    "by cases": lambda n: torch.where(torch.arange(n) < 2, 0, torch.arange(n)),
}


@st.composite
def comparisons(draw: st.DrawFn) -> Mask:
    row, column = (draw(st.sampled_from(sorted(POSITIONS))) for _ in range(2))
    compare = draw(st.sampled_from([torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne]))
    factor, offset = draw(st.sampled_from([1, 1, 2, -1])), draw(st.integers(-12, 12))
    return lambda n: compare(POSITIONS[column](n)[None], factor * POSITIONS[row](n)[:, None] + offset)


def joined(masks: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    joins = st.sampled_from([torch.logical_and, torch.logical_or, torch.bitwise_xor, lambda a, b: a & ~b])
    return st.builds(lambda join, a, b: lambda n: join(a(n), b(n)), joins, masks, masks)


@settings(max_examples=40, deadline=None)
@given(st.recursive(comparisons(), joined, max_leaves=3))
def test_whatever_the_mask_attention_stays_as_it_was(mask: Mask) -> None:
    """Rows of which nothing is kept are NaN in one kernel and 0 in another: results count where eager has a number."""
    compiled = Compiled(lambda n: mask(n) | (torch.arange(n)[None] == 0))
    compiled.check()
