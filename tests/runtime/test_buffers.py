"""Results that kernels write over dead operands: which ones, which never, and that the numbers stay right."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse import backend
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.config import resolve
from dynafuse.lowering.triton.lower import lower
from dynafuse.runtime import buffers, wrapper
from dynafuse.select.place import place
from tests.support import graphs
from tests.support.differential import compiled

X, W = torch.randn(64, 64), torch.randn(64, 64)
Function = Callable[..., Any]


def product(build: graphs.Builder, x: Node, w: Node) -> Node:
    return build.op("aten.mm.default", x, w)


def written_over(bounds: Mapping[str, CanonicalRegion]) -> list[str]:
    """What regions say of results that are written over something."""
    return [reason for bound in bounds.values() for reason in bound.region.reasons if "written over" in reason]


def noted(function: Function, *inputs: torch.Tensor, **options: Any) -> list[str]:
    """What the regions of a function's graphs say of results that are written over something, the backward's included."""
    torch._dynamo.reset()
    found: list[backend.Compiled] = []
    with backend.listening(found.append, plan_only=False):
        result = compiled(function, workers=0, **options)(*inputs)
        if result.requires_grad:
            result.backward()
    return [note for graph in found for note in written_over(graph.bounds)]


def checked(write: Function, expected: Function, inputs: Sequence[torch.Tensor] = (X, W), **options: Any) -> list[str]:
    """The notes of a graph whose results are compared with eager's, twice."""
    run = graphs.compiled(graphs.built(write, *inputs), inputs, resolve(options=options))
    wanted = expected(*inputs)
    for _ in range(2):
        found = run.call(list(inputs))
        for one, other in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
    return written_over(run.bounds)


def test_a_pointwise_result_is_written_over_its_dead_operand() -> None:
    def write(build: graphs.Builder, x: Node, w: Node) -> Node:
        return build.op("aten.tanh.default", product(build, x, w))

    assert checked(write, lambda x, w: (x @ w).tanh()) == ["tanh_default written over mm_default"]
    assert checked(write, lambda x, w: (x @ w).tanh(), reuse_buffers=False) == []


def test_one_of_several_results_is_overwritten() -> None:
    def write(build: graphs.Builder, x: Node, w: Node) -> Node:
        return build.op("aten.tanh.default", piece(build, x, w))

    assert checked(write, lambda x, w: pulled(x, w).tanh()) == ["tanh_default written over getitem"]


def test_it_has_the_address_of_its_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(build: graphs.Builder, x: Node, w: Node) -> Node:
        return build.op("aten.tanh.default", product(build, x, w))

    run = graphs.compiled(graphs.built(write, X, W), [X, W])
    addresses = []
    name = next(name for name in run.call.__globals__ if name.startswith("mm"))  # type: ignore[attr-defined]
    mm = run.call.__globals__[name]  # type: ignore[attr-defined]

    def with_address(*args: Any) -> torch.Tensor:
        made: torch.Tensor = mm(*args)
        addresses.append(made.data_ptr())
        return made

    monkeypatch.setitem(run.call.__globals__, name, with_address)  # type: ignore[attr-defined]
    (result,) = run.call([X, W])
    assert [result.data_ptr()] == addresses
    assert "empty_strided" not in run.call.source  # type: ignore[attr-defined]


def test_a_result_of_another_shape_in_the_same_order_is_too() -> None:
    def soft_capped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return 30 * torch.tanh((x @ w).view(4, 16, 64) / 30)

    assert noted(soft_capped, X, W) == ["mul written over mm"]
    found = compiled(soft_capped)(X, W)
    torch.testing.assert_close(found, soft_capped(X, W))
    assert found.shape == (4, 16, 64) and found.is_contiguous()


@pytest.mark.parametrize("columns", [64, 100, 50000])  # whole rows in registers, masked ones, rows that are read twice
def test_rows_are_written_over_dead_operands(columns: int) -> None:
    def write(build: graphs.Builder, x: Node, w: Node) -> Node:
        return build.op("aten._softmax.default", product(build, x, w), 1, False)

    def difference(build: graphs.Builder, x: Node, w: Node) -> Node:
        a = product(build, x, w)
        return build.op("aten.sub.Tensor", a, build.op("aten.amax.default", a, [1], True))

    inputs = torch.randn(5, 8), torch.randn(8, columns)
    assert checked(difference, lambda x, w: x @ w - (x @ w).amax(1, keepdim=True), inputs) == ["sub_tensor written over mm_default"]


