"""What work costs on an executor: a roofline with launch terms, and what a user waits for.

Device time of a kernel (the roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009, with measured shares)::

    memory     = bytes / (bandwidth_tbs × efficiency[executor, class, row length, width] × share of the device in use)
    arithmetic = flops / (flops_tflops × share)
    work       = max(memory, arithmetic, atomics / atomics_gops)
    device     = work + launches × launch_us[executor] × filling(work) + combine_us, where several programs share a row

The share in use is how many of the device's processors the kernel's programs keep busy, at most all. Rows of 1,024 elements
or more have large programs, whose lanes all load, then all compute. With few others beside them, of which some do the one
during the other, memory and arithmetic hide less of each other (measured over 91 regions of models, of which 68 % are within
1.3 × of the above, 80 % of this; of 51 with rows of up to 8,192 elements 76 % and 94 %)::

    work = max(memory, 1.5 × arithmetic) + 0.25 × min(memory, 1.5 × arithmetic)

A kernel of next to no work takes about half of a launch's time; what it takes to fill the device, and until the last program
ends, comes with the work: ``filling(work) = 0.55 + 0.45 × work / (work + 0.1 µs)``, measured over 47 regions of one kernel.
Host time::

    host = calls × host_us[executor] + allocations × allocation_us

What the user waits for, of a whole plan (sums of the above)::

    plain     max(device, host) + hidden_share × min(device, host) + compile seconds / expected_calls
    captured  work of the device + nodes × replay_us               + compile seconds / expected_calls

so that a plan that the device bounds is chosen by device time, and one that the host bounds by host time.

Kernels that share a launch, each in programs of its own, are at work for the longest of their times, or for the sum of
times × shares where that is longer.

A kernel that serves folds of n lengths in the places of kernels of their own loses and saves, a call of the graph::

    loss  = further arguments × argument_us + 8 × absent terms × points / flops_tflops
    saved = (n - 1) / n × compile_s[triton] / (expected_runs × places in the graph)

A graph that runs on an interim plan while n of its kernels are compiled loses and saves, in all::

    saved = n × compile_s[triton]
    loss  = calls × (a call on it - a call), calls = saved / a call on it, at least 1, at most expected_runs

so that it pays unless the first call on it ends later than one that waits for the compiler.

Worked example, on an H200: adding two ``bfloat16[8192, 4096]`` moves 201 MB; at 0.994 × 4.12 TB/s that is 49 µs, and 2 µs
for the launch. nvFuser's host time of 7.5 µs hardly shows beside that; for ``[8, 4096]`` it is what decides.

What a kernel does (``Work``) is not known here: ``partition/work.py`` says it for regions, ``library_calls.py`` for ops
that run eager.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynafuse.cost.device import EXECUTORS, LENGTHS, REFERENCE_WIDTH, Device
from dynafuse.lowering.registry import PREFERRED
from dynafuse.lowering.registry import executor as executor_of

MANY = 1 << 30  # programs of a kernel that fills any device
IDLE_SHARE = 0.55  # of a launch's time, which a kernel of no work takes
FILLING_US = 0.1  # of work with which a kernel takes half of the rest
FLOPS_OF_TERM = 8.0  # of a fold: instructions for a load that is off, the op, a selection; loads are issued at a lower rate
IN_PHASES_FROM = 1024  # elements of a row from which on a program loads, then computes
IN_PHASES_BELOW = 24  # such programs of a processor from which on some load while others compute
TIMES_IN_PHASES = 1.5  # how many times as long its arithmetic takes
UNHIDDEN = 0.25  # share of the shorter of memory and arithmetic, that nothing hides then
LEAST = 1e-9  # constants may be overridden with 0: whatever needs that rate then takes practically forever


@dataclass(frozen=True)
class Work:
    """What a kernel does, as its executor-independent facts.

    ``bytes`` read and written, ``flops``, ``programs`` it can spread over, its class (``device.CLASSES``), the
    ``launches`` that Triton needs, bytes per element of what it mostly moves (``width``), elements of a row (``length``;
    0 for unknown or none), tensors that it returns (``outputs``), bytes that whole sectors carry ``beside`` those.
    """

    bytes: int
    flops: float
    programs: int
    kernel_class: str  # pointwise | row | column | split | rowcol
    launches: int = 1
    width: int = REFERENCE_WIDTH
    length: int = 0
    outputs: int = 1
    atomics: int = 0  # elements that are combined with what memory holds
    beside: int = 0


def streaming(moved: int, flops: float = 0.0) -> Work:
    """Return the work of a kernel that moves so many bytes, by programs that fill any device, and computes so much."""
    return Work(moved, flops, MANY, "pointwise")


@dataclass(frozen=True)
class Prediction:
    """What work costs: device and host microseconds a call, seconds once; ``captured_us`` as nodes of a CUDA graph.

    ``error`` is how far off it may be, relatively, where that is more than the model's ordinary error. A ``partial`` one
    is of the bytes alone: how much is computed is not known.
    """

    device_us: float = 0.0
    host_us: float = 0.0
    compile_s: float = 0.0
    captured_us: float = 0.0
    error: float = 0.0
    partial: bool = False

    def __add__(self, other: Prediction) -> Prediction:
        return Prediction(self.device_us + other.device_us, self.host_us + other.host_us,
                          self.compile_s + other.compile_s, self.captured_us + other.captured_us)

    @property
    def is_host_bound(self) -> bool:
        """Return whether the host takes longer than the device, unless it is captured."""
        return self.host_us > self.device_us

    def less(self, other: Prediction) -> Prediction:
        """Return what is left of a sum without one of its parts."""
        return Prediction(self.device_us - other.device_us, self.host_us - other.host_us,
                          self.compile_s - other.compile_s, self.captured_us - other.captured_us)


NOTHING = Prediction()
"""What nothing costs."""


def total(predictions: Iterable[Prediction]) -> Prediction:
    """Return what several predictions cost together."""
    device_us = host_us = compile_s = captured_us = 0.0
    for prediction in predictions:
        device_us += prediction.device_us
        host_us += prediction.host_us
        compile_s += prediction.compile_s
        captured_us += prediction.captured_us
    return Prediction(device_us, host_us, compile_s, captured_us)


@dataclass(frozen=True)
class Choice:
    """The cheapest of several executors. ``margin`` is how much more the second costs, relative to the cheapest.

    ``unsure`` are the executors, cheapest first, that the model cannot tell from the cheapest: a measurement has to.
    It holds at least two, or is empty. ``error`` is how far off the model may be, relatively. ``us`` is what the user waits
    longer for the cheapest.
    """

    executor: str
    margin: float
    unsure: tuple[str, ...]
    error: float = field(default=0.0, compare=False)
    us: float = field(default=0.0, compare=False)


def work_us(work: Work, device: Device, executor: str = PREFERRED) -> float:
    """Predict the device time of the work alone, without launches, in microseconds.

    Args:
        work: What a kernel does.
        device: The device that is priced.
        executor: Whose kernel it is; one without constants of its own is priced as ``priced_as`` says.
    """
    efficiency = device.efficiency(_priced_as(executor), work.kernel_class, work.length, work.width)
    memory = (work.bytes + work.beside) / max(device.bandwidth_tbs * 1e6 * efficiency * in_use(work, device), LEAST)
    arithmetic, unhidden = _arithmetic(work, device)
    atomics = work.atomics / max(device.atomics_gops * 1e3, LEAST)
    return max(max(memory, arithmetic) + unhidden * min(memory, arithmetic), atomics)


def _arithmetic(work: Work, device: Device) -> tuple[float, float]:
    """Return how long the arithmetic takes by itself, and the share of the shorter of it and memory that nothing hides."""
    us = work.flops / max(device.flops_tflops * 1e6 * in_use(work, device), LEAST)
    return (TIMES_IN_PHASES * us, UNHIDDEN) if _is_in_phases(work, device) else (us, 0.0)


def _is_in_phases(work: Work, device: Device) -> bool:
    """Return whether memory waits while programs compute, and the other way round: few others do what one does not."""
    are_few = work.programs < IN_PHASES_BELOW * device.processors
    return work.kernel_class == "row" and work.length >= IN_PHASES_FROM and are_few


def in_use(work: Work, device: Device) -> float:
    """Share of the device that the work's programs keep busy."""
    return min(1.0, max(work.programs, 1) / max(device.programs_per_processor * device.processors, LEAST))


