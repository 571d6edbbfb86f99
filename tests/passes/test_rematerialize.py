"""What the backward keeps of the forward when the cost model decides."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from dynafuse import backend
from dynafuse.cost.device import Device
from dynafuse.ir import Annotated
from dynafuse.passes import rematerialize as cut

ROWS, WIDTH = 512, 64
aten = torch.ops.aten


class Cut:
    """A joint graph with what was kept of its forward, and the graphs that became of it."""

    def __init__(self, fn: Callable[..., Any], arguments: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch,
                 **options: Any) -> None:
        self.graphs: list[backend.Compiled] = []
        monkeypatch.setattr(backend, "saved_values", self._kept)
        options = {"device": "h200", "rematerialize": "cost", **options}
        with backend.listening(self.graphs.append, plan_only=True):
            torch.compile(fn, backend=backend.dynafuse, fullgraph=True, dynamic=False, options=options)(*arguments)

    def _kept(self, annotated: Annotated, sides: cut.Sides, device: Device) -> list[Node]:
        self.uses = cut.Uses(annotated, sides)
        self.prices = cut.Prices(self.uses, device)
        self.kept = cut.saved_values(annotated, sides, device)
        return self.kept

    def values(self) -> list[Node]:
        """What is kept and no input, nor a view of one."""
        return [node for node in map(self.uses.base, self.kept) if node.op != "placeholder"]

    def backward(self) -> Counter[Any]:
        """How often the backward calls what."""
        graph = next(g for g in self.graphs if g.kind == "backward")
        return Counter(node.target for node in graph.plan.annotated.graph.nodes)


def matrices(count: int, rows: int = WIDTH) -> list[Tensor]:
    return [torch.randn(rows if i == 0 else WIDTH, WIDTH, requires_grad=True) for i in range(count)]


def normed(layers: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights[:layers]:
            x = x + F.rms_norm(x, (WIDTH,)) @ weight
        return x.sum()

    return fn


def test_residual_stream_is_kept_once_a_layer_and_never_computed_from_the_layers_before(
        monkeypatch: pytest.MonkeyPatch) -> None:
    adds = {}
    for layers in (3, 6):
        found = Cut(normed(layers), matrices(layers + 1, ROWS), monkeypatch)
        streams = [n for n in found.values() if n.target is aten.add.Tensor and tuple(n.meta["val"].shape) == (ROWS, WIDTH)]
        assert len(streams) == layers - 1  # the first is the input, the last one nobody wants
        adds[layers] = found.backward()[aten.add.Tensor]
    assert adds[6] <= 2 * adds[3] + 2


def test_number_per_row_is_kept_and_what_it_normalizes_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(F.rms_norm(x, (WIDTH,)) * weight).sum()

    found = Cut(fn, [*matrices(1, ROWS), torch.randn(WIDTH, requires_grad=True)], monkeypatch)
    assert [tuple(node.meta["val"].shape) for node in found.values()] == [(ROWS, 1)]


def gated(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.gelu(x @ up) @ down).sum()


@pytest.mark.parametrize(("share", "kept"), [(0.25, 2), (4.0, 1)])
def test_price_of_kept_bytes_decides_whether_an_activation_is_computed_again(
        monkeypatch: pytest.MonkeyPatch, share: float, kept: int) -> None:
    """A matrix product wants it: to compute it again, the backward writes and reads it."""
    found = Cut(gated, matrices(3, ROWS), monkeypatch, cost={"kept_share": share})
    activations = [n for n in found.values() if tuple(n.meta["val"].shape) == (ROWS, WIDTH)]
    assert len(activations) == kept
    assert found.backward()[aten.mm.default] == 4


def test_library_calls_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Cut(gated, matrices(3, ROWS), monkeypatch, cost={"kept_share": 1e6})
    assert found.backward()[aten.mm.default] == 4


def test_masks_of_dropout_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Cut(lambda x: F.dropout(x.exp(), 0.5).sum(), matrices(1, ROWS), monkeypatch)
    assert not any(node.meta["val"].dtype is torch.bool for node in found.values())


def test_checkpoint_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, up: Tensor, down: Tensor) -> Any:
        return checkpoint(gated, x, up, down, use_reentrant=False)

    found = Cut(fn, matrices(3, ROWS), monkeypatch)
    assert not found.values()
    assert found.backward()[aten.mm.default] == 5


def test_memory_budget_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        found = Cut(gated, matrices(3, ROWS), monkeypatch)
    assert not hasattr(found, "kept")


def test_gradient_that_is_a_value_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Cut(lambda x, y: (x * y.exp()).sum(), matrices(2), monkeypatch)
    assert {graph.kind for graph in found.graphs} == {"forward", "backward"}


# ---------------------------------------------------------------------- against all possible cuts

LINES: tuple[Callable[[list[Tensor], Tensor], list[Tensor]], ...] = (
    lambda v, w: [*v, torch.tanh(v[-1])],
    lambda v, w: [*v, v[-1] @ w],
    lambda v, w: [*v, v[-1] + v[0]],
    lambda v, w: [*v, v[-1] * v[len(v) // 2]],
    lambda v, w: [*v, v[-1] - v[-1].mean(-1, keepdim=True)],
    lambda v, w: [*v, torch.exp(v[0]) * v[-1]],
    lambda v, w: [*v, v[-1].t().contiguous().t()],
)


def program(seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A few random lines."""
    lines = random.Random(seed).choices(LINES, k=4)

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        values = [x]
        for line in lines:
            values = line(values, weight)
        return values[-1].sum()

    return fn


def made_again(found: Cut, kept: frozenset[Node]) -> list[Node]:
    """What the backward computes of the forward, and what it is given, from the definition: all that it wants, last first."""
    again = set(found.uses.backward)
    wanted = []
    for node in reversed(found.uses.nodes):
        if node in found.uses.backward:
            continue
        if any(user in again for user in node.users) or node in found.uses.sides.required_bw_nodes:
            wanted.append(node)
            if node not in kept:
                again.add(node)
    return wanted


def cost(found: Cut, kept: frozenset[Node]) -> float:
    """What a cut costs."""
    prices = found.prices
    return sum(prices.keep(node) if node in kept else prices.recompute(node) for node in made_again(found, kept))


@pytest.mark.parametrize("seed", range(12))
def test_no_cut_is_cheaper(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    found = Cut(program(seed), matrices(2), monkeypatch)
    inputs = frozenset(node for node in found.uses.home if node.op == "placeholder")
    candidates = [node for node in made_again(found, inputs) if node not in inputs]
    assert len(candidates) <= 16
    subsets = (chosen for size in range(len(candidates) + 1) for chosen in itertools.combinations(candidates, size))
    least = min(cost(found, inputs.union(chosen)) for chosen in subsets)
    assert cost(found, inputs.union(found.kept)) == pytest.approx(least, rel=1e-4)