def softmax_of_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).softmax(-1) @ w.t()


@pytest.mark.parametrize("columns", [64, 100, 50000])
def test_a_softmax_of_a_product(columns: int) -> None:
    x, w = torch.randn(5, 8), torch.randn(8, columns)
    torch.testing.assert_close(compiled(softmax_of_product)(x, w), softmax_of_product(x, w))
    assert noted(softmax_of_product, x, w) == ["div written over mm"]


def test_dynamic_sizes() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).tanh() @ w).softmax(-1) * 2

    run = torch.compile(f, backend="dynafuse", dynamic=True)
    for rows in (7, 64, 3, 100):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(run(x, W), f(x, W))
    notes = noted(f, X, W, dynamic=True)
    assert [note.split()[1:] for note in notes] == [["written", "over", "mm"], ["written", "over", "mm_1"]]


def test_one_operand_serves_one_result() -> None:
    def write(build: graphs.Builder, x: Node, w: Node) -> tuple[Node, ...]:
        a = product(build, x, w)
        return build.op("aten.tanh.default", a), build.op("aten.exp.default", a)

    found = checked(write, lambda x, w: ((x @ w).tanh(), (x @ w).exp()))
    assert len(found) == 1


def test_results_of_kernels_are_overwritten_in_turn() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = (x @ w).tanh()
        return (a @ w).exp() + a  # the product of a is overwritten, or a

    def write(build: graphs.Builder, x: Node, w: Node) -> Node:
        a = build.op("aten.tanh.default", product(build, x, w))
        return build.op("aten.add.Tensor", build.op("aten.exp.default", product(build, a, w)), a)

    first, second = checked(write, f)
    assert first == "tanh_default written over mm_default"
    assert second in ("add_tensor written over mm_default_1", "add_tensor written over tanh_default")


# ---------------------------------------------------------------------- what must stay


def later(build: graphs.Builder, x: Node, w: Node) -> tuple[Node, ...]:
    a = product(build, x, w)
    return build.op("aten.mm.default", build.op("aten.tanh.default", a), w), build.op("aten.mm.default", a, w)


def returned(build: graphs.Builder, x: Node, w: Node) -> tuple[Node, ...]:
    a = product(build, x, w)
    return build.op("aten.tanh.default", a), a


def returned_view(build: graphs.Builder, x: Node, w: Node) -> tuple[Node, ...]:
    a = product(build, x, w)
    return build.op("aten.tanh.default", a), build.op("aten.slice.Tensor", a, 0, 0, 4)


def view_read_later(build: graphs.Builder, x: Node, w: Node) -> tuple[Node, ...]:
    a = product(build, x, w)
    view = build.op("aten.t.default", a)
    return build.op("aten.mm.default", build.op("aten.tanh.default", a), w), build.op("aten.mm.default", w, view)


def given(build: graphs.Builder, x: Node, w: Node) -> Node:
    return build.op("aten.tanh.default", x)


def shifted(build: graphs.Builder, x: Node, w: Node) -> Node:
    a = product(build, x, w)
    return build.op("aten.add.Tensor", a, build.op("aten.flip.default", a, [0]))


def transposed(build: graphs.Builder, x: Node, w: Node) -> Node:
    a = product(build, x, w)
    return build.op("aten.clone.default", build.op("aten.add.Tensor", x, build.op("aten.t.default", a)),
                    memory_format=torch.contiguous_format)


def broadcast(build: graphs.Builder, x: Node, w: Node) -> Node:
    row = build.op("aten.slice.Tensor", product(build, x, w), 0, 0, 1)
    return build.op("aten.add.Tensor", x, row)


def narrower(build: graphs.Builder, x: Node, w: Node) -> Node:
    return build.op("aten._to_copy.default", product(build, x, w), dtype=torch.bfloat16)


def other_type(build: graphs.Builder, x: Node, w: Node) -> Node:
    return build.op("aten._to_copy.default", product(build, x, w), dtype=torch.int32)


def part_of_larger(build: graphs.Builder, x: Node, w: Node) -> Node:
    return build.op("aten.tanh.default", build.op("aten.slice.Tensor", product(build, x, w), 0, 0, 32))


