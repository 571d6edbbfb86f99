"""Measuring of regions that several executors could run, on random data, within a budget of seconds.

Worked example, for one graph whose region ``r0`` the model is unsure about::

    tuner = Tuner(config.tune_budget_s)
    if needs_measuring(region.decision, config.tune):
        measurement = tuner.measure(bound, {"nvfuser": build_nvfuser, "triton": build_triton}, torch.device("cuda", 0))
        choice = cost.choose(measurement.predictions(predicted), device, captured, rest)
    print(tuner)     # tuned 1 region in 0.3 s of 20 s

Each candidate is warmed up, then timed by replays of a CUDA graph that holds many calls, and on the host by calls that are
not waited for. The calls take turns at several buffers: until it is one's turn again, others have moved more than the L2
cache holds. A kernel that cannot be captured is timed by events. Equal regions are measured once in a process.

Nothing here raises because a candidate fails: one that cannot be built, cannot run or does not fit into memory is not
chosen, ``strict`` or not. If all others fail too and it is chosen nevertheless, compiling it for the graph fails in the
ordinary way. The user's tensors and random numbers are not touched.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.fallback import attempted
from dynafuse.forks import Lock
from dynafuse.ir import Spec
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.select import data
from dynafuse.select.clock import CaptureFailed, Gpu, Refused, Timer
from dynafuse.select.measurement import Measurement, MeasurementStore, Timing, measurement_key
from dynafuse.select.runners import Runner, runner

log = logging.getLogger(__name__)

MEASUREMENTS = MeasurementStore()
"""The measurements of this process."""

Build = Callable[[], Any]
"""Builds a candidate's kernel, as ``runners.runner`` takes it."""

MEMORY_SHARE = 0.25  # of the free memory that a region's data may take
CACHES = 2  # multiple of the L2 cache that is moved before the same buffers are used again, if there is memory
MOST_SETS = 32  # of inputs
TARGET_US = 2000.0  # device time of one captured graph
MOST_CALLS = 200  # in a captured graph
ROUGH_CALLS, REPLAYS, ROUNDS, HOST_CALLS, HOST_ROUNDS = 4, 3, 5, 20, 3
_measuring = Lock()  # two measurements at a time would disturb each other


class PredictedChoice(Protocol):
    """A predicted choice between executors: a ``cost.model.Choice``, or the ``ir.Decision`` of a region."""

    @property
    def margin(self) -> float:
        """Return how much more the second executor costs, relative to the first; infinite without a second."""

    @property
    def unsure(self) -> tuple[str, ...]:
        """Return the executors whose predictions are closer than the model's error, best first."""


def needs_measuring(choice: PredictedChoice, tune: str) -> bool:
    """Return whether a choice is to be measured.

    Args:
        choice: What was predicted.
        tune: The option: never, unsure or always; always needs two executors.
    """
    several = not math.isinf(choice.margin)
    return {"never": False, "unsure": len(choice.unsure) > 1, "always": several}[tune]


def contenders(choice: PredictedChoice, tune: str, executors: Sequence[str]) -> tuple[str, ...]:
    """Return the executors to be measured, the predicted winner first; none if nothing is to be measured.

    Args:
        choice: What was predicted.
        tune: The option: never, unsure or always.
        executors: The executors that could run the region, the predicted winner first.
    """
    if not needs_measuring(choice, tune):
        return ()
    return choice.unsure if tune == "unsure" else tuple(executors)


def obstacle(device: torch.device) -> str:
    """Return why nothing can be measured on a device now, or ""."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "not measured: no GPU"
    return "not measured: a CUDA graph is being captured" if torch.cuda.is_current_stream_capturing() else ""


def free_bytes(device: torch.device) -> int:
    """Return the bytes that allocations could take: the device's free ones and those that torch has reserved."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@dataclass
