"""The setting of a graph: all that decides about its plan besides its nodes, and what torch has to know of it.

Worked example: for a graph of CUDA tensors on an H200, ``setting_of("forward", module, ...)`` has the device ``h200``, the
capability 90 and the executors ``("triton", "eager")``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule

from dynafuse.config import Config
from dynafuse.cost import device as devices
from dynafuse.fallback import Guard
from dynafuse.lowering.base import Compilation, Use
from dynafuse.lowering.triton import compiler
from dynafuse.partition.forcing import Forcing
from dynafuse.runtime.capture.decide import Shared
from dynafuse.runtime.observers import plan_only, sizes
from dynafuse.runtime.trace import Trace
from dynafuse.select.enable import fusing, how_to_enable, tell, usable


@dataclass(frozen=True)
class Setting:
    """A normalized graph with all that its plan depends on."""

    kind: str  # forward | backward | inference
    module: GraphModule
    config: Config
    forcing: Forcing
    device: devices.Device
    fused_device: str | None  # the type of device whose tensors are fused
    unusable: Mapping[str, str]  # executors that the options name and that cannot be used, with the reason
    capability: int | None  # the device's, as 90; None where nothing runs natively
    calls: int  # how often a training or inference step calls the graph
    static_inputs: frozenset[int]  # positions of inputs whose addresses do not change from call to call
    guard: Guard
    trace: Trace
    shared: Shared | None = None  # what the graphs of one model tell each other; None for a graph inside another
    sizes: tuple[int, ...] = field(default_factory=sizes)  # for which alone it is compiled; none if for any
    process: int = field(default_factory=os.getpid)

    @property
    def compilation(self) -> Compilation:
        """Return what kernels are compiled for: the capability and the options."""
        return Compilation(self.capability, self.config, self.guard)


def setting_of(kind: str, module: GraphModule, config: Config, forcing: Forcing, calls: int, guard: Guard,
               trace: Trace) -> Setting:
    """Return the setting of a normalized graph.

    Args:
        kind: forward, backward or inference.
        module: The graph.
        config: The options.
        forcing: What the user forces onto which executor.
        calls: How often a step calls the graph.
        guard: How far failures of its stages reach.
        trace: Where values of its stages are written.

    Raises:
        ExecutorError: Under ``strict``, an executor cannot be used.
    """
    device = device_of(values_of(module), config)
    use, enabled, unusable = executors_for(values_of(module), config)
    return Setting(kind, module, config, allowing(forcing, use, enabled), device, fused_device(use, enabled), unusable,
                   None if compiler.interpreting() else device.capability, calls, static_inputs(kind), guard, trace)


def values_of(module: GraphModule) -> Iterator[Any]:
    """Return examples of a graph's values."""
    return (node.meta.get("val") for node in module.graph.nodes)


def device_of(values: Iterable[Any], config: Config) -> devices.Device:
    """Return the device that the cost model prices for: the one that the options name, else the one that tensors are on.

    Args:
        values: Examples of a graph's values; the first tensor on CUDA counts.
        config: The options, whose cost constants override the device's.

    Raises:
        OptionError: The options name a device that is not described.
    """
    if config.device:
        return devices.describe(config.device).overridden(config.cost)
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == "cuda" and torch.cuda.is_available():
            return devices.at_hand(value.device.index or 0).overridden(config.cost)
    described = devices.describe("h200") if compiler.interpreting() else devices.of_host()
    return described.overridden(config.cost)


def executors_for(values: Iterable[Any], config: Config) -> tuple[Use, tuple[str, ...], Mapping[str, str]]:
    """Return what executors would be used for, the ones that can be used, and why others of the options cannot.

    Args:
        values: Examples of a graph's values; it is on CUDA if a tensor among them is.
        config: The options.

    Raises:
        ExecutorError: Under ``strict``, one cannot be used, unless the graph is only planned.
    """
    on_cuda = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)
    use = Use("cuda" if on_cuda else "cpu", config, planning=plan_only() and config.device is not None)
    enabled, unusable = usable(use)
    if not plan_only():
        tell(use, enabled, unusable)
    return use, enabled, unusable


def allowing(forcing: Forcing, use: Use, enabled: Sequence[str]) -> Forcing:
    """Return what is forced, with the executors that can be used and advice on how to enable others.

    Args:
        forcing: What the user forces onto which executor.
        use: Where the graph runs, and with which options.
        enabled: The names of the executors that can be used.
    """
    return replace(forcing, enabled=tuple(enabled), how_to_enable=lambda name: how_to_enable(name, use))


def fused_device(use: Use, enabled: Sequence[str]) -> str | None:
    """Return the type of device whose tensors are fused; None if there is no executor to fuse them."""
    return use.device_type if fusing(enabled) else None


def static_inputs(kind: str) -> frozenset[int]:
    """Return the positions of inputs whose addresses do not change from call to call (parameters)."""
    context = TracingContext.try_get()
    if kind == "backward" or context is None or context.fw_metadata is None:
        return frozenset()
    return frozenset(context.fw_metadata.static_input_indices)


def keep_saved_tensors() -> frozenset[int]:
    """Return the inputs of the backward, by position, that nothing but autograd holds, and refuse them as a gift.

    Torch offers their memory to the backward, which is compiled before anyone knows whether ``retain_graph`` will be asked
    for, and then refuses that. The backward's function asks each time instead. Metadata of plain tensors and of tensor
    subclasses share the list.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None or not context.fw_metadata.bw_donated_idxs:
        return frozenset()
    offered = frozenset(context.fw_metadata.bw_donated_idxs)
    context.fw_metadata.bw_donated_idxs.clear()
    return offered
