"""Regions of traced graphs as recipes: run over torch against float64 and, where the library is installed, recorded in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from dynafuse.errors import LoweringError
from dynafuse.lowering.nvfuser.lower import lower
from dynafuse.lowering.nvfuser.replay import define
from dynafuse.passes.decompositions import decompositions
from tests.support import graphs
from tests.support.planned import Planned, recorded

Function = Callable[..., Any]
BF16, F16, F32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int64


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return h, rms_norm(h, weight)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, target)


def rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    heads = q.view(q.shape[0], q.shape[1], -1, 8).transpose(1, 2)
    turned = torch.cat([-heads[..., 4:], heads[..., :4]], -1)
    return heads * cos[:, None] + turned * sin[:, None]


def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def batch_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.var_mean(x, (0, 2, 3))


def backward(function: Function) -> Function:
    """The gradients of all arguments; the last argument is the output's gradient."""

    def call(*args: Any) -> Any:
        *inputs, grad = args
        wanted = [i for i, value in enumerate(inputs) if value.is_floating_point()]

        def partial(*chosen: torch.Tensor) -> Any:
            rest = iter(chosen)
            return function(*(next(rest) if i in wanted else value for i, value in enumerate(inputs)))

        return torch.func.vjp(partial, *(inputs[i] for i in wanted))[1](grad)

    return call


def made(*specs: Any) -> list[torch.Tensor]:
    """Random tensors: sizes, or sizes and dtype; integers below the last size."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for spec in specs:
        *shape, dtype = spec if spec and isinstance(spec[-1], torch.dtype) else (*spec, F32)
        if dtype is I64:
            found.append(torch.randint(0, shape[-1], shape[:-1], generator=generator))
        else:
            found.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
    return found


def traced(function: Function, inputs: Sequence[torch.Tensor], dynamic: bool = False) -> torch.fx.GraphModule:
    with preserve_node_meta():  # which casts are those of decompositions
        return make_fx(function, decomposition_table=decompositions(), tracing_mode="symbolic" if dynamic else "fake")(*inputs)


def tuple_of(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative root mean square error."""
    return float((found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(1e-30))


def check(function: Function, inputs: Sequence[torch.Tensor], dynamic: bool = False, **options: Any) -> Planned:
    """Every output is at most twice as far from float64 as eager's, in eager's strides; some region was lowered."""
    module = traced(function, inputs, dynamic)
    output = module.graph.output_node().args[0]
    if not isinstance(output, (tuple, list)):
        module.graph.output_node().args = ((output,),)
    plan = Planned(module, **options)
    assert plan.recipes, plan.refused
    compare(function, plan, inputs)
    if dynamic:
        compare(function, plan, [larger(t) for t in inputs])
    return plan


def compare(function: Function, plan: Planned, inputs: Sequence[torch.Tensor]) -> None:
    eager = tuple_of(function(*(t.clone() for t in inputs)))
    truth = tuple_of(function(*(t.double() if t.is_floating_point() else t for t in inputs)))
    for found, theirs, exact in zip(plan.run([t.clone() for t in inputs]), eager, truth, strict=True):
        assert found.dtype is theirs.dtype and found.shape == theirs.shape
        assert error(found, exact.double()) <= 2 * error(theirs, exact.double()) + 1e-6, plan.recipes


def larger(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat(*(2 if size > 1 else 1 for size in tensor.shape))


NORM = ((6, 40, BF16), (40, BF16))
CASES: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "rms_norm": (rms_norm, NORM),
    "add_rms_norm": (add_rms_norm, ((6, 40, BF16), *NORM)),
    "rms_norm_backward": (backward(rms_norm), (*NORM, (6, 40, BF16))),
    "layer_norm": (layer_norm, ((6, 40, F16), (40, F16), (40, F16))),
    "layer_norm_backward": (backward(layer_norm), ((6, 40, F16), (40, F16), (40, F16), (6, 40, F16))),
    "softmax": (lambda x: x.softmax(-1), ((4, 3, 40, BF16),)),
    "softmax_backward": (backward(lambda x: x.softmax(-1)), ((4, 3, 40, BF16), (4, 3, 40, BF16))),
    "log_softmax_backward": (backward(lambda x: x.log_softmax(-1)), ((12, 40), (12, 40))),
    "logsumexp": (lambda x: x.logsumexp(-1), ((12, 40),)),
    "cross_entropy": (cross_entropy, ((12, 30), (12, 30, I64))),
    "cross_entropy_backward": (backward(cross_entropy), ((12, 30), (12, 30, I64), ())),
    "transposed_gate": (lambda x, y: (x * torch.sigmoid(x)).t() * y.t(), ((6, 40, BF16), (6, 40, BF16))),
    "gated": (gated, ((6, 40, BF16), (6, 40, BF16))),
    "gated_backward": (backward(gated), ((6, 40, BF16), (6, 40, BF16), (6, 40, BF16))),
    "gelu_tanh_backward": (backward(gelu_tanh), ((6, 40), (6, 40))),
    "gelu_backward": (backward(F.gelu), ((6, 40), (6, 40))),
    "mean_backward": (backward(lambda x: x.mean(0)), ((6, 40), (40,))),
    "broadcast_sum": (lambda x, y: (x[:, None] + y).sum((0, 2)), ((6, 40), (5, 1))),
    "variance": (lambda x: x.var(-1) + x.std(-1, correction=0), ((6, 40),)),
    "embedding": (lambda w, at: F.embedding(at, w) * 2, ((30, 8, BF16), (4, 5, 30, I64))),
}
DYNAMIC = ("rms_norm", "add_rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward", "softmax",
           "softmax_backward", "gated_backward", "variance", "mean_backward", "logsumexp")


@pytest.mark.parametrize("name", CASES)
def test_region(name: str) -> None:
    function, shapes = CASES[name]
    check(function, made(*shapes))


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_region(name: str) -> None:
    """The same recipes serve sizes twice as large."""
    function, shapes = CASES[name]
    plan = check(function, made(*shapes), dynamic=True)
    assert all(-1 in given.shape for recipe in plan.recipes.values() for given in recipe.inputs if given.shape)


def test_rope() -> None:
    check(rope, made((2, 5, 32, BF16), (2, 5, 8, BF16), (2, 5, 8, BF16)))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rounding_like_eager(dtype: torch.dtype) -> None:
    """Rounded wherever eager rounds, a chain of sums and products has eager's bits; without, it has float32's."""
    inputs = made((6, 40, dtype), (6, 40, dtype))

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x + y) * x - y) * y

    exact, wide = (check(function, inputs, round_like_eager=flag).run(inputs)[0] for flag in (True, False))
    assert torch.equal(exact, function(*inputs))
    assert torch.equal(wide, function(*(t.float() for t in inputs)).to(dtype))
    assert not torch.equal(exact, wide)


