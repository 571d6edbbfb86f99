"""Programs that write in place, return what they are given, and share memory: all that a caller sees is as in eager.

A case's arguments are made anew for every call, so that they may share memory with each other. Compared are values, strides,
gradients, which results and arguments share memory and which are one object, what the memory behind the arguments holds,
and which arguments were written to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse.lowering.inductor import availability
from tests.support.differential import Outcome, compare, compiled, run, tensors

Make = Callable[[], tuple[Any, ...]]
CASES: dict[str, tuple[Callable[..., Any], Make]] = {}
ROWS = torch.tensor([0, 2, 0])


def filled(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(0.1, 2, torch.Size(shape).numel()).view(shape).to(dtype, copy=True).requires_grad_(grad)


def one() -> tuple[Any, ...]:
    return (filled(4, 6),)


def leaf() -> tuple[Any, ...]:
    return (filled(4, 6, grad=True),)


def buffer_and_leaf() -> tuple[Any, ...]:
    return filled(4, 6), filled(4, 6, grad=True)


def two() -> tuple[Any, ...]:
    return filled(4, 6), filled(4, 6)


def views(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], grad: bool = False) -> Make:
    """Two views of one tensor; with gradients it is no leaf, and the leaf is the third argument."""
    def make() -> tuple[Any, ...]:
        root = filled(4, 4, grad=grad)
        shared = root * 1 if grad else root
        return (first(shared), second(shared), *([root] if grad else []))

    return make


def part(view: Callable[[Tensor], Tensor], *shape: int) -> Make:
    return lambda: (view(filled(*shape)),)


def case(*makes: Make) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the cases, once per way to make its arguments."""
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for number, make in enumerate(makes):
            CASES[function.__name__ + (f"_{number}" if len(makes) > 1 else "")] = function, make
        return function

    return add


# Writing to arguments through views --------------------------------------------------------------------------------------


@case(one)
def views_of_views(x):
    rows = x[1:]
    columns = rows[:, 2:]
    columns.add_(1)
    rows.mul_(3)
    return columns.sum(), rows * 2, x


@case(one)
def windows_are_read_after(x):
    windows = x.view(-1).unfold(0, 4, 2)
    x.mul_(2)
    return windows + 1, x.sum()


@case(one)
def in_a_loop(x):
    total = torch.zeros(6)
    for i in range(4):
        x[i].add_(i)
        total += x[i]
        x[:, i].mul_(2)
        x[i] = total
    return total


@case(one)
def rows_swap(x):
    x[0], x[1] = x[1].clone(), x[0].clone()
    return x + 1


@case(one)
def moved_within(x):
    x[1:] = x[:-1].clone()
    x.copy_(x.flip(0))
    square = x[:, :4]
    square.copy_(square.t().clone())
    x.add_(x.sum())
    return x.sum(0)


@case(one)
def pieces(x):
    for i, (row, half) in enumerate(zip(x.unbind(0), x.t().chunk(4), strict=False)):
        row.add_(i)
        half.mul_(2)
    left, right = x.split([2, 4], 1)
    left.copy_(right[:, :2])
    right[:, :2].copy_(left * 2)
    return x


@case(one)
def other_dtypes(x):
    numbers = x.view(torch.int32)
    before = x * 2
    numbers.add_(1)
    pairs = torch.view_as_complex(x.view(4, 3, 2))
    pairs.mul_(2)
    return before, torch.view_as_real(pairs) + 1, numbers, x


@case(one)
def masks_and_indices(x):
    x[x > 1.5] = 0
    x.masked_fill_(x < 0.5, -1)
    x[ROWS] = torch.ones(3, 6)
    x.index_add_(0, ROWS, torch.ones(3, 6))
    x.index_put_((ROWS,), torch.ones(3, 6), accumulate=True)
    x.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 9.0)
    return x * 2


@case(one)
def strided_at_will(x):
    shown = x.as_strided((2, 3), (1, 6))
    x.mul_(2)
    return shown + 1


