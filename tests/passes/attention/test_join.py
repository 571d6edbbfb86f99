"""Attention that is written out: what is recognized, what is left as it is, and what is priced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dynafuse.cost import device as devices
from dynafuse.fx import hint
from dynafuse.passes.attention import join_attention
from dynafuse.passes.attention.scores import SOFTMAXES
from dynafuse.passes.constants import Constants, bodies
from dynafuse.passes.masks.recovery import ATTENTION

B, H, N, D = 4, 8, 512, 64
H200 = devices.describe("h200")
Attend = Callable[..., Any]


def traced(function: Attend, *arguments: Any, dynamic: bool = False) -> GraphModule:
    """The graph that Dynamo gives to its backend; nothing is computed."""
    found: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        found.append(module)
        values = [node.meta["example_value"] for node in module.graph.output_node().all_input_nodes]
        return lambda *_: [torch.empty(tuple(map(hint, value.shape)), dtype=value.dtype) for value in values]

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*arguments)
    (module,) = found
    return module


def matrices(*batch: int, rows: int = N, width: int = D, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty(*(batch or (B, H)), rows, width, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3))
    return q, k, v


def heads_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def turned(x: Tensor) -> Tensor:
    """The same with heads that lie behind one another for each row, as projections leave them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return heads_last((q @ k.transpose(-1, -2) / 8).softmax(-1) @ v)


def joined(function: Attend, *arguments: Any, dynamic: bool = False, kept: Callable[[GraphModule], Any] | None = None) -> int:
    """How many attentions of a function are joined; none of those has left a softmax, or changed what is left."""
    module = traced(function, *arguments, dynamic=dynamic)
    before = module.print_readable(print_output=False)
    softmaxes = sum(node.target in SOFTMAXES for node in module.graph.nodes)
    join_attention(module, H200, kept(module) if kept else ())
    module.graph.lint()
    count = sum(node.target in ATTENTION for node in module.graph.nodes)
    assert sum(node.target in SOFTMAXES for node in module.graph.nodes) == softmaxes - count
    if not count:
        assert module.print_readable(print_output=False) == before
    return count


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_written_out_is_joined(dynamic: bool) -> None:
    assert joined(written, *matrices(), dynamic=dynamic) == 1


def test_several_are_joined() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            q = written(q, k, v).view(B, N, H, D).transpose(1, 2)
        return heads_last(q)

    assert joined(layers, *matrices()) == 3


def test_bodies_of_checkpoints() -> None:
    module = traced(lambda *qkv: checkpoint(written, *qkv, use_reentrant=False), *matrices())
    join_attention(module, H200)
    (body,) = bodies(module).values()
    assert sum(node.target in ATTENTION for node in body.graph.nodes) == 1


@pytest.mark.parametrize("spell", [
    lambda q, k, v: torch.matmul(F.softmax(torch.matmul(q, k.mT) * 0.125, dim=-1), v),
    lambda q, k, v: torch.matmul(torch.softmax(torch.matmul(q / 8, k.permute(0, 1, 3, 2)), 3), v),
    lambda q, k, v: (0.125 * (q @ k.mT)).float().softmax(dim=-1).to(q.dtype) @ v,
    lambda q, k, v: F.dropout(F.softmax(q @ k.mT, -1, dtype=torch.float32).type_as(q), 0.1, False).contiguous() @ v,
    lambda q, k, v: F.softmax(q.float() @ k.float().mT / 8, -1).to(v.dtype) @ v,
    lambda q, k, v: ((q @ k.mT) * torch.ones(H, 1, 1, dtype=q.dtype)).softmax(-1) @ v,
    lambda q, k, v: (q @ k.mT + 1).softmax(-1) @ v,
    lambda q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v[:, :1],
], ids=["functions", "scaled_queries", "float32", "dropout", "widened", "tensor_factor", "shift", "one_key_head"])
def test_spellings(spell: Attend) -> None:
    assert joined(lambda q, k, v: heads_last(spell(q, k, v)), *matrices()) == 1


@pytest.mark.parametrize(("scores", "results"), [
    ("bihd,bjhd->bhij", "bhij,bjhd->bihd"), ("bhid,bhjd->bhij", "bhij,bhjd->bhid"), ("bihd,bjd->bhij", "bhij,bjd->bhid"),
    ("ibhd,jbhd->bhij", "bhij,jbhd->ibhd"), ("bhid,bhjd->hbij", "hbij,bhjd->bihd")])
@pytest.mark.parametrize("turned", [False, True])
def test_einsum(scores: str, results: str, turned: bool) -> None:
    """Heads that lie before or behind tokens, keys of one head, operands the other way round."""
    def product(equation: str, left: Tensor, right: Tensor) -> Tensor:
        if not turned:
            return torch.einsum(equation, left, right)
        first, second, result = equation.replace("->", ",").split(",")
        return torch.einsum(f"{second}, {first} -> {result}", [right, left])

    def made(term: str) -> Tensor:
        sizes = {"b": B, "h": H, "i": N, "j": N + 8, "d": D}
        return torch.empty([sizes[letter] for letter in term], dtype=torch.bfloat16)

    (query, keys), values = scores.split("->")[0].split(","), results.split("->")[0].split(",")[1]
    assert joined(lambda q, k, v: product(results, product(scores, q, k).softmax(-1), v).contiguous() * 2,
                  made(query), made(keys), made(values)) == 1


