"""Regions that Inductor runs on the CPU, against float64; each compiles C++, so there are few of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from dynafuse.errors import LoweringError
from dynafuse.ir import Layout, OpSpec, Ref, Spec, Store
from dynafuse.lowering.inductor import availability
from dynafuse.lowering.inductor.compiler import build
from dynafuse.lowering.inductor.kernel import DelegateKernel
from dynafuse.lowering.inductor.lower import lower, refusal
from dynafuse.ops import Kind, inductor_rows, rows
from dynafuse.passes.decompositions import decompositions
from tests.support import graphs
from tests.support.delegated import Delegated
from tests.support.representative import bounds

Function = Callable[..., Any]
BF16, F16, F32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int64
CPU = torch.device("cpu")

compiles = pytest.mark.skipif(not availability.find("cpu").available, reason=str(availability.find("cpu")))


def made(*specs: Any) -> list[torch.Tensor]:
    """Random tensors of sizes and dtypes; integers below 8."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 8, shape, generator=generator) if dtype is I64 else
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape, dtype in specs]


def delegated(function: Function, inputs: Sequence[torch.Tensor], dynamic: bool = False) -> Delegated:
    mode = "symbolic" if dynamic else "fake"
    with preserve_node_meta():  # which casts are those of decompositions
        module = make_fx(function, decomposition_table=decompositions(), tracing_mode=mode)(*inputs)
    output = module.graph.output_node().args[0]
    if not isinstance(output, (tuple, list)):
        module.graph.output_node().args = ((output,),)
    return Delegated(module)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same in memory of its own, with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative root mean square error."""
    return float((found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(1e-30))


def compare(function: Function, plan: Delegated, inputs: Sequence[torch.Tensor]) -> None:
    """Every output is at most twice as far from float64 as eager's."""
    eager, truth = (value if isinstance(value, tuple) else (value,) for value in (
        function(*inputs), function(*(t.double() if t.is_floating_point() else t for t in inputs))))
    for found, theirs, exact in zip(plan.run(inputs), eager, truth, strict=True):
        assert found.dtype is theirs.dtype and found.shape == theirs.shape
        assert error(found, exact.double()) <= 2 * error(theirs, exact.double()) + 1e-6, plan.kernels


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def layer_norm_backward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor) -> Any:
    return torch.func.vjp(layer_norm, x, weight, bias)[1](grad)


def rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    heads = q.view(q.shape[0], q.shape[1], -1, 8).transpose(1, 2)
    turned = torch.cat([-heads[..., 4:], heads[..., :4]], -1)
    return heads * cos[:, None] + turned * sin[:, None]


def gelu_of_mixed(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, at: torch.Tensor, scale: torch.Tensor) -> Any:
    """Transposed, expanded, 0-d and gathered operands in three dtypes."""
    wide = F.gelu(x.t() + y) * scale
    return wide, (wide.to(F16) + F.embedding(at, weight)).sum()


REGIONS: dict[str, tuple[Function, Callable[[], list[torch.Tensor]]]] = {
    "softmax": (lambda x: x.softmax(-1), lambda: made(((4, 3, 40), BF16))),
    "layer_norm": (layer_norm, lambda: made(((6, 40), F16), ((40,), F16), ((40,), F16))),
    "layer_norm_backward": (
        layer_norm_backward, lambda: made(((6, 40), F32), ((40,), F32), ((40,), F32), ((6, 40), F32))),
    "rope": (rope, lambda: made(((2, 5, 32), BF16), ((2, 5, 8), BF16), ((2, 5, 8), BF16))),
    "gelu_of_mixed": (gelu_of_mixed, lambda: [
        *made(((8, 6), BF16)), made(((8,), F32))[0].expand(6, 8), *made(((8, 8), F16), ((6,), I64), ((), F32))]),
}


