"""The cases of ``tests/support/cases.py`` against eager, and what cannot be written as a case: random numbers, higher-order ops,
graph breaks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.cases import CASES, Case, Maker
from tests.support.differential import check, compare, compiled, copies, regions, run
from tests.support.graphs import recorded


def parameters(*dtypes: torch.dtype, places_once: bool = False) -> list[Any]:
    """Every case in every dtype; one whose arguments have dtypes of their own once, and so one about places if that is enough."""
    return [
        pytest.param(case, dtype, id=f"{case.name}-{str(dtype)[6:]}",
                     marks=[pytest.mark.xfail(strict=True, reason=case.known)] if case.known else [])
        for case in CASES for dtype in (dtypes if not once(case, dtypes, places_once) else dtypes[:1])
    ]


def once(case: Case, dtypes: tuple[torch.dtype, ...], places_once: bool) -> bool:
    return (case.places and places_once) or made(case, dtypes[0]) == made(case, dtypes[-1])


def made(case: Case, dtype: torch.dtype) -> list[torch.dtype]:
    """The dtypes of a case's tensors."""
    arguments = torch.utils._pytree.tree_leaves(case.build(Maker("cpu", dtype)))
    return [argument.dtype for argument in arguments if isinstance(argument, torch.Tensor)]


@pytest.mark.parametrize(("case", "dtype"), parameters(torch.float32, torch.bfloat16, places_once=True))
def test_case(case: Case, dtype: torch.dtype) -> None:
    arguments = case.build(Maker("cpu", dtype))
    check(case.function, *arguments, grad=case.grad, precise=case.precise)


# ---------------------------------------------------------------------- random numbers


def masks_agree(probability: float, x: torch.Tensor) -> None:
    """Dropped elements have no gradient, kept ones the scale."""
    call = compiled(lambda x: F.dropout(x, probability, training=True) * 1)
    out = call(x)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    kept = out != 0
    torch.testing.assert_close(gradient, kept / (1 - probability), check_dtype=False)
    torch.testing.assert_close(out, x * gradient)
    assert abs(kept.double().mean().item() - (1 - probability)) < 4 * (probability * (1 - probability) / x.numel()) ** 0.5


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_has_one_mask_for_forward_and_backward(probability: float) -> None:
    masks_agree(probability, torch.randn(40, 130).abs().add(0.1).requires_grad_())


def test_dropout_at_the_ends() -> None:
    x = torch.randn(7, 130, requires_grad=True)
    # Times two: eager returns its very input, torch.compile a copy of it, whatever the backend.
    check(lambda x: (F.dropout(x, 0.0) * 2, F.dropout(x, 1.0) * 2, F.dropout(x, 0.5, training=False) * 2), x)


def test_random_numbers_differ_between_calls_and_repeat_under_a_seed() -> None:
    call = compiled(lambda x: (F.dropout(x, 0.5), torch.rand_like(x), torch.randn_like(x), torch.rand(130), torch.randint_like(x, 5)))
    x = torch.ones(9, 130)
    torch.manual_seed(3)
    first, second = call(x), call(x)
    torch.manual_seed(3)
    again = call(x)
    for a, b, c in zip(first, second, again, strict=True):
        assert not torch.equal(a, b)
        assert torch.equal(a, c)
    assert not torch.equal(first[1][0], first[3]) and not torch.equal(first[1] > 0.5, first[0] > 0)


def test_random_numbers_are_distributed_as_they_should_be() -> None:
    uniform, normal, dice = compiled(lambda x: (torch.rand_like(x), torch.randn_like(x), torch.randint(-2, 4, (20000,))))(torch.empty(20000))
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.003
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03 and abs((normal**4).mean() - 3) < 0.4
    assert (dice.bincount(minlength=4) if dice.min() >= 0 else (dice + 2).bincount(minlength=6)).double().sub(20000 / 6).abs().max() < 300


def test_eager_random_numbers_on_request() -> None:
    check(lambda x: (F.dropout(x, 0.5), torch.rand_like(x) + x, x.detach().bernoulli(0.3)), torch.rand(9, 130).requires_grad_(), fallback_random=True, precise=False)


def test_two_dropouts_of_one_tensor_differ() -> None:
    a, b = compiled(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)))(torch.ones(9, 130))
    assert not torch.equal(a, b)


# ---------------------------------------------------------------------- options that change numbers


def test_round_like_eager_gives_eagers_bits() -> None:
    x, y = torch.randn(7, 130).bfloat16(), torch.randn(130).bfloat16()
    for function in (lambda x, y: ((x + y) * y - x) * 3, lambda x, y: (x.float().to(torch.float16) * 2 + y).float(), lambda x, y: torch.where(x > y, x * y, x - y)):
        torch._dynamo.reset()
        assert torch.equal(compiled(function, round_like_eager=True)(x, y), function(x, y))


# ---------------------------------------------------------------------- graphs in pieces


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, (16,)) @ weight) + x


X, W = (7, 16), (16, 16)