def _priced_as(executor: str) -> str:
    """Return the executor by whose constants one is priced: Triton, where no device is described for it."""
    named = executor_of(executor).priced_as
    return named if named in EXECUTORS else PREFERRED


def _launches(work: Work, executor: str) -> int:
    """Return how many kernels the work takes: as many as planned where the executor splits reductions alike, else one."""
    return work.launches if executor_of(executor).splits else 1


def launched_us(work: Work, device: Device, executor: str = PREFERRED) -> float:
    """Predict the device time of a kernel besides its work: of its launches, and of waiting for programs that share rows.

    Args:
        work: What the kernel does.
        device: The device that is priced.
        executor: Whose kernel it is.
    """
    return _launched_us(work, device, executor, work_us(work, device, executor), _launch_us(device, executor))


def _launch_us(device: Device, executor: str) -> float:
    """Return the time of a launch of a kernel that fills the device."""
    return device.constants[f"launch_us_{_priced_as(executor)}"]


def _launched_us(work: Work, device: Device, executor: str, busy: float, each: float) -> float:
    """Return the same for launches of ``each`` microseconds, of a kernel whose work takes ``busy`` microseconds."""
    launches = _launches(work, executor)
    filling = IDLE_SHARE + (1 - IDLE_SHARE) * busy / (busy + launches * FILLING_US)
    return launches * each * filling + _combining_us(work, device, executor)


