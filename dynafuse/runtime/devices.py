"""The current CUDA device: a graph's function allocates and launches there, wherever its tensors are.

Worked example: a model on ``cuda:1`` that is called while ``cuda:0`` is current runs inside ``torch.cuda.device(1)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynafuse.ir import Plan

Call = Callable[[list[Any]], Any]
current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)


def cuda_devices(plan: Plan) -> tuple[int, ...]:
    """Return the indices of the CUDA devices that a plan's regions run on, in order."""
    tensors = (plan.annotated.facts[region.outputs[0]].tensor for region in plan.regions)
    devices = {tensor.device for tensor in tensors if tensor is not None}
    return tuple(sorted({device.index or 0 for device in devices if device.type == "cuda"}))


def on_device(call: Call, index: int) -> Call:
    """Return a graph's function that runs with a device current.

    Args:
        call: The function, which takes its arguments as one list.
        index: The device that all of its kernels run on.
    """
    assert current_device is not None
    current = current_device

    def run(args: list[Any]) -> Any:
        if current() == index:
            return call(args)
        with torch.cuda.device(index):
            return call(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def launch_on(index: int, launch: Callable[[], None]) -> None:
    """Launch with a device current: a graph on several devices changes it from kernel to kernel."""
    with torch.cuda.device(index):
        launch()