@compiles
@pytest.mark.parametrize("name", REGIONS)
def test_region(name: str) -> None:
    function, inputs = REGIONS[name]
    plan = delegated(function, inputs())
    assert plan.kernels
    compare(function, plan, inputs())
    assert all("cpp_fused" in kernel.source for kernel in plan.kernels.values())
    assert all(one.plain for kernel in plan.kernels.values() for one in variants(kernel)), "nothing is copied afterwards"


# Layouts and memory ---------------------------------------------------------------------------------------------------


@compiles
def test_stores_keep_their_strides_and_their_memory() -> None:
    """A transposed result, one that is written twice, and a copy of an input; strides and memory are checked in `run`."""
    def write(g: graphs.Builder, x: Any, y: Any) -> Any:
        turned = g.op("aten.add.Tensor", g.op("aten.permute.default", x, [2, 0, 1]), 1.0)
        return [turned, g.op("aten.add.Tensor", g.op("aten.mul.Tensor", turned, 2.0), y), g.op("aten.clone.default", x),
                g.op("aten.clone.default", x)]

    x, y = torch.randn(4, 9, 12)[:, 2:7, ::2], torch.randn(6, 1, 5).expand(6, 4, 5)
    module = graphs.built(write, x, y)
    plan = Delegated(module)
    for _ in range(2):
        for found, expected in zip(plan.run([x, y]), module(x, y), strict=True):
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride()


@compiles
def test_inputs_are_overwritten_when_all_has_been_read() -> None:
    """Running statistics of a batch norm; two inputs that change places."""
    def write(g: graphs.Builder, x: Any, mean: Any, a: Any, b: Any) -> Any:
        new = g.op("aten.mean.dim", x, [0, 2])
        running = g.op("aten.add.Tensor", g.op("aten.mul.Tensor", mean, 0.9), g.op("aten.mul.Tensor", new, 0.1))
        swapped = [g.op("aten.atan2.default", a, b), g.op("aten.atan2.default", b, a)]
        normal = g.op("aten.sub.Tensor", x, g.op("aten.view.default", new, [1, 5, 1]))
        return [g.op("aten.copy_.default", mean, running), normal, running,
                g.op("aten.copy_.default", a, swapped[1]), g.op("aten.copy_.default", b, swapped[0])]

    inputs = [torch.randn(7, 5, 3), torch.randn(5), torch.randn(8), torch.randn(8)]
    module = graphs.built(write, *inputs)
    mine, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    expected = [t.clone() for t in module(*theirs)]
    plan = Delegated(module)
    assert sum(into is not None for kernel in plan.kernels.values() for into in kernel.program.into) == 3
    for found, wanted in zip([*plan.run(mine), *mine], [*expected, *theirs], strict=True):
        torch.testing.assert_close(found, wanted)


# Sizes that are known at run time -------------------------------------------------------------------------------------


@compiles
def test_dynamic_sizes_share_a_function_until_a_guard_says_no() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x + y, x.flip(0)], 1).softmax(-1) * x.shape[0]

    plan = delegated(function, made(((6, 40), F32), ((40,), F32)), dynamic=True)
    kernel, = plan.kernels.values()
    assert kernel.prepare().source == str(kernel.program), "examples of its sizes are asked for"
    assert "cpp_fused" in kernel.prepare((6, 40)).source
    for rows_, length in ((6, 40), (12, 70), (3, 2)):
        compare(function, plan, made(((rows_, length), F32), ((length,), F32)))
    assert len(variants(kernel)) == 1
    compare(function, plan, made(((1, 40), F32), ((40,), F32)))
    assert len(variants(kernel)) == 2, "a size of 1 is no dynamic size to Inductor"
    assert [one.compiled.holds((12, 70)) for one in variants(kernel)] == [True, False]


def variants(kernel: DelegateKernel) -> list[Any]:
    return kernel._variants[None]


# The compilation around it --------------------------------------------------------------------------------------------


