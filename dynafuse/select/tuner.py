"""Measures regions that several executors could run, on random data, within a budget.

Worked example, for one graph whose region ``r0`` the model is unsure about::

    tuner = Tuner(config.tune_budget_s)
    if needs(region.decision, config.tune):
        measurement = tuner.measure(bound, {"nvfuser": build_nvfuser, "triton": build_triton}, torch.device("cuda", 0))
        choice = cost.choose(measurement.predictions(predicted), device, captured, rest)
    print(tuner)     # tuned 1 region in 0.3 s of 20 s

Each candidate is warmed up, then timed by replays of a CUDA graph that holds many calls over buffers which together are
larger than the L2 cache, and on the host by calls that nobody waits for. A kernel that cannot be captured is timed by
events. Equal regions are measured once in a process.

Nothing here raises because a candidate fails: not to build, not to run and not to fit into memory is a reason to choose
another one, not a fault of the graph, ``strict`` or not. If the failed executor is chosen all the same, because no other is
left, compiling it for the graph fails in the ordinary way. The user's tensors and random numbers are not touched.
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
"""What this process has measured."""

Build = Callable[[], Any]
"""Makes an executor's kernel: a ``runtime`` Kernel or FusionKernel, or a function of a list of the spec's inputs."""

MEMORY_SHARE = 0.25  # of the free memory is what a region's data may take
CACHES = 2  # times the L2 cache is what all buffers together exceed, if there is memory
MOST_SETS = 32
TARGET_US = 2000.0  # device time that one captured graph aims at
MOST_CALLS = 200
ROUGH_CALLS, REPLAYS, ROUNDS, HOST_CALLS, HOST_ROUNDS = 4, 3, 5, 20, 3
_measuring = Lock()  # two measurements at a time would measure each other


class Judged(Protocol):
    """A choice between executors with its doubts: a ``cost.Choice``, or the ``ir.Decision`` of a region."""

    @property
    def margin(self) -> float:
        """How much more the second costs, relative to the first; infinite where there is no second."""

    @property
    def unsure(self) -> tuple[str, ...]:
        """Executors that the model cannot tell apart, best first."""


def needs(choice: Judged, tune: str) -> bool:
    """Whether a choice is to be measured, by the option ``tune``: never, unsure or always."""
    several = not math.isinf(choice.margin)
    return {"never": False, "unsure": len(choice.unsure) > 1, "always": several}[tune]


def contenders(choice: Judged, tune: str, executors: Sequence[str]) -> tuple[str, ...]:
    """Which of the ``executors`` that could run a region, the predicted winner first, are to be measured."""
    if not needs(choice, tune):
        return ()
    return choice.unsure if tune == "unsure" else tuple(executors)


def obstacle(device: torch.device) -> str:
    """Why nothing can be measured on a device now, or ""."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "not measured: no GPU"
    return "not measured: a CUDA graph is being captured" if torch.cuda.is_current_stream_capturing() else ""


def free_bytes(device: torch.device) -> int:
    """Memory that allocations could take: the device's and what torch holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def cache_bytes(device: torch.device) -> int:
    """The size of the L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@dataclass
class Rotation:
    """Calls of a kernel over several sets of inputs in turn. As many outputs are kept, so that they rotate too."""

    run: Runner
    sets: Sequence[Sequence[torch.Tensor]]
    turn: int = 0

    def __post_init__(self) -> None:
        self.kept: deque[Any] = deque(maxlen=len(self.sets))

    def __call__(self) -> None:
        self.kept.append(self.run(self.sets[self.turn]))
        self.turn = (self.turn + 1) % len(self.sets)


