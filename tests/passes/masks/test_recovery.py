"""Constant attention masks: what is recognised, what is left alone, and that attention computes the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from dynafuse.passes.constants import Constants, are_handed_on, bodies
from dynafuse.passes.early import rewrite
from dynafuse.passes.masks import recovery
from dynafuse.passes.masks.recovery import ATTENTION

N = 5
Q = torch.randn(2, 3, N, 4)
WIDE = torch.randn(2, 3, N + 2, 4)

Masked = Callable[..., Tensor]


def traced(function: Masked, *arguments: Any, dynamic: bool = False) -> GraphModule:
    """The graph that Dynamo gives to its backend."""
    found: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        found.append(module)
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*arguments)
    (module,) = found
    return module


def attentions(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.target in ATTENTION]


def meaning(node: Node) -> str:
    """What is left of a node's mask."""
    if node.kwargs.get("attn_mask") is not None or len(node.args) > 3:
        return "mask"
    return "causal" if node.kwargs.get("is_causal") else "full"


def tokens(module: GraphModule) -> list[Any]:
    """The inputs of a graph, in order, of those that the tests call functions with."""
    values = {tuple(Q.shape): Q, tuple(WIDE.shape): WIDE}
    return [values[tuple(n.meta["example_value"].shape)] for n in module.graph.nodes if n.op == "placeholder"]


def check(function: Masked, expected: str, *arguments: Tensor) -> GraphModule:
    """The mask is ``expected`` afterwards, and results are as before."""
    module = traced(function, *arguments)
    before = module(*tokens(module))
    rewrite(module)
    assert [meaning(node) for node in attentions(module)] == [expected]
    torch.testing.assert_close(module(*tokens(module)), before)
    return module


def attention(q: Tensor, mask: Tensor | None, k: Tensor | None = None, **keywords: Any) -> Tensor:
    k = q if k is None else k
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, **keywords)


def places(n: int = N) -> tuple[Tensor, Tensor]:
    return torch.arange(n)[:, None], torch.arange(n)[None]


def filled(q: Tensor) -> Tensor:
    mask = torch.ones(N, N, dtype=torch.bool)
    mask[0, 1:] = False
    return attention(q, mask)


def written_by(write: Callable[[Tensor], object]) -> Masked:
    """Attention under a triangle to which something writes."""
    def masked(q: Tensor) -> Tensor:
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        write(mask)
        return attention(q, mask)

    return masked


@torch.library.custom_op("dynafuse_tests::keep_first", mutates_args=("mask",))
def keep_first(mask: Tensor) -> None:
    """Write by an op whose name does not tell."""
    mask[0] = True


WRITES: dict[str, Callable[[Tensor], object]] = {
    "through a row": lambda mask: mask[0].fill_(True),
    "through a view of a view": lambda mask: mask.view(-1)[1:4].unsqueeze(0).logical_not_(),
    "through what was expanded": lambda mask: mask.expand(2, 3, N, N)[1, 2, 0].copy_(torch.ones(N, dtype=torch.bool)),
    "into an output": lambda mask: torch.logical_not(mask[:2], out=mask[:2]),
    "by an op": lambda mask: torch.ops.dynafuse_tests.keep_first(mask),
    "by an op through a view": lambda mask: torch.ops.dynafuse_tests.keep_first(mask[2:]),
    "in lists": lambda mask: torch._foreach_mul_([mask[0], mask[1]], [mask[2], mask[3]]),
    "nothing": lambda mask: mask[0],
}

MASKS: dict[str, tuple[Masked, str]] = {
    "compared places": (lambda q: attention(q, places()[1] <= places()[0]), "causal"),
    "lower triangle": (lambda q: attention(q, torch.ones(N, N, dtype=torch.bool).tril()), "causal"),
    "not the upper triangle": (lambda q: attention(q, ~torch.ones(N, N).triu(1).bool()), "causal"),
    "triangle for every head": (lambda q: attention(q, torch.ones(N, N, dtype=torch.bool).tril().expand(2, 3, N, N)), "causal"),
    "all": (lambda q: attention(q, torch.ones(N, N, dtype=torch.bool)), "full"),
    "all, one for everybody": (lambda q: attention(q, torch.ones(1, 1, dtype=torch.bool)), "full"),
    "window as long as the row": (lambda q: attention(q, (places()[0] - places()[1]).abs() < N), "full"),
    "window": (lambda q: attention(q, (places()[0] - places()[1]).abs() < 2), "mask"),
    "upper triangle": (lambda q: attention(q, torch.ones(N, N, dtype=torch.bool).triu()), "mask"),
    "without the diagonal": (lambda q: attention(q, places()[1] < places()[0] + (places()[0] == 0)), "mask"),
    "added": (lambda q: attention(q, torch.zeros(N, N)), "mask"),
    "of the input": (lambda q: attention(q, q[0, 0, :, :1] < q[0, 0, :, 0]), "mask"),
    "of the input's shape": (lambda q: attention(q, torch.ones_like(q[0, 0, :, :1]).bool()), "mask"),
    "written in place": (filled, "mask"),
    **{f"written {how}": (written_by(write), "causal" if how == "nothing" else "mask") for how, write in WRITES.items()},
    "random": (lambda q: attention(q, torch.rand(N, N) < 2), "mask"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    function, expected = MASKS[name]
    if name == "random":  # is all true, which nobody can know
        module = rewrite(traced(function, Q))
        assert [meaning(node) for node in attentions(module)] == ["mask"]
    else:
        check(function, expected, Q)


def test_a_triangle_of_other_sizes_is_not_causal() -> None:
    """For fewer queries than keys ``is_causal`` means another triangle."""
    check(lambda q, k: attention(q, torch.ones(N, N + 2, dtype=torch.bool).tril(2), k), "mask", Q, WIDE)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["<", "<=", ">", ">=", "=="]), st.integers(-N - 1, N + 1), st.booleans())