@case(one)
def reads_between_writes(x):
    first = x[0] + 1
    x.mul_(2)
    second = x[0] + 1
    x.mul_(2)
    return first, second, x[0] + 1


@case(one)
def empty_parts(x):
    x[2:2].add_(1)
    x[:, 6:].mul_(2)
    return x + 1


@case(part(lambda m: m.t(), 4, 6), part(lambda m: m[:, ::2], 4, 6), part(lambda m: m[1:3, 1:4], 4, 6), part(lambda m: m[1:].t(), 5, 5))
def layouts(x):
    x.exp_()
    x[0] = 7
    return x * 2, x


@case(part(lambda m: m[:1].expand(4, 6), 1, 6), part(lambda m: m.as_strided((3, 3), (2, 1)), 12))
def overlapping_arguments_are_read(x):
    return x * 2, x.sum(0), x


# Results that are arguments, or each other --------------------------------------------------------------------------------


@case(one, leaf)
def arguments_come_back(x):
    return x, x, x.t(), x[0], x * 2


@case(one)
def written_and_returned(x):
    x.add_(1)
    return x, x.view(-1)[3:], x.clone().view(-1)


@case(one, leaf)
def results_share_memory(x):
    y = x * 2
    return y, y.t(), y[1:], y.view(-1)


@case(one)
def results_share_what_is_written(x):
    y = x * 2
    row, flipped = y[1], y.t()
    flipped.add_(1)
    return y, row, flipped


@case(one)
def views_that_change_nothing(x):
    return x.view(4, 6), x.expand(4, 6), x[:], x.contiguous(), x.to(torch.float32), x.detach()


@case(one)
def copies_are_no_views(x):
    casts, powers, ones = x.to(torch.float32, copy=True), x.pow(1), x * 1
    shown = casts.view(-1), powers[1:], ones.t()
    x.add_(1)
    return *shown, x


@case(one)
def equal_results_are_two(x):
    return x.sin(), x.sin(), x.sin().t(), x.clone(), x.clone()


@case(one)
def reshapes_that_copy_or_not(x):
    same, copy = x.reshape(-1), x.t().reshape(-1)
    same.add_(1)
    copy.add_(1)
    return x, same, copy


@case(one)
def sizes_in_place(x):
    y = (x * 2).unsqueeze_(0)
    y.squeeze_().t_()
    y.add_(1)
    return y


# Several arguments in one memory ------------------------------------------------------------------------------------------


@case(views(lambda t: t, lambda t: t), views(lambda t: t, lambda t: t.t()), views(lambda t: t[:3], lambda t: t[1:]),
      views(lambda t: t[:2], lambda t: t.view(-1)[4:].view(3, 4)), views(lambda t: t[:2], lambda t: t[2:]))
def arguments_share_memory(a, b):
    a[0].add_(1)
    b[:, 0].mul_(3)
    return a.sum() + b.sum(), b


@case(views(lambda t: t, lambda t: t, True), views(lambda t: t[:3], lambda t: t[1:], True), views(lambda t: t, lambda t: t.t(), True))
def arguments_share_memory_and_a_gradient(a, b, root):
    a.mul_(2)
    return (b * 3).sin(), a


@case(lambda: (lambda t: (t, t))(filled(4, 6, grad=True)), lambda: (lambda t: (t, t.detach()))(filled(4, 6, grad=True)))
def one_argument_twice(a, b):
    return a, b, a * b


@case(two)
def swapped(a, b):
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept * 2)
    return kept + 1, b, a


@case(lambda: (filled(4, 6), filled(4, 6, dtype=torch.float64), filled(4, 6, dtype=torch.int64), filled(4, 6) > 1))
def copies_between_dtypes(a, b, c, mask):
    a.copy_(b)
    b.copy_(a * 2)
    c.copy_(a * 3)
    mask.logical_not_()
    mask |= a > 1.5
    return a + b, c * 2, mask


@case(two)
def given_as_out(x, out):
    torch.mul(x[0], 2, out=out[1])
    torch.add(x, out, out=out)
    return out * 2


