"""While a kernel is compiled its region runs on another that is there, and eager does the few ops which that one lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dynafuse
from dynafuse import backend, pipeline
from dynafuse.config import resolve
from dynafuse.errors import CompileError, DynafuseWarning
from dynafuse.lowering.triton import pool
from dynafuse.runtime import interim as standin
from tests.support import graphs
from tests.support.differential import compare, compiled, copies, run
from tests.support.graphs import recorded

Function = Callable[..., Any]
X, W, SQUARE = torch.randn(6, 40), torch.randn(40), torch.randn(40, 40) / 6
PLAIN = (X, W)
ARGUMENTS = (X.clone().requires_grad_(), W)


class Waited(Exception):
    """Somebody would wait for the compiler."""


class Compiler:
    """Worker processes that can be held back."""

    def __init__(self) -> None:
        self.submit, self.held = pool.submit, False
        self.waiting: list[tuple[Future[Any], Callable[[], Future[Any]]]] = []

    def __call__(self, *args: Any) -> Future[Any]:
        if not self.held:
            return self.submit(*args)
        self.waiting.append((Future(), lambda: self.submit(*args)))
        return self.waiting[-1][0]

    def finish(self, failure: Exception | None = None) -> None:
        """Compile all that was asked for, or fail to, and be fast from now on."""
        self.held = False
        for future, compile_ in self.waiting:
            future.set_exception(failure) if failure else future.set_result(compile_().result())
        self.waiting.clear()


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Nothing is compiled yet; who waits for what is held back raises ``Waited`` instead."""
    torch._dynamo.reset()
    backend.reset()
    found, outcome = Compiler(), pipeline.outcome

    def checked(futures: Any) -> Any:
        if not all(future.done() for future in futures.values()):
            raise Waited
        return outcome(futures)

    monkeypatch.setattr(pool, "submit", found)
    monkeypatch.setattr(pipeline, "outcome", checked)
    yield found
    backend.reset()


def layer(x: Tensor, w: Tensor) -> Tensor:
    return (torch.sin(x) * w).softmax(-1) * x


def held(compiler: Compiler, function: Function, *known: Function, arguments: Any = ARGUMENTS, dynamic: bool = False,
         **options: Any) -> Function:
    """``function``, compiled once what is ``known`` has its kernels and the compiler is held back."""
    for one in known or (layer,):
        run(compiled(one, dynamic=dynamic), copies(arguments))
    compiler.held = True
    return compiled(function, dynamic=dynamic, **{"interim_plan": True, **options})


def check(compiler: Compiler, function: Function, *known: Function, arguments: Any = ARGUMENTS,
          dynamic: bool = False) -> list[backend.Compiled]:
    """All that a caller of ``function`` sees is right before and after its kernels are there; the graphs, in order."""
    eager = run(function, copies(arguments))
    truth = run(function, copies(arguments, torch.float64))
    call = held(compiler, function, *known, arguments=arguments, dynamic=dynamic)
    with recorded() as found:
        compare(run(call, copies(arguments)), eager, truth)
        compiler.finish()
        compare(run(call, copies(arguments)), eager, truth)
    return found


def kinds(found: list[backend.Compiled]) -> list[tuple[str, bool]]:
    """Which graphs were made, and whether with stand-ins."""
    return [(one.kind, one.meanwhile is not None) for one in found]


BOTH = [("forward", True), ("backward", True), ("forward", False), ("backward", False)]


# What stands in -------------------------------------------------------------------------------------------------------

ENDS: dict[str, Function] = {
    "relu": lambda x, w: torch.relu(layer(x, w)),
    "number": lambda x, w: layer(x, w) * 0.3,
    "tanh": lambda x, w: torch.tanh(layer(x, w)),
    "two results": lambda x, w: (lambda y: (y, torch.relu(y)))(layer(x, w)),
    "view": lambda x, w: torch.relu(layer(x, w)).view(2, 120),
    "transposed": lambda x, w: torch.relu(layer(x, w)).t(),
}
BEGINNINGS: dict[str, Function] = {
    "number": lambda x, w: layer(x * 0.3, w),
    "tanh": lambda x, w: layer(torch.tanh(x), w),
    "sigmoid": lambda x, w: layer(torch.sigmoid(x), w),
    "two tensors": lambda x, w: layer(x, w * 0.3 + 1.5),
}


