"""Descriptions of devices: the constants that the cost model prices work with.

A description is a JSON file per known GPU under ``devices/``; a GPU without one gets the nearest shipped description,
scaled by what torch reports of it. Every constant can be overridden with ``DYNAFUSE_COST_<NAME>`` or
``options={"cost": {...}}``.

Worked example: ``describe("h200").constants["bandwidth_tbs"]`` is the measured copy bandwidth, counting bytes read plus
bytes written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

import torch

from dynafuse.config import register_cost_constants
from dynafuse.errors import OptionError

COST_CONSTANTS: dict[str, str] = {
    "bandwidth_tbs": "memory bandwidth that a copy reaches, TB/s of bytes read plus written",
    "flops_tflops": "rate of plain float32 arithmetic in fused kernels, TFLOP/s",
    "launch_us": "device time that a kernel costs besides its work, microseconds",
    "host_launch_us": "host time of a kernel launch, microseconds",
    "processors": "streaming multiprocessors",
    "efficiency_pointwise": "share of the bandwidth that a pointwise kernel reaches",
    "efficiency_reduction": "share of the bandwidth that a reduction kernel reaches",
    "efficiency_transpose": "share of the bandwidth that a transposing kernel reaches",
    "efficiency_eager": "share of the bandwidth that an eager memory-bound op reaches",
}
register_cost_constants(COST_CONSTANTS)


@dataclass(frozen=True)
class Device:
    """A device as the cost model sees it. ``capability`` is the compute capability as an int (90 is 9.0)."""

    name: str
    title: str
    source: str
    capability: int
    constants: Mapping[str, float]

    def __getattr__(self, name: str) -> float:
        try:
            return self.constants[name]
        except KeyError:
            raise AttributeError(name) from None

    def overridden(self, costs: Mapping[str, float]) -> Device:
        """This device with some constants replaced."""
        return replace(self, constants={**self.constants, **costs}) if costs else self


@cache
def known() -> tuple[str, ...]:
    """Names of the shipped descriptions."""
    folder = resources.files("dynafuse.partition") / "devices"
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


@cache
def describe(name: str) -> Device:
    """The shipped description ``name``. Raises OptionError, listing the shipped ones, if there is none."""
    if name not in known():
        raise OptionError(f"unknown device {name!r}; known: {', '.join(known())}")
    text = (resources.files("dynafuse.partition") / "devices" / f"{name}.json").read_text()
    return Device(**json.loads(text))


@cache
def at_hand(index: int) -> Device:
    """The description of CUDA device ``index``: the shipped one of that name, else the H200's scaled to its size."""
    properties = torch.cuda.get_device_properties(index)
    for name in known():
        if name in properties.name.lower():
            return describe(name)
    base = describe("h200")
    share = properties.multi_processor_count / base.processors
    scaled = {
        "processors": float(properties.multi_processor_count),
        "bandwidth_tbs": base.bandwidth_tbs * share,
        "flops_tflops": base.flops_tflops * share,
    }
    capability = properties.major * 10 + properties.minor
    return Device(properties.name, properties.name, "scaled from h200", capability, {**base.constants, **scaled})