def test_mean_beside_a_variance_is_infinite_where_eager_says_so() -> None:
    """nvFuser's own mean beside a variance is NaN there: Welford's recurrence subtracts infinities."""
    x = torch.randn(3, 40)
    x[0, 7], x[1, 0] = torch.inf, -torch.inf
    _, (mean, variance) = by_hand(
        lambda g, a: [g.op("aten.mean.dim", a, [1]), g.op("aten.var.correction", a, [1], correction=0)], x)
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(variance, x.var(1, correction=0), equal_nan=True)


# Layouts --------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "size_one": lambda: torch.randn(4, 1, 6),
    "expanded": lambda: torch.randn(4, 1, 6).expand(4, 5, 6),
    "expanded_outside": lambda: torch.randn(6).expand(4, 5, 6),
    "permuted": lambda: torch.randn(4, 5, 6).permute(2, 0, 1),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(4, 9, 12)[:, 2:7, ::2],
    "single": lambda: torch.randn(1, 1),
    "scalar": lambda: torch.randn(()),
}


def by_hand(write: Function, *inputs: torch.Tensor, dynamic: bool = False) -> tuple[Planned, list[torch.Tensor]]:
    """A graph written op by op, run by recipe."""
    plan = Planned(graphs.built(write, *inputs, dynamic=dynamic))
    assert plan.recipes and not plan.eager, (plan.refused, plan.eager)
    return plan, plan.run([t.clone(memory_format=torch.preserve_format) if t.is_contiguous() else t for t in inputs])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str, dynamic: bool) -> None:
    """The strides of outputs are checked where regions are run (``Planned.run``)."""
    x = LAYOUTS[layout]()
    _, (found,) = by_hand(lambda g, a: g.op("aten.exp.default", a), x, dynamic=dynamic)
    torch.testing.assert_close(found, x.exp())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "scalar"])