@pytest.mark.parametrize("end", ENDS)
def test_ops_at_the_end(compiler: Compiler, end: str) -> None:
    assert kinds(check(compiler, ENDS[end])) == BOTH


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_ops_at_the_beginning(compiler: Compiler, beginning: str) -> None:
    assert kinds(check(compiler, BEGINNINGS[beginning])) == BOTH


def test_later_calls_have_the_bits_and_the_kernels_of_a_graph_that_waited(compiler: Compiler) -> None:
    call = held(compiler, ENDS["tanh"])
    with recorded() as found:
        run(call, copies(ARGUMENTS))
        compiler.finish()
        ours = run(call, copies(ARGUMENTS))
        torch._dynamo.reset()
        waited = run(compiled(ENDS["tanh"]), copies(ARGUMENTS))
    assert kinds(found) == [*BOTH, ("forward", False), ("backward", False)]
    assert [one.bounds["r0"].key for one in found[2:4]] == [one.bounds["r0"].key for one in found[4:]]
    assert torch.equal(ours.result, waited.result) and torch.equal(*(one.gradients[0] for one in (ours, waited)))


def test_steps_say_what_they_are(compiler: Compiler) -> None:
    forward = check(compiler, ENDS["number"])[0]
    assert [step.name for step in forward.plan.steps] == ["r0.r0", "mul_2"]
    assert forward.plan.regions[0].reasons == ("stands in for r0, whose kernel is being compiled",)
    (eager,) = (facts.reason for facts in forward.plan.annotated.facts.values() if facts.role == "eager")
    assert eager == "r0's kernel is being compiled"
    assert forward.meanwhile is not None and forward.meanwhile.pays


def test_equal_regions_with_other_numbers(compiler: Compiler) -> None:
    def layers(x: Tensor, w: Tensor, square: Tensor) -> Tensor:
        for number in (0.3, 0.7, 0.9):
            x = layer(x, w) * number @ square
        return x

    def known(x: Tensor, w: Tensor, square: Tensor) -> Tensor:
        return layer(layer(x, w) @ square, w) @ square

    found = check(compiler, layers, known, arguments=(*ARGUMENTS, SQUARE))
    forward = found[0]
    assert forward.meanwhile is not None and len(forward.plan.regions) == 3 and len({b.key for b in forward.bounds.values()}) == 1
    assert sum(facts.reason.endswith("is being compiled") for facts in forward.plan.annotated.facts.values()) == 3


def test_few_ops_run_without_any_kernel(compiler: Compiler) -> None:
    found = check(compiler, lambda x, w: torch.relu(x) * 0.3, layer)
    assert kinds(found) == BOTH and not found[0].plan.regions


def test_dynamic_sizes(compiler: Compiler) -> None:
    found = check(compiler, ENDS["number"], dynamic=True)
    assert kinds(found) == BOTH and all(one.bounds["r0.r0" if one.meanwhile else "r0"].symbols for one in found)


def test_sixteen_bits(compiler: Compiler) -> None:
    arguments = (X.bfloat16().requires_grad_(), W.bfloat16())
    assert kinds(check(compiler, ENDS["number"], arguments=arguments)) == BOTH


def test_channels_last(compiler: Compiler) -> None:
    def known(x: Tensor) -> Tensor:
        return torch.sin(x) / (1 + x.exp()) + x.cos() * x

    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    assert kinds(check(compiler, lambda x: torch.relu(known(x)), known, arguments=(image,))) == BOTH