@case(lambda: ([filled(4), filled(3, 2)], [filled(4), filled(3, 2)], [filled(4), filled(3, 2)]))
def foreach_optimizer(parameters, means, squares):
    torch._foreach_lerp_(means, parameters, 0.1)
    torch._foreach_mul_(squares, 0.9)
    torch._foreach_addcmul_(squares, parameters, parameters, 0.1)
    torch._foreach_addcdiv_(parameters, means, torch._foreach_add(torch._foreach_sqrt(squares), 1e-3), -0.01)
    return torch._foreach_norm(parameters)


@case(lambda: ({"a": filled(4), "b": [filled(3), filled(2, 2)]},))
def nested(tree):
    tree["a"].add_(1)
    tree["b"][0].mul_(tree["a"][0])
    return {"a": tree["a"], "t": tree["b"][1].t()}


@case(lambda: (torch.tensor(3), torch.tensor(3.0), filled(1), filled(4, 6)))
def counters(count, scale, single, x):
    count.add_(1)
    scale += 1
    single.add_(x.sum())
    return x * count * scale, single.expand(3), count


@case(lambda: (filled(3, 4, 6), torch.tensor([1]), filled(3, 1, 6)))
def cache_of_keys(cache, position, new):
    cache.index_copy_(1, position, new)
    return cache * 2, cache[:, :2]


# With gradients -----------------------------------------------------------------------------------------------------------


@case(leaf)
def in_place_on_what_is_computed(x):
    y = x.sin()
    row = y[1]
    row.mul_(2)
    y[:, 1] = y[:, 0] * 2
    y[0] += x[1]
    return y.exp(), row, F.relu(y - 1, inplace=True)


@case(leaf)
def base_written_after_its_view(x):
    y = x.sin()
    row = y[1]
    y.mul_(2)
    return row.exp(), y


@case(leaf)
def without_gradient(x):
    y = x * 2
    detached = y.detach()
    detached.add_(1)
    with torch.no_grad():
        z = y.sin()
    return y, detached, x.detach(), z, x > 1, x.long()


@case(leaf)
def detached_beside_a_view(x):
    """All three share memory; the gradient comes through the view alone."""
    computed = x * 2
    return computed.detach(), computed.unsqueeze(0), computed.view(4, 6).detach()


@case(leaf)
def leaf_written_under_no_grad(x):
    y = (x * 2).sum()
    with torch.no_grad():
        x.mul_(2)
        x[1:3].add_(1)
    return x.sin(), y


@case(buffer_and_leaf)
def buffer_gets_a_gradient(b, x):
    b.mul_(x)
    return b.sin(), x * 1


@case(buffer_and_leaf)
def view_of_a_buffer_gets_a_gradient(b, x):
    b[1:3].mul_(x[1:3])
    b[:, 0].copy_(x[:, 1].sin())
    return (b * x).sum(), b, b.t()


@case(buffer_and_leaf)
def buffer_under_no_grad(b, x):
    y = x.sin()
    with torch.no_grad():
        b.lerp_(y, 0.1)
        b[1].copy_(F.normalize(x @ x[0], dim=0).repeat(2)[:6])
        norm = b.clone()
    return (y - norm).square().mean()


@case(buffer_and_leaf)
def buffer_read_before_and_after(b, x):
    old = b[1].clone()
    b[:, 2:4] = x[:, :2].detach()
    return (b[:, :4] * x[:, :4]).sum() * x[0], old, b[1]


class _Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class _SavesAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp() * b
        ctx.save_for_backward(x, y, b)
        return y, y.view(-1)[1:].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, y, b = ctx.saved_tensors
        return grad * y + x * rest.sum(), grad * y / b


@case(leaf)
def marked_dirty(x):
    y = x * 1
    z = _Dirty.apply(y)
    return z.sin(), y.cos()


@case(lambda: (filled(4, 6, grad=True), filled(4, 6, grad=True)))
def saved_inputs_and_outputs(x, b):
    y, rest = _SavesAll.apply(x, b)
    return y.sin(), rest, x, y * b


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.view(4, 6), lambda y: y.t(), lambda y: y[1:]])
def test_writing_to_what_is_saved_is_an_error(view: Callable[[Tensor], Tensor]) -> None:
    """The detached result shares memory with what the backward reads."""
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return view(y).detach(), y.sum()

    (x,) = leaf()
    detached, total = compiled(function)(x)
    detached.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


