"""Validation of another library's kernel against torch: for gross differences, not for rounding.

Worked example: a kernel for ``relu(x) + 1`` that forgets the 1 is off by about its own magnitude, and is rejected; one that
rounds to bfloat16 once where torch rounds twice is off by a few thousandths, and passes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.ir import Ref, Spec
from dynafuse.lowering.interpret import Interpreter
from dynafuse.select.data import NoData, inputs_for
from dynafuse.select.runners import Runner, runner

log = logging.getLogger(__name__)

GROSS = 0.25  # of the expected norm, for a difference of floats; of the elements, for those that differ otherwise


def validate(kernel: Any, region: CanonicalRegion) -> None:
    """Run a kernel once at the example's sizes: a failure or a wrong result is known before the first call.

    Without a GPU, or where no data can be made up, nothing is compared.

    Args:
        kernel: The kernel.
        region: The region that it was made for.

    Raises:
        RuntimeError: A result is not torch's.
    """
    if region.device.type != "cuda" or not torch.cuda.is_available():
        return
    try:
        with _disable_current_modes():  # the graph's own fake tensors are being traced around us
            check(runner(kernel, region.spec, region.hints, region.device), region.spec, region.hints, region.device)
    except (NoData, torch.OutOfMemoryError) as error:
        log.info("%s is compiled at its first call: %s", region.key, error)


def check(run: Runner, spec: Spec, hints: Mapping[str, int], device: torch.device) -> None:
    """Run a kernel once on made-up data and compare its results with torch's.

    Args:
        run: The kernel, as a function of the spec's inputs.
        spec: The region.
        hints: The values of its size symbols, by name.
        device: Where it runs.

    Raises:
        RuntimeError: A result is wrong.
        NoData: No data can be made up.
    """
    inputs = inputs_for(spec, hints, device)
    interpreter = Interpreter(spec, hints, [tensor.clone() for tensor in inputs], device)
    expected = [interpreter.value(Ref("op", store.op)) for store in spec.stores]
    for number, (result, reference) in enumerate(zip(run(inputs), expected, strict=True)):
        if differs(result, reference):
            raise RuntimeError(f"result {number}, of {spec.ops[spec.stores[number].op].target}, is not torch's")


def differs(result: torch.Tensor, reference: torch.Tensor) -> bool:
    """Return whether a result is grossly different from a reference of the same size, or of one that broadcasts to it."""
    reference = reference.broadcast_to(result.shape)
    if not result.numel():
        return False
    if not result.dtype.is_floating_point:
        return bool((result != reference).float().mean() > GROSS)
    result, reference = result.float(), reference.float()
    if bool((result.isfinite() != reference.isfinite()).float().mean() > GROSS):
        return True
    finite = result.isfinite() & reference.isfinite()
    values, expected = (torch.where(finite, tensor, 0.0) for tensor in (result, reference))
    return bool((values - expected).norm() > GROSS * expected.norm() + 1e-3)
