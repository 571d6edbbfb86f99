"""What a layer costs, and what it costs more as a function of its own, by the cost model.

A library's call is priced as everywhere; what is fused between two of them reads what the one wrote and writes what the
other reads. A function of its own takes the host ``piece_us`` longer, which nobody waits for where the device is busy
meanwhile, and moves what could have stayed in a kernel.

Worked example, on an H200: a layer of Llama on 8192 tokens of width 2048 takes 1228 µs, in which the host has been ready for
long; sixty more there count a tenth, 0.5 % of it, and the layer is taken out. Of 8 tokens the host sets the pace: it stays.
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
from dynafuse.cost.model import LEAST, Prediction, Work, objective, predict
from dynafuse.passes.layers.cuts import Program, bytes_of, value_of


@dataclass(frozen=True)
class Price:
    """Microseconds of a layer's forward, as part of a graph and as a function of its own."""

    whole_us: float
    apart_us: float
    share: float  # what may be lost, of the first

    @property
    def pays(self) -> bool:
        """Whether the loss is small enough."""
        return self.apart_us <= (1 + self.share) * self.whole_us

    def __str__(self) -> str:
        return f"{self.whole_us:.0f} µs a layer, {self.apart_us:.0f} as a function of its own"


def price(program: Program, calls: Sequence[Node], crossing: Iterable[Node], lost_bytes: int, device: Device) -> Price:
    """The price of taking out calls which ``crossing`` values enter and leave."""
    whole = _prediction(program, calls, [value_of(node) for node in crossing], device)
    moved_us = 2 * lost_bytes / max(device.bandwidth_tbs * 1e6, LEAST)
    apart = whole + Prediction(moved_us, device.piece_us, 0.0, moved_us)
    return Price(objective(whole, device), objective(apart, device), device.piece_share)


def _prediction(program: Program, calls: Sequence[Node], crossing: Sequence[Any], device: Device) -> Prediction:
    """A layer's forward: its libraries' calls, and a fused kernel before, between and after them."""
    library = [call for node in calls for call in program.library(node)]
    weights = {_storage(value) for value in crossing if isinstance(value, torch.nn.Parameter)}
    total, between = Prediction(), _bytes(crossing, weights)
    for call in library:
        tensors = (call.args, call.kwargs, call.result)
        total += op_prediction(call.target, call.args, call.kwargs, call.result, _bytes(tensors, set()), device)
        between += _bytes(tensors, weights)
    kernels = len(library) + 1
    fused = predict(Work(between, 0.0, 1 << 30, "pointwise"), device)
    return total + fused + Prediction(device_us=(kernels - 1) * device.launch_us_triton,
                                      host_us=(kernels - 1) * device.host_us_triton)


def _bytes(values: Any, weights: set[int]) -> int:
    """Bytes of the tensors among some values, but for those in the memory of weights."""
    return bytes_of(t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and _storage(t) not in weights)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