def test_checkpointed_blocks() -> None:
    from torch.utils.checkpoint import checkpoint

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(block, x, weight, use_reentrant=False)
        return x.sin()

    check(function, torch.randn(X, requires_grad=True), torch.randn(W, requires_grad=True))


def test_checkpointed_dropout_draws_its_mask_again() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(9, 130).abs().add(0.1).requires_grad_()
    out = compiled(lambda x: checkpoint(lambda t: F.dropout(t.exp().log(), 0.5), x, use_reentrant=False) * 1)(x)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(gradient, (out != 0) * 2.0)


def test_nested_compile_region() -> None:
    region = torch.compiler.nested_compile_region(block)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return region(region(region(x, weight), weight), weight).sin()

    with recorded() as graphs:
        torch._dynamo.reset()
        call = compiled(function)
        arguments = (torch.randn(X, requires_grad=True), torch.randn(W, requires_grad=True))
        ours = run(call, copies(arguments))
    compare(ours, run(lambda x, w: block(block(block(x, w), w), w).sin(), copies(arguments)),
            run(lambda x, w: block(block(block(x, w), w), w).sin(), copies(arguments, torch.float64)))
    assert regions(graphs)


def test_cond() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin() + 1, lambda t: t.cos() * 2, (x * 3,)) + x

    check(function, torch.rand(7, 130))
    check(function, -torch.rand(7, 130))


def test_autograd_functions() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = context.saved_tensors
            return gradient * 2 + x * 0

    check(lambda x: Twice.apply(x.sin()).exp(), torch.randn(7, 130, requires_grad=True))


def test_graph_breaks() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.softmax(-1)
        torch._dynamo.graph_break()
        z = y.sum(0) * 2
        if z.max().item() > 1e9:
            return z
        return z + x.mean(0)

    assert len({id(g.regions) for g in check(function, torch.randn(7, 130, requires_grad=True), fullgraph=False)}) >= 4


def test_gradients_of_gradients_are_refused_by_torch_or_right() -> None:
    x = torch.randn(130, requires_grad=True)
    first = torch.autograd.grad(compiled(lambda x: x.sin() * x)(x).sum(), x)[0]
    torch.testing.assert_close(first, x.cos() * x + x.sin())


def test_no_grad_and_inference_mode() -> None:
    x = torch.randn(7, 130)
    call = compiled(lambda x: x.softmax(-1) * 2)
    expected = x.softmax(-1) * 2
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(call(x), expected)


def test_autocast() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.layer_norm((x @ w).relu(), (16,)).softmax(-1)

    check(function, torch.randn(X, requires_grad=True), torch.randn(W, requires_grad=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_complex_numbers(dynamic: bool) -> None:
    """The gradient takes the conjugate of a number, which is a view by its schema, but one of nothing."""
    x = torch.randn(5, 2, requires_grad=True)
    check(lambda x: torch.view_as_real(torch.view_as_complex(x) * (3 + 2j)) * 2, x, dynamic=dynamic)


def test_repeated_calls_see_new_values() -> None:
    call = compiled(lambda x, y: x * y + y.sum())
    for _ in range(3):
        x, y = torch.randn(7, 130), torch.randn(130)
        torch.testing.assert_close(call(x, y), x * y + y.sum())


def test_misaligned_inputs() -> None:
    memory = torch.randn(1031)
    call = compiled(lambda x: x * 2 + x.sum())
    for start in (0, 1, 2, 3):
        x = memory[start:start + 1028]
        torch.testing.assert_close(call(x), x * 2 + x.sum())


def test_gradients_accumulate_into_leaves() -> None:
    x = torch.randn(7, 130, requires_grad=True)
    call = compiled(lambda x: (x * x).sum(1))
    for _ in range(2):
        call(x).sum().backward()
    torch.testing.assert_close(x.grad, 4 * x.detach())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [(4, 6), (1, 5)], ids=str)
def test_adaptive_pooling_to_fewer_as_many_and_more_places(size: tuple[int, int], dynamic: bool) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        pooled = [F.adaptive_avg_pool2d(x.sin(), (rows, columns)) for rows in (1, 3, 4, 8) for columns in (3, 5, 6, 12)]
        pooled += [F.adaptive_max_pool2d(x.sin(), (8, 3)), F.adaptive_avg_pool1d(x[0].sin(), 12), F.adaptive_avg_pool3d(x.sin(), (6, 2, 12))]
        return [pool * 2 for pool in pooled]

    check(function, torch.randn(2, 3, *size, requires_grad=True), dynamic=dynamic)


@pytest.mark.parametrize(("dtype", "numbers"), [(torch.float64, (3.3, -2.7)), (torch.int64, (3, 5)), (torch.bool, (True, False))], ids=str)
def test_a_choice_of_two_numbers_has_their_dtype(dtype: torch.dtype, numbers: tuple[float, float]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = (torch.full((4,), number, dtype=dtype, device=x.device) for number in numbers)
        return tuple(t * numbers[0] * 1_000_000_000 for t in (F.pad(first, [1, -1], value=numbers[1]), torch.cat([first, second]),
                                                 torch.where(x > 0, first, second)))

    check(function, torch.linspace(-1, 1, 4), executors="triton", precise=False)