# Ops that write -----------------------------------------------------------------------------------------------------------


def _shift(x: Tensor, by: Tensor) -> None:
    x.add_(by).mul_(2)


def _both(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(1) + y.mul_(x)


def _scale(xs: list[Tensor], by: float) -> None:
    torch._foreach_mul_(xs, by)


@pytest.fixture(scope="module", autouse=True)
def _ops_that_write() -> Iterator[None]:
    with torch.library._scoped_library("dynafuse_aliasing", "FRAGMENT") as library:
        library.define("shift_(Tensor(a!) x, Tensor by) -> ()")
        library.impl("shift_", _shift, "CompositeExplicitAutograd")
        library.define("both_(Tensor(a!) x, Tensor(b!) y) -> Tensor")
        library.impl("both_", _both, "CPU")
        library.impl("both_", lambda x, y: torch.empty_like(x), "Meta")
        library.define("scale_(Tensor(a!)[] xs, float by) -> ()")
        library.impl("scale_", _scale, "CompositeExplicitAutograd")
        yield


@case(two)
def op_writes_between_reads(x, b):
    y = x * 2
    torch.ops.dynafuse_aliasing.shift_(x, b)
    z = x + 1
    torch.ops.dynafuse_aliasing.shift_(x, z)
    return y, z, x * b


@case(two)
def op_writes_to_a_view(x, b):
    rows, y = x[1:3], x * 2
    torch.ops.dynafuse_aliasing.shift_(rows, b[:2])
    torch.ops.dynafuse_aliasing.shift_(y, b)
    return rows * 1, x.sum(), y.t() + 1, y


@case(two)
def op_writes_to_two(x, y):
    product = x * y
    z = torch.ops.dynafuse_aliasing.both_(x, y)
    return z, product, x * y, torch.ops.dynafuse_aliasing.both_(x[:2], x[2:])


@case(two)
def op_writes_to_a_list(a, b):
    torch.ops.dynafuse_aliasing.scale_([a[0], b, a[1]], 3.0)
    return a + b


# The comparison -----------------------------------------------------------------------------------------------------------


def seen(call: Callable[..., Any], make: Make) -> tuple[Outcome, list[Tensor], list[bool], list[tuple[int, int]]]:
    """What a caller sees: the outcome, the memory behind the arguments, which were written to, which values are one object."""
    arguments = make()
    given = tensors(arguments)
    behind = [tensor if tensor._base is None else tensor._base for tensor in given]
    versions = [tensor._version for tensor in given]
    outcome = run(call, arguments)
    values = tensors(outcome.result) + given
    same = [(i, j) for (i, a), (j, b) in itertools.combinations(enumerate(values), 2) if a is b]
    written = [tensor._version > version for tensor, version in zip(given, versions, strict=True)]
    return outcome, [tensor.detach().clone() for tensor in behind], written, same


def same_as_eager(name: str, **options: Any) -> None:
    function, make = CASES[name]
    call = compiled(function, **options)
    eager, behind, written, same = seen(function, make)
    for _ in range(2):
        ours = seen(call, make)
        compare(ours[0], eager)
        torch.testing.assert_close(ours[1], behind)
        assert ours[2:] == (written, same)


@pytest.mark.parametrize("name", CASES)
def test_static(name: str) -> None:
    same_as_eager(name)


@pytest.mark.parametrize("name", list(CASES)[::3])
def test_dynamic(name: str) -> None:
    same_as_eager(name, dynamic=True)


@pytest.mark.skipif(not availability.find("cpu").available, reason="Inductor has no C++ compiler")
@pytest.mark.parametrize("name", ["layouts_1", "results_share_what_is_written", "buffer_gets_a_gradient"])
def test_in_cpp(name: str) -> None:
    same_as_eager(name, executors="inductor")
