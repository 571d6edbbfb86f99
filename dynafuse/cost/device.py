"""Descriptions of devices: the constants that the cost model prices work with, each with where it comes from.

A description is a JSON file per known GPU under ``devices/``; ``dynafuse calibrate`` measures the GPU at hand and stores
what it finds. A GPU with neither gets the H200's description scaled to its size; the CPU has one, scaled to its cores. Every
constant can be overridden with ``DYNAFUSE_COST_<NAME>`` or ``options={"cost": {...}}``; :data:`COST_CONSTANTS` says what
each one means.

Worked example: ``describe("h200").bandwidth_tbs`` is the measured copy bandwidth, counting bytes read plus bytes written,
and ``describe("h200").efficiency_nvfuser_row`` the share of it that nvFuser's row reductions reach. Of a kernel's class
the efficiency is ``efficiency × length × width``: the first at rows of 4096 elements of 16 bits, the others factors for
other row lengths (:data:`LENGTHS`, interpolated in the logarithm) and other element widths (:data:`WIDTHS`, bytes).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch

from dynafuse.config import register_cost_constants
from dynafuse.cost import calibration
from dynafuse.errors import OptionError
from dynafuse.lowering.registry import SHIPPED

log = logging.getLogger(__name__)

EXECUTORS = tuple(SHIPPED)
CLASSES = ("pointwise", "row", "column", "split", "rowcol")
RATES = ("flops_tflops", "contraction_tflops", "contraction_tflops_float32", "contraction_tflops_tf32", "atomics_gops",
         "sorted_adds_gops")
CORES_TO_FILL_MEMORY = 16  # beyond which more cores move no more bytes
BY_LENGTH = ("row", "rowcol")  # classes whose efficiency depends on the row length
REFERENCE_LENGTH = 4096
LENGTHS = (256, 1024, 16384, 65536)  # row lengths that have a factor; at REFERENCE_LENGTH it is one
REFERENCE_WIDTH = 2
WIDTHS = (1, 4, 8)  # bytes per element that have a factor; at REFERENCE_WIDTH it is one


def _documented() -> dict[str, str]:
    docs = {
        "bandwidth_tbs": "memory bandwidth that a copy reaches, TB/s of bytes read plus written",
        "flops_tflops": "rate of plain float32 arithmetic in fused kernels, TFLOP/s",
        "contraction_tflops": "rate of matrix products, convolutions and attention in 16-bit floats, TFLOP/s",
        "contraction_tflops_float32": "the same in float32, without TensorFloat-32",
        "contraction_tflops_tf32": "the same in float32, as TensorFloat-32",
        "contraction_share_8": "share of the rate that products of 16-bit matrices reach with rows of a multiple of 8 "
                               "bytes, not of 16",
        "contraction_share_4": "the same with rows of a multiple of 4 bytes",
        "contraction_share_2": "the same with rows of a multiple of 2 bytes",
        "contraction_share_tf32": "the same of float32 matrices as TensorFloat-32, with rows of no multiple of 16 bytes",
        "unaligned_share": "share of the bandwidth that copies reach where one side's rows are no multiple of 16 bytes",
        "atomics_gops": "rate of atomic operations of kernels on elements in memory, 1e9 a second",
        "sorted_adds_gops": "rate at which eager adds values at indices that it has sorted before, 1e9 a second",
        "processors": "streaming multiprocessors, or cores",
        "programs_per_processor": "programs in flight that keep a processor's memory pipes full",
        "replay_us": "device time of a node of a captured CUDA graph besides its work, microseconds",
        "combine_us": "device time of a reduction split over programs besides its work and launches, microseconds: what "
                      "combines their results waits for the last of them",
        "allocation_us": "host time of one allocation of device memory, microseconds",
        "expected_calls": "calls over which a kernel's compile time is spread",
        "expected_runs": "calls of a graph over which the compile time of a kernel that it calls once is spread",
        "host_us_contraction": "host time of a matrix product, microseconds",
        "host_us_convolution": "host time of a convolution, and of each gradient of one, microseconds",
        "host_us_attention": "host time of attention by a kernel of its own, microseconds",
        "argument_us": "host time of an argument of a kernel of Triton, microseconds",
        "piece_us": "host time that a layer takes longer as a function of its own, microseconds (`reuse_layers`)",
        "piece_share": "share of a layer's time that its being one may cost",
        "near_least_terms": "terms from which a fold may run on a kernel that serves several lengths (`near_match`)",
        "hidden_share": "share of the shorter of host and device time that is waited for all the same",
        "kept_share": "what keeping a byte for the backward costs, as a share of the time in which it is written "
                      "(`rematerialize`)",
        "model_error": "relative difference of two predictions below which a measurement has to decide",
        "model_error_long": f"the same for rows of more than {LENGTHS[-1]} elements, longer than any that are measured",
        "measured_gain": "share of a plan's predicted time that a measurement has to be able to gain to be made",
    }
    for executor in EXECUTORS:
        docs[f"launch_us_{executor}"] = f"device time of a kernel of {executor} besides its work, microseconds"
        docs[f"host_us_{executor}"] = f"host time of a call of {executor}, microseconds"
        docs[f"compile_s_{executor}"] = f"time until a new kernel of {executor} is compiled, seconds"
        for kind in CLASSES:
            docs[f"efficiency_{executor}_{kind}"] = f"share of the bandwidth that {_kernel(kind)} of {executor} reaches"
        for kind in BY_LENGTH:
            for length in LENGTHS:
                what = f"factor on efficiency_{executor}_{kind} for rows of {length} elements"
                docs[f"length_{executor}_{kind}_{length}"] = what
        for width in WIDTHS:
            docs[f"width_{executor}_{width}"] = f"factor on efficiencies of {executor} for elements of {width} bytes"
    return docs


def _kernel(kind: str) -> str:
    return {
        "pointwise": "a pointwise kernel", "row": "a reduction of contiguous rows",
        "column": "a reduction across rows", "split": "a reduction of few rows, split over programs",
        "rowcol": "a reduction of rows and columns in one pass",
    }[kind]


COST_CONSTANTS: dict[str, str] = _documented()
register_cost_constants(COST_CONSTANTS)


@dataclass(frozen=True)
class Device:
    """A device as the cost model sees it; constants are attributes, ``sources`` says where each comes from.

    ``capability`` is the compute capability as an int (90 is 9.0; 0 for a CPU), ``kind`` one of shipped, calibrated, scaled.
    """

    name: str
    title: str
    source: str
    capability: int
    constants: Mapping[str, float]
    sources: Mapping[str, str] = field(default_factory=dict)
    kind: str = "shipped"

    def __post_init__(self) -> None:
        self.__dict__.update(self.constants)  # prices are made of them by the thousand

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> float: ...

    def overridden(self, costs: Mapping[str, float]) -> Device:
        """Return this device with some constants replaced."""
        return self.updated(costs, "override") if costs else self

    def updated(self, constants: Mapping[str, float], origin: str, **changes: Any) -> Device:
        """Return this device with some constants replaced.

        Args:
            constants: The new values by the names of COST_CONSTANTS, each in the unit that is said there.
            origin: Where they come from, which ``sources`` says of them from now on.
            **changes: Other fields, such as ``name`` or ``kind``, with their new values.
        """
        sources = {**self.sources, **dict.fromkeys(constants, origin)}
        return replace(self, constants={**self.constants, **constants}, sources=sources, **changes)

    def efficiency(self, executor: str, kernel_class: str, length: int = 0, width: int = REFERENCE_WIDTH) -> float:
        """Return the share of the bandwidth that a kernel reaches.

        Args:
            executor: An executor with constants of its own, one of EXECUTORS.
            kernel_class: One of CLASSES.
            length: The elements of a row, for the classes that depend on it; 0 is not known and counts as the reference.
            width: Bytes per element of what is mostly moved; the nearest one that has a factor counts.
        """
        share = self.constants[f"efficiency_{executor}_{kernel_class}"]
        if kernel_class in BY_LENGTH and length > 0:
            share *= self._length_factor(f"length_{executor}_{kernel_class}", length)
        if width != REFERENCE_WIDTH:
            share *= self.constants[f"width_{executor}_{_nearest_width(width)}"]
        return share

    def _length_factor(self, prefix: str, length: int) -> float:
        """Return the factor of a row length: linear in its logarithm between the known ones, constant beyond them."""
        knots = [(math.log2(at), self.constants[f"{prefix}_{at}"]) for at in LENGTHS] + [(math.log2(REFERENCE_LENGTH), 1.0)]
        knots.sort()
        x = min(max(math.log2(length), knots[0][0]), knots[-1][0])
        for (x0, y0), (x1, y1) in itertools.pairwise(knots):
            if x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        raise AssertionError(length)


def _nearest_width(width: int) -> int:
    return min(WIDTHS, key=lambda known_width: abs(math.log2(known_width) - math.log2(max(width, 1))))


@cache
def known() -> tuple[str, ...]:
    """Return the names of the shipped descriptions."""
    folder = resources.files("dynafuse.cost") / "devices"
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


@cache
def describe(name: str) -> Device:
    """Return a shipped description, by its name.

    Raises:
        OptionError: There is none of that name; the message lists those there are.
    """
    if name not in known():
        raise OptionError(f"unknown device {name!r}; known: {', '.join(known())}")
    text = (resources.files("dynafuse.cost") / "devices" / f"{name}.json").read_text(encoding="utf-8")
    return parse(json.loads(text))


def parse(data: Mapping[str, Any]) -> Device:
    """Parse a description from its JSON form; what it does not say comes from the ``base`` that it names."""
    constants: dict[str, float] = {}
    sources: dict[str, str] = {}
    if "base" in data:
        base = describe(data["base"])
        constants = dict(base.constants)
        sources = {name: f"carried over from {base.name} ({source})" for name, source in base.sources.items()}
    for name, said in data["constants"].items():
        constants[name], sources[name] = float(said["value"]), said["source"]
    assert constants.keys() == COST_CONSTANTS.keys(), constants.keys() ^ COST_CONSTANTS.keys()
    return Device(data["name"], data["title"], data["source"], data["capability"], constants, sources)


@cache
def at_hand(index: int) -> Device:
    """Describe CUDA device ``index``: calibrated if it was with these versions, else shipped, else scaled."""
    return calibrated(not_calibrated(index), torch.cuda.get_device_properties(index).name)


@cache
def of_host() -> Device:
    """Return the description of this machine's CPU: the shipped one, scaled to as many cores."""
    base, cores = describe("cpu"), os.cpu_count() or 1
    if cores == base.processors:
        return base
    constants = {
        "processors": float(cores),
        "bandwidth_tbs": base.bandwidth_tbs * min(cores, CORES_TO_FILL_MEMORY) / base.processors,
        **{name: base.constants[name] * cores / base.processors for name in RATES},
    }
    source = "scaled from cpu by cores"
    return base.updated(constants, source, title=f"CPU of {cores} cores", source=source, kind="scaled")


