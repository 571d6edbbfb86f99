"""Convolution nets that are moved to channels-last, against eager: values, gradients, the strides of both, shared memory.

torch's heuristic leaves nets as small as these alone; here every graph with convolutions moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from dynafuse.passes import channels_last as layout
from dynafuse.runtime import wrapper
from dynafuse.runtime.alignment import aligned
from tests.support.cases import Maker
from tests.support.differential import check, compiled, copies, run, significant

Shape = tuple[int, ...]


def squeeze_and_excite(x: Tensor, w: Tensor, down: Tensor, up: Tensor) -> Tensor:
    y = F.silu(F.conv2d(x, w, padding=1))
    gate = F.conv2d(F.relu(F.conv2d(y.mean((2, 3), keepdim=True), down)), up)
    return y * gate.sigmoid()


def depthwise(x: Tensor, w: Tensor, each: Tensor, point: Tensor) -> Tensor:
    y = F.relu6(F.conv2d(x, w))
    return F.conv2d(F.relu6(F.conv2d(y, each, padding=1, groups=y.shape[1])), point)


def gray(x: Tensor, w: Tensor, point: Tensor) -> Tensor:
    return F.conv2d(F.relu(F.conv2d(x, w)), point) * 2


def one_pixel(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return F.conv2d(F.gelu(F.conv2d(x, first)), second)


def transposed(x: Tensor, w: Tensor, back: Tensor) -> Tensor:
    return F.conv_transpose2d(F.elu(F.conv2d(x, w)), back, stride=2).tanh()


def features(x: Tensor, w: Tensor, point: Tensor) -> tuple[Tensor, ...]:
    """What detectors and transformers take out of such nets: features, also flattened, also with channels behind."""
    y = F.relu(F.conv2d(x, w))
    z = F.conv2d(y, point)
    return y, z.flatten(2).transpose(1, 2), z.permute(0, 2, 3, 1), y.permute(1, 0, 3, 2).exp(), z[:, 2:4], z.mean((2, 3))


def pooled(x: Tensor, w: Tensor, point: Tensor) -> tuple[Tensor, ...]:
    y = F.conv2d(x, w)
    return F.max_pool2d(F.relu(y), 3, 2, 1), F.conv2d(F.max_pool2d(y, 2, ceil_mode=True), point), F.avg_pool2d(y, 2)


def shared(x: Tensor, w: Tensor, point: Tensor) -> tuple[Tensor, ...]:
    """One weight for two convolutions, and its own part of the result: its gradient is a sum."""
    y = F.conv2d(F.conv2d(x, w), point)
    return F.conv2d(y, point).relu() + y, point * 3


def normalized(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, var: Tensor, point: Tensor) -> Tensor:
    """In training, which overwrites the statistics."""
    y = F.batch_norm(F.conv2d(x, w), mean, var, scale, shift, training=True)
    return F.conv2d(F.relu(y), point)


def frozen(x: Tensor, w: Tensor, shift: Tensor) -> Tensor:
    """A convolution that needs no gradient: the backward has none, but what the forward saved is in its layout."""
    return F.relu(F.conv2d(x.detach(), w.detach()) + shift)


def in_memory(x: Tensor, w: Tensor, point: Tensor) -> tuple[Tensor, ...]:
    """What reads the memory of convolutions' results by places: of a tensor, of views of one, of such a read, written."""
    y = F.pad(F.conv2d(x, w), [1, 1, 1, 1])
    rows, columns, heights = y.shape[3], y.shape[2], y.shape[1]
    plane = rows * columns
    apart = y.as_strided((2, heights, 3, rows, 2), (heights * plane, plane, rows, 1, 2 * rows))
    again = apart.as_strided((heights, 2, 3), (plane, rows, 1))
    part = y[1:, 2:].as_strided((3, rows), (rows, 1))
    z = F.conv2d(y, point)
    patches = z.transpose(2, 3)[:, 1].as_strided((2, 4), (1, 3), 5)
    written = torch.as_strided_scatter(z, z.new_full((3,), 2.0), (3,), (7,), 1)
    return apart.clone(memory_format=torch.contiguous_format), again.exp(), part * 2, patches, written.sin()


