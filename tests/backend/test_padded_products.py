"""Programs whose matrix products run in padded sizes, against eager: values, gradients, strides, NaN, what is kept.

The sizes here are too small for padding to pay; products of unaligned rows are priced so that it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import dynafuse
from dynafuse.backend import Compiled
from dynafuse.passes.padded_products import PADDED
from dynafuse.passes.strides import is_spread
from tests.support import differential
from tests.support.cases import Maker
from tests.support.differential import compiled, copies, significant
from tests.support.graphs import recorded

BF16, FP16 = torch.bfloat16, torch.float16
VOCABULARY, WIDTH = 101, 24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device on which products of unaligned rows are said to be very slow."""
    for name in ("2", "4", "8", "TF32"):
        monkeypatch.setenv(f"DYNAFUSE_COST_CONTRACTION_SHARE_{name}", "1e-9")
    monkeypatch.setenv("DYNAFUSE_EXECUTORS", "triton")
    return str(request.param)


def check(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Compiled]:
    """The graphs of a function that does what eager does, but that rows of its results may be further apart."""
    return differential.check(function, *arguments, strides="spread", **options)


def padded(graphs: Sequence[Compiled]) -> dict[str, int]:
    """How many products run in padded sizes, by the kind of graph."""
    counts: dict[str, int] = {}
    for graph in graphs:
        products = sum(PADDED in node.meta for node in graph.plan.annotated.facts)
        counts[graph.kind] = counts.get(graph.kind, 0) + products
    return counts


def targets(make: Maker, *shape: int) -> Tensor:
    return make.ints(0, VOCABULARY, *shape)


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), y.view(-1))


