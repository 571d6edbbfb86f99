"""Forcing executors: every way to say it, what follows it into the backward, what it does to the plan, and the contract."""

from __future__ import annotations

import copy
import inspect
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import dynafuse
from dynafuse import backend, force_backend, fx
from dynafuse.backend import Compiled
from dynafuse.config import FORCE_MARK
from dynafuse.cost import device as devices
from dynafuse.errors import DynafuseWarning, ForceError, OptionError, Violation
from dynafuse.ir import Plan
from dynafuse.lowering import registry
from dynafuse.lowering.nvfuser import availability as nvfuser
from dynafuse.lowering.triton import compiler
from dynafuse.partition import forcing as force
from dynafuse.partition.annotate import annotate
from dynafuse.partition.executors import Executors
from dynafuse.partition.forcing import Forcing
from dynafuse.partition.search import partition
from dynafuse.passes.normalize import normalize
from tests.support import graphs

X = torch.linspace(-2, 2, 128).reshape(8, 16)


@pytest.fixture(autouse=True)
def _nothing_told() -> Iterator[None]:
    force.reset()
    yield


def compiled(fn: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, fullgraph: bool = True,
             dynamic: bool | None = None) -> list[Compiled]:
    """The graphs of a call of ``fn``, planned for an H200 and run node by node; a backward follows if one can."""
    found: list[Compiled] = []
    torch._dynamo.reset()
    with backend.listening(found.append, plan_only=True):
        call = torch.compile(fn, backend=backend.dynafuse, fullgraph=fullgraph, dynamic=dynamic,
                             options={"device": "h200", **(options or {})})
        result = call(*args)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
    return found


def forced(one: Compiled) -> dict[str, set[str | None]]:
    """Per op what its nodes are forced to; views and scalars are left out."""
    found: dict[str, set[str | None]] = {}
    for node, facts in one.plan.annotated.facts.items():
        if facts.role in ("fused", "eager") and isinstance(node.target, torch._ops.OpOverload):
            found.setdefault(str(node.target).split(".")[1], set()).add(facts.forced)
    return found


