"""Liger's kernels for the functions that benchmarks measure: a line for each function that Liger has a kernel for.

Example:
    >>> kernel(micro.rms_norm)  # with liger-kernel installed
    functools.partial(<function <lambda> ...>, <module 'liger_kernel.transformers.functional' ...>)

They are called as a model that Liger has patched calls them, writes over operands included: rope turns queries and keys
where they lie, the forward of a cross-entropy leaves the gradient in the memory of the logits, and the backward of a
gated unit leaves its gradients in the memory of its inputs. Only norms are asked to leave the incoming gradient alone,
which moves as many bytes. Liger's GELU is the approximation by tanh, and its loss has the dtype of the logits.
"""
from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from bench.models import Skip

Function = Callable[..., Any]

# By the name of the function that they compute: called with Liger's functions, then with that function's arguments.
KERNELS: dict[str, Function] = {
    "rms_norm": lambda liger, x, weight: liger.liger_rms_norm(x, weight, 1e-6, in_place=False),
    "add_rms_norm": lambda liger, x, residual, weight: (
        liger.liger_fused_add_rms_norm(x, residual, weight, 1e-6, in_place=False)),
    "layer_norm": lambda liger, x, weight, bias: liger.liger_layer_norm(x, weight, bias, 1e-5),
    "softmax": lambda liger, x: liger.liger_softmax(x),
    "cross_entropy": lambda liger, logits, target: liger.liger_cross_entropy(logits, target),
    "swiglu": lambda liger, gate, up: liger.liger_swiglu(gate, up),
    "geglu": lambda liger, gate, up: liger.liger_geglu(gate, up),
    "rope": lambda liger, q, k, cos, sin: liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
}


def kernel(fn: Function) -> Function:
    """Return Liger's own function in the place of `fn`; raises Skip where Liger has none or is not installed."""
    name = getattr(fn, "__name__", type(fn).__name__)
    if name not in KERNELS:
        raise Skip(f"Liger has no kernel for {name}")
    if importlib.util.find_spec("liger_kernel") is None:
        raise Skip("needs liger_kernel, which is not installed here")
    return functools.partial(KERNELS[name], importlib.import_module("liger_kernel.transformers.functional"))