class Rotation:
    """Calls of a kernel on several sets of inputs in turn. As many outputs are kept alive, so that these rotate too."""

    run: Runner
    sets: Sequence[Sequence[torch.Tensor]]
    turn: int = 0

    def __post_init__(self) -> None:
        self._outputs: deque[Any] = deque(maxlen=len(self.sets))

    def __call__(self) -> None:
        self._outputs.append(self.run(self.sets[self.turn]))
        self.turn = (self.turn + 1) % len(self.sets)


@dataclass
class Tuner:
    """Measures the regions of one graph. ``obstacle``, ``free`` and ``cache`` describe the device; ``now`` is a clock."""

    budget_s: float
    clock: Timer = field(default_factory=Gpu)
    store: MeasurementStore = field(default_factory=lambda: MEASUREMENTS)
    now: Callable[[], float] = time.monotonic
    obstacle: Callable[[torch.device], str] = obstacle
    free: Callable[[torch.device], int] = free_bytes
    cache: Callable[[torch.device], int] = cache_bytes
    spent_s: float = 0.0
    regions: int = 0  # that were measured
    reused: int = 0  # regions that had been measured before
    unusable: str = ""  # why the device can no longer be measured on

    def measure(self, bound: CanonicalRegion, candidates: Mapping[str, Build], device: torch.device,
                hints: Mapping[str, int] | None = None) -> Measurement:
        """Measure a region on each of the candidates, except on those whose timings are stored.

        Args:
            bound: The region with its spec.
            candidates: What builds the kernel of each executor, in the order of the predictions, best first.
            device: Where to run them.
            hints: Values of the spec's size symbols; by default those of the example inputs.
        """
        names = tuple(candidates)
        reason = self.unusable or self.obstacle(device) or ("" if len(names) > 1 else "not measured: nothing to compare")
        if reason:
            return Measurement("", {}, names, reason)
        hints = bound.hints if hints is None else hints
        key = measurement_key(bound.member.code if bound.member else bound.spec, hints, device)  # one key for a fold family
        missing = {name: build for name, build in candidates.items() if name not in self.store.get(key)}
        if missing:
            reason, seconds = self._measure_missing(key, bound, missing, hints, device)
        else:
            self.reused += 1
        timings = self.store.get(key)
        measurement = Measurement(key, {name: timings[name] for name in names if name in timings}, names, reason,
                                  reason == EXHAUSTED)
        if missing:
            log.info("tuned %s: %s, %.2f s", bound.region.name, measurement, seconds)
        return measurement

    def _measure_missing(self, key: str, bound: CanonicalRegion, missing: Mapping[str, Build], hints: Mapping[str, int],
                         device: torch.device) -> tuple[str, float]:
        """Store the missing timings; return why some are still missing, or "", and the seconds that it took."""
        if self.spent_s >= self.budget_s:
            return EXHAUSTED, 0.0
        with _measuring, _isolated(device):
            start = self.now()
            try:
                return self._store_timings(key, bound, missing, hints, device, start), self.now() - start
            finally:
                self.spent_s += self.now() - start

    def _store_timings(self, key: str, bound: CanonicalRegion, missing: Mapping[str, Build], hints: Mapping[str, int],
                       device: torch.device, start: float) -> str:
        """Time the candidates in turn, from ``start`` on while the budget lasts; return why some are missing, or ""."""
        try:
            sets = self._input_sets(bound.spec, hints, device)
        except (data.NoData, RuntimeError, KeyError) as error:  # RuntimeError: what CUDA and torch raise
            return f"not measured: {_text(error)}"
        self.regions += 1
        for name, build in missing.items():
            if self.spent_s + self.now() - start >= self.budget_s:
                return EXHAUSTED
            if self.unusable:
                return self.unusable
            self.store.put(key, name, self._timing(name, build, bound, hints, device, sets))
        return ""

    def _input_sets(self, spec: Spec, hints: Mapping[str, int], device: torch.device) -> list[list[torch.Tensor]]:
        """Return sets of inputs: as many that none is in the L2 cache when its turn comes, or as fit. Raises NoData."""
        each, share = max(1, data.needed_bytes(spec, hints)), int(self.free(device) * MEMORY_SHARE)
        if each > share:
            raise data.NoData(f"its data take {each / 1e6:.0f} MB, and {share / 1e6:.0f} MB may be taken")
        count = min(1 + math.ceil(CACHES * self.cache(device) / each), share // each, MOST_SETS)
        first = data.inputs_for(spec, hints, device)
        return [first, *(data.copies(first) for _ in range(1, count))]

    def _timing(self, name: str, build: Build, bound: CanonicalRegion, hints: Mapping[str, int], device: torch.device,
                sets: Sequence[Sequence[torch.Tensor]]) -> Timing:
        """Return the timing of one candidate, which says so if the candidate fails."""
        def run() -> Timing:
            kernel = build()
            if isinstance(kernel, Kernel) and kernel.interpreted and device.type == "cuda":
                return Timing(reason="not measured: Triton runs in its interpreter")
            rotation = Rotation(runner(kernel, bound.spec, hints, device, bound.member, bound.classes), sets)
            rotation()
            _synchronize(device)
            return self._clocked(rotation)

        def failed(error: Exception) -> Timing:
            self._check(device)
            return _failed(name, error)

        return attempted(run, failed)  # whatever a compiler or a kernel raises is a reason not to choose it

    def _clocked(self, rotation: Rotation) -> Timing:
        """Time a kernel that has run once: on the device by replays, or by events without capture; on the host by calls.

        Raises Refused for a time that cannot be.
        """
        rough = self.clock.device(rotation, ROUGH_CALLS)
        sets = len(rotation.sets)
        calls = sets * math.ceil(min(MOST_CALLS, max(TARGET_US / max(rough, 0.1), sets)) / sets)
        captured = True
        try:
            device_us = self.clock.replay(rotation, calls, REPLAYS, ROUNDS)
        except CaptureFailed as error:
            log.debug("timed without capture: %s", error)
            captured = False
            device_us = median(self.clock.device(rotation, min(calls, HOST_CALLS)) for _ in range(ROUNDS))
        host_us = median(self.clock.host(rotation, HOST_CALLS) for _ in range(HOST_ROUNDS))
        if not (device_us > 0 and math.isfinite(device_us)):
            raise Refused(f"{device_us} µs cannot be")
        return Timing(device_us, host_us, captured)

    def _check(self, device: torch.device) -> None:
        """Note if a failure has left the device unusable, as an illegal access does."""
        try:
            _synchronize(device)
        except RuntimeError as error:
            self.unusable = f"not measured: the device fails since a candidate ran: {_text(error)}"
            log.error("%s", self.unusable)

    def __str__(self) -> str:
        reused = f", {self.reused} known from before" if self.reused else ""
        regions = f"{self.regions} region{'' if self.regions == 1 else 's'}"
        return f"tuned {regions} in {self.spent_s:.1f} s of {self.budget_s:g} s{reused}"


EXHAUSTED = "the time for measuring is used up"


def _failed(name: str, error: Exception) -> Timing:
    """Log that a candidate failed, and return its timing. One that failed for want of memory may not fail another time."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
    reason = "out of memory" if out_of_memory else _text(error)
    log.warning("%s is not considered for a region: %s", name, reason)
    log.debug("%s", reason, exc_info=error)
    return Timing(reason=reason, transient=out_of_memory or isinstance(error, Refused))


def _text(error: Exception) -> str:
    if isinstance(error, (data.NoData, Refused)):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Run the block on real tensors, even while tracing, without gradients, on ``device``; restore random state."""
    indices = [device.index or 0] if device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        if indices:
            stack.enter_context(torch.cuda.device(indices[0]))
        stack.enter_context(torch.random.fork_rng(indices, device_type="cuda"))
        try:
            yield
        finally:
            if indices:
                with contextlib.suppress(RuntimeError):
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