def test_comparisons_mean_what_their_values_are(operator: str, offset: int, negated: bool) -> None:
    """Whatever band of the square is kept: its values decide, not how it is written."""
    compare: Any = {"<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq}[operator]

    def mask() -> Tensor:
        rows, columns = places()
        band = compare(columns - rows, offset)
        return ~band if negated else band

    module = rewrite(traced(lambda q: attention(q, mask()), Q))
    torch._dynamo.reset()
    triangle = torch.ones(N, N, dtype=torch.bool).tril()
    expected = "full" if mask().all() else "causal" if mask().equal(triangle) else "mask"
    assert [meaning(node) for node in attentions(module)] == [expected]


# What else a call says ------------------------------------------------------------------------------------------------


def test_other_arguments_stay() -> None:
    def function(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, torch.ones(N, N, dtype=torch.bool).tril(), 0.0, False, scale=0.3)

    module = check(function, "causal", Q)
    (node,) = attentions(module)
    assert node.kwargs == {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.3}


def test_a_mask_stays_where_results_would_have_other_strides() -> None:
    def masked(q: Tensor) -> Tensor:
        heads_inside = q.transpose(1, 2).contiguous().transpose(1, 2)
        return attention(heads_inside, torch.ones(1, N, N, dtype=torch.bool))  # torch's fused kernel for the CPU takes no such mask

    check(masked, "mask", Q)
    check(lambda q: masked(q).mul(2)[:, 1:], "mask", Q)
    check(lambda q: masked(q).view(2, -1), "mask", Q)
    check(lambda q: masked(q).contiguous() + q, "full", Q)
    check(lambda q: masked(q).sum(-1), "full", Q)


@pytest.mark.parametrize(("channels_last", "width", "expected"), [(True, 2, "mask"), (True, 8, "full"), (False, 2, "full")])
def test_a_mask_stays_where_padding_would_spread_heads(channels_last: bool, width: int, expected: str) -> None:
    """Torch pads narrow heads in the operand's memory format, and its kernel then refuses channels-last ones."""
    def function(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, torch.ones(N, N, dtype=torch.bool)) * 2

    q = torch.randn(2, 4, N, width)
    q = q.contiguous(memory_format=torch.channels_last) if channels_last else q
    module = traced(function, q)
    rewrite(module)
    assert [meaning(node) for node in attentions(module)] == [expected]


def test_what_made_the_mask_goes_unless_somebody_else_needs_it() -> None:
    def twice(q: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        return attention(q, mask), mask.sum()

    alone = check(lambda q: attention(q, torch.ones(N, N, dtype=torch.bool).tril()), "causal", Q)
    assert [node.op for node in alone.graph.nodes if node not in attentions(alone)] == ["placeholder", "output"]
    shared = traced(twice, Q)
    before = shared(Q)
    torch.testing.assert_close(rewrite(shared)(Q), before)
    assert [meaning(node) for node in attentions(shared)] == ["causal"]


def test_writes_beside_a_mask_stay() -> None:
    """Methods that write return what they wrote to, which nobody has to read."""
    def write(q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        attended = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(N, N, dtype=torch.bool).tril())
        y, z = x * 2, torch.zeros_like(x)
        y.add_(1)
        z.scatter_(0, torch.tensor([1]), 3.0)
        y.mul_(z)
        x[0] = 7
        return attended, y

    module, x = traced(write, Q, torch.arange(3.0)), torch.arange(3.0)
    rewrite(module)
    (attention,) = [node for node in module.graph.nodes if node.target in ATTENTION]
    assert attention.kwargs["is_causal"]
    expected = write(Q, x)
    again = torch.arange(3.0)
    torch.testing.assert_close(tuple(module(Q, again)), expected)
    torch.testing.assert_close(again, x)


def test_a_mask_of_several_layers_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[Node] = []
    value = Constants.value
    monkeypatch.setattr(Constants, "value", lambda self, node, sources: evaluated.append(node) or value(self, node, sources))

    def layers(q: Tensor) -> Tensor:
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        for _ in range(3):
            q = attention(q, mask)
        return q

    module = rewrite(traced(layers, Q))
    assert [meaning(node) for node in attentions(module)] == ["causal"] * 3 and len(evaluated) == 1


@pytest.mark.parametrize(("largest", "expected"), [(N * N, "causal"), (N * N - 1, "mask")])
def test_large_masks_are_not_evaluated(monkeypatch: pytest.MonkeyPatch, largest: int, expected: str) -> None:
    monkeypatch.setattr(recovery, "LARGEST_MASK", largest)
    check(lambda q: attention(q, torch.ones(N, N, dtype=torch.bool).tril()), expected, Q)


# Graphs in pieces -----------------------------------------------------------------------------------------------------


def layered(q: Tensor, layer: Masked, spoil: Callable[[Tensor], object] = lambda mask: None) -> Tensor:
    mask = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
    spoil(mask)
    for _ in range(2):
        q = layer(q, mask)
    return q


def checkpointed(q: Tensor, mask: Tensor) -> Tensor:
    return checkpoint(lambda q, mask: attention(q, mask[:, :, :N]) + q, q, mask, use_reentrant=False)


def inner_meanings(module: GraphModule) -> list[str]:
    return [meaning(node) for part in module.modules() if isinstance(part, GraphModule) for node in attentions(part)]


def test_masks_of_checkpointed_layers() -> None:
    q = Q.clone().requires_grad_()
    module = traced(lambda q: layered(q, checkpointed), q)
    before = module(q)
    assert inner_meanings(rewrite(module)) == ["causal", "causal"]
    torch.testing.assert_close(module(q), before)


@pytest.mark.parametrize("inside", [False, True], ids=["before", "in a layer"])
def test_masks_of_checkpointed_layers_that_are_written_to_stay(inside: bool) -> None:
    def spoil(mask: Tensor) -> object:
        return mask[0, 0, 0].fill_(True)

    def layer(q: Tensor, mask: Tensor) -> Tensor:
        spoil(mask)
        return attention(q, mask) + q

    def function(q: Tensor) -> Tensor:
        if inside:
            return layered(q, lambda q, mask: checkpoint(layer, q, mask, use_reentrant=False))
        return layered(q, checkpointed, spoil)

    module = traced(function, Q.clone().requires_grad_())
    assert set(inner_meanings(rewrite(module))) == {"mask"}


def test_what_two_calls_run_stays() -> None:
    module = traced(lambda q: layered(q, checkpointed), Q.clone().requires_grad_())
    first, second = (node.args[0] for node in bodies(module))
    second.replace_all_uses_with(first)
    assert not bodies(module)
    assert inner_meanings(rewrite(module)) == ["mask", "mask"]


def split(module: GraphModule) -> list[GraphModule]:
    """The graph in pieces that end with an attention, as DDP splits it behind each bucket of gradients."""
    piece, number = {}, 0
    for node in module.graph.nodes:
        piece[node] = number
        number += node in attentions(module)
    whole = split_module(module, module, piece.__getitem__)
    return [part for _, part in whole.named_children() if isinstance(part, GraphModule)]


@pytest.mark.parametrize(("spoil", "expected"), [(lambda mask: None, "causal"), (lambda mask: mask[0, 0, 0].fill_(True), "mask")],
                         ids=["as it was", "written to"])
def test_masks_that_another_piece_has_made(spoil: Callable[[Tensor], object], expected: str) -> None:
    pieces = split(traced(lambda q: layered(q, lambda q, mask: attention(q, mask[:, :, :N]) + q, spoil), Q))
    for piece in pieces:
        rewrite(piece)
    assert [meaning(node) for piece in pieces for node in attentions(piece)] == [expected, expected]
    assert are_handed_on() == (expected == "causal")
    del pieces, piece
    torch._dynamo.reset()
    gc.collect()
    assert not are_handed_on()


def test_ddp_hands_masks_on_from_bucket_to_bucket(tmp_path: Path) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = torch.nn.Sequential(torch.nn.Linear(4, 2**16), torch.nn.Linear(2**16, 4))  # more than a bucket

        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            return attention(self.inside(q), mask) + q

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer(), Layer()])

        def forward(self, q: Tensor) -> Tensor:
            mask = torch.ones(N, N, dtype=torch.bool).tril()
            for layer in self.layers:
                q = layer(q, mask)
            return q

    found: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        found.append(rewrite(module))
        return module.forward

    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        model = torch.nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=1)
        torch.compile(model, backend=backend)(Q)
    finally:
        dist.destroy_process_group()
    assert len(found) > 1
    assert [meaning(node) for module in found for node in attentions(module)] == ["causal"] * 3
