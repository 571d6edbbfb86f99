"""Tracing of a function in order to plan it, by :func:`explain`, which leaves everything as it was.

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
from dynafuse.report.isolation import isolated
from dynafuse.report.reading import report_of
from dynafuse.runtime.observers import Compiled, listening


def explain(fn: Callable[..., Any], *args: Any, device: str | None = None, mode: str | None = None,
            options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """Plan ``fn(*args, **kwargs)``, and its backward if an output requires grad, and report the plan.

    The function is called once, and a backward runs from the sum of its outputs. A module, and the tensors among the
    arguments, are copied first, so that parameters, buffers and inputs stay as they are; gradients never go to a
    ``.grad``, and random number generators are restored. Only what a plain function changes by itself (buffers of a
    module that it closes over, a list that it appends to) stays changed: explaining a training step takes a step. What was
    compiled before stays compiled. Whatever ``fn`` raises is raised.

    Args:
        fn: A function or an nn.Module. If it was compiled with this backend, the arguments here are merged over the ones
            given then.
        *args: Its arguments.
        device: The name of a described GPU to plan for, such as ``"h200"``, which the machine need not have; None: the one
            that the options name, else the one that the tensors are on.
        mode: As for ``torch.compile``.
        options: As for ``torch.compile``.
        **kwargs: Its arguments by name. Those with the names above can be bound with ``functools.partial``.

    Returns:
        The report, without kernels: none is compiled.

    Raises:
        OptionError: The device is not described, or a mode, an option or a variable is wrong.
        ForceError: Ops are forced, strictly, to an executor that cannot run them or that is not enabled.
    """
    resolve(mode, options)  # before merging, so that an error speaks of these alone
    settings = settings_of(fn)
    options = {**settings.options, **(options or {})} | ({} if device is None else {"device": device})
    mode = mode or settings.mode
    config = resolve(mode, options)
    if config.device is not None:
        devices.describe(config.device)
    compiled: list[Compiled] = []
    call, args, kwargs = _detached(_eager(fn), args, kwargs)
    planner = functools.partial(backend.dynafuse, mode=mode, options=options)
    with (isolated(planner), graph_breaks() as breaks, _unchanged_random(),
          listening(compiled.append, plan_only=True)):
        _backward(torch.compile(call, backend=planner, dynamic=settings.dynamic)(*args, **kwargs))
    return replace(report_of(compiled, config.device, config.cudagraphs), breaks=tuple(breaks))


# ---------------------------------------------------------------------- settings of compiled functions


@dataclass(frozen=True)
class Settings:
    """The arguments that ``torch.compile`` was called with."""

    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None


def settings_of(fn: Any) -> Settings:
    """Return the settings of a function or module that was compiled with this backend; empty ones for any other."""
    compiler: Any = _callback(fn)
    while compiler is not None and not isinstance(compiler, torch._TorchCompileWrapper):
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None)
    if compiler is None or compiler.compiler_fn is not backend.dynafuse:
        return Settings()
    return Settings(compiler.kwargs.get("mode"), compiler.kwargs.get("options", {}), compiler.dynamic)


def _callback(fn: Any) -> Any:
    """Return what Dynamo calls for the frames of a compiled module or function; None for others."""
    if isinstance(fn, torch._dynamo.OptimizedModule):
        return fn.dynamo_ctx.callback
    if isinstance(fn, torch.nn.Module):  # compiled in place, by its method ``compile``
        fn = fn._compiled_call_impl
    if not hasattr(fn, "_torchdynamo_orig_callable") or not inspect.isfunction(fn):
        return None
    return inspect.getclosurevars(fn).nonlocals.get("callback")


# ---------------------------------------------------------------------- running without a trace


def _eager(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a compiled function or module was compiled from; anything else as it is."""
    return torch._dynamo.eval_frame.innermost_fn(getattr(fn, "_orig_mod", fn))


def _detached(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Copy the modules and tensors among a function and its arguments; the copies share memory as the originals do."""
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
    """Wrap ``fn`` in a function of ours: Dynamo skips functions of torch that are compiled directly."""
    return lambda *args, **kwargs: fn(*args, **kwargs)


def _twin(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a tensor with its sizes, strides, values and marks (``mark_dynamic``) out of its autograd graph."""
    twin: torch.Tensor = copy.deepcopy(tensor.detach(), memo).requires_grad_(tensor.requires_grad)
    twin = twin if tensor.is_leaf else twin.clone()  # a leaf that requires grad could not be overwritten
    twin.__dict__.update(tensor.__dict__)
    return twin


@contextmanager
def _unchanged_random() -> Iterator[None]:
    """Restore torch's random number generators on all devices when the block ends."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


BACKWARD_DONE = "backward through the graph a second time"
"""Torch's error where the function has run the backward of its outputs by itself, as a training step does."""


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
        if BACKWARD_DONE not in str(error):
            raise


def _grad_leaves(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a backward from ``outputs`` would accumulate gradients into."""
    tensors = {id(t): t for t in outputs if t.grad_fn is None}
    stack = [t.grad_fn for t in outputs]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(after for after, _ in node.next_functions)
        if hasattr(node, "variable"):  # only the nodes that accumulate into a leaf have one
            tensors[id(node.variable)] = node.variable
    return list(tensors.values())
