"""Runs a function eager, in float64 and compiled, and compares everything that a caller could see.

Worked example::

    check(lambda x: x.softmax(-1), torch.randn(7, 130))         # outputs, gradients, strides, aliases, NaN and Inf

A result is right when its relative RMSE against float64 is at most twice eager's own, plus a few units in the last
place of its dtype (eager may be exact by luck); NaN and Inf are where eager has them, unless a 16-bit intermediate of
eager overflows that is held in float32 here; integers and bools are equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map

from dynafuse import backend
from dynafuse.passes.strides import is_spread
from tests.support.graphs import recorded

ROUNDING = {torch.float64: 64.0, torch.float32: 8.0, torch.bfloat16: 1.0, torch.float16: 1.0}
"""How many units in the last place (of the largest magnitudes) are no error, by dtype."""


def regions(graphs: Sequence[backend.Compiled], kind: str | None = None) -> int:
    """How many fused regions the graphs have, those of one kind or all."""
    return sum(len(graph.plan.regions) for graph in graphs if kind in (None, graph.kind))


def compiled(fn: Callable[..., Any], *, fullgraph: bool = True, dynamic: bool | None = False,
             **options: Any) -> Callable[..., Any]:
    """``fn`` through the backend. The callable is the same object every time: torch guards on it."""
    return torch.compile(fn, backend=backend.dynafuse, fullgraph=fullgraph, dynamic=dynamic, options=options or None)


# ---------------------------------------------------------------------- values


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree of containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copies(tree: Any, dtype: torch.dtype | None = None, device: str | None = None) -> Any:
    """New leaf tensors with the same values, sizes and strides, floats in ``dtype`` and on ``device`` if these are given."""
    return tree_map(lambda leaf: _copy(leaf, dtype, device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None, device: str | torch.device | None) -> torch.Tensor:
    plain, device = tensor.detach(), device or tensor.device
    if dtype is not None and plain.is_floating_point():
        plain = plain.to(dtype)
    if plain.layout is not torch.strided:
        return plain.to(device, copy=True).requires_grad_(tensor.requires_grad)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
    if plain.numel() == 0:
        made = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=device)
    else:  # copied as memory, so that expanded and overlapping tensors stay as they are
        made = plain.as_strided((extent,), (1,)).to(device, copy=True).as_strided(plain.shape, plain.stride(), 0)
    return made.requires_grad_(tensor.requires_grad)


# ---------------------------------------------------------------------- comparison


Strides = Literal["same", "spread", "any"]
"""Of results, beside eager's: the same, or with rows further apart, or any."""


def assert_same(actual: torch.Tensor, expected: torch.Tensor, reference: torch.Tensor | None = None, what: str = "",
                strides: Strides = "same") -> None:
    """``actual`` is what eager's ``expected`` is; ``reference`` is the same in float64, if there is one."""
    facts = ("dtype", "shape", "device", "layout", "requires_grad")
    ours, eager = ({fact: getattr(t, fact) for fact in facts} for t in (actual, expected))
    assert ours == eager, f"{what}: {ours} is not {eager}"
    if actual.layout is not torch.strided:
        torch.testing.assert_close(actual, expected, equal_nan=True)
        return
    right = strides == "any" or significant(actual) == significant(expected)
    right |= strides == "spread" and is_spread(actual, expected.stride())
    assert right, f"{what}: strides {actual.stride()}, {expected.stride()}"
    actual, expected = actual.detach(), expected.detach()
    if actual.dtype.is_floating_point:
        _assert_close(actual, expected, None if reference is None else reference.detach(), what)
    elif actual.dtype.is_complex:
        torch.testing.assert_close(actual, expected, equal_nan=True, msg=lambda m: f"{what}: {m}")
    else:
        different = actual != expected
        assert not different.any(), f"{what}: {actual[different][:4]} is not {expected[different][:4]}"


def significant(tensor: torch.Tensor) -> list[int]:
    """The strides that say where elements are: those of dimensions with more than one element."""
    if tensor.numel() == 0:
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, reference: torch.Tensor | None, what: str) -> None:
    if torch.equal(actual, expected):  # without NaN; large tensors take seconds in float64
        return
    # What casts explicitly is of its own dtype on wider operands, too, but made of values that were rounded less often.
    if reference is None or reference.dtype.itemsize < expected.dtype.itemsize or expected.dtype is torch.float64:
        reference = expected
    same = torch.where(expected.isfinite(), actual.isfinite(), (actual == expected) | (actual.isnan() & expected.isnan()))
    # Where a 16-bit intermediate of eager overflows and the truth does not, the truth will do.
    same |= actual.isfinite() & reference.to(expected.dtype).isfinite()
    assert same.all(), f"{what}: NaN or Inf differ: {actual[~same][:4]} is not {expected[~same][:4]}"
    finite = expected.isfinite() & reference.isfinite()
    truth = reference[finite].double()
    if not truth.numel():
        return
    ours, eager = (found[finite].double() - truth for found in (actual, expected))
    unit = torch.finfo(expected.dtype).eps * ROUNDING[expected.dtype]
    for norm, slack in ((_rms, 1.0), (_largest, 4.0)):
        allowed = 2 * slack * norm(eager) + slack * unit * norm(truth) + unit**2
        assert norm(ours) <= allowed, (
            f"{what}: {norm.__name__[1:]} error {norm(ours):.3e}, eager's {norm(eager):.3e}, allowed {allowed:.3e}, "
            f"magnitude {norm(truth):.3e}, shape {tuple(actual.shape)}")


