"""Scatters at permutations: which become gathers, that others stay, and that values stay the same, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dynafuse.passes.decompositions import decompositions
from dynafuse.passes.permutations import gather_by_inverses
from tests.support import graphs
from tests.support.differential import check

aten = torch.ops.aten
TOKENS, COPIES, WIDTH = 6, 4, 5
ROWS = TOKENS * COPIES
SCORES = torch.rand(TOKENS, COPIES, generator=torch.Generator().manual_seed(3)).mul(8).round()  # with ties
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4))
BASE = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def order(scores: Tensor) -> Tensor:
    return scores.view(-1).argsort()


def zeros(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(rows, WIDTH, dtype=dtype)


def tokens() -> Tensor:
    return torch.arange(TOKENS).unsqueeze(1).expand(-1, COPIES).reshape(-1)


def wide(place: Tensor) -> Tensor:
    return place.view(-1, 1).expand(-1, WIDTH)


def rewritten(function: Function) -> GraphModule:
    """The graph of a function after the pass, which returns what it did."""
    inputs = (SCORES, X, BASE)
    module = graphs.traced(function, *inputs)
    expected = module(*inputs)
    gather_by_inverses(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), expected)
    return module


def counted(module: GraphModule) -> tuple[int, int, int]:
    """How many sorts, scatters of rows and gathers a graph has."""
    targets = [node.target for node in module.graph.nodes]
    scatters = [node for node in module.graph.nodes if node.target in (
        aten.index_put.default, aten.scatter_add.default, aten.scatter.src) and node.meta["val"].is_floating_point()]
    return (sum(target in (aten.sort.default, aten.sort.stable) for target in targets), len(scatters),
            targets.count(aten.index.Tensor))


GATHERED: dict[str, Function] = {
    "rows that are added": lambda s, x, base: zeros().index_put([order(s)], x, accumulate=True),
    "rows that are written": lambda s, x, base: zeros().index_put([order(s)], x),
    "over others": lambda s, x, base: base.index_put([order(s)], x),
    "onto others": lambda s, x, base: base.index_put([order(s)], x, accumulate=True),
    "in falling order": lambda s, x, base: zeros().index_put([s.view(-1).argsort(descending=True)], x, accumulate=True),
    "of a stable sort": lambda s, x, base: zeros().index_put([s.view(-1).sort(stable=True)[1]], x, accumulate=True),
    "by the index of every element": lambda s, x, base: zeros().scatter_add(0, wide(order(s)), x),
    "written so": lambda s, x, base: base.scatter(0, wide(order(s)), x),
    "numbers": lambda s, x, base: torch.zeros(ROWS).scatter_add(0, order(s), x[:, 0]),
    "by index_add": lambda s, x, base: zeros().index_add(0, order(s), x),
    "copies of a token": lambda s, x, base: zeros(TOKENS).index_put([order(s) // COPIES], x, accumulate=True),
    "copies by the index of every element": lambda s, x, base: zeros(TOKENS).scatter_add(0, wide(order(s) // COPIES), x),
    "copies onto others": lambda s, x, base: base[:TOKENS].index_add(0, order(s).div(COPIES, rounding_mode="trunc"), x),
    "copies by their tokens": lambda s, x, base: zeros(TOKENS).index_put([tokens()[order(s)]], x, accumulate=True),
    "copies by repeated tokens": lambda s, x, base: zeros(TOKENS).index_put(
        [torch.arange(TOKENS).repeat_interleave(COPIES)[order(s)]], x, accumulate=True),
    "in 16 bits": lambda s, x, base: zeros(TOKENS, torch.bfloat16).index_put(
        [order(s) // COPIES], x.bfloat16().round(), accumulate=True),
}
KEPT: dict[str, Function] = {
    "a number": lambda s, x, base: zeros().index_put([order(s)], x[0, 0], accumulate=True),
    "at a number": lambda s, x, base: torch.zeros(ROWS).index_put([order(s)[0]], x[0, 0], accumulate=True),
    "into a number": lambda s, x, base: torch.zeros(()).scatter_add(0, order(s)[0] * 0, x[0, 0]),
    "a sort of rows": lambda s, x, base: zeros().index_put([s.argsort().view(-1)], x, accumulate=True),
    "the sorted values": lambda s, x, base: zeros().index_put([s.view(-1).sort()[0].long()], x, accumulate=True),
    "part of an order": lambda s, x, base: zeros().index_put([order(s)[:5]], x[:5], accumulate=True),
    "into more rows": lambda s, x, base: zeros(ROWS + 1).index_put([order(s)], x, accumulate=True),
    "one row at all places": lambda s, x, base: zeros().index_put([order(s)], x[0], accumulate=True),
    "backwards": lambda s, x, base: zeros().index_put([ROWS - 1 - order(s)], x, accumulate=True),
    "divided by another number": lambda s, x, base: zeros(TOKENS).index_put([order(s) // (COPIES + 1)], x, accumulate=True),
    "divided by less": lambda s, x, base: zeros().index_put([order(s) // COPIES], x, accumulate=True),
    "the last of the copies": lambda s, x, base: zeros(TOKENS).index_put([order(s) // COPIES], x),
    "one index of two": lambda s, x, base: zeros().index_put([order(s), torch.zeros(ROWS).long()], x[:, 0], accumulate=True),
    "along the other dimension": lambda s, x, base: x.new_zeros(WIDTH, ROWS).scatter_add(
        1, order(s).expand(WIDTH, ROWS), x.t()),
    "elements anywhere": lambda s, x, base: zeros().scatter_add(0, s.view(-1, 1).expand(-1, WIDTH).argsort(0), x),
}


@pytest.mark.parametrize("name", GATHERED)
def test_gathered(name: str) -> None:
    sorts, scatters, gathers = counted(rewritten(GATHERED[name]))
    assert (sorts, scatters) == (1, 0)
    assert gathers >= 1


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name: str) -> None:
    assert counted(rewritten(KEPT[name]))[1] == 1


def test_inverses_of_the_graph_are_taken() -> None:
    def sorted_again(scores: Tensor, x: Tensor, base: Tensor) -> Tensor:
        place = order(scores)
        return zeros().index_put([place.argsort()], x[place.argsort()], accumulate=True)

    def counted_back(scores: Tensor, x: Tensor, base: Tensor) -> Tensor:
        place = order(scores)
        back = torch.empty_like(place).index_put([place], torch.arange(ROWS))
        return zeros().index_put([back], x, accumulate=True) + zeros().index_put([place], base, accumulate=True)

    for function in (sorted_again, counted_back):
        module = rewritten(function)
        assert counted(module) == (1, 0, 2)
        assert len(module.graph.find_nodes(op="call_function", target=aten.index_put.default)) == 1


def test_what_falls_is_no_inverse() -> None:
    module = rewritten(lambda s, x, base: zeros().index_put([order(s).argsort(descending=True)], x, accumulate=True))
    assert counted(module)[:2] == (2, 0)


def test_nodes_that_stay_eager_are_left() -> None:
    module = make_fx(GATHERED["rows that are added"], decomposition_table=decompositions())(SCORES, X, BASE)
    gather_by_inverses(module.graph, module.graph.find_nodes(op="call_function", target=aten.index_put.default))
    assert counted_scatters(module) == 1


def counted_scatters(module: GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=aten.index_put.default))


def routed(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
    """What experts do: rows in the order of their experts, computed, and back in order, a sum a token."""
    place = order(scores)
    back = torch.empty_like(place)
    back[place] = torch.arange(len(place), device=place.device)
    rows = x[place // COPIES] * weight[place]
    return rows[back].view(-1, COPIES, x.shape[-1]).sum(1)


def added(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
    place = scores.view(-1).argsort(stable=True)
    index = (place // COPIES).view(-1, 1).expand(-1, x.shape[1])
    return torch.zeros_like(x).scatter_add(0, index, torch.gather(x, 0, index) * weight[place])


@pytest.mark.parametrize("function", [routed, added])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(function: Function, dtype: torch.dtype) -> None:
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.rand(ROWS, 1, dtype=dtype, requires_grad=True)
    check(function, x, torch.rand(TOKENS, COPIES), weight)


def test_an_order_of_dynamic_sizes_is_sorted() -> None:
    def function(x: Tensor, scores: Tensor) -> Tensor:
        return x[order(scores).argsort()] * 2

    for count in (TOKENS, TOKENS + 3):
        check(function, torch.randn(count * COPIES, WIDTH, requires_grad=True), torch.rand(count, COPIES), dynamic=True)


def test_experts_of_dynamic_sizes() -> None:
    for count in (TOKENS, TOKENS + 3):
        x = torch.randn(count, WIDTH, requires_grad=True)
        check(routed, x, torch.rand(count, COPIES), torch.rand(count * COPIES, 1), dynamic=True)
