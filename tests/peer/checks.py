"""What a mode puts in the place of ``check_model``, the check that nearly all of Inductor's tests go through.

A check counts the comparisons it came to: inputs without a float have nothing to be cast, eager may refuse a dtype, and a
function that draws random numbers without a seed cannot be compared. A test in which nothing was compared does not apply.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.support import differential

Check = Callable[..., None]


class Compared:
    """How often a test asked for the check, and to how many comparisons that came."""

    asked = count = 0


def cast(check_model: Check, dtype: torch.dtype, compared: Compared) -> Check:
    """The suite's own check on inputs and parameters cast to ``dtype``; what it finds too far from float32, float64 decides.

    It compares with float32 within a part in a thousand, which eager in 16 bits does not keep either where sums cancel.
    """
    def check(self: Any, model: Any, example_inputs: Sequence[Any], kwargs: Any = None, **options: Any) -> None:
        compared.asked += 1
        inputs = [_cast(value, dtype) for value in example_inputs]
        if all(a is b for a, b in zip(inputs, example_inputs, strict=True)):
            return
        model, inputs = _placed(self, model, inputs, options)
        model = model.to(dtype) if isinstance(model, torch.nn.Module) else model
        if not _runs(model, inputs, kwargs or {}):
            return
        if options.get("rtol") is not None:
            options["rtol"] = max(2e-3, options["rtol"])  # as the suite's own low precision pass
        try:
            check_model(self, model, inputs, kwargs, **{**options, "check_lowp": False})
        except AssertionError as error:
            arguments = (tuple(inputs), kwargs or {})
            if not _agree(model, arguments, _outcome(_called(model), arguments, grad=False), options.get("nopython", True), grad=False):
                raise AssertionError(f"{error}; nothing to compare with: eager is not the same twice") from error
        compared.count += 1

    return check


def _placed(test: Any, model: Any, inputs: Sequence[Any], options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A copy of a model, and inputs, on the device of a test, as the suite's own check places them."""
    if isinstance(model, torch.nn.Module):
        model = copy.deepcopy(model).to(test.device)
    return model, list(differential.copies(tuple(inputs), device=test.device if options.get("copy_to_gpu", True) else None))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=value.device).copy_(value)


def _runs(model: Callable[..., Any], inputs: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether eager has the function in this dtype."""
    try:
        model(*[value.clone() if isinstance(value, torch.Tensor) else value for value in inputs], **kwargs)
    except RuntimeError:
        return False
    return True


def deep(_: Check, compared: Compared) -> Check:
    """The project's own check: strides, aliases, what is written to arguments, and gradients of every float."""
    def check(self: Any, model: Any, example_inputs: Sequence[Any], kwargs: Any = None, *, nopython: bool = True,
              **options: Any) -> None:
        compared.asked += 1
        model, inputs = _placed(self, model, example_inputs, options)
        arguments = (tuple(inputs), kwargs or {})
        for candidate in (tree_map(_differentiable, arguments), arguments):
            eager = _outcome(_called(model), candidate)
            if eager is not None:
                compared.count += _agree(model, candidate, eager, nopython)
                return

    return check


def _agree(model: Callable[..., Any], arguments: Any, eager: differential.Outcome | None, nopython: bool,
           grad: bool = True) -> bool:
    """Raise where the compiled model is farther from float64 than eager is, by our own check; False if nothing is compared.

    ``arguments`` are the positional ones and the named ones. Nothing is compared where eager is not the same twice.
    """
    in_double = copy.deepcopy(model).double() if isinstance(model, torch.nn.Module) else model
    comparable = eager is not None and _same(_outcome(_called(model), arguments, grad), eager)
    torch._dynamo.reset()
    # A fresh function for each check: torch would recompile one that it has seen.
    compiled = torch.compile(lambda args, named: model(*args, **named), fullgraph=nopython)
    ours = differential.run(compiled, differential.copies(arguments), grad)
    if comparable:
        assert eager is not None
        wide = differential.copies(arguments, torch.float64)
        differential.compare(ours, eager, _outcome(_called(in_double), wide, grad))
    return comparable


def _called(model: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A model as a function of its positional and its named arguments."""
    return lambda args, named: model(*args, **named)


def _differentiable(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided:
        return differential.copies(value.detach()).requires_grad_()
    return value


def _outcome(function: Callable[..., Any], arguments: Any, grad: bool = True) -> differential.Outcome | None:
    """What eager leaves; None where it refuses, as it does writing to a leaf that requires grad."""
    try:
        return differential.run(function, differential.copies(arguments), grad)
    except Exception:  # whatever eager raises: there is nothing to compare with then
        return None


def _same(again: differential.Outcome | None, eager: differential.Outcome) -> bool:
    """Whether eager computes the same twice."""
    try:
        assert again is not None
        differential.compare(again, eager)
    except AssertionError:
        return False
    return True
