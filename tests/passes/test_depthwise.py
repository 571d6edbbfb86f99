"""Convolutions that keep channels apart: written out as they are in float64, gradients too, and where they stay a library's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dynafuse import backend, explain, force_backend
from dynafuse.ops.depthwise import DEPTHWISE, DEPTHWISE_BACKWARD
from tests.support.differential import check, compiled

aten = torch.ops.aten
SLOW = {"device": "h200", "cost": {"processors": 1}}
"""Options with which a library computes so slowly that everything is written out."""

DEAR = {"device": "h200", "cost": {"flops_tflops": 0.0001}}
"""Options with which a kernel of ours computes so slowly that nothing is."""

CONVOLUTIONS: Sequence[Callable[..., Tensor]] = (F.conv1d, F.conv2d, F.conv3d)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {  # x, window, copies, the rest
    "same": ((2, 5, 8, 9), (3, 3), 1, {"padding": 1}),
    "valid": ((2, 5, 8, 9), (3, 2), 1, {}),
    "strided": ((2, 5, 9, 8), (3, 3), 1, {"stride": 2, "padding": 1}),
    "strides of their own": ((1, 3, 11, 7), (3, 2), 1, {"stride": (3, 1), "padding": (2, 0)}),
    "farther apart than long": ((1, 3, 11, 12), (2, 2), 1, {"stride": 3}),
    "dilated": ((1, 3, 9, 10), (3, 3), 1, {"dilation": (2, 1), "padding": (2, 1)}),
    "dilated and strided": ((1, 3, 11, 12), (3, 3), 1, {"dilation": 2, "stride": (2, 3), "padding": 2}),
    "two for each": ((2, 4, 7, 8), (3, 3), 2, {"padding": 1}),
    "three for each, strided": ((1, 2, 9, 9), (2, 2), 3, {"stride": 2}),
    "a causal sequence": ((2, 6, 19), (4,), 1, {"padding": 3}),
    "a long window": ((1, 3, 20), (9,), 1, {"padding": 4}),
    "a volume": ((1, 3, 5, 4, 6), (3, 1, 2), 1, {"padding": (1, 0, 1)}),
    "windows of one": ((2, 3, 5, 6), (1, 1), 1, {}),
    "windows of one, strided, two for each": ((2, 3, 5, 6), (1, 1), 2, {"stride": 2}),
    "row by row": ((2, 5, 9, 10), (7, 7), 1, {"padding": 3}),
    "row by row, strided": ((1, 3, 13, 12), (7, 5), 1, {"stride": 2, "padding": (3, 2)}),
    "row by row, dilated": ((1, 3, 16, 15), (3, 9), 1, {"dilation": (2, 1), "padding": (2, 4)}),
    "slice by slice": ((1, 2, 6, 5, 6), (3, 3, 3), 1, {"padding": 1}),
    "windows larger than the image": ((1, 3, 1, 2), (3, 5), 1, {"padding": 2}),
}


def operands(name: str, dtype: torch.dtype, layout: str = "planes") -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    """A case's function of its operand and its weight, and these; images in a layout."""
    sizes, window, copies, rest = CASES[name]
    x, weight = torch.randn(sizes, dtype=dtype), torch.randn(copies * sizes[1], 1, *window, dtype=dtype)
    if layout == "channels":
        formats: dict[int, Any] = {4: torch.channels_last, 5: torch.channels_last_3d}
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() == 3 else x.to(memory_format=formats[x.dim()])
    convolution = CONVOLUTIONS[len(window) - 1]
    return (lambda x, weight: convolution(x, weight, groups=x.shape[1], **rest)), x.requires_grad_(), weight.requires_grad_()