def sliced(x: Tensor, w: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Slices of channels, each with a convolution, which saves it, and with arithmetic, which reads it again."""
    parts = F.relu(F.conv2d(x, w)).split(3, 1)
    y = F.conv2d(parts[1], first) * parts[1].tanh()
    return torch.cat([parts[0], y, F.conv2d(parts[2] + y, second) * parts[2].tanh()], 1)


NETS: dict[str, tuple[Callable[..., Any], Sequence[Shape]]] = {
    "squeeze and excite": (squeeze_and_excite, [(2, 3, 7, 6), (8, 3, 3, 3), (4, 8, 1, 1), (8, 4, 1, 1)]),
    "depthwise": (depthwise, [(2, 3, 7, 6), (8, 3, 3, 3), (8, 1, 3, 3), (5, 8, 1, 1)]),
    "gray": (gray, [(2, 1, 7, 6), (4, 1, 3, 3), (5, 4, 1, 1)]),
    "one pixel": (one_pixel, [(3, 4, 1, 1), (5, 4, 1, 1), (2, 5, 1, 1)]),
    "one channel": (gray, [(2, 1, 7, 6), (1, 1, 3, 3), (1, 1, 1, 1)]),
    "transposed": (transposed, [(2, 3, 7, 6), (4, 3, 3, 3), (4, 2, 3, 3)]),
    "features": (features, [(2, 3, 7, 6), (4, 3, 3, 3), (6, 4, 1, 1)]),
    "pooled": (pooled, [(2, 3, 9, 8), (4, 3, 3, 3), (6, 4, 1, 1)]),
    "frozen": (frozen, [(2, 3, 7, 6), (4, 3, 3, 3), (2, 4, 5, 4)]),
    "in memory": (in_memory, [(2, 3, 7, 6), (4, 3, 3, 3), (6, 4, 1, 1)]),
    "sliced": (sliced, [(2, 3, 7, 6), (9, 3, 3, 3), (3, 3, 1, 1), (3, 3, 1, 1)]),
    "shared": (shared, [(2, 3, 7, 6), (4, 3, 3, 3), (4, 4, 1, 1)]),
}


def move_all(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Have every graph with convolutions go channels-last; returns those that do."""
    graphs: list[GraphModule] = []

    def pays(kind: str, module: GraphModule) -> bool:
        has = bool(layout.convolutions(module))
        graphs.extend([module] * has)
        return has

    monkeypatch.setattr(layout, "pays", pays)
    return graphs


def check_net(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference, training, and the strides of the gradients, which optimizers and reducers look at."""
    (function, shapes), make, moved = NETS[name], Maker(device, torch.float32), move_all(monkeypatch)
    given = [make(*shape) for shape in shapes]
    with torch.no_grad():
        check(function, *given)
    assert len(moved) == 1
    check(function, *given)
    assert len(moved) == (2 if name == "frozen" else 3)
    torch._dynamo.reset()
    ours, eager = (run(call, copies(given)).gradients for call in (compiled(function), function))
    for mine, theirs in zip(ours, eager, strict=True):
        assert (mine is None) is (theirs is None)
        assert mine is None or significant(mine) == significant(theirs)


def check_batch_norm(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, moved = Maker(device, torch.float32), move_all(monkeypatch)
    running = make(4, grad=False), make(4, grad=False).abs()
    check(normalized, make(2, 3, 7, 6), make(4, 3, 3, 3), make(4), make(4), *running, make(6, 4, 1, 1))
    assert len(moved) == 2


@pytest.mark.parametrize("name", NETS)
def test_net(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_net(name, "cpu", monkeypatch)


@pytest.mark.parametrize("name", NETS)
def test_net_of_any_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (function, shapes), make, moved = NETS[name], Maker("cpu", torch.float32), move_all(monkeypatch)
    with torch.no_grad():
        check(function, *(make(*shape) for shape in shapes), dynamic=True)
    assert len(moved) == 1


@pytest.mark.parametrize("name", NETS)
def test_net_of_any_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch has another size: from then on that is dynamic, and what the forward keeps still has known strides."""
    (function, shapes), make, moved = NETS[name], Maker("cpu", torch.float32), move_all(monkeypatch)
    net = compiled(function, dynamic=None, specialize_after=0)
    batched = {0, 2} if name == "frozen" else {0}
    torch._dynamo.reset()
    for batch in (2, 11, 13):
        given = [make(batch, *shape[1:]) if place in batched else make(*shape) for place, shape in enumerate(shapes)]
        ours, eager = (run(call, copies(given)) for call in (net, function))
        torch.testing.assert_close(ours.result, eager.result, atol=1e-4, rtol=1e-4)
        for mine, theirs in zip(ours.gradients, eager.gradients, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
            assert mine is None or significant(mine) == significant(theirs)
    assert len(moved) == {"frozen": 2, "in memory": 6}.get(name, 4)  # torch compiles the latter anew for each size


def test_slices_that_are_saved_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice begins at channel 3 of a place, 12 bytes into it; as torch has traced it, 60 elements of 4 bytes."""
    copied: list[Tensor] = []
    monkeypatch.setattr(wrapper, "aligned", lambda tensor: copied.append(tensor) or aligned(tensor))
    (function, shapes), make, moved = NETS["sliced"], Maker("cpu", torch.float32), move_all(monkeypatch)
    given = [make(*shape) for shape in shapes]
    ours, eager = (run(call, copies(given)) for call in (compiled(function), function))
    assert len(moved) == 2 and not copied
    assert len(ours.gradients) == len(eager.gradients)
    torch.testing.assert_close((ours.result, ours.gradients), (eager.result, eager.gradients))


def test_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    check_batch_norm("cpu", monkeypatch)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda y: F.dropout(y, 0.4),
    "dropout of a part": lambda y: F.dropout(y[:, 1:].relu(), 0.4),
    "bernoulli": lambda y: y.sigmoid().bernoulli(),
    "like": torch.rand_like,
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_drawn_in_eagers_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.conv2d(x, w).sin()
        return DRAWS[name](y), DRAWS[name](y.exp())

    make, moved = Maker("cpu", torch.float32), move_all(monkeypatch)
    for grad in (False, True):
        given = [make(2, 3, 7, 6, grad=grad), make(4, 3, 3, 3, grad=grad)]
        torch._dynamo.reset()
        ours, eager = (run(call, copies(given), seed=3) for call in (compiled(function, fallback_random=True), function))
        torch.testing.assert_close((ours.result, ours.gradients), (eager.result, eager.gradients))
    assert len(moved) == (3 if name.startswith("dropout") else 2)
