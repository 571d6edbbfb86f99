"""The generated function of a graph: what it frees and when, alignment, sizes, and its arguments."""

from __future__ import annotations

import itertools
import operator
import re
import weakref
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse import backend
from dynafuse.runtime import wrapper
from tests.support import graphs

X, W = torch.randn(8, 8), torch.randn(8, 8)


def source(run: graphs.Run) -> list[str]:
    return [line.strip() for line in run.call.source.splitlines()]  # type: ignore[attr-defined]


def position(lines: list[str], pattern: str) -> int:
    return next(k for k, line in enumerate(lines) if re.search(pattern, line))


def products(build: graphs.Builder, x: Node, w: Node) -> Node:
    """Three fused steps between two products."""
    a = build.op("aten.mm.default", build.op("aten.relu.default", x), w)
    return build.op("aten.neg.default", build.op("aten.mm.default", build.op("aten.exp.default", a), w))


def test_it_computes_what_the_graph_does() -> None:
    module = graphs.built(products, X, W)
    (found,) = graphs.compiled(module, [X, W]).call([X, W])
    torch.testing.assert_close(found, -((X.relu() @ W).exp() @ W))


def test_buffers_are_freed_at_their_last_use() -> None:
    lines = source(graphs.compiled(graphs.built(products, X, W), [X, W]))
    uses = {"relu_default": "^mm_default = ", "mm_default": r"k_\w*exp", "exp_default": "^mm_default_1 ="}
    for name, last in uses.items():
        freed = position(lines, rf"^del .*\b{name}\b")
        assert position(lines, last) < freed
        assert not any(re.search(rf"\b{name}\b", line) for line in lines[freed + 1:])
    assert position(lines, r"^del .*\barg0\b") < position(lines, "^mm_default =")
    assert not any(re.search(r"^del .*\bneg_default\b", line) for line in lines)


def test_inputs_die_inside_the_call() -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def probe(tensor: torch.Tensor) -> torch.Tensor:
        alive.extend(reference() is not None for reference in held)
        return tensor + 1

    def write(build: graphs.Builder, x: Node, w: Node) -> Node:
        return build.op(probe, build.op("aten.mm.default", build.op("aten.relu.default", x), w))

    run = graphs.compiled(graphs.built(write, X, W), [X, W])
    arguments = [X.clone(), W.clone()]
    held += [weakref.ref(argument) for argument in arguments]
    run.call(arguments)
    assert alive == [False, False]


def test_arguments_are_boxed() -> None:
    run = graphs.compiled(graphs.built(products, X, W), [X, W])
    assert run.call._boxed_call  # type: ignore[attr-defined]
    arguments = [X, W]
    run.call(arguments)
    assert arguments == []


def test_a_graph_without_inputs_runs() -> None:
    run = graphs.compiled(graphs.built(lambda b: b.op("aten.full.default", [3], 2.0)))
    assert run.call([])[0].tolist() == [2.0, 2.0, 2.0]
    assert run.call(())[0].tolist() == [2.0, 2.0, 2.0]  # type: ignore[arg-type]  # as torch calls such a graph at places


def test_every_call_has_memory_of_its_own() -> None:
    run = graphs.compiled(graphs.built(products, X, W), [X, W])
    (first,), (second,) = run.call([X, W]), run.call([-X, W])
    assert first.data_ptr() != second.data_ptr() and not torch.equal(first, second)


# Alignment ------------------------------------------------------------------------------------------------------------