@pytest.mark.parametrize("misaligned", [False, True])
def test_an_input_that_is_overwritten(compiler: Compiler, misaligned: bool) -> None:
    def overwrite(x: Tensor, w: Tensor) -> Tensor:
        y = layer(x, w)
        x.copy_(y * 0.3)
        return y

    eager, truth = (run(overwrite, copies(PLAIN, dtype)) for dtype in (None, torch.float64))
    call = held(compiler, overwrite, arguments=PLAIN)
    with recorded() as found:
        call(X.clone(), W)  # which is aligned
        for _ in range(2):
            x = torch.empty(X.numel() + 1)[1:].view(6, 40).copy_(X) if misaligned else X.clone()
            compare(run(call, (x, W)), eager, truth)
            compiler.finish()
    assert kinds(found) == [("inference", True), ("inference", False)]


def test_the_forward_may_have_switched_before_the_backward_runs(compiler: Compiler) -> None:
    function = ENDS["tanh"]
    call = held(compiler, function)
    x, y = (X.clone().requires_grad_() for _ in range(2))
    result = call(x, W)
    compiler.finish()
    result.sum().backward()
    function(y, W).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


# Where kernels come from, and when the switch is ----------------------------------------------------------------------


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DYNAFUSE_CACHE", "1")
    monkeypatch.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def forgotten(compiler: Compiler, function: Function) -> Function:
    """``function`` in a process that has no kernels, the compiler held back."""
    run(compiled(layer), copies(ARGUMENTS))
    torch._dynamo.reset()
    backend.reset()
    compiler.held = True
    return compiled(function, interim_plan=True)


def test_kernels_on_disk(compiler: Compiler, on_disk: Path) -> None:
    call = forgotten(compiler, ENDS["relu"])
    with recorded() as found:
        for _ in range(2):
            compare(run(call, copies(ARGUMENTS)), run(ENDS["relu"], copies(ARGUMENTS)))
            compiler.finish()
    counted = backend.stats()
    assert kinds(found) == BOTH and (counted["disk_hits"], counted["compiled"]) == (2, 2)


def test_a_damaged_entry_stands_in_for_nothing(compiler: Compiler, on_disk: Path) -> None:
    call = forgotten(compiler, ENDS["relu"])
    for entry in on_disk.iterdir():
        entry.write_bytes(entry.read_bytes()[:-9])
    with pytest.raises(Waited):
        call(*ARGUMENTS)
    compiler.finish()
    compare(run(call, copies(ARGUMENTS)), run(ENDS["relu"], copies(ARGUMENTS)))