def test_layout_of_reduced_operand(layout: str) -> None:
    x = LAYOUTS[layout]() + 0 if layout == "single" else LAYOUTS[layout]()
    if x.shape[-1] == 1:
        x = torch.randn(1, 1, 3)
    for name, expected in (("sum.dim_IntList", x.sum((0, -1))), ("amax.default", x.amax((0, -1))),
                           ("var.correction", x.var((0, -1)))):
        _, (found,) = by_hand(lambda g, a, name=name: g.op(f"aten.{name}", a, [0, -1]), x)
        torch.testing.assert_close(found, expected)


def test_transposed_output_keeps_its_strides() -> None:
    x, y = torch.randn(4, 6), torch.randn(6, 4).t()
    plan, (found,) = by_hand(lambda g, a, b: g.op("aten.add.Tensor", g.op("aten.relu.default", b), 1.0), x, y)
    assert found.stride() == y.stride()
    recipe, = plan.recipes.values()
    assert recipe.steps[-1].name == "stride_order" and recipe.steps[-1].args[1] == (0, 1)


def test_copies_do_not_hand_out_the_input() -> None:
    """A clone is marked, so that the kernel copies it if nvFuser returns the input's memory."""
    x = torch.randn(4, 6)
    plan, found = by_hand(lambda g, a: [g.op("aten.clone.default", a), g.op("aten.relu.default", a)], x)
    assert torch.equal(found[0], x) and found[0].data_ptr() != x.data_ptr()
    marks = [o.copies for recipe in plan.recipes.values() for o in recipe.outputs]
    assert sorted(marks) == [False, True]


# Overwritten inputs ---------------------------------------------------------------------------------------------------


def running_mean(g: graphs.Builder, x: Any, mean: Any) -> Any:
    new = g.op("aten.mul.Tensor", g.op("aten.mean.dim", x, [0]), 0.1)
    return [g.op("aten.copy_.default", mean, g.op("aten.add.Tensor", g.op("aten.mul.Tensor", mean, 0.9), new))]


def test_overwritten_input() -> None:
    x, mean = torch.randn(30, 20), torch.randn(20)
    plan = Planned(graphs.built(running_mean, x, mean))
    expected, kept = mean * 0.9 + x.mean(0) * 0.1, mean.clone()
    plan.run([x, kept])
    torch.testing.assert_close(kept, expected)
    recipe, = plan.recipes.values()
    assert [recipe.inputs[o.into].shape for o in recipe.outputs if o.into is not None] == [(20,)]


def test_overwritten_input_that_another_store_reads_is_refused() -> None:
    def write(g: graphs.Builder, x: Any) -> Any:
        total = g.op("aten.sum.dim_IntList", g.op("aten.exp.default", x), [1])
        return [g.op("aten.copy_.default", x, g.op("aten.neg.default", x)), total]

    plan = Planned(graphs.built(write, torch.randn(30, 20)))
    assert plan.refused == ["in0 is overwritten, but aten.sum.dim_IntList reads it"]
    with pytest.raises(LoweringError, match="is overwritten"):
        lower(next(iter(plan.bounds.values())).spec)


# Goldens --------------------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).parent
GOLDENS = ("add_rms_norm", "layer_norm_backward", "softmax_backward", "transposed_gate")


def text(name: str) -> str:
    function, shapes = CASES[name]
    return "\n\n".join(str(recipe) for recipe in check(function, made(*shapes)).recipes.values()) + "\n"


def golden(name: str, found: str) -> None:
    path = FOLDER / f"{name}.expected"
    if os.environ.get("REWRITE_GOLDENS") == "1":
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8"), "REWRITE_GOLDENS=1 rewrites the file if this is meant"


@pytest.mark.parametrize("name", GOLDENS)
def test_recipe_text(name: str) -> None:
    golden(name, text(name))


@pytest.mark.nvfuser
@pytest.mark.parametrize("name", GOLDENS)
def test_a_trace_around_us_does_not_see_a_recording(name: str) -> None:
    """Graphs are compiled while their fake tensors are being traced."""
    function, shapes = CASES[name]
    for recipe in check(function, made(*shapes)).recipes.values():
        with FakeTensorMode():
            define(recipe)


@pytest.mark.nvfuser
@pytest.mark.parametrize("name", GOLDENS)
def test_definition_text(name: str) -> None:
    """What nvFuser itself says that it recorded."""
    function, shapes = CASES[name]
    recipes = check(function, made(*shapes)).recipes.values()
    golden(f"{name}.fusion", "\n".join(repr(recorded(recipe)).strip() for recipe in recipes) + "\n")