def piece(build: graphs.Builder, x: Node, w: Node) -> Node:
    """One of the results of a call that makes several: what a convolution's input gets."""
    images = [build.op("aten.view.default", given, [1, 4, 32, 32]) for given in (x, w)]
    weight = build.op("aten.slice.Tensor", build.op("aten.view.default", w, [64, 4, 4, 4]), 0, 0, 4)
    weight = build.op("aten.slice.Tensor", build.op("aten.slice.Tensor", weight, 2, 0, 1), 3, 0, 1)
    gradients = build.op("aten.convolution_backward.default", *images, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
                         [True, True, False])
    return build.op(operator.getitem, gradients, 0)


def pulled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What ``piece`` computes."""
    weight = w.view(64, 4, 4, 4)[:4, :, :1, :1]
    return torch.nn.functional.conv_transpose2d(x.view(1, 4, 32, 32), weight)


def piece_view_returned(build: graphs.Builder, x: Node, w: Node) -> tuple[Node, ...]:
    a = build.op("aten.squeeze.dim", piece(build, x, w), 0)
    return build.op("aten.tanh.default", a), a


def piece_view_read_later(build: graphs.Builder, x: Node, w: Node) -> tuple[Node, ...]:
    a = piece(build, x, w)
    view = build.op("aten.view.default", a, [64, 64])
    return build.op("aten.tanh.default", a), build.op("aten.mm.default", view, w)


STAY: dict[str, tuple[Function, Function]] = {
    "read by a later step": (later, lambda x, w: ((x @ w).tanh() @ w, x @ w @ w)),
    "returned": (returned, lambda x, w: ((x @ w).tanh(), x @ w)),
    "a view is returned": (returned_view, lambda x, w: ((x @ w).tanh(), (x @ w)[:4])),
    "a view is read later": (view_read_later, lambda x, w: ((x @ w).tanh() @ w, w @ (x @ w).t())),
    "a view of one of several results is returned": (piece_view_returned, lambda x, w: (pulled(x, w)[0].tanh(), pulled(x, w)[0])),
    "a view of one of several results is read later": (
        piece_view_read_later, lambda x, w: (pulled(x, w).tanh(), pulled(x, w).view(64, 64) @ w)),
    "an input of the graph": (given, lambda x, w: x.tanh()),
    "read at another index, too": (shifted, lambda x, w: (x @ w) + (x @ w).flip(0)),
    "read in another order": (transposed, lambda x, w: x + (x @ w).t()),
    "read more than once": (broadcast, lambda x, w: x + (x @ w)[:1]),
    "of a wider dtype": (narrower, lambda x, w: (x @ w).bfloat16()),
    "of another dtype": (other_type, lambda x, w: (x @ w).int()),
    "larger": (part_of_larger, lambda x, w: (x @ w)[:32].tanh()),
}


@pytest.mark.parametrize("case", STAY)
def test_what_must_stay(case: str) -> None:
    write, expected = STAY[case]
    assert checked(write, expected) == []


def test_what_an_op_of_others_may_keep_stays() -> None:
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.clone()

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x @ w
        return torch.ops.dynafuse_test_buffers.keep(a), a.tanh()

    library = torch.library.Library("dynafuse_test_buffers", "FRAGMENT")
    library.define("keep(Tensor x) -> Tensor")
    library.impl("keep", keep, "CPU")
    library.impl("keep", torch.empty_like, "Meta")
    torch.testing.assert_close(compiled(f)(X, W), (X @ W, (X @ W).tanh()))
    torch.testing.assert_close(kept[0], X @ W)


# ---------------------------------------------------------------------- what the forward saves


def of_exponentials(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((x @ w).exp().sum(1) * v).sum()  # the product is saved, and its gradient has its size


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What backwards find out when they ask whether they may overwrite what was saved."""
    given: list[bool] = []

    def asked(tensor: torch.Tensor, references: int, elements: int = 0) -> bool:
        given.append(buffers.is_given_up(tensor, references, elements))
        return given[-1]

    monkeypatch.setattr(wrapper, "is_given_up", asked)
    return given


def leaves() -> tuple[torch.Tensor, ...]:
    return (X / 8).requires_grad_(), (W / 8).requires_grad_(), torch.randn(64)