def test_all_kernels_have_to_be_done(compiler: Compiler) -> None:
    def two(x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(torch.relu(layer(x, w)) @ SQUARE)

    call = held(compiler, two, arguments=PLAIN)
    with recorded() as found:
        torch.testing.assert_close(call(*PLAIN), two(*PLAIN))
        first, second = compiler.waiting
        for future, compile_ in (second, first):
            assert kinds(found) == [("inference", True)]
            future.set_result(compile_().result())
            torch.testing.assert_close(call(*PLAIN), two(*PLAIN))
    assert kinds(found) == [("inference", True), ("inference", False)]


def test_a_kernel_that_fails_raises_when_strict(compiler: Compiler) -> None:
    call = held(compiler, ENDS["relu"])
    torch.testing.assert_close(call(*ARGUMENTS), ENDS["relu"](*ARGUMENTS))
    compiler.finish(ValueError("no such instruction"))
    with pytest.raises(CompileError, match="no such instruction"):
        call(*ARGUMENTS)


def test_a_kernel_that_fails_is_demoted_once(compiler: Compiler, tmp_path: Path) -> None:
    call = held(compiler, ENDS["relu"], arguments=PLAIN, strict=False, repro_dir=tmp_path)
    with recorded() as found:
        torch.testing.assert_close(call(*PLAIN), ENDS["relu"](*PLAIN))
        compiler.finish(ValueError("no such instruction"))
        with pytest.warns(DynafuseWarning, match="no such instruction") as caught:
            for _ in range(2):
                torch.testing.assert_close(call(*PLAIN), ENDS["relu"](*PLAIN))
    assert len(caught) == 1 and kinds(found) == [("inference", True), ("inference", False)]
    assert not found[1].plan.regions


# Where nothing stands in ----------------------------------------------------------------------------------------------


def other(x: Tensor) -> Tensor:
    return (x.exp() + x.cos() * x.sin()).sum(-1, keepdim=True) * x.tanh()


NOTHING: dict[str, tuple[Function, dict[str, Any]]] = {
    "the option is off": (ENDS["relu"], {"interim_plan": False}),
    "a second kernel has none": (lambda x, w: other(torch.relu(layer(x, w)) @ SQUARE), {}),
    "nothing is alike": (lambda x, w: other(x), {}),
    "compiling takes no time": (ENDS["relu"], {"cost": {"compile_s_triton": 0.0}}),
    "eager takes too long": (ENDS["relu"], {"cost": {"launch_us_eager": 1e7}}),
    "random numbers": (lambda x, w: torch.nn.functional.dropout(layer(x, w), 0.3), {}),
    "forced": (dynafuse.force_backend("triton")(ENDS["relu"]), {}),
    "too many ops": (lambda x, w: torch.cos(torch.sin(torch.exp(torch.tanh(torch.relu(layer(x, w)))))), {}),
}


@pytest.mark.parametrize("why", NOTHING)
def test_nothing_stands_in_if(compiler: Compiler, why: str) -> None:
    function, options = NOTHING[why]
    call = held(compiler, function, arguments=PLAIN, **options)
    with recorded() as found:
        with pytest.raises(Waited):
            call(*PLAIN)
        assert not found
        compiler.finish()
        call(*PLAIN)
    assert kinds(found) == [("inference", False)]


def test_a_graph_that_lacks_many_kernels_is_not_looked_through(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "partition", lambda *_, **__: pytest.fail("something was planned"))

    def many(x: Tensor, w: Tensor) -> Tensor:
        for op in (torch.relu, torch.sin, torch.cos, torch.exp, torch.tanh):
            x = op(x) @ SQUARE
        return x

    with pytest.raises(Waited):
        held(compiler, many, arguments=PLAIN)(*PLAIN)


def test_captured_graphs_wait(compiler: Compiler) -> None:
    compiler.held = True
    module = graphs.built(lambda b, x: b.op("aten.relu.default", x), X)
    call = pipeline.compile_graph("inference", resolve(options={"interim_plan": True, "cudagraphs": True}), module, [X])
    with pytest.raises(Waited):
        call([X])


def test_looking_asks_for_no_kernel(compiler: Compiler) -> None:
    call = held(compiler, NOTHING["nothing is alike"][0], arguments=PLAIN)
    before = backend.stats()
    with pytest.raises(Waited):
        call(*PLAIN)
    after = backend.stats()
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {"misses": 1, "compiled": 1}


# What is tried --------------------------------------------------------------------------------------------------------


def test_the_fewest_ops_are_tried_first() -> None:
    def write(b: graphs.Builder, x: Any, y: Any) -> Any:
        total = b.op("aten.sum.dim_IntList", b.op("aten.add.Tensor", b.op("aten.tanh.default", x), y), [1], True)
        return b.op("aten.relu.default", b.op("aten.mul.Tensor", x, total))

    plan = graphs.planned(graphs.built(write, X, X))
    (region,) = plan.regions
    found = ["".join(node.name[0] for node in region.nodes if node in ops)
             for ops in standin.remainders(region, plan.annotated.facts)]
    assert found == ["t", "r", "ta", "tr", "mr", "tas", "tar", "tmr", "smr", "tasm", "tasr", "tamr", "tsmr", "asmr"]


def test_random_numbers_are_never_left_to_eager() -> None:
    def write(b: graphs.Builder, x: Any) -> Any:
        seeds = b.op("prims.inductor_seeds.default", 1, torch.device("cpu"))
        seed = b.op("prims.inductor_lookup_seed.default", seeds, 0)
        return b.op("aten.mul.Tensor", x, b.op("prims.inductor_random.default", [6, 40], seed, "rand"))

    plan = graphs.planned(graphs.built(write, X))
    (region,) = plan.regions
    assert [node.name for ops in standin.remainders(region, plan.annotated.facts) for node in ops] == ["mul_tensor"]