def _rms(values: torch.Tensor) -> float:
    return math.sqrt(values.square().mean().item())


def _largest(values: torch.Tensor) -> float:
    return values.abs().max().item()


# ---------------------------------------------------------------------- the whole check


@dataclass
class Outcome:
    """What one call leaves: its result, its arguments afterwards, the gradients of its differentiable arguments."""

    result: Any
    arguments: Any
    gradients: list[torch.Tensor | None]


def run(fn: Callable[..., Any], arguments: Any, grad: bool = True, seed: int = 0) -> Outcome:
    """Call ``fn(*arguments)``; back-propagate fixed random gradients into every differentiable argument."""
    torch.manual_seed(seed)
    result = fn(*arguments)
    wanted = [t for t in tensors(arguments) if t.requires_grad and t.is_leaf]
    roots = [t for t in tensors(result) if t.requires_grad]
    gradients: list[torch.Tensor | None] = []
    if grad and wanted and roots:
        tangents = [_tangent(t) for t in roots]
        gradients = list(torch.autograd.grad(roots, wanted, tangents, allow_unused=True))
    return Outcome(result, arguments, gradients)


def _tangent(tensor: torch.Tensor) -> torch.Tensor:
    """The same values for a shape whatever the dtype, device and strides, exact in every dtype."""
    values = torch.arange(tensor.numel()).mul(7).add(3).remainder(17).sub(8).div(8)
    return values.view(tensor.shape).to(tensor.device, tensor.dtype)


def check(fn: Callable[..., Any], *arguments: Any, grad: bool = True, fullgraph: bool = True,
          dynamic: bool | None = False, precise: bool = True, calls: int = 1, strides: Strides = "same",
          **options: Any) -> list[backend.Compiled]:
    """Everything that a caller of ``fn`` sees is as in eager; returns the graphs that were compiled.

    ``precise`` compares with a float64 run of the same function (switch it off for functions that have none).
    """
    torch._dynamo.reset()
    with recorded() as graphs:
        function = compiled(fn, fullgraph=fullgraph, dynamic=dynamic, **options)
        for _ in range(calls):
            ours = run(function, copies(arguments), grad)
    eager = run(fn, copies(arguments), grad)
    truth = run(fn, copies(arguments, torch.float64), grad) if precise else None
    compare(ours, eager, truth, strides)
    return graphs


def compare(ours: Outcome, eager: Outcome, truth: Outcome | None = None, strides: Strides = "same") -> None:
    """Two outcomes are the same: values, strides, gradients, what was written to arguments, what shares memory."""
    for what in ("result", "arguments"):
        _compare_all(what, getattr(ours, what), getattr(eager, what), getattr(truth, what) if truth else None, strides)
    assert aliases(ours) == aliases(eager), f"memory is shared by {aliases(ours)}, in eager by {aliases(eager)}"
    assert [g is None for g in ours.gradients] == [g is None for g in eager.gradients]
    _compare_all("gradients", ours.gradients, eager.gradients, truth.gradients if truth else None, "any")


def _compare_all(what: str, ours: Any, eager: Any, truth: Any, strides: Strides) -> None:
    a, b, c = tree_leaves(ours), tree_leaves(eager), tree_leaves(truth)
    assert len(a) == len(b), f"{what}: {len(a)} values, in eager {len(b)}"
    if len(c) != len(a):
        c = [None] * len(a)
    for k, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        if isinstance(y, torch.Tensor):
            assert isinstance(x, torch.Tensor), f"{what} {k}: {x} is no tensor"
            assert_same(x, y, z if isinstance(z, torch.Tensor) and z.shape == y.shape else None, f"{what} {k}", strides)
        else:
            assert type(x) is type(y) and (x == y or x != x), f"{what} {k}: {x!r} is not {y!r}"


def aliases(outcome: Outcome) -> set[tuple[int, int]]:
    """Which of the results and arguments share memory: pairs of positions, results first."""
    found = tensors(outcome.result) + tensors(outcome.arguments)
    strided = [(k, t) for k, t in enumerate(found) if t.layout is torch.strided and t.numel()]
    return {(i, j) for (i, a), (j, b) in itertools.combinations(strided, 2)
            if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()}
