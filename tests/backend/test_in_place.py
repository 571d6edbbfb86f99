"""What writes a part of an input, as of a cache of keys, writes that part alone: nothing copies the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse import backend
from dynafuse.fx import in_place
from dynafuse.ir import Region, Role
from dynafuse.ops.overloads import COPIES_INTO
from tests.support.differential import check, compare, compiled, copies, run
from tests.support.graphs import recorded

aten = torch.ops.aten
BATCH, HEADS, LENGTH, WIDTH = 2, 2, 16, 8
EXECUTORS = ("triton", "inductor")


def cache(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def row(count: int = 1, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, HEADS, count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def at(*places: int) -> Tensor:
    return torch.tensor(places)


def whole_copies(graph: backend.Compiled) -> list[str]:
    """The steps that make or rewrite a tensor as large as the largest input."""
    facts, nodes = graph.plan.annotated.facts, graph.plan.annotated.graph.nodes
    most = max(fact.tensor.hint for node in nodes if node.op == "placeholder" and (fact := facts[node]).tensor is not None)

    def writes_all(step: Region | Any) -> list[str]:
        outputs = [n for n in step.outputs if n not in step.copies or n.target is COPIES_INTO] if isinstance(step, Region) else [step]
        made = [n for n in outputs if facts[n].role in (Role.FUSED, Role.EAGER) and not in_place(n)]
        return [n.name for n in made if (tensor := facts[n].tensor) is not None and tensor.hint >= most]

    return [name for step in graph.plan.steps for name in writes_all(step)]


def index_copy(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c.index_copy_(2, i, k * 2)
    return c.sum(2)


def index_put(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[:, :, i] = k.exp()
    return c.sum(2)


def index_add(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c.index_add_(2, i, k)
    return c.sum(2)


def attention(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c.index_copy_(2, i, k.tanh())
    return F.scaled_dot_product_attention(k, c, c)


def a_slice(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[:, :, 3:4] = k[:, :, :1] + 1
    return c.sum(2)


def every_other(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[:, :, 3:7:2] = k[:, :, :1]  # is repeated
    return c.sum(2)


def from_the_end(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[:, :, -2:] = k[:, :, :1].double()  # is rounded
    return c.sum(2)


def a_slice_of_a_slice(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[:1, :, 5:6] = k[:1, :, :1] * 2
    return c[:1, :, :6].sum(2)


def selected(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[:, :, 5] = k[:, :, 0]
    return c.sum(2)


def selected_in_a_slice(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[1, :, 5:6] = k[1, :, :1].sin()
    return c.sum(2)


def twice(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c.index_copy_(2, i, k)
    c.index_copy_(2, (i + 1) % LENGTH, k * 2)
    return c.sum(2)


def after_a_read(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    before = (c * 2).sum(2)  # of the old values
    c.index_copy_(2, i, k)
    return before


WRITES = (index_copy, index_put, index_add, attention, a_slice, every_other, from_the_end, a_slice_of_a_slice, selected,
          selected_in_a_slice, twice, after_a_read)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_nothing_copies_the_input(write: Callable[..., Tensor], executor: str) -> None:
    (graph,) = check(write, cache(), row(), at(4), executors=executor)
    assert not whole_copies(graph)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", [index_copy, index_add, a_slice], ids=lambda write: write.__name__)
def test_in_16_bits(write: Callable[..., Tensor], dtype: torch.dtype) -> None:
    (graph,) = check(write, cache(dtype=dtype), row(2, dtype=dtype), at(4, 9), executors="triton")
    assert not whole_copies(graph)


def test_where_the_order_of_values_is_to_be_eagers() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        (graph,) = check(index_copy, cache(), row(), at(4), executors="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert not whole_copies(graph)


def old_and_new(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    doubled = c * 2
    c.index_copy_(2, i, k)
    return doubled + c  # needs both at once


def returned(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    new = c.index_copy(2, i, k)
    c.copy_(new)
    return new  # a tensor of its own


def returned_view(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    new = c.index_copy(2, i, k)
    c.copy_(new)
    return new[0].t() if new.dim() == 3 else new[0, 0].t()


def from_itself(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[:, :, 2:6] = c[:, :, 0:4].clone()  # moved along
    return c.sum(2)


def the_other_way_round(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    k.copy_(c[:, :, :1])
    c.index_copy_(2, i, k)
    return c.sum(2)


def most_of_it(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[:, :, 1:] = c[:, :, :-1].clone()
    return c.sum(2)


def gathered(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    picked = c[:, :, (i + 3) % LENGTH] * 2
    c.index_copy_(2, i, picked)
    return picked + 1


def several(c: Tensor, k: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    old = c[:, :, :1].sum()
    c.index_copy_(2, i, k + old)
    return c.sum(2), (old + k).sum(2)


OTHERS = (old_and_new, returned, returned_view, from_itself, the_other_way_round, most_of_it, gathered, several)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("write", OTHERS, ids=lambda write: write.__name__)
def test_who_reads_what(write: Callable[..., Any], executor: str) -> None:
    check(write, cache(), row(), at(4), executors=executor, calls=1)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", ["misaligned", "transposed", "with gaps", "expanded values", "one memory twice"])
def test_layouts(layout: str, executor: str) -> None:
    memory = torch.randn(2 * cache().numel() + 1, generator=torch.Generator().manual_seed(3))

    def inputs() -> tuple[Tensor, ...]:
        fresh, shape = memory.clone(), cache().shape
        if layout == "misaligned":
            return fresh[1:cache().numel() + 1].view(shape), row(), at(4)
        if layout == "transposed":
            return fresh[:cache().numel()].view(BATCH, LENGTH, HEADS, WIDTH).transpose(1, 2), row(), at(4)
        if layout == "with gaps":
            return fresh[:2 * cache().numel()].view(BATCH, HEADS, LENGTH, 2 * WIDTH)[..., :WIDTH], row(), at(4)
        whole = fresh[:cache().numel()].view(shape)
        return whole, (whole[:, :, :1] if layout == "one memory twice" else row()[:1, :, :, :1].expand(row().shape)), at(4)

    torch._dynamo.reset()
    compare(run(compiled(index_copy, executors=executor), inputs()), run(index_copy, inputs()))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_was_written_into_gaps_is_read_through_views_with_gaps(executor: str) -> None:
    """A slice that is replaced leaves the gaps of its input; places that are written would close them."""
    def write(c: Tensor, k: Tensor) -> Tensor:
        c[:, 1:2] -= k
        return F.conv2d(c[None, None], torch.ones(2, 1, 1, 1))

    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(16, 8, generator=torch.Generator().manual_seed(3))[::2, ::2], torch.ones(8, 1)

    compare(run(compiled(write, executors=executor), inputs()), run(write, inputs()))


def test_places_that_change_from_call_to_call() -> None:
    def write(c: Tensor, k: Tensor, start: int) -> Tensor:
        c[:1, :, start:start + k.shape[2]] = k[:1]
        return c[:, :, :start + k.shape[2]].sum(2)

    torch._dynamo.reset()
    call = compiled(write, dynamic=None, executors="triton")
    with recorded() as graphs:
        for start in (3, 4, 5, 9):
            arguments = (cache(), row(), start)
            compare(run(call, copies(arguments)), run(write, copies(arguments)))
        for count in (2, 3, 5):
            arguments = (cache(), row(count), 4)
            compare(run(call, copies(arguments)), run(write, copies(arguments)))
    assert len(graphs) == 3  # the first place, any other, any count
    assert not any(map(whole_copies, graphs))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_training(executor: str) -> None:
    def write(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
        c.index_copy_(2, i, k.detach())
        return (k * c.sum(2, keepdim=True)).exp()

    check(write, cache() / LENGTH, row().requires_grad_(), at(4), executors=executor)


def test_many_steps_on_one_cache() -> None:
    call, ours, eager = compiled(attention), cache(), cache()
    for position in range(LENGTH):
        key = row(seed=position)
        torch.testing.assert_close(call(ours, key, at(position)), attention(eager, key, at(position)))
    torch.testing.assert_close(ours, eager)


def test_a_region_that_fails_still_writes() -> None:
    """Eager's op writes into the input as the kernel would have."""
    (graph,) = check(index_copy, cache(), row(), at(4), executors="eager")
    assert not whole_copies(graph)


PIECES: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda x: x.split(8)[1].view(2, 4), "unbind": lambda x: x.view(4, 2, 4).unbind(0)[1], "slice": lambda x: x[8:16].view(2, 4),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_an_input_that_begins_within_its_memory(name: str) -> None:
    """What is written to it is made elsewhere, where memory begins with its first element."""
    def f(x: Tensor, w: Tensor) -> Tensor:
        x[1:16:3] = x[1:16:3] * 2
        return PIECES[name](x) @ w

    w = torch.randn(4, 4)
    expected, actual = (call(torch.arange(64.0)[8:40], w) for call in (f, compiled(f)))
    torch.testing.assert_close(actual, expected)