def _combining_us(work: Work, device: Device, executor: str) -> float:
    """Return how long what combines the results of programs waits for the last of them."""
    return device.combine_us if work.kernel_class == "split" and executor_of(executor).splits else 0.0


def predict(work: Work, device: Device, executor: str = PREFERRED, compiled: bool = False) -> Prediction:
    """Predict all that work costs on an executor.

    An executor that allocates its outputs inside the call has that in the call's price. What eager does with a
    region is the sum over its ops, each priced with its own bytes.

    Args:
        work: What a kernel does.
        device: The device that is priced.
        executor: Whose kernel it is.
        compiled: Whether the kernel is there already, so that nobody waits for the compiler.
    """
    return _prediction(work, work_us(work, device, executor), device, executor, compiled)


def predict_together(works: Sequence[Work], device: Device, executor: str = PREFERRED) -> Prediction:
    """Predict kernels that become one launch, in which each has programs of its own.

    Together they take as long as the longest, or as the device takes for all if it is busy with each to its share.

    Args:
        works: What the kernels do, each in one launch.
        device: The device that is priced.
        executor: Whose kernel it is.
    """
    times = [(work_us(work, device, executor), in_use(work, device)) for work in works]
    busy = max(*(us for us, _ in times), sum(us * share for us, share in times))
    whole = replace(max(works, key=lambda work: work.bytes), outputs=sum(work.outputs for work in works))
    return _prediction(whole, busy, device, executor)


def _prediction(work: Work, busy: float, device: Device, executor: str, compiled: bool = False) -> Prediction:
    """Return all that work costs which takes ``busy`` microseconds besides its launches."""
    launches = _launches(work, executor)
    host = launches * device.constants[f"host_us_{_priced_as(executor)}"]
    if not executor_of(executor).allocates:
        host += (work.outputs + launches - 1) * device.allocation_us  # a second launch reads what the first left
    return Prediction(
        device_us=busy + _launched_us(work, device, executor, busy, _launch_us(device, executor)),
        host_us=host,
        compile_s=0.0 if compiled else launches * device.constants[f"compile_s_{_priced_as(executor)}"],
        captured_us=busy + _launched_us(work, device, executor, busy, device.replay_us),
        error=device.model_error_long if work.length > LENGTHS[-1] else 0.0,
    )


def objective(prediction: Prediction, device: Device, captured: bool = False) -> float:
    """Return what a user waits for per call, in microseconds: of a whole plan, or of work by itself. Lower is better.

    Args:
        prediction: What it costs.
        device: The device that is priced; its ``expected_calls`` spread the compile time.
        captured: Whether it runs as nodes of a CUDA graph, where no host time counts.
    """
    compiling = prediction.compile_s * 1e6 / max(device.expected_calls, LEAST)
    if captured:
        return prediction.captured_us + compiling
    longer, shorter = prediction.device_us, prediction.host_us
    if longer < shorter:
        longer, shorter = shorter, longer
    return longer + device.hidden_share * shorter + compiling


def choose(
    candidates: Mapping[str, Prediction], device: Device, captured: bool = False, rest: Prediction | None = None
) -> Choice:
    """Return the executor with which the plan costs least. Ties go to the first.

    Args:
        candidates: What the work costs, by executor.
        device: The device that is priced.
        captured: Whether the plan runs as a CUDA graph.
        rest: What the plan's other work costs, which says whether the device or the host bounds it; None if there is none.

    Raises:
        ValueError: There are no candidates.
    """
    around = rest or Prediction()
    totals = {name: objective(around + prediction, device, captured) for name, prediction in candidates.items()}
    order = sorted(totals, key=lambda name: totals[name])
    if not order:
        raise ValueError("no executor to choose from")
    us = totals[order[0]] - objective(around, device, captured)
    cheapest = max(us, LEAST)
    margins = {name: (totals[name] - totals[order[0]]) / cheapest for name in order}
    error = max(device.model_error, *(prediction.error for prediction in candidates.values()))
    close = tuple(name for name in order if margins[name] <= error)
    margin = margins[order[1]] if len(order) > 1 else float("inf")
    return Choice(order[0], margin, close if len(close) > 1 else (), error, us)


