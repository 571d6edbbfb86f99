"""Planning a function without running it for real: :func:`explain` leaves everything as it was.

Worked example: ``explain(model, x)`` runs a copy of ``model`` on a copy of ``x`` once, with a backend that only plans.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynafuse import backend
from dynafuse.backend import Compiled
from dynafuse.config import resolve
from dynafuse.partition import device as devices
from dynafuse.report.data import Report
from dynafuse.report.reading import report_of


def explain(fn: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> Report:
    """Plan ``fn(*args, **kwargs)``, and its backward if an output requires grad, and report the plan.

    ``fn`` is a function or an nn.Module; ``device`` names a described GPU to plan for, such as ``"h200"``, which need
    not be there (a ``device`` argument of ``fn`` itself can be bound with ``functools.partial``). Options come from the
    environment.

    The function is called once, and a backward runs from the sum of its outputs. A module, and the tensors among the
    arguments, are copied first, so that parameters, buffers and inputs stay as they are; gradients never go to a
    ``.grad``, and random number generators are put back. Only what a plain function changes by itself (buffers of a
    module that it closes over, a list that it appends to) stays changed. Dynamo is reset before and after: what was
    compiled compiles again at its next call.

    Raises OptionError for a device that is not described, and whatever ``fn`` raises.
    """
    config = resolve()
    name = device or config.device
    if name is not None:
        devices.describe(name)
    compiled: list[Compiled] = []
    call, args, kwargs = _detached(_eager(fn), args, kwargs)
    options: dict[str, Any] = {} if name is None else {"device": name}
    with _fresh_dynamo(), _unchanged_random(), backend.listening(compiled.append, plan_only=True):
        _backward(torch.compile(call, backend=backend.dynafuse, options=options)(*args, **kwargs))
    return report_of(compiled, name, config.cudagraphs)


# ---------------------------------------------------------------------- running without a trace


def _eager(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a compiled function or module was compiled from; anything else as it is."""
    return torch._dynamo.eval_frame.innermost_fn(getattr(fn, "_orig_mod", fn))


def _detached(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function with its arguments, where modules and tensors are copies that share memory as the originals do."""
    memo: dict[int, Any] = {}
    call = copy.deepcopy(fn, memo) if isinstance(fn, torch.nn.Module) else _wrapped(fn)
    twins: dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in twins:
            twins[id(tensor)] = memo[id(tensor)] if id(tensor) in memo else _twin(tensor, memo)
        return twins[id(tensor)]

    args, kwargs = pytree.tree_map_only(torch.Tensor, twin, (args, kwargs))
    return call, args, kwargs


def _wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of our own around ``fn``: Dynamo skips torch's functions when they are what is compiled."""
    return lambda *args, **kwargs: fn(*args, **kwargs)


def _twin(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """The same sizes, strides, values and marks (``mark_dynamic``), outside the original's autograd graph."""
    made: torch.Tensor = copy.deepcopy(tensor.detach(), memo).requires_grad_(tensor.requires_grad)
    made = made if tensor.is_leaf else made.clone()  # no leaf either: it may be overwritten
    made.__dict__.update(tensor.__dict__)
    return made


@contextmanager
def _fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before, and nothing left behind."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@contextmanager
def _unchanged_random() -> Iterator[None]:
    """Put torch's random number generators back, on all devices."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


def _backward(result: Any) -> None:
    """Differentiate the sum of the tensors in ``result`` that require grad; the gradients are dropped."""
    leaves = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    outputs = list({id(leaf): leaf for leaf in leaves}.values())
    inputs = _grad_leaves(outputs)
    if inputs:
        torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)


def _grad_leaves(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a backward from ``outputs`` would put gradients on."""
    found = {id(t): t for t in outputs if t.grad_fn is None}
    stack = [t.grad_fn for t in outputs]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(after for after, _ in node.next_functions)
        if hasattr(node, "variable"):  # only the nodes that accumulate into a leaf have one
            found[id(node.variable)] = node.variable
    return list(found.values())