def gradients(fn: Function, inputs: tuple[torch.Tensor, ...], **options: Any) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(fn(*inputs), inputs[:2], **options)


@pytest.mark.parametrize("retained", [False, True])
def test_a_backward_overwrites_what_was_saved_unless_the_graph_is_retained(retained: bool, answers: list[bool]) -> None:
    inputs = leaves()
    wanted = gradients(of_exponentials, inputs)
    loss = compiled(of_exponentials)(*inputs)
    found = [torch.autograd.grad(loss, inputs[:2], retain_graph=retained)]
    if retained:
        found.append(torch.autograd.grad(loss, inputs[:2]))
    assert answers == [False, True][1 - retained:]
    for gradient in found:
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(("begin", "is_over"), [(0, True), (4, True), (1, False), (2, False)])
def test_what_was_saved_is_overwritten_only_where_it_is_aligned(begin: int, is_over: bool) -> None:
    """A kernel writes 16 bytes at once; the input begins at that many elements of 4."""
    x = torch.randn(68)[begin:begin + 64].view(8, 8)
    plan = place(graphs.planned(graphs.built(lambda build, x: build.op("aten.exp.default", x), x)), resolve(), None)
    (region,) = plan.regions
    launches = lower(region.code).launches
    assert bool(buffers.reused_buffers(plan, lambda _: launches, offered=[0]).over) == is_over


def of_a_padded_head(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((x @ w).float(), v)


@pytest.mark.parametrize("has_room", [True, False])
def test_a_gradient_fills_the_gaps_between_rows_of_what_was_saved(
    has_room: bool, answers: list[bool], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of logits of 13 columns is padded to 16, in the memory of the logits, which are padded, too."""
    for size in (2, 4, 8):
        monkeypatch.setenv(f"DYNAFUSE_COST_CONTRACTION_SHARE_{size}", "1e-9")
    x, w = (torch.randn(sizes).bfloat16().requires_grad_() for sizes in ((64, 16), (16, 13)))
    inputs = x, w, torch.randint(0, 13, (64,))
    wanted = gradients(of_a_padded_head, inputs)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if has_room or tensor.size() != (64, 13):
            return tensor
        memory = torch.empty(63 * 16 + 13, dtype=tensor.dtype)
        return memory.as_strided((64, 13), (16, 1)).copy_(tensor)

    run = compiled(of_a_padded_head, executors="triton", cache=False)
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor) if not has_room else nullcontext():
        found = gradients(run, inputs)
    assert (False in answers) is not has_room and answers
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other)


def test_what_a_hook_on_saved_tensors_holds_stays(answers: list[bool]) -> None:
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    inputs, run = leaves(), compiled(of_exponentials)
    run(*inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run(*inputs)
    before = [tensor.clone() for tensor in kept]
    found = torch.autograd.grad(loss, inputs[:2])
    torch.testing.assert_close(found, gradients(of_exponentials, inputs))
    assert answers == [False]
    assert all(map(torch.equal, kept, before))


def test_what_is_saved_and_returned_stays(answers: list[bool]) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x @ w
        return (a.exp().sum(1) * v).sum(), a

    inputs = leaves()
    loss, a = compiled(f)(*inputs)
    before = a.detach().clone()
    torch.testing.assert_close(torch.autograd.grad(loss, inputs[:2]), gradients(of_exponentials, inputs))
    assert torch.equal(a, before)
    assert answers == []


def test_the_report_says_so() -> None:
    (note,) = noted(of_exponentials, *leaves())
    assert note.endswith(" written over mm, unless the graph is retained")
    assert not noted(of_exponentials, *leaves(), reuse_buffers=False)


def test_an_overwritten_input_is_right() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = (x @ w).tanh()
        x.add_(a)
        return a * 2 + x

    mine, theirs = X.clone(), X.clone()
    torch.testing.assert_close(compiled(f)(mine, W), f(theirs, W))
    torch.testing.assert_close(mine, theirs)


def test_sums_over_rows_that_another_kernel_finishes() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = (x @ w).exp()
        return a.sum(0), a * 2

    x, w = torch.randn(3000, 8), torch.randn(8, 16)
    torch.testing.assert_close(compiled(f)(x, w), f(x, w))