def not_calibrated(index: int) -> Device:
    """Return the description of CUDA device ``index`` without what ``dynafuse calibrate`` may have measured."""
    properties = torch.cuda.get_device_properties(index)
    for name in known():
        base = describe(name)
        if name in properties.name.lower():
            # Cards of one name come in sizes: a description fits one that has as many processors.
            same = properties.multi_processor_count == base.processors
            return base if same else scaled(base, properties)
    return scaled(describe("h200"), properties)


def scaled(base: Device, properties: Any) -> Device:
    """Return ``base`` scaled by processors, for the GPU that torch's ``properties`` tell of."""
    share = properties.multi_processor_count / base.processors
    constants = {
        "processors": float(properties.multi_processor_count),
        "bandwidth_tbs": base.bandwidth_tbs * share,
        **{name: base.constants[name] * share for name in RATES},
    }
    source = f"scaled from {base.name} by processors"
    capability = properties.major * 10 + properties.minor
    name = properties.name
    return base.updated(constants, source, name=name, title=name, source=source, capability=capability, kind="scaled")


def calibrated(device: Device, name: str) -> Device:
    """Return ``device`` with what was measured, with the same versions, on the GPU that torch calls ``name``."""
    measured = calibration.load(name, COST_CONSTANTS)
    if measured is None:
        return device
    log.info("costs of %s as calibrated on %s", name, measured.date)
    return device.updated(measured.constants, "calibrated", source=f"calibrated on {measured.date}", kind="calibrated")