@pytest.mark.parametrize("batch", [(B * H,), (2, 2, 8)])
def test_any_number_of_batches(batch: tuple[int, ...]) -> None:
    assert joined(lambda q, k, v: ((q @ k.mT / 8).softmax(-1) @ v).contiguous() + 1, *matrices(*batch)) == 1


def test_batches_that_views_change_in_between() -> None:
    def bloom(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
        scores = alibi.baddbmm(q, k.mT, beta=1.0, alpha=0.125).view(B, H, N, N) + mask
        return heads_last(torch.bmm(scores.softmax(-1).view(B * H, N, N), v).view(B, H, N, D))

    alibi, mask = torch.empty(B * H, 1, N, dtype=torch.bfloat16), torch.empty(B, 1, N, N, dtype=torch.bfloat16)
    assert joined(bloom, *matrices(B * H), alibi, mask) == 1


@pytest.mark.parametrize("spell", [
    lambda s, bias, mask: s + bias,
    lambda s, bias, mask: bias + s + bias,
    lambda s, bias, mask: s.add_(bias).mul_(0.5),
    lambda s, bias, mask: s.masked_fill(mask, -1e9) + bias,
    lambda s, bias, mask: torch.where(mask, s, torch.finfo(s.dtype).min),
    lambda s, bias, mask: torch.where(mask, float("-inf"), s),
    lambda s, bias, mask: s.masked_fill_(mask, -10000.0),
    lambda s, bias, mask: torch.where(mask, s, torch.full([], -1e9, dtype=s.dtype)),
    lambda s, bias, mask: torch.max(s + bias, torch.tensor(torch.finfo(s.dtype).min)),
], ids=["bias", "biases", "in_place", "filled", "chosen", "infinite", "filled_in_place", "constant", "largest"])
def test_what_is_added(spell: Attend) -> None:
    bias, mask = torch.empty(1, H, N, N, dtype=torch.bfloat16), torch.empty(B, 1, 1, N, dtype=torch.bool)
    function = lambda q, k, v, bias, mask: heads_last(spell(q @ k.mT / 8, bias, mask).softmax(-1) @ v)  # noqa: E731
    assert joined(function, *matrices(), bias, mask) == 1


def attention_of(function: Attend, *arguments: Any) -> Any:
    module = traced(function, *arguments)
    join_attention(module, H200)
    (node,) = [node for node in module.graph.nodes if node.target in ATTENTION]
    return node


@pytest.mark.parametrize("spell", [
    lambda s: s.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), float("-inf")),
    lambda s: torch.where(torch.ones(N, N, dtype=torch.bool).tril(), s, -1e9),
    lambda s: s + torch.full((N, N), float("-inf"), dtype=s.dtype).triu(1),
], ids=["filled", "chosen", "added"])
def test_a_triangle_needs_no_bias(spell: Attend) -> None:
    node = attention_of(lambda q, k, v: heads_last(spell(q @ k.mT / 8).softmax(-1) @ v), *matrices())
    assert node.kwargs["is_causal"] and node.kwargs["attn_mask"] is None and node.kwargs["scale"] == 0.125


def test_a_mask_that_keeps_all_needs_no_bias() -> None:
    full = attention_of(lambda q, k, v: heads_last(
        (q @ k.mT).masked_fill(torch.zeros(N, N, dtype=torch.bool), -1e9).softmax(-1) @ v), *matrices())
    assert full.kwargs["attn_mask"] is None and not full.kwargs.get("is_causal")


def test_a_triangle_that_is_less_than_the_scores_is_a_bias() -> None:
    node = attention_of(lambda q, k, v: heads_last(
        (q @ k.mT + torch.full((N, N), -3.0, dtype=q.dtype).triu(1)).softmax(-1) @ v), *matrices())
    assert node.kwargs["attn_mask"] is not None and not node.kwargs.get("is_causal")