def head(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return loss_of(F.linear(F.gelu(x), w), y)


def head_with_logits(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(F.gelu(x), w)
    return loss_of(logits, y), logits


def head_with_views(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """As some models return logits: without the last token, and flattened."""
    logits = F.linear(x, w)
    return loss_of(logits, y), logits[:, :-1], logits.view(-1), logits.transpose(0, 1), logits[..., 3] * 2


def tied(ids: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """The embedding's weight as the head's."""
    return loss_of(F.linear(F.gelu(F.embedding(ids, w)), w), y)


def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def odd_layers(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """Sizes in the middle that are odd: what one product returns is what the next one reads."""
    return F.linear(F.linear(F.linear(x, w, b), v), w, b)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v


def scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(x, a, b, beta=0.5, alpha=2.0)


def batches(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(x, a, b, beta=2, alpha=0.5)


def overwritten(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w).relu()
    with torch.no_grad():
        w.mul_(2)
    return y


def transposed_weight(x: Tensor, w: Tensor) -> Tensor:
    """Column by column: the weight as GPT-2's Conv1D has it, read the other way round."""
    return (x @ w).sin() @ w.t()


Program = tuple[Callable[..., Any], Callable[[Maker], list[Tensor]], dict[str, int]]
HEAD = {"forward": 1, "backward": 2}
PROGRAMS: dict[str, Program] = {
    "head": (head, lambda m: [m(4, 8, WIDTH), m(VOCABULARY, WIDTH), targets(m, 4, 8)], HEAD),
    "head with logits": (head_with_logits, lambda m: [m(4, 8, WIDTH), m(VOCABULARY, WIDTH), targets(m, 4, 8)], HEAD),
    "head with views": (head_with_views, lambda m: [m(4, 8, WIDTH), m(VOCABULARY, WIDTH), targets(m, 4, 8)], HEAD),
    "tied": (tied, lambda m: [targets(m, 4, 8), m(VOCABULARY, WIDTH), targets(m, 4, 8)], HEAD),
    "bias": (biased, lambda m: [m(16, WIDTH), m(33, WIDTH), m(33)], HEAD),
    "odd layers": (odd_layers, lambda m: [m(16, WIDTH), m(33, WIDTH), m(33), m(WIDTH, 33)], {"forward": 3, "backward": 6}),
    "attention": (attention, lambda m: [m(3, 13, 16), m(3, 13, 16), m(3, 13, 16)], {"forward": 2, "backward": 4}),
    "attention, keys of another size": (attention, lambda m: [m(3, 5, 12), m(3, 13, 12), m(3, 13, 6)],
                                        {"forward": 2, "backward": 4}),
    "2-D bias": (scaled, lambda m: [m(9, 33), m(9, 17), m(17, 33)], HEAD),
    "bias per row": (scaled, lambda m: [m(9, 1), m(9, 17), m(17, 33)], HEAD),
    "bias of one": (scaled, lambda m: [m(1), m(9, 17), m(17, 33)], HEAD),
    "bias per column": (scaled, lambda m: [m(33), m(9, 17), m(17, 33)], HEAD),
    "batches": (batches, lambda m: [m(3, 9, 33), m(3, 9, 17), m(3, 17, 33)], HEAD),
    "batches, bias per column": (batches, lambda m: [m(33), m(3, 9, 17), m(3, 17, 33)], HEAD),
    "transposed weight": (transposed_weight, lambda m: [m(16, WIDTH), m(WIDTH, 33)], {"forward": 2, "backward": 4}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_training(name: str, device: str) -> None:
    function, make, counts = PROGRAMS[name]
    graphs = check(function, *make(Maker(device, BF16)), calls=2, join_attention=False)
    assert padded(graphs) == counts


@pytest.mark.parametrize("name", ["head with logits", "bias", "attention", "2-D bias"])
def test_inference(name: str, device: str) -> None:
    function, make, counts = PROGRAMS[name]
    with torch.no_grad():
        graphs = check(function, *make(Maker(device, FP16)), join_attention=False)
    assert padded(graphs) == {"inference": counts["forward"]}


def test_gradients_have_eagers_strides(device: str) -> None:
    function, make, _ = PROGRAMS["tied"]
    given = make(Maker(device, BF16))
    gradients = []
    for call in (compiled(function), function):
        ids, w, y = copies(given)
        call(ids, w, y).backward()
        gradients.append(w.grad)
    assert significant(gradients[0]) == significant(gradients[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_where_it_is(value: float, device: str) -> None:
    make = Maker(device, BF16)

    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y = a @ b
        return y, y @ c

    a, b, c = make(16, 13, grad=False), make(13, 21, grad=False), make(21, 8, grad=False)
    a[3, 5] = b[7, 2] = c[20, 1] = value
    assert padded(check(function, a, b, c)) == {"inference": 2}
    b[:] = 0
    check(function, a, b, c)


def test_a_bias_that_is_multiplied_by_zero_is_not_read(device: str) -> None:
    make = Maker(device, BF16)
    bias = torch.full((33,), float("nan"), dtype=BF16, device=device)
    graphs = check(lambda x, a, b: torch.addmm(x, a, b, beta=0), bias, make(9, 16, grad=False), make(16, 33, grad=False))
    assert padded(graphs) == {"inference": 1}


def test_an_operand_that_is_overwritten_behind_its_product(device: str) -> None:
    make = Maker(device, BF16)
    assert padded(check(overwritten, make(16, WIDTH, grad=False), make(33, WIDTH, grad=False))) == {"inference": 1}


@pytest.mark.parametrize(("name", "rows"), [("head with logits", VOCABULARY + 3), ("bias", 33), ("2-D bias", 40)])
def test_results_alone_in_memory_are_not_copied(name: str, rows: int, device: str) -> None:
    function, make, _ = PROGRAMS[name]
    given = copies(make(Maker(device, BF16)))
    with torch.no_grad():
        result = compiled(function)(*given)
    assert (result[-1] if isinstance(result, tuple) else result).stride(-2) == rows


@pytest.mark.parametrize("name", ["head with logits", "head with views"])
def test_what_shares_memory_with_results_or_with_what_is_saved_is(name: str, device: str) -> None:
    function, make, _ = PROGRAMS[name]
    differential.check(function, *make(Maker(device, BF16)))


class Layer(torch.nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear((x.relu() * x.sigmoid()).tanh().cos(), self.w)


def test_what_layers_give_each_other_keeps_eagers_strides(device: str) -> None:
    """A layer that is a function of its own counts on the strides that its input was traced with."""
    make = Maker(device, BF16)
    layers = torch.nn.Sequential(*[Layer(make(33, 33, grad=False)) for _ in range(12)])
    x = make(16, 33, grad=False)
    with torch.no_grad(), recorded() as graphs:
        result = compiled(layers, reuse_layers="always")(x)
    assert sum(padded(graphs).values()) == len(graphs) < 12 and result.is_contiguous()
    torch.testing.assert_close(result, layers(x), rtol=2e-2, atol=2e-2)


def test_parts_of_a_subclass_keep_eagers_strides(device: str) -> None:
    make = Maker(device, BF16)
    x, w = make(16, WIDTH, grad=False), make(33, WIDTH, grad=False)
    with torch.no_grad():
        result = compiled(F.linear)(TwoTensor(x, x * 2), w)
    assert all(part.is_contiguous() for part in (result.a, result.b))
    torch.testing.assert_close(result.b, F.linear(x * 2, w), rtol=2e-2, atol=2e-2)


def test_a_result_may_be_overwritten(device: str) -> None:
    """Without harm to what is saved for the backward, or to another result."""
    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return y, (y * v).sum()

    make = Maker(device, BF16)
    given, found = [make(16, WIDTH), make(33, WIDTH), make(33, grad=False)], []
    for call in (compiled(function), function):
        x, w, v = copies(given)
        y, total = call(x, w, v)
        with torch.no_grad():
            y.zero_()
        total.backward()
        found.append((total, x.grad, w.grad))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_what_the_backward_keeps_is_not_copied(device: str) -> None:
    function, make, _ = PROGRAMS["head"]
    graphs = check(function, *make(Maker(device, BF16)))
    forward = next(graph.plan.annotated for graph in graphs if graph.kind == "forward")
    outputs = forward.graph.output_node().args[0]
    kept = [node for node in outputs if node.meta["val"].shape[-1:] == (VOCABULARY,)]  # type: ignore[union-attr]
    assert kept and all(node.meta["val"].stride(-2) == VOCABULARY + 3 for node in kept)


def test_dynamic_tokens(device: str) -> None:
    make = Maker(device, BF16)
    w, y = make(VOCABULARY, WIDTH), targets(make, 4, 9)
    x = make(4, 9, WIDTH)
    for tensor in (x, y):
        torch._dynamo.mark_dynamic(tensor, 1)
    with recorded() as graphs:
        call = compiled(head_with_logits, dynamic=None)
        found = call(x, w, y)
        found[0].backward()
        fewer = call(x.detach()[:, :7].clone().requires_grad_(), w, y[:, :7].contiguous())
    assert padded(graphs) == HEAD
    for (loss, logits), tokens in ((found, 9), (fewer, 7)):
        wanted = head_with_logits(x.double()[:, :tokens], w.double(), y[:, :tokens].contiguous())
        torch.testing.assert_close(loss, wanted[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(logits.double(), wanted[1], rtol=2e-2, atol=5e-2)
        assert is_spread(logits, wanted[1].stride())
    assert w.grad is not None and w.grad.shape == w.shape


def test_tf32(device: str) -> None:
    make = Maker(device, torch.float32)
    given = [make(16, WIDTH), make(33, WIDTH), make(33)]
    assert padded(check(biased, *given)) == {"forward": 0, "backward": 0}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert padded(check(biased, *given, precise=device == "cpu")) == HEAD
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_change_of_precision_compiles_anew(device: str) -> None:
    x, w = torch.randn(16, WIDTH, device=device), torch.randn(33, WIDTH, device=device)
    before = torch.get_float32_matmul_precision()
    try:
        with recorded() as graphs:
            call = compiled(lambda x, w: F.linear(x, w).relu())
            call(x, w)
            torch.set_float32_matmul_precision("high")
            call(x, w)
    finally:
        torch.set_float32_matmul_precision(before)
    assert [padded([graph]) for graph in graphs] == [{"inference": 0}, {"inference": 1}]


def test_the_option_turns_it_off(device: str) -> None:
    function, make, _ = PROGRAMS["bias"]
    assert padded(check(function, *make(Maker(device, BF16)), pad_products=False)) == {"forward": 0, "backward": 0}


def test_products_that_are_forced_to_eager_stay(device: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with dynafuse.force_backend("eager"):
            y = F.linear(x, w)
        return F.linear(y.relu(), w.t())

    make = Maker(device, BF16)
    graphs = check(function, make(16, WIDTH, grad=False), make(33, WIDTH, grad=False))
    assert padded(graphs) == {"inference": 1}


def test_the_plan_is_the_same_again(device: str) -> None:
    function, make, _ = PROGRAMS["odd layers"]
    given, texts = make(Maker(device, BF16)), []
    for _ in range(2):
        torch._dynamo.reset()
        with recorded() as graphs:
            compiled(function)(*copies(given)).sum().backward()
        texts.append([str(graph.plan) for graph in graphs])
    assert texts[0] == texts[1] and len(texts[0]) == 2


def test_the_report_tells_both_prices(device: str) -> None:
    function, make, _ = PROGRAMS["bias"]
    report = dynafuse.explain(function, *make(Maker(device, BF16)), device="h200")
    (note,) = (note for step in report.graphs[0].steps for note in step.notes if step.executor == "eager")
    assert re.fullmatch(r"in sizes 16×24×40, which takes [\d.]+ µs, and [\d.]+ for copies, instead of 16×24×33, [\d.]+ µs", note)
    assert "addmm_default: in sizes 16×24×40" in str(report)


@pytest.mark.gpu
def test_a_head_of_an_odd_vocabulary_is_faster() -> None:
    """In the shipped prices: forward and backward of a head, at least twice as fast as in the sizes that it has."""
    make, times = Maker("cuda", BF16), {}
    x, w, y = make(8192, 768), make(50257, 768), make.ints(0, 50257, 8192)
    for pads in (False, True):
        torch._dynamo.reset()
        call = compiled(head, pad_products=pads)
        for _ in range(3):
            call(x, w, y).backward()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(5):
            call(x, w, y).backward()
        ended.record()
        torch.cuda.synchronize()
        times[pads] = began.elapsed_time(ended)
    assert times[True] < times[False] / 2, times
