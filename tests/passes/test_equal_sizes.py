"""Sizes that torch has found equal as products: what is asked of it then, and what that makes of a loss after a graph break."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import sympy
import torch
from torch.nn import functional as F

from dynafuse.passes.equal_sizes import equate_factors
from tests.support.differential import compiled
from tests.support.environments import environment_of
from tests.support.graphs import recorded


def test_factors_are_equal_by_their_examples() -> None:
    environment, (a, b, c, d, e) = environment_of(4, 9, 9, 4, 3)
    environment.evaluate_expr(sympy.Eq(a * b * e, c * d * e))
    equate_factors(environment)
    assert environment.replace(a) == environment.replace(d) != environment.replace(b) == environment.replace(c)
    assert environment.replace(e) == e


@pytest.mark.parametrize("sizes", [(6, 4, 8, 3), (5, 5, 5, 5), (4, 9, 6, 6)])
def test_what_examples_leave_open_stays_open(sizes: tuple[int, ...]) -> None:
    environment, (a, b, c, d) = environment_of(*sizes)
    environment.evaluate_expr(sympy.Eq(a * b, c * d))
    before = [guard.expr for guard in environment.guards]
    equate_factors(environment)
    assert [guard.expr for guard in environment.guards] == before and not environment.replacements


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_taken_for_equal_that_torch_does_not_check(frozen: bool) -> None:
    environment, (a, b, c, d) = environment_of(4, 9, 9, 4)
    environment.evaluate_expr(sympy.Eq(a * b, c * d))
    if frozen:
        environment.freeze()
    with nullcontext() if frozen else environment.suppress_guards():
        equate_factors(environment)
    assert len(environment.guards) == 1 and environment.replace(a) == a


def head_and_loss(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = x @ w
    torch._dynamo.graph_break()
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))


def test_a_loss_of_what_an_earlier_graph_returned_is_planned_as_with_known_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in which only the products are equal is compiled anew."""
    monkeypatch.setenv("DYNAFUSE_EXECUTORS", "triton")
    w, call, regions = torch.randn(8, 50), compiled(head_and_loss, fullgraph=False, dynamic=True), []
    for function, batch, tokens, labels, compiles in (
            (compiled(head_and_loss, fullgraph=False), 4, 6, (4, 6), True), (call, 4, 6, (4, 6), True),
            (call, 5, 7, (5, 7), False), (call, 4, 6, (3, 8), True)):
        given = torch.randn(batch, tokens, 8, requires_grad=True), w, torch.randint(50, labels)
        with recorded() as graphs:
            loss = function(*given)
        loss.backward()
        torch.testing.assert_close(loss, head_and_loss(*given))
        assert bool(graphs) is compiles
        regions.append([len(graph.plan.regions) for graph in graphs])
    known, dynamic, _, apart = regions
    assert dynamic == known and sum(apart) > sum(known)