@dataclass
class Tuner:
    """Measures for one graph. ``obstacle``, ``free`` and ``cache`` tell of the device, ``now`` the time."""

    budget_s: float
    clock: Timer = field(default_factory=Gpu)
    store: MeasurementStore = field(default_factory=lambda: MEASUREMENTS)
    now: Callable[[], float] = time.monotonic
    obstacle: Callable[[torch.device], str] = obstacle
    free: Callable[[torch.device], int] = free_bytes
    cache: Callable[[torch.device], int] = cache_bytes
    spent_s: float = 0.0
    regions: int = 0  # measured
    reused: int = 0  # known from earlier measurements
    unusable: str = ""  # why the device cannot be measured on any more

    def measure(self, bound: CanonicalRegion, candidates: Mapping[str, Build], device: torch.device,
                hints: Mapping[str, int] | None = None) -> Measurement:
        """What is fastest for a region, of candidates in the order of their predictions, best first.

        ``hints`` are values of the spec's size symbols; by default those of the example inputs.
        """
        names = tuple(candidates)
        reason = self.unusable or self.obstacle(device) or ("" if len(names) > 1 else "not measured: nothing to compare")
        if reason:
            return Measurement("", {}, names, reason)
        hints = bound.hints if hints is None else hints
        key = measurement_key(bound.member.code if bound.member else bound.spec, hints, device)  # one for a family
        missing = {name: build for name, build in candidates.items() if name not in self.store.get(key)}
        if missing:
            reason, seconds = self._measure(key, bound, missing, hints, device)
        else:
            self.reused += 1
        held = self.store.get(key)
        found = Measurement(key, {name: held[name] for name in names if name in held}, names, reason, reason == EXHAUSTED)
        if missing:
            log.info("tuned %s: %s, %.2f s", bound.region.name, found, seconds)
        return found

    def _measure(self, key: str, bound: CanonicalRegion, missing: Mapping[str, Build], hints: Mapping[str, int],
                 device: torch.device) -> tuple[str, float]:
        """Measure what is missing; why some still is, and the seconds that it took."""
        if self.spent_s >= self.budget_s:
            return EXHAUSTED, 0.0
        with _measuring, _apart(device):
            began = self.now()
            try:
                return self._measured(key, bound, missing, hints, device, began), self.now() - began
            finally:
                self.spent_s += self.now() - began

    def _measured(self, key: str, bound: CanonicalRegion, missing: Mapping[str, Build], hints: Mapping[str, int],
                  device: torch.device, began: float) -> str:
        try:
            sets = self._sets(bound.spec, hints, device)
        except (data.NoData, RuntimeError, KeyError) as error:  # RuntimeError: what CUDA and torch raise
            return f"not measured: {_text(error)}"
        self.regions += 1
        for name, build in missing.items():
            if self.spent_s + self.now() - began >= self.budget_s:
                return EXHAUSTED
            if self.unusable:
                return self.unusable
            self.store.put(key, name, self._one(name, build, bound, hints, device, sets))
        return ""

    def _sets(self, spec: Spec, hints: Mapping[str, int], device: torch.device) -> list[list[torch.Tensor]]:
        """Sets of inputs, as many as it takes to be larger than the L2 cache, or as fit. Raises NoData."""
        each, share = max(1, data.needed_bytes(spec, hints)), int(self.free(device) * MEMORY_SHARE)
        if each > share:
            raise data.NoData(f"its data take {each / 1e6:.0f} MB, and {share / 1e6:.0f} MB may be taken")
        count = min(math.ceil(CACHES * self.cache(device) / each), share // each, MOST_SETS)
        first = data.inputs_for(spec, hints, device)
        return [first, *(data.copied(first) for _ in range(1, count))]

    def _one(self, name: str, build: Build, bound: CanonicalRegion, hints: Mapping[str, int], device: torch.device,
             sets: Sequence[Sequence[torch.Tensor]]) -> Timing:
        """One candidate's times, or why there are none."""
        def measured() -> Timing:
            kernel = build()
            if isinstance(kernel, Kernel) and kernel.interpreted and device.type == "cuda":
                return Timing(reason="not measured: Triton runs in its interpreter")
            rotation = Rotation(runner(kernel, bound.spec, hints, device, bound.member, bound.classes), sets)
            rotation()
            _synchronize(device)
            return self._timed(rotation)

        def failed(error: Exception) -> Timing:
            self._check(device)
            return _failed(name, error)

        return attempted(measured, failed)  # whatever a compiler or a kernel raises is a reason not to choose it

    def _timed(self, rotation: Rotation) -> Timing:
        """Device time by replays, else by events; host time by calls."""
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
        """Find out whether a failure has left the device unusable, as an illegal access does."""
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
    """A candidate that failed, logged. For want of memory it may not fail another time."""
    memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
    reason = "out of memory" if memory else _text(error)
    log.warning("%s is not considered for a region: %s", name, reason)
    log.debug("%s", reason, exc_info=error)
    return Timing(reason=reason, transient=memory or isinstance(error, Refused))


def _text(error: Exception) -> str:
    if isinstance(error, (data.NoData, Refused)):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Real tensors whatever is being traced, no gradients, the device current, random numbers and memory as before."""
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