def misaligned(shape: tuple[int, ...] = (8, 8)) -> torch.Tensor:
    """A tensor whose address is no multiple of 16 bytes."""
    made = torch.randn(shape[0] * shape[1] + 1)[1:].view(shape)
    assert made.data_ptr() % 16
    return made


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that kernels are launched with."""
    from dynafuse.lowering.triton import launch

    seen: list[int] = []
    bind = launch._interpreted

    def recorded(function: Any, kernel: Any, places: Any) -> Any:
        call = bind(function, kernel, places)

        def wrapped(stream: Any, x: int, y: int, z: int, *arguments: Any) -> None:
            seen.extend(a.data_ptr() for a in arguments if isinstance(a, torch.Tensor))
            call(stream, x, y, z, *arguments)

        return wrapped

    monkeypatch.setattr(launch, "_interpreted", recorded)
    return seen


def exp(build: graphs.Builder, x: Node) -> Node:
    return build.op("aten.exp.default", x)


def overwrite(build: graphs.Builder, x: Node) -> Node:
    return build.op("aten.copy_.default", x, build.op("aten.exp.default", x))


@pytest.mark.parametrize("turn", [lambda t: t, torch.t, lambda t: t[:1].expand(8, 8), lambda t: t[:, ::2]])
def test_an_input_that_is_less_aligned_than_it_was_is_copied(turn: Any, addresses: list[int]) -> None:
    seen, x = turn(torch.randn(8, 8)), turn(misaligned())
    (found,) = graphs.compiled(graphs.built(exp, seen), [seen]).call([x])
    assert addresses and not any(address % 16 for address in addresses)
    torch.testing.assert_close(found, x.exp())


@pytest.mark.parametrize(("seen", "given", "stays"), [
    (1, 1, True), (1, 0, True), (1, 2, True), (2, 2, True), (2, 0, True), (2, 6, True), (2, 4, True), (2, 1, False),
    (2, 3, False), (4, 4, True), (4, 2, False), (0, 2, False),
])
def test_kernels_assume_of_an_input_what_was_seen(seen: int, given: int, stays: bool, addresses: list[int]) -> None:
    """Inputs begin at that many elements of 4 bytes."""
    first, x = (torch.randn(72)[offset:offset + 64].view(8, 8) for offset in (seen, given))
    (found,) = graphs.compiled(graphs.built(exp, first), [first]).call([x])
    assert (x.data_ptr() in addresses) == stays
    torch.testing.assert_close(found, x.exp())


def test_a_misaligned_input_that_a_kernel_overwrites_is_copied_back(addresses: list[int]) -> None:
    x = misaligned()
    before = x.clone()
    (found,) = graphs.compiled(graphs.built(overwrite, X), [X]).call([x])
    assert addresses and not any(address % 16 for address in addresses)
    torch.testing.assert_close(x, before.exp())
    assert found.data_ptr() == x.data_ptr()


def test_an_input_that_was_seen_misaligned_is_overwritten_where_it_is(addresses: list[int]) -> None:
    x = misaligned()
    before = x.clone()
    run = graphs.compiled(graphs.built(overwrite, x), [x])
    (found,) = run.call([x])
    assert set(addresses) == {x.data_ptr()}
    torch.testing.assert_close(x, before.exp())
    assert found.data_ptr() == x.data_ptr()


def test_a_slice_that_a_forward_saves_is_read_where_it_is(addresses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it begins is known when the backward is compiled: it is neither copied, nor written over as if it were aligned."""
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(wrapper, "aligned", lambda tensor: copied.append(tensor))
    w, v = (torch.randn(13, 13, requires_grad=True) for _ in range(2))

    def function(x: torch.Tensor) -> torch.Tensor:
        left, right = (x @ w).split([5, 8])
        return left.sin().sum() + right.sin().sum() + (right @ v).sum()

    ours, eager = (torch.ones(13, 13).div_(3).requires_grad_() for _ in range(2))
    torch.compile(function, backend="dynafuse", options={"executors": "triton"})(ours).backward()
    function(eager).backward()
    torch.testing.assert_close(ours.grad, eager.grad)
    assert not copied
    assert any(address % 16 for address in addresses)


def _eager(x: torch.Tensor, place: torch.Tensor) -> None:
    x[x < 0] = 0.25


def _kernel(x: torch.Tensor, place: torch.Tensor) -> None:
    x[place % len(x)] = -2.0


ORDERS = [order for count in (1, 2, 3) for order in itertools.product((_eager, _kernel), repeat=count)]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(write.__name__ for write in order))
@pytest.mark.parametrize("reads", ["", "before", "after"])
@pytest.mark.parametrize("offset", [0, 1])
def test_an_input_that_kernels_and_eager_ops_write_to_in_turn(order: Any, reads: str, offset: int) -> None:
    """A kernel may have an aligned copy of it, which must not be lost, nor be older than the input."""
    def function(x: torch.Tensor, place: torch.Tensor) -> Any:
        before = x * 2 if reads == "before" else None
        for write in order:
            write(x, place)
        return before, (x.exp() if reads == "after" else None)

    memory, place = torch.randn(65), torch.tensor([3, 40, 7])
    x, expected = memory.clone()[offset:offset + 64], memory.clone()[offset:offset + 64]
    found = torch.compile(function, backend="dynafuse", fullgraph=True, options={"executors": "triton"})(x, place)
    torch.testing.assert_close(found, function(expected, place))
    assert torch.equal(x, expected)