def all_forced(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[set[str | None]]:
    """Per graph all that its ops are forced to."""
    return [set().union(*forced(one).values()) for one in compiled(fn, *args, **kwargs)]


def leaf() -> torch.Tensor:
    return X.clone().requires_grad_()


class Act(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.act = Act()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.act(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.mlp(torch.exp(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.named = nn.ModuleDict({"a-b": Act()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.cos(self.named["a-b"](x))


# ---------------------------------------------------------------------- the ways to say it


@force_backend("eager")
class ForcedAct(Act):
    pass


class WithMethods(nn.Module):
    @force_backend("eager")
    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 3

    @force_backend("eager")
    @staticmethod
    def alone(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 3

    @staticmethod
    @force_backend("eager")
    def alone_too(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 3

    @force_backend("eager")
    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 3


@force_backend("eager")
def function(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 3


def block(x: torch.Tensor) -> torch.Tensor:
    with force_backend("eager"):
        return torch.tanh(x) * 3


WAYS: dict[str, Callable[[], Callable[..., Any]]] = {
    "class": ForcedAct,
    "instance": lambda: force_backend("eager")(Act()),
    "method": lambda: WithMethods().inside,
    "static method": lambda: WithMethods.alone,
    "static method around": lambda: WithMethods.alone_too,
    "class method": lambda: WithMethods.of_class,
    "function": lambda: function,
    "bound method": lambda: force_backend("eager")(Act().forward),
    "block": lambda: block,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_forces_forward_and_backward_and_nothing_else(way: str) -> None:
    inner = WAYS[way]()
    forward, backward = compiled(lambda x: torch.exp(inner(torch.sin(x))), leaf())
    assert forced(forward) == {"sin": {None}, "tanh": {"eager"}, "mul": {"eager"}, "exp": {None}}
    found = forced(backward)
    assert found["cos"] == {None} and found["mul"] == {None, "eager"} and found["sub"] == {"eager"}
    for facts in (f for one in (forward, backward) for f in one.plan.annotated.facts.values() if f.call is not None):
        expected = ("eager", "forced to eager") if facts.forced else ("fused", "")
        assert facts.role == "view" or (facts.role, facts.reason) == expected


@pytest.mark.parametrize("way", ["class", "instance"])
def test_a_forced_module_as_what_is_compiled(way: str) -> None:
    assert all_forced(WAYS[way](), leaf()) == [{"eager"}, {"eager"}]


def test_without_any_nothing_is_forced() -> None:
    assert all_forced(Model(), leaf()) == [{None}, {None}]


def test_the_innermost_wins() -> None:
    def nested(x: torch.Tensor) -> torch.Tensor:
        with force_backend("eager"):
            x = torch.sin(x)
            with force_backend("triton"):
                x = function(torch.tanh(x).exp())
                x = torch.sqrt(x)
            return torch.cos(x)

    forward, backward = compiled(nested, X)[0], compiled(nested, leaf())[1]
    assert forced(forward) == {"sin": {"eager"}, "exp": {"triton"}, "tanh": {"triton", "eager"}, "mul": {"eager"},
                               "sqrt": {"triton"}, "cos": {"eager"}}
    assert forced(backward)["neg"] == {"eager"} and forced(backward)["mul"] == {"triton", "eager"}


def test_a_graph_break_inside_keeps_the_order() -> None:
    @force_backend("eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x)

    found = compiled(lambda x: torch.exp(broken(torch.tanh(x))), X, fullgraph=False)
    ops = {op: order for one in found for op, order in forced(one).items()}
    assert ops == {"tanh": {None}, "sin": {"eager"}, "cos": {"eager"}, "exp": {None}}


def test_around_the_call_of_a_compiled_function_it_holds_for_what_compiles() -> None:
    found: list[Compiled] = []
    x = leaf()
    with backend.listening(found.append, plan_only=True):
        call = torch.compile(lambda x: torch.exp(function_of("triton")(torch.sin(x)) * torch.sin(x)), fullgraph=True,
                             backend=backend.dynafuse, options={"device": "h200"})
        with force_backend("eager"):
            result = call(x)
        result.sum().backward()
        call(x)
    assert [one.kind for one in found] == ["forward", "backward"]
    assert forced(found[0])["sin"] == {"eager"} and forced(found[0])["tanh"] == {"triton"}
    assert forced(found[1])["cos"] == {"eager"} and forced(found[1])["sub"] == {"triton"}
    torch._dynamo.reset()
    with force_backend("triton"), pytest.raises(BackendCompilerFailed, match=r"triton cannot run aten.histc.default"):
        torch.compile(lambda x: torch.histc(x), backend=backend.dynafuse, options={"device": "h200"})(X)


def test_a_compiled_module_can_be_forced() -> None:
    module = Act()
    found: list[Compiled] = []
    with backend.listening(found.append, plan_only=True):
        whole = torch.compile(module, backend=backend.dynafuse, options={"device": "h200"})
        assert force_backend("eager")(whole) is whole
        whole(X)
    assert set().union(*forced(found[0]).values()) == {"eager"}


@pytest.mark.parametrize("make", [lambda: 3, lambda: int, lambda: (i for i in ()), lambda: nn.ReLU], ids=range(4))
def test_only_code_can_be_decorated(make: Callable[[], Any]) -> None:
    target = make()
    if target is nn.ReLU:
        class Later(nn.ReLU):
            async def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return x

        target = Later().forward
    with pytest.raises(OptionError, match=r"what force_backend decorates is .*expected an nn.Module class or instance"):
        force_backend("eager")(target)


def test_executor_and_strict_are_checked_when_it_is_made() -> None:
    with pytest.raises(OptionError, match=r"unknown executor 'tritn' \(did you mean 'triton'\?\); valid: eager, inductor, nv"):
        force_backend("tritn")
    with pytest.raises(OptionError, match=r"`strict` is 1 .*expected true or false"):
        force_backend("triton", strict=1)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what is not compiled, copies and pickles


def test_code_that_is_not_compiled_runs_as_without() -> None:
    for way, make in WAYS.items():
        assert torch.equal(make()(X), torch.tanh(X) * 3), way
    assert FORCE_MARK not in torch.fx.traceback.current_meta.get("custom", {})
    with pytest.raises(ZeroDivisionError), force_backend("eager"):
        raise ZeroDivisionError
    assert FORCE_MARK not in torch.fx.traceback.current_meta.get("custom", {})


def test_code_that_is_not_compiled_pays_microseconds() -> None:
    plain, marked = (lambda: None), force_backend("eager")(lambda: None)

    def once(function: Callable[[], None]) -> float:
        start = time.perf_counter()
        for _ in range(1000):
            function()
        return time.perf_counter() - start

    assert min(once(marked) for _ in range(5)) - min(once(plain) for _ in range(5)) < 1000 * 50e-6


def test_decorated_code_keeps_its_name_and_signature() -> None:
    assert function.__name__ == "function" and str(inspect.signature(function)).startswith("(x")
    assert ForcedAct.forward.__name__ == "forward"
    module = force_backend("eager")(Mlp())
    assert list(inspect.signature(module.forward).parameters) == ["x"]
    assert list(inspect.signature(type(module).forward).parameters) == ["self", "x"]


def test_a_class_is_changed_in_place_and_its_base_is_not() -> None:
    class Derived(Act):
        pass

    assert force_backend("eager")(Derived) is Derived
    assert all_forced(Derived(), X) == [{"eager"}]
    assert all_forced(Act(), X) == [{None}]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("inside", [False, True])
def test_copies_are_forced_and_use_their_own_parameters(copied: Callable[[Any], Any], inside: bool) -> None:
    original = Layer()
    force_backend("eager")(original.mlp if inside else original)
    twin = copied(original)
    with torch.no_grad():
        original.mlp.up.weight.zero_()
        original.mlp.up.bias.zero_()
        twin.mlp.up.weight.fill_(0.01)
    fresh = Layer()
    fresh.load_state_dict(twin.state_dict())
    assert torch.equal(twin(X), fresh(X)) and not torch.equal(twin(X), original(X))
    forward = forced(compiled(twin, X)[0])
    assert forward["tanh"] == {"eager"} and forward["exp"] == {None if inside else "eager"}
    assert list(original.state_dict()) == list(fresh.state_dict())
    assert [name for name, _ in original.named_modules()] == [name for name, _ in fresh.named_modules()]


def test_an_instance_that_is_forced_twice_follows_the_first() -> None:
    module = force_backend("triton")(force_backend("eager")(Act()))
    assert all_forced(copy.deepcopy(module), X) == [{"eager"}]


# ---------------------------------------------------------------------- patterns

MLP = {"addmm", "tanh", "mul", "sigmoid"}


@pytest.mark.parametrize(("patterns", "covered"), [
    ("layers.*.mlp=eager", MLP),
    ("layers.0.mlp=eager", MLP),
    ("layers.[0-3].m?p=eager", MLP),
    ("layers=eager", {*MLP, "exp", "sin"}),
    ("layers.*=eager", {*MLP, "exp", "sin"}),
    ("**.act=eager", {"tanh", "mul"}),
    ("**.mlp.**.act=eager", {"tanh", "mul"}),
    ("self.layers.0.mlp.act=eager", {"tanh", "mul"}),
    ("*=eager", {*MLP, "exp", "sin", "cos"}),
    ("**=eager", {*MLP, "exp", "sin", "cos"}),
    ("named.a-b=eager", {"tanh", "mul"}),
    ("*.*=eager", {*MLP, "exp", "sin"}),
    ("layers.*.act=eager", set()),
    ("mlp=eager", set()),
], ids=lambda value: value if isinstance(value, str) else " ".join(sorted(value)))
def test_patterns(monkeypatch: pytest.MonkeyPatch, patterns: str, covered: set[str]) -> None:
    monkeypatch.setenv("DYNAFUSE_FORCE", patterns)
    monkeypatch.setenv("DYNAFUSE_STRICT", "0")  # some match nothing
    found = forced(compiled(Model(), X)[0])
    assert {op for op, orders in found.items() if "eager" in orders} == covered
    both = {"tanh", "mul"} if "act" in patterns or "mlp" in patterns or "a-b" in patterns or "layers" in patterns else set()
    assert {op for op, orders in found.items() if orders == {"eager"}} == covered - both


def test_patterns_follow_into_the_backward() -> None:
    forward, backward = compiled(Model(), leaf(), options={"force": {"layers.*.mlp.act": "eager"}})
    assert forced(forward)["sin"] == {None} and "eager" in forced(forward)["tanh"]
    assert "eager" in forced(backward)["sub"] and forced(backward)["mm"] == {None} and forced(backward)["cos"] == {None}


def test_in_a_function_the_variable_may_stand_in_front() -> None:
    net = Model()
    for pattern in ("net.layers.0.mlp", "layers.0.mlp"):
        found = forced(compiled(lambda x: torch.exp2(net(x)), X, options={"force": {pattern: "eager"}})[0])
        assert found["sigmoid"] == {"eager"} and found["exp2"] == {None} and found["cos"] == {None}


@pytest.mark.parametrize(("patterns", "sin", "sigmoid", "act"), [
    ({"layers.*": "eager", "layers.*.mlp": "triton"}, "eager", "triton", "triton"),
    ({"layers.*.mlp": "triton", "layers.*": "eager"}, "eager", "triton", "triton"),  # whatever the order
    ({"**.mlp": "triton", "**": "eager"}, "eager", "triton", "triton"),
    ({"layers.0.mlp": "triton", "layers.*.mlp": "eager"}, None, "triton", "triton"),  # the more literal one
    ({"layers.?.mlp": "triton", "layers.*.mlp": "eager"}, None, "eager", "eager"),  # alike: the later one
    ({"layers.*.mlp": "eager", "**.act": "triton"}, None, "eager", "triton"),
], ids=range(6))
def test_of_patterns_the_innermost_wins(patterns: dict[str, str], sin: str, sigmoid: str, act: str) -> None:
    model = Model()
    model.named["a-b"] = nn.Identity()  # type: ignore[assignment]
    found = forced(compiled(model, X, options={"force": patterns})[0])
    assert (found["sin"], found["sigmoid"], found["tanh"]) == ({sin}, {sigmoid}, {act})


@pytest.mark.parametrize(("pattern", "sigmoid", "act"), [
    ("layers.*", "eager", "eager"),  # further out than the decorated module
    ("layers.*.mlp", "triton", "triton"),  # the decorated module itself: a run can override the code
    ("layers.*.mlp.act", "eager", "triton"),
])
def test_patterns_and_decorated_modules(pattern: str, sigmoid: str, act: str) -> None:
    for decorated in ("instance", "class", "base class"):
        model = Model()
        model.named["a-b"] = nn.Identity()  # type: ignore[assignment]
        if decorated == "instance":
            force_backend("eager")(model.layers[0].mlp)
        else:
            base = force_backend("eager")(type("Forced", (Mlp,), {"forward": Mlp.forward}))
            model.layers[0].mlp = (base if decorated == "class" else type("Derived", (base,), {}))()  # type: ignore[assignment]
        found = forced(compiled(model, X, options={"force": {pattern: "triton"}})[0])
        assert (found["sigmoid"], found["tanh"]) == ({sigmoid}, {act}), decorated


def test_a_pattern_does_not_reach_into_a_block_or_a_function() -> None:
    class Holder(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(block(function(torch.sin(x))))

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Holder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.holder(x)

    found = forced(compiled(Root(), X, options={"force": {"holder": "triton"}})[0])
    assert found == {"sin": {"triton"}, "tanh": {"eager"}, "mul": {"eager"}, "exp": {"triton"}}


def test_options_come_after_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_FORCE", "layers=eager,named=eager")
    found = forced(compiled(Model(), X, options={"force": {"layers": "triton"}})[0])
    assert found["sin"] == {"triton"} and found["tanh"] == {"triton", "eager"}


def test_a_pattern_that_matches_nothing_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_STRICT", "0")
    options = {"force": {"layers.*.mpl": "eager", "layers.0": "eager"}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(Model(), leaf(), options=options)
        compiled(lambda x: x + 1, X, options={"force": {"nothing": "eager"}})  # no module at all
    (only,) = [str(one.message) for one in told if issubclass(one.category, DynafuseWarning)]
    assert only.startswith("force pattern 'layers.*.mpl' matches no module of what is compiled; closest: layers.0.mlp")


def test_a_strict_pattern_that_matches_nothing_raises_when_strict() -> None:
    for _ in range(2):
        with pytest.raises(OptionError, match=r"force pattern 'layers.\*.mpl' matches no module of what is compiled; closest: "):
            compiled(Model(), X, options={"force": {"layers.*.mpl": "eager"}})
    model = nn.Sequential(Act())  # a variable is no module: it is not proposed
    with pytest.raises(OptionError, match=r"closest: 0$"):
        compiled(model, X, options={"force": {"module": "eager"}})
    with pytest.warns(DynafuseWarning, match="mpl"):
        compiled(Model(), X, options={"force": {"layers.*.mpl": "eager?"}})


class Broken(nn.Module):
    """Three graphs: before the break, inside the module that breaks, behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Act(), Act()
        self.unused = Act()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Broken()
        self.head = Act()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


@pytest.mark.parametrize("pattern", ["head", "inner", "inner.first", "inner.last", "inner.unused", "**.last", "inn*.*", "self.head"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "function"])
def test_a_pattern_for_another_graph_is_no_mistake(pattern: str, wrapped: bool) -> None:
    model = Outer()
    call = (lambda x: model(x)) if wrapped else model
    if wrapped and pattern == "self.head":
        pattern = "model.head"
    with warnings.catch_warnings():
        warnings.simplefilter("error", DynafuseWarning)
        assert len(compiled(call, X, options={"force": {pattern: "eager"}}, fullgraph=False)) >= 2
    with pytest.raises(OptionError, match=r"'inner\.frist' matches no module"):
        compiled(call, X, options={"force": {"inner.frist": "eager"}}, fullgraph=False)


def test_patterns_are_looked_for_in_whole_graphs_and_not_in_repeated_layers() -> None:
    model = nn.Sequential(*(Layer() for _ in range(12)), Act())
    with warnings.catch_warnings():
        warnings.simplefilter("error", DynafuseWarning)
        compiled(model, leaf(), options={"force": {"12": "eager"}, "reuse_layers": "always"})


def test_a_pattern_within_a_marked_block_counts_as_matched() -> None:
    model = Model()

    def call(x: torch.Tensor) -> torch.Tensor:
        with force_backend("eager"):
            return model(x)

    one = compiled(call, X, options={"force": {"layers.0": "triton"}})[0]
    assert forced(one)["sin"] == {"eager"}


@pytest.mark.parametrize(("source", "path"), [
    ("L['self'].layers.0.mlp", ["self", "layers", "0", "mlp"]),
    ("L['self'].layers[0].mlp", ["self", "layers", "0", "mlp"]),
    ("L['self']._modules['layers']._modules['0']", ["self", "layers", "0"]),
    ("G['net'].named.a-b", ["net", "named", "a-b"]),
    ("L['self'].block.forward._dynafuse_module.up@1", ["self", "block", "up"]),
    ("L['self']", ["self"]),
])
def test_paths_in_every_spelling_of_dynamo(source: str, path: list[str]) -> None:
    assert fx.module_path(source) == path


# ---------------------------------------------------------------------- what Dynamo and AOTAutograd do to graphs


def test_sums_of_gradients_follow_where_all_they_add_agrees() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with force_backend("eager"):
            y = torch.sin(x)
            z = y * torch.cos(y) * torch.exp(y)
        return z * torch.tanh(x)

    _, backward = compiled(fn, leaf())
    sums = [(node, facts) for node, facts in backward.plan.annotated.facts.items()
            if str(node.target) == "aten.add.Tensor" and "custom" not in node.meta]
    assert [facts.forced for _, facts in sums].count("eager") == len(sums) - 1 >= 2
    ((border, _),) = [(node, facts) for node, facts in sums if facts.forced is None]
    operands = {backward.plan.annotated.facts[node].forced for node in border.all_input_nodes}
    assert operands == {None, "eager"}


def test_dynamic_shapes_compile_once() -> None:
    found: list[Compiled] = []
    with backend.listening(found.append, plan_only=True):
        call = torch.compile(lambda x: torch.exp(function(x)), backend=backend.dynafuse, fullgraph=True, dynamic=True,
                             options={"device": "h200"})
        for size in (4, 8, 12):
            call(torch.randn(size, 16, requires_grad=True)).sum().backward()
    assert [one.kind for one in found] == ["forward", "backward"]
    assert forced(found[0]) == {"tanh": {"eager"}, "mul": {"eager"}, "exp": {None}}
    assert all(facts.forced is None for facts in found[0].plan.annotated.facts.values() if facts.role == "host")


def test_forcing_adds_no_graphs_and_no_recompilation() -> None:
    counts = []
    for decorate in (lambda f: f, force_backend("eager")):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = decorate(Model())
        with backend.listening(lambda one: None, plan_only=True):
            call = torch.compile(model, backend=backend.dynafuse, options={"device": "h200"})
            for _ in range(3):
                call(X)
        counts.append(dict(torch._dynamo.utils.counters["stats"]))
    assert counts[0] == counts[1] and counts[0]["unique_graphs"] == 1


def test_what_a_checkpoint_computes_again_is_forced() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        with force_backend("eager"):
            return torch.exp(torch.sin(torch.tanh(x)))

    forward, backward = compiled(lambda x: checkpoint(inner, torch.relu(x), use_reentrant=False) * 2, leaf())
    assert forced(forward)["tanh"] == {"eager"} and forced(forward)["relu"] == {None}
    again = forced(backward)
    assert again["tanh"] == again["sin"] == again["exp"] == {"eager"}


def test_nested_compile_regions_are_looked_at_inside() -> None:
    region = torch.compiler.nested_compile_region(lambda x: torch.sin(function(x)))
    found = compiled(lambda x: torch.exp(region(x)), X)
    ops = {op: orders for one in found for op, orders in forced(one).items()}
    assert ops["tanh"] == {"eager"} and ops["sin"] == {None} and ops["exp"] == {None}


def test_random_numbers_of_ops_forced_to_eager_are_eagers() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with force_backend("eager"):
            noise = torch.rand_like(x)
        return noise * torch.exp(x)

    torch.manual_seed(3)
    expected = fn(X)
    torch.manual_seed(3)
    torch.testing.assert_close(torch.compile(fn, backend=backend.dynafuse)(X), expected)


def test_a_mask_that_is_forced_to_eager_is_the_same_in_the_backward() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with force_backend("eager"):
            return nn.functional.dropout(torch.exp(x), 0.5)

    x = leaf()
    y = torch.compile(fn, backend=backend.dynafuse)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert 0.2 < (y == 0).float().mean() < 0.8
    torch.testing.assert_close(grad, y.detach())


# ---------------------------------------------------------------------- the contract


def raised(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> ForceError:
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(fn, *args, **kwargs)
    error = caught.value.inner_exception
    assert isinstance(error, dynafuse.ForceError)
    return error


def test_the_error_says_what_where_why_and_what_to_do() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with force_backend("triton"):
            x = torch.sin(x)
            return torch.histc(x)  # line + 3

    line = inspect.getsourcelines(fn)[1] + 3
    assert str(raised(fn, X)) == "\n  ".join([
        "force_backend cannot be kept for 1 op:",
        "triton cannot run aten.histc.default (float32[100] on cpu): histogram: a scatter",
        f"  {__file__}:{line}, in fn: return torch.histc(x)  # line + 3",
        "move them out, force another executor (enabled: triton, eager), or let them fall back: "
        "force_backend(..., strict=False), or `?` behind the executor of a `force` pattern",
    ])


def test_the_error_lists_all_ops_that_cannot_run() -> None:
    @force_backend("triton")
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(torch.cummax(x.to(torch.complex64).abs(), 1).values).values

    error = raised(fn, X)
    assert [v.op for v in error.violations] == [
        "prims.convert_element_type.default", "aten.abs.default", "aten.cummax.default", "aten.sort.default"]
    assert error.violations[-1].tensor == "float32[8, 16] on cpu, int64[8, 16] on cpu"
    assert all(v.executor == "triton" and v.reason and v.where.startswith(__file__) for v in error.violations)


def test_an_op_of_the_backward_is_held_to_it_too() -> None:
    @force_backend("triton")
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(i, x, scale_grad_by_freq=True) * 2

    x, i = leaf(), torch.tensor([1, 3])
    found: list[Compiled] = []
    with backend.listening(found.append, plan_only=True), pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(fn, backend=backend.dynafuse, options={"device": "h200"})(x, i)
    assert isinstance(caught.value.inner_exception, ForceError)
    assert "triton cannot run aten.embedding_dense_backward.default (float32[8, 16] on cpu)" in str(caught.value)
    assert f"backward of {__file__}" in str(caught.value)


def test_patterns_are_held_to_it_and_may_be_let_off() -> None:
    class Sorts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(torch.sin(x)).values

    model = nn.Sequential(Sorts())
    assert [v.op for v in raised(model, X, options={"force": {"0": "triton"}}).violations] == ["aten.sort.default"]
    (one,) = compiled(model, X, options={"force": {"0": "triton?"}})
    assert forced(one)["sin"] == {"triton"} and forced(one)["sort"] == {None}


def test_without_strict_it_falls_back_and_the_facts_say_so() -> None:
    @force_backend("triton", strict=False)
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.histc(torch.sin(x)))

    (one,) = compiled(fn, X)
    facts = {str(node.target): f for node, f in one.plan.annotated.facts.items()}
    histogram = facts["aten.histc.default"]
    assert (histogram.role, histogram.forced, histogram.fallback) == ("eager", None, "triton: histogram: a scatter")
    assert facts["aten.exp.default"].forced == "triton" and facts["aten.exp.default"].fallback == ""
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend=backend.dynafuse)(X), fn(X))


@pytest.mark.parametrize("executor", ["nvfuser", "inductor"])
def test_an_executor_that_is_not_enabled_is_an_error_or_falls_back(executor: str) -> None:
    error = raised(force_backend(executor)(lambda x: torch.sin(x) * 2), X)
    assert error.enabled == ("triton", "eager") and {v.executor for v in error.violations} == {executor}
    assert f"{executor} cannot run aten.sin.default (float32[8, 16] on cpu): executor '{executor}' is not enabled" in str(error)
    assert "(enabled: triton, eager)" in str(error)
    (one,) = compiled(force_backend(executor, strict=False)(lambda x: torch.sin(x) * 2), X)
    assert [(f.role, f.forced, f.fallback) for f in one.plan.annotated.facts.values() if f.call] == [
        ("fused", None, f"{executor}: executor '{executor}' is not enabled")] * 2
    assert len(one.plan.regions) == 1


def test_triton_that_is_switched_off_cannot_be_forced() -> None:
    error = raised(function_of("triton"), X, options={"executors": "eager"})
    assert error.enabled == ("eager",) and "executor 'triton' is not enabled" in str(error)
    assert all_forced(function_of("eager"), X, options={"executors": "eager"}) == [{"eager"}]


def function_of(executor: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return force_backend(executor)(lambda x: torch.tanh(x) * 3)


EXEMPT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "product": (lambda x: torch.mm(x, x.t()) + 1, (X,)),
    "linear": (lambda x: nn.functional.linear(x, x, x[:, 0]).sin(), (X,)),
    "convolution": (lambda x: nn.functional.conv1d(x[None], x[:, :, None][:, :8]).sin(), (X,)),
    "attention": (lambda x: nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]), (X,)),
    "fft": (lambda x: torch.fft.rfft(x).shape[1] + x, (X,)),
    "views": (lambda x: x.t().reshape(4, 32)[1:, None].expand(3, 2, 32), (X,)),
    "view that runs eager": (lambda x: x.as_strided((4, 4), (1, 2)), (X,)),
    "an empty tensor": (lambda x: torch.sin(x[:0]), (X,)),
    "a sum of one element": (lambda x: x[:1].sum(0), (X,)),
    "sizes": (lambda x: x * x.shape[0] * (x.shape[1] // 2), (X,)),
    "uninitialised": (lambda x: torch.empty_like(x).fill_(2) + x, (X,)),
}


@pytest.mark.parametrize("name", EXEMPT)
def test_the_contract_is_not_about(name: str) -> None:
    fn, args = EXEMPT[name]
    for kind in (None, True):
        (one,) = compiled(force_backend("triton")(fn), *args, dynamic=kind)
        assert one.plan.annotated.facts


VIOLATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "sort": (lambda x: torch.sort(x).indices, "sort"),
    "complex": (lambda x: (x * 1j).abs(), "dtype torch.complex64 is not fused"),
    "no row": (lambda x: torch.cdist(x, x), "no row in the op table"),
    "several outputs": (lambda x: torch.topk(x, 2).values, "selection"),
    "higher-order op": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "returns no single tensor"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_the_contract_is_about(name: str) -> None:
    fn, reason = VIOLATIONS[name]
    error = raised(force_backend("triton")(fn), X)
    assert any(reason in v.reason for v in error.violations), str(error)


def test_where_there_is_no_line_of_the_users_the_error_names_the_module() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), nn.LogSoftmax(1)), nn.ReLU())
    error = raised(model, X.to(torch.complex64).real.cumsum(0), options={"force": {"0": "inductor"}})
    assert {v.where.rpartition(".")[2] for v in error.violations} == {"1"}
    assert all(v.where.startswith("module ") and v.where.endswith(".0.1") for v in error.violations)


def test_what_nothing_is_fused_for_cannot_be_forced_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "interpreting", lambda: False)
    with pytest.raises(BackendCompilerFailed, match=r"triton cannot run aten.tanh.default .*: executor 'triton' is not enabled"):
        torch.compile(function_of("triton"), backend=backend.dynafuse)(X)


def test_the_error_survives_pickling_and_shortens_long_lists() -> None:
    error = ForceError([Violation("triton", f"op{i}", "float32[2]", "because") for i in range(20)], ["triton", "eager"])
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error) and "op11" in str(error) and "op12" not in str(error) and "… 8 more" in str(error)
    assert str(error).startswith("force_backend cannot be kept for 20 ops:")


@pytest.mark.parametrize(("fn", "reason"), [
    (lambda x: torch.sin(x * x) + x.sum(1, keepdim=True), ""),
    (lambda x: torch.where(x > 0, x, 2.0), ""),
    (lambda x: torch.sin(x.to(torch.uint8)), "nvFuser has no torch.uint8"),
    (lambda x: torch.sort(x).values, "sort: a selection over the whole dimension"),
], ids=range(4))
def test_what_nvfuser_can_run_is_asked_of_its_rows(fn: Callable[..., Any], reason: str) -> None:
    (one,) = compiled(force_backend("triton", strict=False)(fn), X)
    module = torch.fx.GraphModule(nn.Module(), one.plan.annotated.graph)
    for node in module.graph.nodes:
        if FORCE_MARK in node.meta.get("custom", {}):
            node.meta["custom"] = {FORCE_MARK: ("nvfuser", True, "")}
    forcing = Forcing(enabled=("triton", "nvfuser", "eager"))
    if not reason:
        found = annotate(module, "cpu", forcing=forcing).facts.values()
        assert {f.forced for f in found if f.role == "fused"} == {"nvfuser"}
        return
    with pytest.raises(ForceError) as caught:
        annotate(module, "cpu", forcing=forcing)
    assert reason in {v.reason for v in caught.value.violations}


@pytest.mark.parametrize(("name", "words"), [
    ("inductor", 'to enable inductor: options={"executors": "triton,inductor"}, or DYNAFUSE_EXECUTORS=triton,inductor'),
    ("nvfuser", "nvfuser cannot be enabled here: nvFuser is not available: not today"),
])
def test_an_executor_that_is_not_enabled_comes_with_how_to_enable_it(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvfuser, "find", lambda: nvfuser.Availability(False, "not today"))
    lines = str(raised(force_backend(name)(torch.tanh), X)).splitlines()
    assert lines[-2].strip() == words and lines[-1].startswith("  move them out")
    if name == "inductor":
        executors = words.split("=")[-1]
        (one,) = compiled(force_backend(name)(torch.tanh), X, options={"executors": executors})
        assert forced(one) == {"tanh": {name}}


@pytest.mark.parametrize(("fn", "reason"), [
    (lambda x: torch.sin(x.to(torch.uint8)) @ x.t() + 1, ""),
    (lambda x: nn.functional.dropout(x, 0.5) * 2, "random numbers: the bits would depend on the executor"),
    (lambda x: torch.sort(x).values, "sort: a selection over the whole dimension"),
], ids=range(3))
def test_what_inductor_can_run_is_all_that_is_fused_but_random_numbers(fn: Callable[..., Any], reason: str) -> None:
    (one,) = compiled(force_backend("inductor", strict=False)(fn), X)
    module = torch.fx.GraphModule(nn.Module(), one.plan.annotated.graph)
    for node in module.graph.nodes:
        if FORCE_MARK in node.meta.get("custom", {}):
            node.meta["custom"] = {FORCE_MARK: ("inductor", True, "")}
    forcing = Forcing(enabled=("inductor", "eager"))
    if not reason:
        found = annotate(module, "cpu", forcing=forcing).facts.values()
        assert {f.forced for f in found if f.role == "fused"} == {"inductor"}
        return
    with pytest.raises(ForceError) as caught:
        annotate(module, "cpu", forcing=forcing)
    assert reason in {v.reason for v in caught.value.violations}


# ---------------------------------------------------------------------- the plan


def plan_of(*executors: str | None) -> Plan:
    """The plan of a chain of ops, each forced as given, when nvFuser can do all that Triton can."""
    def write(build: graphs.Builder, x: Node) -> Node:
        for executor in executors:
            x = build.op("aten.tanh.default", x)
            if executor is not None:
                x.meta["custom"] = {FORCE_MARK: (executor, True, "")}
            x.meta["stack_trace"] = 'File "here.py", line 1, in f\n  x'
        return x

    module = normalize(graphs.built(write, torch.empty(512, 512)))
    facts = annotate(module, "cpu", forcing=Forcing(enabled=("triton", "nvfuser", "eager")))
    return partition(facts, devices.describe("h200"), Executors(facts.facts, ("triton", "nvfuser")))


@pytest.fixture
def _able_nvfuser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.executor("nvfuser"), "refuses_node", lambda *args: "")


@pytest.mark.usefixtures("_able_nvfuser")
def test_different_executors_never_share_a_kernel() -> None:
    plan = plan_of("triton", "triton", "nvfuser", "nvfuser", "triton")
    assert [len(region.nodes) for region in plan.regions] == [2, 2, 1]
    kinds = {(refusal.kind, refusal.detail) for refusal in plan.refusals}
    assert ("forced to different executors", "nvfuser, triton") in kinds
    assert [len(region.nodes) for region in plan_of("triton", "triton", "triton", "triton", "triton").regions] == [5]


@pytest.mark.usefixtures("_able_nvfuser")
def test_what_nothing_forces_may_join() -> None:
    assert [len(region.nodes) for region in plan_of(None, "triton", None).regions] == [3]
    plan = plan_of("triton", None, "nvfuser")
    assert sorted(len(region.nodes) for region in plan.regions) == [1, 2]
    for region in plan.regions:
        assert len({plan.annotated.facts[n].forced for n in region.nodes} - {None}) <= 1


@pytest.mark.usefixtures("_able_nvfuser")
def test_a_cheap_forced_op_is_not_computed_again_in_another_executors_kernel() -> None:
    def write(mark: str) -> Callable[..., Node]:
        def graph(build: graphs.Builder, x: Node) -> Node:
            cheap = build.op("aten.mul.Tensor", x, 2.0)
            last = build.op("aten.tanh.default", cheap)
            for node, executor in ((cheap, mark), (last, "nvfuser")):
                node.meta |= {"custom": {FORCE_MARK: (executor, True, "")}, "stack_trace": "x"}
            return last
        return graph

    sizes = []
    for mark in ("nvfuser", "triton"):
        module = normalize(graphs.built(write(mark), torch.empty(512, 512)))
        facts = annotate(module, "cpu", forcing=Forcing(enabled=("triton", "nvfuser", "eager")))
        sizes.append([len(region.nodes) for region in partition(facts, devices.describe("h200"), Executors(facts.facts, ("triton", "nvfuser"))).regions])
    assert sizes == [[2], [1, 1]]


def steps(fn: Callable[..., Any], *args: Any) -> list[tuple[str, list[str]]]:
    """Executor and ops of every step of the first graph."""
    (graph, *_) = dynafuse.explain(fn, *args, device="h200").to_dict()["graphs"]
    return [(step["executor"], [op.split(".")[1] for op in step["ops"]]) for step in graph["steps"]]


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(function_of("eager")(torch.sin(x)))


def test_forcing_to_eager_takes_ops_out_of_the_kernel() -> None:
    plain = steps(lambda x: torch.exp(torch.tanh(torch.sin(x)) * 3), X)
    assert plain == [("triton", ["sin", "tanh", "mul", "exp"])]
    assert steps(chain, X) == [("triton", ["sin"]), ("eager", ["tanh"]), ("eager", ["mul"]), ("triton", ["exp"])]


def test_the_environment_flips_it_without_touching_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Act(), nn.ReLU())
    assert steps(model, X) == [("triton", ["tanh", "mul", "relu"])]
    monkeypatch.setenv("DYNAFUSE_FORCE", "0=eager")
    assert steps(model, X) == [("eager", ["tanh"]), ("eager", ["mul"]), ("triton", ["relu"])]
    monkeypatch.setenv("DYNAFUSE_FORCE", "*=eager,0=triton")
    assert steps(model, X) == [("triton", ["tanh", "mul"]), ("eager", ["relu"])]
    monkeypatch.setenv("DYNAFUSE_FORCE", "")
    monkeypatch.setenv("DYNAFUSE_EXECUTORS", "eager")
    assert {executor for executor, _ in steps(model, X)} == {"eager"}


@pytest.mark.parametrize(("efficiency", "launch_us", "kernels"), [
    ("0.9", "2", 1), ("0.05", "2", 2), ("0.2", "0", 2), ("0.2", "500", 1),
])
def test_a_cost_constant_flips_a_merge(monkeypatch: pytest.MonkeyPatch, efficiency: str, launch_us: str, kernels: int) -> None:
    monkeypatch.setenv("DYNAFUSE_COST_EFFICIENCY_TRITON_ROWCOL", efficiency)
    for executor in ("TRITON", "EAGER"):  # or the ops would run eager instead
        monkeypatch.setenv(f"DYNAFUSE_COST_LAUNCH_US_{executor}", launch_us)
    x = torch.empty((4096, 4096), dtype=torch.bfloat16)
    report = dynafuse.explain(lambda x: (x.softmax(-1), x.sum(0)), x, device="h200")
    assert len(report.graphs[0].fused) == kernels
    assert any(refusal.kind == "does not pay" for refusal in report.refusals) == (kernels == 2)


def test_a_model_of_forced_parts_computes_the_same() -> None:
    plain = Model()
    mixed = copy.deepcopy(plain)
    force_backend("eager")(mixed.layers[0].mlp.act)
    force_backend("triton")(mixed.layers[0])
    x, y = leaf(), leaf()
    torch._dynamo.reset()
    out = torch.compile(mixed, backend=backend.dynafuse, options={"force": {"named": "eager"}}, fullgraph=True)(y)
    expected = plain(x)
    torch.testing.assert_close(out, expected)
    for result in (out, expected):
        result.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    for (name, a), b in zip(plain.named_parameters(), mixed.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)
