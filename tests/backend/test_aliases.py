"""Results that are views of arguments: what autograd lets a caller do to them, and that they share the caller's memory.

Most such results torch makes anew from the argument; those of ops that return several views it takes from the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.differential import check, compiled

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "unbind": lambda a: list(a.unbind(0)),
    "split": lambda a: a.split(2, 1),
    "chunk": lambda a: a.chunk(2),
    "split of a transpose": lambda a: a.t().split([1, 3]),
    "beside what is computed": lambda a: (a.unbind(1), a.exp(), a.sum(0)),
    "and computed with": lambda a: [*a.unbind(0), a.unbind(0)[1].sin() @ a[0].cos()],
}

every_view = pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
dynamic_or_not = pytest.mark.parametrize("dynamic", [False, True])


def argument(requires_grad: bool, begin: int) -> torch.Tensor:
    """A tensor that is no leaf, at an address that is a multiple of 16 bytes or not."""
    return torch.arange(24.0, requires_grad=requires_grad).mul(0.1)[begin:][:16].view(4, 4)


@every_view
@dynamic_or_not
@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_they_share_the_callers_memory(function: Callable[[torch.Tensor], Any], dynamic: bool, begin: int,
                                       requires_grad: bool) -> None:
    base = argument(requires_grad, begin)
    views = [r for r in torch.utils._pytree.tree_leaves(compiled(function, dynamic=dynamic)(base)) if r.dim() and r._is_view()]
    expected = [r for r in torch.utils._pytree.tree_leaves(function(base)) if r._is_view()]
    assert [v.data_ptr() for v in views] == [e.data_ptr() for e in expected]
    assert [v.stride() for v in views] == [e.stride() for e in expected]


@every_view
@dynamic_or_not
def test_their_gradients_are_eagers(function: Callable[[torch.Tensor], Any], dynamic: bool) -> None:
    check(function, argument(True, 0).detach().requires_grad_(), dynamic=dynamic)


@every_view
@pytest.mark.parametrize("begin", [0, 1])
def test_one_of_several_is_not_written_to(function: Callable[[torch.Tensor], Any], begin: int) -> None:
    view = torch.utils._pytree.tree_leaves(compiled(function)(argument(True, begin)))[0]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        view.mul_(2)


@every_view
def test_what_they_view_is_not_written_to_before_they_are_differentiated(function: Callable[[torch.Tensor], Any]) -> None:
    base = argument(True, 0)
    view = torch.utils._pytree.tree_leaves(compiled(function)(base))[0]
    base.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        view.sum().backward()