def targets(graphs: Sequence[backend.Compiled]) -> list[Any]:
    return [node.target for graph in graphs for node in graph.plan.annotated.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("layout", ["planes", "channels"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_eager_computes(name: str, layout: str) -> None:
    function, x, weight = operands(name, torch.float32, layout)
    found = targets(check(function, x, weight, **SLOW))
    assert DEPTHWISE in found and DEPTHWISE_BACKWARD in found and aten.convolution.default not in found


@pytest.mark.parametrize("name", ["same", "strided", "two for each", "a causal sequence", "row by row"])
def test_16_bit_floats_are_summed_in_float32(name: str) -> None:
    function, x, weight = operands(name, torch.bfloat16)
    assert DEPTHWISE in targets(check(function, x, weight, **SLOW))


@pytest.mark.parametrize(("name", "is_written"), [("a causal sequence", True), ("a long window", False), ("two for each", False)])
def test_gradients_of_short_weights_are_sums(name: str, is_written: bool) -> None:
    function, x, weight = operands(name, torch.float32)
    assert (aten.convolution_backward.default not in targets(check(function, x, weight, **SLOW))) is is_written


def test_gradients_of_weights_are_made_in_planes_where_that_is_faster() -> None:
    function, x, weight = operands("two for each", torch.float32, "channels")
    graphs = check(function, x, weight, **SLOW)
    (gradient,) = (node for graph in graphs for node in graph.plan.annotated.graph.nodes
                   if node.target is aten.convolution_backward.default)
    assert [operand.meta["val"].is_contiguous() for operand in gradient.args[:3]] == [True, True, True]
    assert "group by group" in str(explain(compiled(function, **SLOW), x, weight))


def test_gradients_of_too_many_terms_stay() -> None:
    x, weight = torch.randn(1, 2, 9, 9, requires_grad=True), torch.randn(4, 1, 5, 6, requires_grad=True)
    found = targets(check(lambda x, w: F.conv2d(x, w, padding=2, groups=2), x, weight, **SLOW))
    assert DEPTHWISE in found and DEPTHWISE_BACKWARD not in found


def test_one_gradient_alone() -> None:
    function, x, weight = operands("same", torch.float32)
    of_input = targets(check(function, x, weight.detach(), **SLOW))
    assert DEPTHWISE_BACKWARD in of_input and aten.convolution_backward.default not in of_input
    of_weight = targets(check(function, x.detach(), weight, **SLOW))
    assert DEPTHWISE_BACKWARD not in of_weight and aten.convolution_backward.default in of_weight


def test_a_bias_is_added() -> None:
    _, x, weight = operands("same", torch.float32)
    bias = torch.randn(5, requires_grad=True)
    graphs = check(lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=5).relu(), x, weight, bias, **SLOW)
    assert DEPTHWISE in targets(graphs)


def test_numbers_may_be_one_for_all_dimensions() -> None:
    x, weight = torch.randn(2, 5, 8, 9, requires_grad=True), torch.randn(5, 1, 3, 3, requires_grad=True)
    for options in (SLOW, DEAR):
        check(lambda x, w: torch.convolution(x, w, None, [2], [1], [1], False, [0], 5), x, weight, **options)


def test_what_is_around_it_is_in_its_kernel() -> None:
    def causal(x: Tensor, weight: Tensor) -> Tensor:
        convolved = F.conv1d(x.transpose(1, 2), weight, padding=3, groups=6)[..., :x.shape[1]]
        return F.silu(convolved).transpose(1, 2)

    x, weight = torch.randn(2, 70, 6), torch.randn(6, 1, 4)
    (graph,) = check(causal, x, weight, grad=False, **SLOW)
    assert len(graph.plan.regions) == 1 and DEPTHWISE in targets([graph])


@pytest.mark.parametrize("name", ["same", "row by row"])
def test_infinities_and_nans_reach_the_elements_whose_windows_have_them(name: str) -> None:
    function, x, weight = operands(name, torch.float32)
    with torch.no_grad():
        x[0, 0, 2, 3], x[0, 1, 0, 0], x[1, 2, 7, 8] = torch.inf, -torch.inf, torch.nan
    check(function, x, weight, **SLOW)


@pytest.mark.parametrize("grad", [False, True])
def test_sizes_may_be_dynamic(grad: bool) -> None:
    model = torch.nn.Conv1d(6, 6, 4, padding=3, groups=6, bias=False)
    for batch, length in ((3, 19), (5, 33), (2, 7)):
        x = torch.randn(batch, 6, length, requires_grad=grad)
        graphs = check(lambda x: model(x)[..., :x.shape[-1]], x, grad=grad, dynamic=True, precise=False, **SLOW)
        assert DEPTHWISE in targets(graphs) and (DEPTHWISE_BACKWARD in targets(graphs)) is grad


@pytest.mark.parametrize("grad", [False, True])
def test_images_of_large_windows_may_be_dynamic(grad: bool) -> None:
    model = torch.nn.Conv2d(6, 6, 7, padding=3, groups=6, bias=False)
    for batch, height, width in ((3, 9, 8), (5, 11, 14), (2, 8, 7)):
        x = torch.randn(batch, 6, height, width, requires_grad=grad)
        graphs = check(model, x, grad=grad, dynamic=True, precise=False, **SLOW)
        assert DEPTHWISE in targets(graphs) and (DEPTHWISE_BACKWARD in targets(graphs)) is grad


@pytest.mark.parametrize("size", [(0, 5, 8, 9), (2, 0, 8, 9)])
def test_nothing_is_convolved(size: tuple[int, ...]) -> None:
    x, weight = torch.randn(size), torch.randn(size[1], 1, 3, 3)
    check(lambda x, w: F.conv2d(x, w, padding=1, groups=max(size[1], 1)) if size[1] else x + 1, x, weight, grad=False, **SLOW)


def others() -> dict[str, Callable[[], Tensor]]:
    x = torch.randn(2, 6, 8, 9)
    return {
        "all channels": lambda: F.conv2d(x, torch.ones(4, 6, 3, 3)),
        "groups of channels": lambda: F.conv2d(x, torch.ones(6, 2, 3, 3), groups=3),
        "transposed": lambda: F.conv_transpose2d(x, torch.ones(6, 1, 3, 3), groups=6),
        "a single channel": lambda: F.conv2d(x[:, :1], torch.ones(4, 1, 3, 3)),
        "many channels for each": lambda: F.conv2d(x, torch.ones(48, 1, 3, 3), groups=6),
        "a large window": lambda: F.conv2d(x, torch.ones(6, 1, 8, 7), groups=6),
        "64 bits": lambda: F.conv2d(x.double(), torch.ones(6, 1, 3, 3).double(), groups=6),
    }


@pytest.mark.parametrize("name", others())
def test_others_stay(name: str) -> None:
    found = targets(check(others()[name], grad=False, **SLOW))
    assert DEPTHWISE not in found and aten.convolution.default in found


def test_it_stays_where_the_library_is_faster() -> None:
    function, x, weight = operands("same", torch.float32)
    found = targets(check(function, x, weight, **DEAR))
    assert DEPTHWISE not in found and DEPTHWISE_BACKWARD not in found


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_it_stays_where_it_is_forced_to_what_does_not_take_it(executor: str) -> None:
    def forced(x: Tensor, weight: Tensor) -> Tensor:
        with force_backend(executor):
            return F.conv2d(x, weight, padding=1, groups=5)

    _, x, weight = operands("same", torch.float32)
    report = explain(compiled(forced, executors="triton,inductor", **SLOW), x.detach(), weight.detach())
    assert "written out" not in str(report) and "convolution" in str(report)


def test_the_report_says_at_what_price() -> None:
    function, x, weight = operands("same", torch.float32)
    report = explain(compiled(function, **SLOW), x.detach(), weight.detach())
    assert "depthwise_convolution_default written out, " in str(report) and " in a library" in str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["planes", "channels"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_eager_computes_on_a_gpu(name: str, layout: str, dtype: torch.dtype) -> None:
    function, *given = operands(name, dtype, layout)
    x, weight = (tensor.detach().cuda().requires_grad_() for tensor in given)
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert DEPTHWISE in targets(check(function, x, weight, cost=SLOW["cost"]))
