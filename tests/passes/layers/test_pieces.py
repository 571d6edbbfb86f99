"""Layers that are traced once: what is compiled, and that results, gradients, buffers and random numbers are as without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynafuse
from dynafuse import backend
from dynafuse.passes.layers import cuts, pieces
from dynafuse.passes.layers.repeats import Run
from tests.support.graphs import recorded

WIDTH = 8
LAYERS = 8


class Layer(nn.Module):
    """A residual layer of a norm and two products."""

    def __init__(self, eps: float = 1e-5, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = h * torch.sigmoid(h) + h
        return x + F.dropout(self.down(h), self.dropout, self.training)


class Model(nn.Module):
    """Layers between an affine input and a loss."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def outcome(model: nn.Module, call: Callable[..., Any], *inputs: Tensor) -> dict[str, Tensor]:
    """The outputs of a step, the gradients of inputs and parameters, and the buffers after it."""
    inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
    torch.manual_seed(0)
    results = call(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    found = {f"output {i}": result.detach().clone() for i, result in enumerate(results)}
    total = sum(result.sum() for result in results)
    if total.requires_grad:
        total.backward()
    found |= {f"input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {name: b.clone() for name, b in model.named_buffers()}
    return found


def check(model: nn.Module, *inputs: Tensor, steps: int = 2, **options: Any) -> list[backend.Compiled]:
    """Compare steps with eager's; the graphs that were compiled. Ops run one by one: how graphs are taken apart is looked at."""
    options = {"reuse_layers": "always", "fallback_random": True, "executors": "eager", **options}
    model, inputs = model.double(), tuple(x.detach().double().requires_grad_(x.requires_grad) for x in inputs)
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    backend.reset()
    compiled = torch.compile(model, backend=backend.dynafuse, fullgraph=True, options=options)
    with recorded() as graphs:
        for _ in range(steps):
            ours, eager = outcome(model, compiled, *inputs), outcome(twin, twin, *inputs)
            assert ours.keys() == eager.keys()
            for name, value in eager.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
            for module in (model, twin):
                module.zero_grad()
    return graphs


def calls(graphs: list[backend.Compiled], kind: str = "forward") -> list[int]:
    """How often each graph of a kind is called."""
    return [graph.calls for graph in graphs if graph.kind == kind]


def rows(n: int = 4, **how: Any) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(n, WIDTH, **how)


def test_equal_layers_are_compiled_once() -> None:
    graphs = check(Model([Layer() for _ in range(LAYERS)]), rows(requires_grad=True))
    assert max(calls(graphs)) >= LAYERS - 1 and len(calls(graphs)) == 3
    assert sorted(calls(graphs)) == sorted(calls(graphs, "backward"))


def test_the_number_of_graphs_does_not_grow() -> None:
    few, many = (len(check(Model([Layer() for _ in range(n)]), rows(), steps=1)) for n in (8, 14))
    assert few == many == 6


def test_nothing_is_lost_at_the_cut() -> None:
    model = Model([Layer() for _ in range(LAYERS)])
    whole, apart = (check(model, rows(), steps=1, executors="triton", reuse_layers=how) for how in ("never", "always"))
    def launches(graphs: list[backend.Compiled]) -> int:
        return sum(len(graph.plan.regions) * graph.calls for graph in graphs if graph.kind == "forward")

    assert launches(apart) <= launches(whole) + 1


def test_the_option_turns_it_off() -> None:
    assert calls(check(Model([Layer() for _ in range(LAYERS)]), rows(), steps=1, reuse_layers="never")) == [1]


class Wide(nn.Module):
    """Layers of a wide product and an activation each."""

    def __init__(self, width: int, layers: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, device="meta") for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(("rows", "cost", "apart"), [(8192, {}, True), (8, {}, False), (8, {"piece_us": 0.0}, True),
                                                     (8192, {"piece_share": 0.0}, False)])
def test_layers_are_taken_out_where_the_device_sets_the_pace(rows: int, cost: dict[str, float], apart: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Wide(4096), backend=backend.dynafuse, options={"device": "h200", "cost": cost})
    graphs: list[backend.Compiled] = []
    with backend.listening(graphs.append, plan_only=True):
        compiled(torch.empty(rows, 4096, device="meta"))
    assert (max(graph.calls for graph in graphs) > 20) == apart


@pytest.mark.parametrize("strict", [False, True])
def test_a_search_that_fails_leaves_the_graph_whole(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(backend, "take_apart", fail)
    if strict:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="on purpose"):
            check(Model([Layer()]), rows(), strict=True)
    else:
        with pytest.warns(dynafuse.DynafuseWarning, match="ZeroDivisionError: on purpose\n.*stays whole"):
            assert calls(check(Model([Layer()]), rows(), steps=1, strict=False)) == [1]


def test_gradients_come_back_in_the_layout_of_their_values() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.weight @ x.t()).t()

    model, x = nn.Sequential(*(Transposed() for _ in range(12))), torch.randn(WIDTH, 4).t().requires_grad_()
    torch._dynamo.reset()
    with torch._functorch.config.patch(guess_tangent_strides_as_outputs=False):  # as it is in older torch
        options = {"reuse_layers": "always", "executors": "eager"}
        compiled = torch.compile(model, backend=backend.dynafuse, options=options)
        with recorded() as graphs:
            result = compiled(x)
        assert max(calls(graphs)) >= 10
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.backward(result, torch.ones(WIDTH, 4).t())
    assert not [event for event in profile.events() if event.name == "aten::contiguous" and event.cpu_children]


def test_values_cross_in_the_layout_that_they_have_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cached(nn.Module):
        """Puts keys behind none, as an empty cache does; torch's decomposition of that leaves them transposed."""

        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            keys = self.key(x).view(2, 6, 2, WIDTH // 2).transpose(1, 2)
            keys = torch.cat([torch.tensor([], dtype=x.dtype), keys], -2)
            return x + torch.tanh(keys.view(4, 6, WIDTH // 2) + 1.0).view(2, 6, WIDTH)

    def behind_cat(program: cuts.Program, run: Run) -> list[cuts.Cut]:
        return [c for c in cuts.cuts(program, run) if program.calls[run.start + run.period + c.offset - 1].target is torch.cat]

    monkeypatch.setattr(pieces, "cuts", behind_cat)
    graphs = check(nn.Sequential(*(Cached() for _ in range(LAYERS))), torch.randn(2, 6, WIDTH, requires_grad=True))
    assert max(calls(graphs)) >= LAYERS - 1


def test_few_layers_stay_whole() -> None:
    assert calls(check(Model([Layer() for _ in range(3)]), rows(), steps=1)) == [1]


def test_alternating_layers_are_a_layer_of_two() -> None:
    layers = [Layer(eps=(1e-5, 1e-3)[i % 2]) for i in range(2 * LAYERS)]
    assert max(calls(check(Model(layers), rows(), steps=1))) >= LAYERS - 1


def test_two_kinds_of_layers_in_a_row() -> None:
    class Other(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x - torch.tanh(self.down(torch.relu(self.up(self.norm(x)))))

    layers = [Layer() for _ in range(LAYERS)] + [Other() for _ in range(LAYERS + 2)]
    found = sorted(calls(check(Model(layers), rows(), steps=1)))
    assert LAYERS - 2 <= found[-2] <= LAYERS <= found[-1] <= LAYERS + 2


def test_a_different_layer_in_the_middle_is_compiled_apart() -> None:
    layers = [Layer(eps=1e-2 if i == LAYERS else 1e-5) for i in range(2 * LAYERS + 1)]
    found = sorted(calls(check(Model(layers), rows(), steps=1)))
    assert found[-2:] == [LAYERS - 1, LAYERS] or found[-2:] == [LAYERS, LAYERS]


def test_dropout_draws_what_eager_draws() -> None:
    graphs = check(Model([Layer(dropout=0.3) for _ in range(LAYERS)]), rows())
    assert max(calls(graphs)) >= LAYERS - 1


def test_dropout_of_our_own_is_the_same_in_the_backward() -> None:
    class Drop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = F.dropout(x * 1.0 + 0.0, 0.1)
                x = x + 0.0
            return x

    torch._dynamo.reset()
    x = torch.ones(64, 64, requires_grad=True)
    compiled = torch.compile(Drop(), backend=backend.dynafuse, options={"reuse_layers": "always"})
    with recorded() as graphs:
        out = compiled(x)
        out.sum().backward()
    assert max(calls(graphs)) >= 11
    assert x.grad is not None
    torch.testing.assert_close(x.grad, out.detach())  # the function is linear, so its gradient at ones is its value
    kept = (out != 0).double().mean()
    assert abs(kept - 0.9 ** 12) < 0.03, "the layers draw masks of their own"


def test_buffers_are_updated() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)
            self.bn = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.bn(self.lin(x)))
            return torch.sigmoid(y) * y + x

    graphs = check(Model([Normed() for _ in range(LAYERS)]), rows(16, requires_grad=True))
    assert max(calls(graphs)) >= LAYERS - 1


def test_one_parameter_of_all_layers() -> None:
    layer = Layer()
    graphs = check(Model([layer] * LAYERS), rows())
    assert max(calls(graphs)) >= LAYERS - 1


def test_frozen_layers_are_another_kind() -> None:
    layers = [Layer() for _ in range(2 * LAYERS)]
    for layer in layers[:LAYERS]:
        layer.requires_grad_(False)
    graphs = check(Model(layers), rows(requires_grad=True))
    assert sum(n >= LAYERS - 2 for n in calls(graphs)) == 2


def test_all_hidden_states_are_returned() -> None:
    class States(Model):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            states = [self.first(x)]
            for layer in self.layers:
                states.append(layer(states[-1]))
            return tuple(states)

    graphs = check(States([Layer() for _ in range(LAYERS)]), rows())
    assert max(calls(graphs)) >= LAYERS - 1


def test_values_from_before_the_layers_are_used_in_all_of_them() -> None:
    class Conditioned(Model):
        def forward(self, x: Tensor) -> Tensor:
            c = torch.sin(x) * 2
            x = self.first(x)
            for layer in self.layers:
                x = layer(x * c) + c.flip(0)
            return (x * c).sum()

    graphs = check(Conditioned([Layer() for _ in range(LAYERS)]), rows(requires_grad=True))
    assert max(calls(graphs)) >= LAYERS - 1


def test_a_stream_that_is_written_in_place() -> None:
    class InPlace(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                y = layer(x)
                x = y.clone()
                x += torch.tanh(y)
                x.mul_(0.5)
            return x.square().mean()

    check(InPlace([Layer() for _ in range(LAYERS)]), rows())


def test_a_buffer_outside_that_every_layer_writes_to() -> None:
    class Counting(Model):
        def __init__(self, layers: list[nn.Module]) -> None:
            super().__init__(layers)
            self.register_buffer("total", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
                self.total += x.detach().mean(0)
                x = x + 0.01 * self.total
            return x.square().mean()

    check(Counting([Layer() for _ in range(LAYERS)]), rows())


def test_views_cross_the_cut() -> None:
    class Views(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).t()
            for layer in self.layers:
                a, b = layer(x.t()).chunk(2, -1)
                x = torch.cat([b.sin(), a], -1).t()
            return x.square().mean()

    check(Views([Layer() for _ in range(LAYERS)]), rows())


@pytest.mark.parametrize("where", ["inside", "around"])
def test_gradients_that_are_turned_off(where: str) -> None:
    class Partly(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if where == "around":
                with torch.no_grad():
                    for layer in self.layers:
                        x = layer(x)
                return self.first(x).sum()
            for layer in self.layers:
                with torch.no_grad():
                    scale = x.abs().amax() + 1
                x = layer(x / scale)
            return x.sum()

    graphs = check(Partly([Layer() for _ in range(LAYERS)]), rows())
    assert where == "around" or max(calls(graphs)) >= LAYERS - 1


@pytest.mark.parametrize("where", ["inside", "around"])
def test_autocast(where: str) -> None:
    class Cast(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
                for layer in self.layers:
                    with torch.autocast("cpu", enabled=False):
                        x = layer(x.double())
            return x.sum()

    check(Cast([Layer() for _ in range(LAYERS)]), rows())


def test_inference_with_a_call_that_only_logs() -> None:
    class Logged(Model):
        def forward(self, x: Tensor) -> Tensor:
            torch._C._log_api_usage_once("test")
            return super().forward(x)

    model = Logged([Layer() for _ in range(LAYERS)]).eval()
    with torch.no_grad():
        graphs = check(model, rows())
    assert max(calls(graphs, "inference")) >= LAYERS - 1


def test_a_forced_layer_is_another_kind() -> None:
    graphs = check(Model([Layer() for _ in range(2 * LAYERS + 1)]), rows(), steps=1, force={f"layers.{LAYERS}": "eager"})
    assert sorted(calls(graphs))[-2] >= LAYERS - 1
    eager = [g for g in graphs if g.calls == 1 and any(f.forced == "eager" for f in g.plan.annotated.facts.values())]
    assert eager and all(f.forced != "eager" for g in graphs if g.calls > 1 for f in g.plan.annotated.facts.values())


def test_a_decorated_class_is_forced_in_every_layer() -> None:
    @dynafuse.force_backend("eager")
    class Forced(Layer):
        pass

    graphs = check(Model([Forced() for _ in range(LAYERS)]), rows(), steps=1)
    assert max(calls(graphs)) >= LAYERS - 1 and not any(g.plan.regions for g in graphs if g.calls > 1)


def test_dynamic_sizes_stay_whole() -> None:
    model = Model([Layer() for _ in range(LAYERS)])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend.dynafuse, dynamic=True, options={"reuse_layers": "always"})
    with recorded() as graphs:
        for n in (4, 6):
            torch.testing.assert_close(compiled(rows(n)), model(rows(n)))
    assert calls(graphs) == [1]


def test_layers_that_are_checkpointed() -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x.square().mean()

    check(Checkpointed([Layer() for _ in range(LAYERS)]), rows())


def test_new_weights_need_no_new_code() -> None:
    model = Model([Layer() for _ in range(LAYERS)])
    graphs = check(model, rows())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert len(graphs) == 6


def test_the_report_says_how_often_a_graph_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_REUSE_LAYERS", "always")
    report = dynafuse.explain(Model([Layer() for _ in range(LAYERS)]), rows(), device="h200")
    called = [graph["called"] for graph in report.to_dict()["graphs"]]
    assert max(called) >= LAYERS - 1 and len(called) == 6
    assert f"forward, {max(called)} times a step:" in str(report)
