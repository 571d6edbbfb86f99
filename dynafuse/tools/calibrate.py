"""``dynafuse calibrate``: measures the cost model's constants on the GPU at hand, in under a minute, and stores them.

Every constant is measured by kernels of its class that dynafuse compiles itself (eager's are torch's), and computed from
their time by turning the cost model's formula around. Two clocks: on the device, CUDA events around many calls that were
queued while the device was held busy, so that the host's pace does not count; on the host, calls of kernels too small for
the device's to count. A constant whose samples scatter, whose value cannot be, or that no time is left for keeps its
shipped value; so do those that are not measured: compile seconds, arithmetic but that of products in 16 bits, elements of 1
and 8 bytes, and what is a matter of taste (expected calls, the hidden share, the model's error).

Worked example: softmax of ``bfloat16[32768, 4096]`` moves 537 MB; if Triton takes 146 µs, of which 2 are for the launch,
where a copy reaches 4.28 TB/s, then ``efficiency_triton_row`` is 537 / (144 × 4.28) = 0.87.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import geometric_mean, median

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dynafuse.config import resolve
from dynafuse.cost import calibration
from dynafuse.cost import device as devices
from dynafuse.cost.calibration import Calibration
from dynafuse.cost.device import CLASSES, REFERENCE_LENGTH, Device
from dynafuse.cost.model import efficiency_to_match
from dynafuse.cost.products import ALIGNED, SHARES
from dynafuse.errors import DynafuseError
from dynafuse.lowering.nvfuser import availability
from dynafuse.lowering.registry import EAGER
from dynafuse.lowering.registry import executor as executor_of
from dynafuse.lowering.triton.compiler import interpreting
from dynafuse.passes.decompositions import decompositions
from dynafuse.pipeline import compile_graph
from dynafuse.runtime.observers import Compiled, listening
from dynafuse.select.clock import Gpu, Refused, Run, Timer
from dynafuse.tools.calibrate_cases import BF16, Case, bandwidth_cases, chain, copied, product

SECONDS = 45.0  # after which no new constant is begun
ROUNDS = 7
CALLS = 20  # of a large kernel, per round
CHAIN = 9  # tiny kernels in one call
CHAIN_CALLS = 20
SCATTER = 0.15  # median deviation, relative to the median, above which samples are refused
LARGEST_BYTES = 512_000_000  # moved by one call: many times any L2 cache
MEMORY_SHARE = 32  # of the device's memory is what one call moves at most
SANE: Mapping[str, tuple[float, float]] = {
    "bandwidth": (0.02, 50.0), "efficiency": (0.01, 1.3), "length": (0.05, 20.0), "width": (0.05, 20.0),
    "launch": (0.2, 100.0), "replay": (0.1, 100.0), "host": (0.1, 1000.0), "allocation": (0.05, 1000.0),
    "contraction": (0.001, 20000.0),
}
"""The least and the greatest plausible value of a constant, by the first word of its name."""

Build = Callable[[Case], Run]


@dataclass
class Calibrator:
    """Measures constants one by one; later ones are computed with earlier ones.

    Attributes:
        shipped: The device's description before it is calibrated.
        builds: How to build a case, by executor.
        timer: Measures microseconds.
        moved: Bytes that one call of a large kernel moves.
        clock: Tells seconds.
        seconds: After how many no new constant is begun.
        measured: The constants so far.
        refused: Why the others keep their shipped values.
    """

    shipped: Device
    builds: Mapping[str, Build]
    timer: Timer
    moved: int = LARGEST_BYTES
    clock: Callable[[], float] = time.monotonic
    seconds: float = SECONDS
    measured: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> Device:
        """Return the description as far as it has been measured."""
        return self.shipped.overridden(self.measured)

    def run(self, progress: Callable[[str], None] = lambda name: None) -> None:
        """Measure everything, in order; ``progress`` is called with the name of each constant before it is measured."""
        end = self.clock() + self.seconds
        for name, measure in self.steps():
            progress(name)
            if self.clock() >= end:
                self.refused[name] = "no time left"
                continue
            try:
                self.measured[name] = _sane(name, measure())
            except (Refused, DynafuseError, RuntimeError) as error:  # RuntimeError: what CUDA and torch raise
                self.refused[name] = " ".join(str(error).split()) or type(error).__name__

    def steps(self) -> list[tuple[str, Callable[[], float]]]:
        """Return what is measured, by name, in order: later steps rest on earlier ones."""
        fused = [name for name in self.builds if executor_of(name).fuses]
        steps: list[tuple[str, Callable[[], float]]] = [("allocation_us", self.allocation)]
        for executor in self.builds:
            steps.append((f"launch_us_{executor}", partial(self.launch, executor)))
            steps.append((f"host_us_{executor}", partial(self.host, executor)))
        steps += [("replay_us", self.replay), ("bandwidth_tbs", self.bandwidth)]
        for kind in ("row", *(kind for kind in CLASSES if kind != "row")):
            for executor in self.builds:
                steps.append((f"efficiency_{executor}_{kind}", partial(self.efficiency, executor, kind)))
        for kind, length in (("row", 1024), ("row", 16384), ("rowcol", 1024), ("row", 65536), ("rowcol", 16384),
                             ("row", 256)):
            for executor in (*fused, EAGER) if kind == "row" else fused:
                steps.append((f"length_{executor}_{kind}_{length}", partial(self.length, executor, kind, length)))
        steps += [(f"width_{executor}_4", partial(self.width, executor, 4)) for executor in self.builds]
        steps.append(("contraction_tflops", partial(self.contraction, ALIGNED)))
        return steps + [(name, partial(self.contraction_share, alignment)) for alignment, name in SHARES.items()]

    # ------------------------------------------------------------------ launches

    def allocation(self) -> float:
        """Measure the host time of an allocation, µs."""
        return self._settled(lambda: self.timer.host(self.builds[EAGER](ALLOCATION), CHAIN_CALLS * CHAIN))

    def launch(self, executor: str) -> float:
        """Measure the device time of a kernel that does next to nothing, µs."""
        run = self._built(chain(executor, CHAIN))
        return self._settled(lambda: self.timer.device(run, CHAIN_CALLS)) / CHAIN

    def host(self, executor: str) -> float:
        """Measure the host time of one more call, µs, without the allocation, which the model counts by itself."""
        long, short = (self._built(chain(executor, count)) for count in (CHAIN, 1))
        each = [self._settled(lambda run=run: self.timer.host(run, CHAIN_CALLS)) for run in (long, short)]  # type: ignore[misc]
        slope = (each[0] - each[1]) / (CHAIN - 1)
        return slope - (0.0 if executor_of(executor).allocates else self.device.allocation_us)

    def replay(self) -> float:
        """Measure the device time of a node of a captured graph that does next to nothing, µs."""
        run = self._built(chain("eager", CHAIN))
        return self._settled(lambda: self.timer.replay(run)) / CHAIN

    # ------------------------------------------------------------------ bandwidth and shares of it

    def bandwidth(self) -> float:
        """Measure the bandwidth of a copy, TB/s."""
        case = copied(self.moved)
        us = self._us(case) - self.device.launch_us_eager
        return case.work.bytes / us / 1e6 if us > 0 else math.nan

    def efficiency(self, executor: str, kind: str, length: int = REFERENCE_LENGTH, dtype: torch.dtype = BF16) -> float:
        """Measure an efficiency: the one at which the model, with its factors at 1, predicts the measured time.

        Args:
            executor: The executor.
            kind: The kernel class.
            length: The elements of a row.
            dtype: The dtype of the elements.

        Raises:
            Refused: A kernel takes no longer than its launch.
        """
        efficiencies = []
        names = {f"length_{executor}_{kind}_{length}", f"width_{executor}_{dtype.itemsize}"}
        plain = self.device.overridden(dict.fromkeys(names & self.shipped.constants.keys(), 1.0))
        for case in bandwidth_cases(executor, kind, length, dtype, self.moved):
            value = efficiency_to_match(case.work, plain, executor, self._us(case))
            if value is None:
                raise Refused("the kernel took no longer than its launch")
            efficiencies.append(value)
        return geometric_mean(efficiencies)

    def length(self, executor: str, kind: str, length: int) -> float:
        """Measure the factor of a row length.

        Args:
            executor: The executor.
            kind: The kernel class.
            length: The elements of a row.

        Raises:
            Refused: The efficiency that it is relative to was not measured, or a kernel takes no longer than its launch.
        """
        return self.efficiency(executor, kind, length) / self._base(executor, kind)

    def width(self, executor: str, width: int) -> float:
        """Measure the factor of an element width (bytes) by pointwise kernels."""
        assert width == 4, width
        return self.efficiency(executor, "pointwise", dtype=torch.float32) / self._base(executor, "pointwise")

    # ------------------------------------------------------------------ matrix products

    def contraction(self, alignment: int) -> float:
        """Measure the rate of a product whose result has rows of a multiple of so many bytes, TFLOP/s."""
        case = product(alignment)
        us = self._us(case) - self.device.launch_us_eager
        return case.work.flops / us / 1e6 if us > 0 else math.nan

    def contraction_share(self, alignment: int) -> float:
        """Measure the share of the rate that is left where rows are a multiple of ``alignment`` bytes, not of 16.

        Raises:
            Refused: The rate was not measured.
        """
        if "contraction_tflops" not in self.measured:
            raise Refused("rests on contraction_tflops, which was not measured")
        return self.contraction(alignment) / self.measured["contraction_tflops"]

    # ------------------------------------------------------------------ what measurements share

    def _base(self, executor: str, kind: str) -> float:
        name = f"efficiency_{executor}_{kind}"
        if name not in self.measured:
            raise Refused(f"rests on {name}, which was not measured")
        return self.measured[name]

    def _us(self, case: Case) -> float:
        run = self._built(case)
        return self._settled(lambda: self.timer.device(run, CALLS))

    def _built(self, case: Case) -> Run:
        """Build a case, and call it until it is warm."""
        run = self.builds[case.executor](case)
        for _ in range(3):
            run()
        return run

    def _settled(self, sample: Callable[[], float]) -> float:
        """Return the median of several samples. Raises Refused if they do not agree."""
        samples = [sample() for _ in range(ROUNDS)]
        middle = median(samples)
        scatter = median(abs(value - middle) for value in samples)
        if not (middle > 0 and scatter <= SCATTER * middle):
            raise Refused(f"samples scatter: {min(samples):.3g} to {max(samples):.3g} µs")
        return middle


def _sane(name: str, value: float) -> float:
    low, high = SANE[name.split("_")[0]]
    if not low <= value <= high:  # NaN is not either
        raise Refused(f"{value:.4g} cannot be: expected {low:g} to {high:g}")
    return value


# ---------------------------------------------------------------------- on a GPU


def _allocate(size: Tensor) -> tuple[Tensor, ...]:
    """Allocate as generated code does."""
    return (torch._C._dynamo.guards._empty_strided_cuda((1024,), (1,), BF16),)  # type: ignore[attr-defined]


ALLOCATION = Case("allocation", "eager", _allocate, ((1,),), BF16)


def _inputs(case: Case) -> list[Tensor]:
    return [torch.randn(shape, dtype=case.dtype, device="cuda") for shape in case.shapes]


def eager(case: Case) -> Run:
    """Return a case as torch runs it."""
    inputs = _inputs(case)
    return lambda: case.function(*inputs)


def compiled(executor: str, case: Case) -> Run:
    """Compile a case for an executor, without Dynamo and its guards.

    Args:
        executor: The executor that the case has to run on.
        case: The case; its inputs are made here.

    Raises:
        Refused: Dynafuse does not fuse it.
    """
    return bound(executor, case, _inputs(case))


def bound(executor: str, case: Case, inputs: Sequence[Tensor]) -> Run:
    """Return the compiled function of a case with its inputs bound.

    Args:
        executor: The executor that the case has to run on.
        case: The case.
        inputs: Its inputs.

    Raises:
        Refused: The planner did not give it to that executor.
    """
    module = make_fx(case.function, decompositions(), tracing_mode="fake")(*inputs)
    costly = {"host_us_eager": 1e6, "launch_us_eager": 1e6}  # so that nothing is left to eager
    config = resolve(None, {"executors": [executor], "strict": True, "tune": "never", "workers": 0, "cost": costly}, {})
    graphs: list[Compiled] = []
    with listening(graphs.append, plan_only=False):
        call = compile_graph("inference", config, module, list(inputs))
    regions = graphs[-1].plan.regions
    if not regions or any(region.executor != executor for region in regions):
        raise Refused(f"{executor} was not given the kernel")
    return lambda: call(list(inputs))


def executors_at_hand() -> dict[str, Build]:
    """Return how to build a case for each executor that can be used here, by name."""
    builds: dict[str, Build] = {"triton": partial(compiled, "triton"), "eager": eager}
    if availability.find().available:
        builds["nvfuser"] = partial(compiled, "nvfuser")
    return builds


# ---------------------------------------------------------------------- the command


def main(seconds: float = SECONDS, console: Console | None = None) -> int:
    """Calibrate the current CUDA device, print the constants and store them.

    Returns:
        The exit status: 1 if the bandwidth could not be measured, so that nothing is stored.

    Raises:
        DynafuseError: Without a GPU, or if Triton interprets.
    """
    if not torch.cuda.is_available():
        raise DynafuseError("no CUDA device is available: there is nothing to calibrate")
    if interpreting():
        raise DynafuseError("Triton runs in its interpreter: calibrate without TRITON_INTERPRET")
    console = console or Console()
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    moved = min(LARGEST_BYTES, properties.total_memory // MEMORY_SHARE)
    calibrator = Calibrator(devices.not_calibrated(index), executors_at_hand(), Gpu(), moved, seconds=seconds)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("calibrating", total=len(calibrator.steps()))
        calibrator.run(lambda name: progress.update(task, advance=1, description=f"calibrating {name}"))
    torch.cuda.empty_cache()
    show(console, calibrator)
    if "bandwidth_tbs" not in calibrator.measured:
        console.print("nothing is stored: without the bandwidth the rest means nothing")
        return 1
    path = calibration.save(result(calibrator, properties.name))
    devices.at_hand.cache_clear()
    console.print(f"stored in {path}", soft_wrap=True)
    return 0


def result(calibrator: Calibrator, name: str) -> Calibration:
    """Return the measured constants as they are stored for the device that torch calls ``name``."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rounded = {constant: float(f"{value:.4g}") for constant, value in calibrator.measured.items()}
    return Calibration(name, calibration.versions(), date, rounded)


def _title(device: Device) -> str:
    return f"{device.title}, {device.source}"


def show(console: Console, calibrator: Calibrator) -> None:
    """Print the table (constant, shipped, measured, ratio), and below it what kept its shipped value."""
    table = Table("constant", "shipped", "measured", "ratio", title=_title(calibrator.shipped))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, value in calibrator.measured.items():
        shipped = calibrator.shipped.constants[name]
        table.add_row(name, f"{shipped:.3g}", f"{value:.3g}", f"{value / shipped:.2f}" if shipped else "–")
    console.print(table)
    for name, why in calibrator.refused.items():
        console.print(f"{name} keeps {calibrator.shipped.constants[name]:.3g}: {escape(why)}", highlight=False)
