"""Planning a function without running it for real: :func:`explain` leaves everything as it was.

Worked example: ``explain(model, x)`` runs a copy of ``model`` on a copy of ``x`` once, with a backend that only plans.
``explain(torch.compile(model, backend="dynafuse", options=…), x)`` plans with those options.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynafuse import backend
from dynafuse.config import resolve
from dynafuse.cost import device as devices
from dynafuse.report.breaks import graph_breaks
from dynafuse.report.data import Report
from dynafuse.report.isolation import beside_what_is_compiled
from dynafuse.report.reading import report_of
from dynafuse.runtime.observers import Compiled, listening


def explain(fn: Callable[..., Any], *args: Any, device: str | None = None, mode: str | None = None,
            options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """Plan ``fn(*args, **kwargs)``, and its backward if an output requires grad, and report the plan.

    ``fn`` is a function or an nn.Module; ``device`` names a described GPU to plan for, such as ``"h200"``, which need
    not be there. ``mode`` and ``options`` are those of ``torch.compile``; what has been compiled with this backend brings
    its own, which those given here are put over. (Arguments of ``fn`` itself with these names can be bound with
    ``functools.partial``.)

    The function is called once, and a backward runs from the sum of its outputs. A module, and the tensors among the
    arguments, are copied first, so that parameters, buffers and inputs stay as they are; gradients never go to a
    ``.grad``, and random number generators are put back. Only what a plain function changes by itself (buffers of a
    module that it closes over, a list that it appends to) stays changed: explaining a training step takes a step. What was
    compiled before stays compiled.

    Raises OptionError for a device that is not described and for wrong options, and whatever ``fn`` raises.
    """
    resolve(mode, options)  # what is wrong with them is said of them alone
    own = settings_of(fn)
    options = {**own.options, **(options or {})} | ({} if device is None else {"device": device})
    mode = mode or own.mode
    config = resolve(mode, options)
    if config.device is not None:
        devices.describe(config.device)
    compiled: list[Compiled] = []
    call, args, kwargs = _detached(_eager(fn), args, kwargs)
    planner = functools.partial(backend.dynafuse, mode=mode, options=options)
    with (beside_what_is_compiled(planner), graph_breaks() as breaks, _unchanged_random(),
          listening(compiled.append, plan_only=True)):
        _backward(torch.compile(call, backend=planner, dynamic=own.dynamic)(*args, **kwargs))
    return replace(report_of(compiled, config.device, config.cudagraphs), breaks=tuple(breaks))


# ---------------------------------------------------------------------- what was compiled before


@dataclass(frozen=True)
class Settings:
    """With what ``torch.compile`` was called."""

    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None


def settings_of(fn: Any) -> Settings:
    """The settings of what was compiled with this backend; none for anything else."""
    inside: Any = _callback(fn)
    while inside is not None and not isinstance(inside, torch._TorchCompileWrapper):
        inside = getattr(inside, "_torchdynamo_orig_backend", None)
    if inside is None or inside.compiler_fn is not backend.dynafuse:
        return Settings()
    return Settings(inside.kwargs.get("mode"), inside.kwargs.get("options", {}), inside.dynamic)


def _callback(fn: Any) -> Any:
    """What Dynamo calls for the frames of a compiled module or function; None for others."""
    if isinstance(fn, torch._dynamo.OptimizedModule):
        return fn.dynamo_ctx.callback
    if isinstance(fn, torch.nn.Module):  # compiled in place, by its method ``compile``
        fn = fn._compiled_call_impl
    if not hasattr(fn, "_torchdynamo_orig_callable") or not inspect.isfunction(fn):
        return None
    return inspect.getclosurevars(fn).nonlocals.get("callback")


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
def _unchanged_random() -> Iterator[None]:
    """Put torch's random number generators back, on all devices."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


DONE = "backward through the graph a second time"
"""What torch says of outputs whose backward the function has run by itself, as a training step does."""


def _backward(result: Any) -> None:
    """Differentiate the sum of the tensors in ``result`` that require grad; the gradients are dropped."""
    leaves = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    outputs = list({id(leaf): leaf for leaf in leaves}.values())
    inputs = _grad_leaves(outputs)
    if not inputs:
        return
    try:
        torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)
    except RuntimeError as error:
        if DONE not in str(error):
            raise


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
