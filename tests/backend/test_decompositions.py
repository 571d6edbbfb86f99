"""Decompositions keep what eager promises besides values: strides of copies, and with ``fallback_random`` every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from dynafuse.passes.decompositions import decompositions
from tests.support.differential import check, compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Function = Callable[[torch.Tensor], torch.Tensor]

LAYOUTS: dict[str, torch.Tensor] = {
    "rows": torch.randn(2, 3, 4),
    "transposed": torch.randn(4, 3, 2).transpose(0, 2),
    "columns": torch.randn(4, 3).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
    "size 1": torch.randn(2, 1, 2).transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": torch.randn(1, 3, 4).expand(2, 3, 4),
}
CATS: dict[str, Function] = {
    "itself": lambda x: torch.cat([x, x], 1),
    "itself, in front": lambda x: torch.cat([x, x, x], 0),
    "one": lambda x: torch.cat([x], 0),
    "an empty one": lambda x: torch.cat([x, x[:, :0]], 1),
    "an empty one of no sizes": lambda x: torch.cat([x.new_empty(0), x], 0),
    "a value and itself": lambda x: torch.cat([x.sin(), x.sin()], -1),
    "two and an empty one": lambda x: torch.cat([x, x * 2, x[:, :0]], 1),
    "two": lambda x: torch.cat([x, x * 2], 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cat_has_eagers_strides(layout: str) -> None:
    for cat in CATS.values():
        check(cat, LAYOUTS[layout], executors="triton")


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "an empty one in between": lambda x, y: torch.cat([x, y[:, :0], x * 2], 1),
    "an empty one of no sizes": lambda x, y: torch.cat([x, y.new_empty(0), x * 2], 1),
    "an empty one beside integers": lambda x, y: torch.cat([(x * 4).int(), y[:, :0], (x * 2).int()], 1),
    "mish_backward": lambda x, y: torch.ops.aten.mish_backward(y, x),
    "mse_loss_backward": lambda x, y: torch.ops.aten.mse_loss_backward(y, x, x * 2, 1),
    "smooth_l1_loss_backward": lambda x, y: torch.ops.aten.smooth_l1_loss_backward(y, x, x * 2, 1, 1.0),
    "threshold_backward": lambda x, y: torch.ops.aten.threshold_backward(x, y, 0.5),
    "threshold_backward of an integer": lambda x, y: torch.ops.aten.threshold_backward((x * 4).int(), y, -3.25),
    "threshold_backward of no dimensions": lambda x, y: torch.ops.aten.threshold_backward(y.sum(), x, 0.5),
    "hardtanh_backward": lambda x, y: torch.ops.aten.hardtanh_backward(x, y, -0.5, 0.5),
    "hardtanh_backward of an integer": lambda x, y: torch.ops.aten.hardtanh_backward((y * 4).int(), x, -0.5, 0.5),
    "addcmul of integers": lambda x, y: torch.addcmul((x * 4).int(), (x * 3).int(), (y * 3).int(), value=2.5),
}


@pytest.mark.parametrize("name", MIXED)
def test_dtypes_are_eagers(name: str) -> None:
    check(MIXED[name], torch.randn(2, 3, dtype=torch.float16), torch.randn(2, 3), executors="triton", precise=False)


@pytest.mark.parametrize("index", [torch.tensor(3), torch.tensor([3]), torch.tensor([0, 3])], ids=["none", "one", "two"])
def test_selections_by_an_index_of_any_dimensions_have_gradients(index: torch.Tensor) -> None:
    check(lambda x, i: x.index_select(-1, i), torch.randn(2, 3, 4).requires_grad_(), index, executors="triton", precise=False)


@pytest.mark.parametrize("decimals", [1, 2, 3, -1, -2])
def test_decimals_are_divided_by_powers_of_ten(decimals: int) -> None:
    """Products with their reciprocals would be off in the last bit."""
    x = torch.linspace(-300, 300, 4001, device=DEVICE)
    assert torch.equal(compiled(lambda x: torch.round(x, decimals=decimals), executors="triton")(x), torch.round(x, decimals=decimals))


DRAWN: dict[str, Function] = {
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli of a number": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "dropout": lambda x: F.dropout(x, 0.3),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "uniform": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential": lambda x: torch.empty_like(x).exponential_(2),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
}


def _seeded(function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return function(x), torch.rand(2, device=DEVICE)  # and the generator is where eager leaves it


def _of_both(function: Function, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    torch._dynamo.reset()
    return _seeded(compiled(function, executors="triton", fallback_random=True), x), _seeded(function, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DRAWN)
def test_fallback_draws_eagers_bits(name: str, dtype: torch.dtype) -> None:
    ours, theirs = _of_both(DRAWN[name], torch.linspace(-2, 2, 41, device=DEVICE).to(dtype))
    assert all(map(torch.equal, ours[1:], theirs[1:]))
    if name in ("rrelu", "alpha dropout"):  # they compute with what they draw
        torch.testing.assert_close(ours[0], theirs[0])
    else:
        assert torch.equal(ours[0] != 0, theirs[0] != 0)
        torch.testing.assert_close(ours[0], theirs[0], rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["rand_like", "randn_like", "randint_like"])
def test_fallback_draws_eagers_bits_whatever_the_strides(name: str, layout: str) -> None:
    ours, theirs = _of_both(DRAWN[name], LAYOUTS[layout].to(DEVICE))
    assert all(map(torch.equal, ours, theirs))


def _unread(x: torch.Tensor) -> torch.Tensor:
    drawn = torch.bernoulli(torch.full_like(x, 0.3))
    return torch.randn_like(drawn.new_zeros(drawn.shape)) + x


def _in_between(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        torch.rand(2, device=x.device)
        x = F.dropout(x.sin(), 0.3) * torch.rand(x.shape, device=x.device)
    return x


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", [_unread, _in_between])
def test_fallback_draws_what_nothing_reads_and_in_eagers_order(function: Function, grad: bool) -> None:
    ours, theirs = _of_both(function, torch.linspace(-2, 2, 40, device=DEVICE).view(5, 8).requires_grad_(grad))
    torch.testing.assert_close(ours, theirs)


# ---------------------------------------------------------------------- convolutions

CONVOLUTIONS = [
    ("conv1d", (2, 4, 9), (6, 4, 3), {"padding": 1}), ("conv2d", (2, 4, 9, 8), (8, 1, 3, 3), {"groups": 4, "stride": 2}),
    ("conv3d", (2, 4, 5, 5, 5), (6, 4, 3, 3, 3), {}), ("conv_transpose2d", (2, 4, 5, 5), (4, 6, 3, 3), {"stride": 2}),
    ("conv2d", (4, 9, 8), (6, 4, 3, 3), {}),  # without a batch
]


def convolution(name: str, shape: tuple[int, ...], weight: tuple[int, ...], device: str, **rest: Any) -> tuple[Any, Any]:
    """A convolution with bias, and its graph for a device that need not be there."""
    from torch._subclasses import FakeTensorMode

    function = getattr(F, name)
    channels = weight[1] if "transpose" in name else weight[0]

    def call(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> Any:
        return function(x, w, bias, **rest)

    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(sizes, device=device) for sizes in (shape, weight, (channels,))]
        graph = make_fx(call, decomposition_table=decompositions())(*inputs)
    return call, graph


@pytest.mark.parametrize(("name", "shape", "weight", "rest"), CONVOLUTIONS)
def test_biases_of_convolutions_are_sums_on_a_gpu(name: str, shape: tuple[int, ...], weight: tuple[int, ...],
                                                  rest: dict[str, Any]) -> None:
    call, graph = convolution(name, shape, weight, "cuda", **rest)
    (node,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.convolution.default)
    assert node.args[2] is None
    channels = weight[1] if "transpose" in name else weight[0]
    inputs = torch.randn(shape), torch.randn(weight), torch.randn(channels)
    torch.testing.assert_close(graph(*inputs), call(*inputs))


def test_elsewhere_libraries_add_biases() -> None:
    _, graph = convolution("conv2d", (2, 4, 9, 8), (6, 4, 3, 3), "cpu")
    (node,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.convolution.default)
    assert node.args[2] is not None
