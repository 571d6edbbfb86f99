"""What the backward makes again of much less: what is kept instead, and what is not made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynafuse.fx import base
from tests.passes.test_joint import Split, expected
from tests.support.differential import check, compiled

Function = Callable[..., Tensor]


def repeated(x: Tensor, w: Tensor) -> Tensor:
    """Rows for each of sixteen heads, of products with a weight for each."""
    heads = x[:, None].expand(-1, 16, -1, -1).reshape(-1, 6, 4)
    return torch.bmm(heads.sin(), w)


def in_each_head(x: Tensor, w: Tensor) -> Tensor:
    """The same, each head with a factor of its own."""
    factors = torch.arange(1.0, 17.0)[:, None, None] * x.mean()
    return torch.bmm((x[:, None] * factors).reshape(-1, 6, 4), w)


def for_few_heads(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x[:, None].expand(-1, 4, -1, -1).reshape(-1, 6, 4).sin(), w[:12])


def shown(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    heads = x[:, None].expand(-1, 16, -1, -1).reshape(-1, 6, 4).sin()
    return torch.bmm(heads, w), heads


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(3, 6, 4, generator=generator).requires_grad_(),
            torch.randn(48, 4, 5, generator=generator).requires_grad_())


def largest_kept(split: Split) -> int:
    """The most elements of what is kept beside the inputs and views of these."""
    (outputs,) = split.forward.graph.output_node().args
    kept = (node for node in outputs[1:] if base(node).op != "placeholder")  # type: ignore[index,union-attr,arg-type]
    return max((node.meta["val"].numel() for node in kept), default=0)


@pytest.mark.parametrize(("function", "most"), [(repeated, 72), (in_each_head, 72), (for_few_heads, 288)])
def test_what_repeats_much_less_is_not_kept(function: Function, most: int) -> None:
    split = Split(function, *operands())
    assert largest_kept(split) <= most
    torch.testing.assert_close((split.output, split.gradients), expected(function, *operands()))


def test_few_repetitions_are_kept() -> None:
    assert largest_kept(Split(for_few_heads, *operands())) == 288


@pytest.mark.parametrize("function", [repeated, in_each_head, for_few_heads, shown])
def test_everything_is_as_in_eager(function: Function) -> None:
    check(function, *operands())


@pytest.mark.parametrize("function", [repeated, in_each_head])
def test_sizes_may_be_dynamic(function: Function) -> None:
    x, w = operands()
    check(lambda x, w: function(x, w[:16 * x.shape[0]]), x, w, dynamic=True)


def test_an_operand_that_is_overwritten_afterwards_is_kept_as_it_was() -> None:
    def overwritten(x: Tensor, w: Tensor, state: Tensor) -> Tensor:
        result = torch.bmm(state[:, None].expand(-1, 16, -1, -1).reshape(-1, 6, 4) * x.mean(), w)
        state.add_(1)
        return result

    x, w = operands()
    check(overwritten, x, w, x.detach().clone())


def test_two_that_repeat_the_same_keep_it_once() -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        rows = torch.mm(x[:, 0], w[0])  # (3, 5)
        first = rows[:, None, None].expand(-1, 16, 6, -1).reshape(-1, 6, 5)
        second = rows[:, None, None].expand(-1, 16, 2, -1).reshape(-1, 2, 5) * 2
        return torch.cat([torch.bmm(w, part.mT) for part in (first.sin(), second.cos())], -1)

    split = Split(twice, *operands())
    (outputs,) = split.forward.graph.output_node().args
    assert len(set(outputs)) == len(outputs) and largest_kept(split) <= 15  # type: ignore[arg-type]
    torch.testing.assert_close((split.output, split.gradients), expected(twice, *operands()))


def test_integers_of_their_place_that_others_are_made_of_come_first() -> None:
    def scaled(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        places = (torch.arange(6) + 1).remainder(6)
        picked = x[0, places]
        rows = (places.float()[:, None] * x.mean()).expand(48, 6, 4).reshape(48, 6, 4).cos()
        return picked, torch.bmm(rows, w)

    check(scaled, *operands(), precise=False)


def test_inputs_may_be_written_to_before_the_backward_runs() -> None:
    def heads(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x[:, None].expand(-1, 16, -1, -1).reshape(-1, 6, 4), w)

    gradients = []
    for function in (heads, compiled(heads)):
        x, w = operands()
        result = function(x, w)
        with torch.no_grad():
            x.mul_(2)
        result.sum().backward()
        gradients.append(w.grad)
    torch.testing.assert_close(*gradients)