@pytest.mark.parametrize("turn", [lambda t: t, torch.t, lambda t: t[2:]])
def test_dropout_as_in_eager_reads_a_misaligned_input_where_it_is(turn: Any, addresses: list[int],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """How many numbers a CUDA device draws at a time depends on the alignment of what is dropped."""
    def function(x: torch.Tensor) -> Any:
        return x * 2, torch.nn.functional.dropout(turn(x), 0.5), x + 1

    dropped: list[int] = []
    called = wrapper._called

    def recorded(target: Any) -> Any:
        if target is not torch.ops.aten.native_dropout.default:
            return called(target)
        return lambda x, *others: (dropped.append(x.data_ptr()), target(x, *others))[1]

    monkeypatch.setattr(wrapper, "_called", recorded)
    compiled = torch.compile(function, backend="dynafuse", fullgraph=True,
                             options={"executors": "triton", "fallback_random": True})
    compiled(X)  # as which it is aligned
    dropped.clear()
    x = misaligned()
    torch.manual_seed(4)
    found = compiled(x)
    assert dropped == [turn(x).data_ptr()] and not any(address % 16 for address in addresses)
    torch.manual_seed(4)
    torch.testing.assert_close(found, function(x))


def test_a_parameter_that_is_misaligned_in_its_memory_stays_there(addresses: list[int]) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.nn.Parameter(torch.randn(65))
            self.scale = torch.nn.Parameter(flat.detach()[1:].view(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp() * self.scale

    module = Scaled()
    assert module.scale.data_ptr() % 16
    found = torch.compile(module, backend=backend.dynafuse)(X)
    assert module.scale.data_ptr() in addresses
    torch.testing.assert_close(found, X.exp() * module.scale)


def test_a_misaligned_result_of_an_eager_op_is_copied(addresses: list[int]) -> None:
    def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)

    module = graphs.built(lambda b, x: b.op("aten.neg.default", b.op(off_by_one, x)), X)
    (found,) = graphs.compiled(module, [X]).call([X])
    assert addresses and not any(address % 16 for address in addresses)
    assert torch.equal(found, -X)


def test_an_aligned_input_is_not_copied(addresses: list[int]) -> None:
    run = graphs.compiled(graphs.built(lambda b, x: b.op("aten.exp.default", x), X), [X])
    run.call([X])
    assert X.data_ptr() in addresses


def test_an_overwritten_input_is_written_in_place(addresses: list[int]) -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        return build.op("aten.copy_.default", x, build.op("aten.exp.default", x))

    x = X.clone()
    (found,) = graphs.compiled(graphs.built(write, x), [x]).call([x])
    torch.testing.assert_close(x, X.exp())
    assert found.data_ptr() == x.data_ptr()


# Sizes ----------------------------------------------------------------------------------------------------------------


def total(build: graphs.Builder, x: Node) -> list[Node]:
    return [build.op("aten.exp.default", x), build.op("aten.sum.dim_IntList", x, [0])]


def test_one_function_serves_all_sizes() -> None:
    run = graphs.compiled(graphs.built(total, X, dynamic=True), [X])
    for shape in ((8, 8), (3, 5), (70, 130), (2, 1030)):
        x = torch.randn(shape)
        exp, added = run.call([x])
        torch.testing.assert_close(exp, x.exp())
        torch.testing.assert_close(added, x.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_tensor_of_dynamic_size_launches_nothing(shape: tuple[int, int]) -> None:
    run = graphs.compiled(graphs.built(lambda b, x: b.op("aten.exp.default", x), X, dynamic=True), [X])
    assert run.call([torch.empty(shape)])[0].shape == shape


def test_a_sum_over_no_rows_is_zero() -> None:
    run = graphs.compiled(graphs.built(lambda b, x: b.op("aten.sum.dim_IntList", x, [0]), X, dynamic=True), [X])
    assert run.call([torch.empty(0, 5)])[0].tolist() == [0.0] * 5


def test_sizes_can_be_arguments() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        rows = build.op(torch.ops.aten.sym_size.int, x, 0)
        return build.op("aten.add.Tensor", build.op("aten.full.default", [rows, 3], 1.5), rows)

    run = graphs.compiled(graphs.built(write, X, dynamic=True), [X])
    assert run.call([torch.empty(5, 2)])[0].tolist() == [[6.5] * 3] * 5


# Views and outputs ----------------------------------------------------------------------------------------------------


def test_views_of_inputs_and_results_are_views() -> None:
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        made = build.op("aten.exp.default", x)
        return [build.op("aten.permute.default", x, [1, 0]), build.op("aten.slice.Tensor", made, 0, 2, 5), made]

    x = X.clone()
    turned, piece, whole = graphs.compiled(graphs.built(write, x), [x]).call([x])
    assert turned.data_ptr() == x.data_ptr() and torch.equal(turned, x.t())
    assert piece.data_ptr() == whole[2:].data_ptr() and torch.equal(piece, whole[2:5])


def test_an_output_may_be_an_input_a_constant_or_twice_the_same() -> None:
    def write(build: graphs.Builder, x: Node) -> list[Any]:
        made = build.op("aten.exp.default", x)
        return [x, made, made, None, 3]

    x = X.clone()
    same, first, second, nothing, three = graphs.compiled(graphs.built(write, x), [x]).call([x])
    assert same is x and first is second and nothing is None and three == 3


@pytest.mark.parametrize("name", ["args", "call", "lambda", "c_0", "empty", "s0"])
def test_names_of_nodes_do_not_clash_with_the_functions(name: str) -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        made = build.op("aten.sort.default", build.op("aten.exp.default", x))
        made.name = name
        return build.op(operator.getitem, made, 0)

    (found,) = graphs.compiled(graphs.built(write, X), [X]).call([X])
    torch.testing.assert_close(found, X.exp().sort()[0])


@pytest.mark.parametrize(("kind", "device", "expected"), [("*bf16", 0, "x.data_ptr()"), ("*bf16", None, "x"), ("i32", 0, "x")])
def test_launchers_get_addresses_and_the_interpreter_tensors(kind: str, device: int | None, expected: str) -> None:
    assert wrapper._passed("x", kind, device) == expected