def family_loss_us(arguments: int, terms: int, points: int, device: Device, captured: bool = False) -> float:
    """Predict what a call loses at most on a fold family's kernel, in microseconds.

    Terms that are not there move nothing, and cost ``FLOPS_OF_TERM`` at each of a number of points.

    Args:
        arguments: How many arguments the kernel takes beyond those that are needed.
        terms: How many terms its fold has beyond those that are needed.
        points: The elements that the fold is computed at.
        device: The device that is priced.
        captured: Whether the call is in a CUDA graph, where arguments cost nothing.
    """
    host = 0.0 if captured else arguments * device.argument_us
    return host + FLOPS_OF_TERM * terms * points / max(device.flops_tflops * 1e6, LEAST)


def family_gain_us(lengths: int, sites: int, device: Device) -> float:
    """Return what a call saves of compile time, in microseconds, if one kernel serves several lengths.

    Args:
        lengths: How many lengths it serves, at least 1.
        sites: How many places in its graph each length has.
        device: The device that is priced; its ``expected_runs`` spread the compile time.
    """
    share = (lengths - 1) / lengths
    return share * device.constants[f"compile_s_{PREFERRED}"] * 1e6 / max(device.expected_runs * sites, LEAST)


@dataclass(frozen=True)
class Meanwhile:
    """Calls while kernels are compiled, what each loses on stand-ins, and the waiting that they save all together, in µs."""

    calls: float
    loss_us: float
    saved_us: float

    @property
    def pays(self) -> bool:
        """Return whether all calls together lose less than is saved."""
        return self.calls * self.loss_us < self.saved_us

    def __str__(self) -> str:
        return f"{self.calls:.0f} calls lose {self.loss_us:.1f} µs each, {self.saved_us / 1e6:.2f} s of waiting are saved"


def meanwhile(exact: Prediction, instead: Prediction, kernels: int, device: Device) -> Meanwhile:
    """Predict what calls lose on stand-ins while a graph's kernels are compiled.

    Args:
        exact: What a call costs on the graph's own kernels.
        instead: What it costs on those that are there already.
        kernels: How many kernels are compiled.
        device: The device that is priced.
    """
    saved, us = kernels * device.constants[f"compile_s_{PREFERRED}"] * 1e6, objective(instead, device)
    calls = min(max(saved / max(us, LEAST), 1.0), device.expected_runs)
    return Meanwhile(calls, us - objective(exact, device), saved)


def _work_in(us: float, work: Work, device: Device, executor: str) -> float:
    """Return how long the work takes of a kernel's ``us`` microseconds: a root; not above 0 if there is no time for it."""
    launches = _launches(work, executor)
    each, ramp = _launch_us(device, executor), launches * FILLING_US
    left = us - launches * each * IDLE_SHARE - _combining_us(work, device, executor)
    filled = ramp + launches * each * (1 - IDLE_SHARE) - left
    return (math.sqrt(filled * filled + 4 * ramp * left) - filled) / 2 if left > 0 else left


def efficiency_to_match(work: Work, device: Device, executor: str, us: float) -> float | None:
    """Return the ``efficiency_<executor>_<class>`` at which the executor's device time is ``us``: what would flip a choice.

    Args:
        work: What a kernel does.
        device: The device that is priced.
        executor: Whose kernel it is.
        us: The device time to be reached, in microseconds, launches included.

    Returns:
        None if no efficiency does it: launches or arithmetic alone take longer, or nothing is moved.
    """
    left = _work_in(us, work, device, executor)
    arithmetic, unhidden = _arithmetic(work, device)
    atomics = work.atomics / max(device.atomics_gops * 1e3, LEAST)
    if left <= 0 or max(arithmetic, atomics) > left or not work.bytes:
        return None
    memory = left - unhidden * arithmetic
    if memory < arithmetic:
        memory = (left - arithmetic) / unhidden
    shipped = device.constants[f"efficiency_{_priced_as(executor)}_{work.kernel_class}"]
    efficiency = device.efficiency(_priced_as(executor), work.kernel_class, work.length, work.width)
    factors = efficiency / shipped if shipped else 1.0
    return (work.bytes + work.beside) / max(memory * device.bandwidth_tbs * 1e6 * in_use(work, device) * factors, LEAST)
