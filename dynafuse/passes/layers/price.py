"""The predicted price of a layer, within its graph and as a function of its own.

Library calls are priced as everywhere; a fused kernel between two of them reads what the one wrote and writes what the other
reads. A function of its own takes the host ``piece_us`` longer, which is hidden where the device is busy meanwhile, and
moves values that could have stayed in a kernel.

Worked example, on an H200: a layer of Llama on 8192 tokens of width 2048 takes 1228 µs of the device, far more than of the
host; 60 µs more of the host count a tenth, 0.5 % of it, and the layer becomes a function. With 8 tokens the host bounds the
layer, which stays in its graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import op_prediction
from dynafuse.cost.model import LEAST, Prediction, objective, predict, streaming
from dynafuse.lowering.registry import PREFERRED
from dynafuse.passes.layers.cuts import Program, bytes_of, value_of


@dataclass(frozen=True)
class Price:
    """Microseconds of a layer's forward, as part of a graph (``whole_us``) and as a function of its own (``apart_us``)."""

    whole_us: float
    apart_us: float
    share: float  # of the former that may be lost

    @property
    def pays(self) -> bool:
        """Return whether the loss is small enough."""
        return self.apart_us <= (1 + self.share) * self.whole_us

    def __str__(self) -> str:
        return f"{self.whole_us:.0f} µs a layer, {self.apart_us:.0f} as a function of its own"


def price(program: Program, calls: Sequence[Node], crossing: Iterable[Node], lost_bytes: int, device: Device) -> Price:
    """Return the price of making a function of some calls.

    Args:
        program: The graph that they are of.
        calls: The calls of a layer.
        crossing: The values that enter or leave it.
        lost_bytes: The bytes that cutting there writes and reads again, a call.
        device: The device that is priced.
    """
    whole = _prediction(program, calls, [value_of(node) for node in crossing], device)
    moved_us = 2 * lost_bytes / max(device.bandwidth_tbs * 1e6, LEAST)
    apart = whole + Prediction(moved_us, device.piece_us, 0.0, moved_us)
    return Price(objective(whole, device), objective(apart, device), device.piece_share)


def _prediction(program: Program, calls: Sequence[Node], crossing: Sequence[Any], device: Device) -> Prediction:
    """Predict a layer's forward: its library calls, and a fused kernel before, between and behind them."""
    library_calls = [call for node in calls for call in program.library(node)]
    weights = {_storage(value) for value in crossing if isinstance(value, torch.nn.Parameter)}
    total, between = Prediction(), _bytes(crossing, weights)
    for call in library_calls:
        tensors = (call.args, call.kwargs, call.result)
        total += op_prediction(call.target, call.args, call.kwargs, call.result, _bytes(tensors, set()), device)
        between += _bytes(tensors, weights)
    kernels = len(library_calls) + 1
    fused = predict(streaming(between), device)
    return total + fused + Prediction(device_us=(kernels - 1) * device.constants[f"launch_us_{PREFERRED}"],
                                      host_us=(kernels - 1) * device.constants[f"host_us_{PREFERRED}"])


def _bytes(values: Any, weights: set[int]) -> int:
    """Return the bytes of the tensors among some values, except those in the memory of ``weights``."""
    return bytes_of(t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and _storage(t) not in weights)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
