"""The current CUDA device: a graph's function allocates and launches there, wherever its tensors are.

Worked example: a model on ``cuda:1`` that is called while ``cuda:0`` is current runs inside ``torch.cuda.device(1)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

Call = Callable[[list[Any]], Any]
current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)


def only_cuda_device(module: GraphModule) -> int | None:
    """Return the index of the CUDA device that all tensors of a graph are on; None if they are on others or on several."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    device = devices.pop() if len(devices) == 1 else None
    return device.index or 0 if device is not None and device.type == "cuda" else None


def on_device(call: Call, index: int) -> Call:
    """Return a graph's function that runs with a device current.

    Args:
        call: The function, which takes its arguments as one list.
        index: The device that all of its tensors are on.
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