def relu_and_one() -> Spec:
    """``relu(x) + 1`` over float32[8, 4]."""
    layout = Layout(F32, (8, 4), (4, 1))
    ops = (OpSpec("aten.relu.default", (("self", Ref("in", 0)),), (8, 4), F32),
           OpSpec("aten.add.Tensor", (("self", Ref("op", 0)), ("other", 1), ("alpha", 1)), (8, 4), F32))
    return Spec((layout,), ops, (), (), (Store(1, layout, ((0,), (1,))),), ())


@compiles
def test_the_compilation_around_it_is_left_alone_and_threads_share_a_function() -> None:
    outer, x = FakeTensorMode(), torch.randn(8, 4)
    calls: list[Any] = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return build(*args)

    kernel = DelegateKernel("key", lower(relu_and_one()), counted)
    threads = [threading.Thread(target=kernel.run, args=([x], None)) for _ in range(3)]
    with tracing(TracingContext(outer)) as context, outer:
        before = torch.empty(3)
        kernel.prepare()
        assert TracingContext.get() is context and TracingContext.get().fake_mode is outer
        assert (torch.empty(3) + before).fake_mode is outer
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, = kernel.run([x], None)
    assert torch.equal(found, x.relu() + 1) and len(calls) == 1


def test_a_program_runs_eager_too() -> None:
    program, x = lower(relu_and_one()), torch.randn(8, 4)
    found, = program.run([x], (), CPU)
    assert torch.equal(found, x.relu() + 1) and str(program) == str(relu_and_one())


# Refusals -------------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    (dropout,) = bounds("dropout_with_seed")
    assert refusal(dropout.spec) == (
        "prims.inductor_lookup_seed.default: random numbers: the bits would depend on the executor")
    with pytest.raises(LoweringError, match="random numbers"):
        lower(dropout.spec)
    spec = relu_and_one()
    view = OpSpec("aten.permute.default", (("self", Ref("in", 0)), ("dims", (1, 0))), (4, 8), F32)
    assert refusal(Spec(spec.inputs, (view,), (), (), (), ())) == "it computes nothing"
    rounded = (("round_like_eager", True),)
    narrow = OpSpec("aten.relu.default", (("self", Ref("in", 0)),), (8, 4), BF16)
    assert refusal(Spec(spec.inputs, spec.ops, (), (), spec.stores, (), rounded)) == ""
    assert "does not round torch.bfloat16 as eager does" in refusal(Spec((), (narrow,), (), (), (), (), rounded))


def test_an_op_that_answers_otherwise_than_the_graph_says_is_an_error() -> None:
    spec = relu_and_one()
    wrong = OpSpec("aten.relu.default", (("self", Ref("in", 0)),), (8, 5), F32)
    with pytest.raises(LoweringError, match=r"its output is float32\[8, 4\] here, float32\[8, 5\] in the graph"):
        lower(Spec(spec.inputs, (wrong,), (), (), (), ())).run([torch.randn(8, 4)], (), CPU)


def test_without_a_compiler_there_is_no_inductor() -> None:
    from torch._inductor import config

    availability.find.cache_clear()
    with config.patch({"cpp.cxx": ("/no/such/compiler",)}):
        found = availability.find("cpu")
    availability.find.cache_clear()
    assert str(found) == "Inductor is not available: no C++ compiler: install g++, or name one in CXX"
    assert "xpu" in availability.find("xpu").reason


def test_what_the_table_says_is_missing_is_what_inductor_lacks() -> None:
    from torch._inductor import lowering
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    candidates = [row.target for row in rows() if row.fusible and row.kind not in (Kind.RANDOM, Kind.SCAN)]
    lacking = {
        target for target in candidates if target.namespace in ("aten", "prims") and target not in table
        and not target._can_decompose() and (target not in lowering.lowerings or target in lowering.fallbacks)
    }
    assert lacking == {target for target in candidates if target in inductor_rows.MISSING}