def as_tuple(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = (q @ k.mT / 8).softmax(-1)
    return heads_last(probabilities @ v), probabilities


def scores_as_well(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT / 8
    return heads_last(scores.softmax(-1) @ v), scores.amax(-1)


REFUSED: dict[str, Attend] = {
    "probabilities are returned": as_tuple,
    "scores are read": scores_as_well,
    "probabilities are dropped": lambda q, k, v: heads_last(F.dropout((q @ k.mT).softmax(-1), 0.1) @ v),
    "other dimension": lambda q, k, v: heads_last((q @ k.mT).softmax(-2) @ v),
    "transposed probabilities": lambda q, k, v: heads_last((q @ k.mT).softmax(-1).mT @ v),
    "probabilities on the right": lambda q, k, v: heads_last(v.mT @ (q @ k.mT).softmax(-1)),
    "capped": lambda q, k, v: heads_last((torch.tanh(q @ k.mT / 50) * 50).softmax(-1) @ v),
    "negative factor": lambda q, k, v: heads_last((q @ k.mT * -1).softmax(-1) @ v),
    "factor of keys": lambda q, k, v: heads_last((q @ k.mT * torch.ones(N, dtype=q.dtype)).softmax(-1) @ v),
    "raised": lambda q, k, v: heads_last(torch.max(q @ k.mT, torch.tensor(-1e3)).softmax(-1) @ v),
    "small fill": lambda q, k, v: heads_last((q @ k.mT).masked_fill(torch.eye(N, dtype=torch.bool), -5.0).softmax(-1) @ v),
    "fill that a factor makes small": lambda q, k, v: heads_last(
        ((q @ k.mT).masked_fill(torch.eye(N, dtype=torch.bool), -1e4) * 1e-3).softmax(-1) @ v),
    "bias of float32": lambda q, k, v: heads_last((q @ k.mT + torch.eye(N)).softmax(-1).to(v.dtype) @ v),
    "bits in another dtype": lambda q, k, v: heads_last((q @ k.mT).view(torch.float16).softmax(-1).to(v.dtype) @ v),
    "strides of the result": lambda q, k, v: (turned(q) @ k.mT).softmax(-1) @ v,
    "a view that needs the strides": lambda q, k, v: ((turned(q) @ k.mT).softmax(-1) @ v).view(B * H, N * D) + 1,
    "float32": lambda q, k, v: heads_last((q.float() * 2 @ k.float().mT).softmax(-1) @ v.float()),
    "values of float32": lambda q, k, v: heads_last((q.float() @ k.float().mT).softmax(-1) @ v.float()),
    "wide heads": lambda q, k, v: heads_last((q.mT @ k).softmax(-1) @ v.mT),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_left_as_it_is(why: str) -> None:
    assert joined(REFUSED[why], *matrices()) == 0


@pytest.mark.parametrize("written", ["q", "a view of k", "bias", "nothing"])
def test_what_is_written_in_between_is_read_before(written: str) -> None:
    """A call of attention reads all of its operands where the last product was."""
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        q, k = q * 1, k * 1
        scores = q @ k.mT + bias
        if written == "q":
            q.zero_()
        elif written == "a view of k":
            k[0].mul_(2)
        elif written == "bias":
            bias[:, 1:] = 0
        return heads_last(scores.softmax(-1) @ v) + q.sum()

    bias = torch.empty(1, H, N, N, dtype=torch.bfloat16)
    assert joined(function, *matrices(grad=False), bias) == (written == "nothing")


@pytest.mark.parametrize("spell", [
    lambda s, bias: bias.add_(s), lambda s, bias: operator.iadd(bias, s), lambda s, bias: bias.mul_(s)])
def test_scores_that_are_written_to_something_else_stay(spell: Attend) -> None:
    bias = torch.empty(B, H, N, N, dtype=torch.bfloat16)
    assert joined(lambda q, k, v, bias: heads_last(spell(q @ k.mT, bias).softmax(-1) @ v), *matrices(grad=False), bias) == 0


def test_a_bias_with_a_gradient_stays() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return heads_last((q @ k.mT + bias).softmax(-1) @ v)

    bias = torch.empty(1, H, N, N, dtype=torch.bfloat16)
    assert joined(biased, *matrices(), bias) == 1
    assert joined(biased, *matrices(), bias.requires_grad_()) == 0


def test_a_mask_of_many_layers_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(N, N, dtype=torch.bool).triu(1)
        for _ in range(4):
            q = heads_last((q @ k.mT).masked_fill(later, -1e9).softmax(-1) @ v).view(B, N, H, D).transpose(1, 2)
        return heads_last(q)

    evaluated, value = [], Constants.value
    monkeypatch.setattr(Constants, "value", lambda self, *given: evaluated.append(given) or value(self, *given))
    assert joined(layers, *matrices()) == 4 and len(evaluated) == 1


def test_calls_that_are_kept_stay() -> None:
    assert joined(written, *matrices(), kept=lambda module: [n for n in module.graph.nodes if n.target is operator.matmul]) == 0


def test_what_the_user_allows() -> None:
    module = traced(written, *matrices())
    with sdpa_kernel(SDPBackend.MATH):
        join_attention(module, H200)
    assert not any(node.target in ATTENTION for node in module.graph.nodes)


@pytest.mark.parametrize(("batch", "rows", "width", "faster"), [
    ((B, H), 512, 64, True), ((32, 12), 197, 64, True), ((1, 16), 2048, 64, True), ((2048, 3), 49, 32, False), ((64, 6), 64, 32, False)])
def test_the_faster_form_is_taken(batch: tuple[int, int], rows: int, width: int, faster: bool) -> None:
    assert joined(written, *matrices(*batch, rows=rows, width=width)) == faster
