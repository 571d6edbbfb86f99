"""What schedules cost: the kernels of a file of regions, each under the schedule that dynafuse chooses and under others.

Example:
    python -m bench.schedules regions.jsonl.xz --most 24 --jobs 28 --seconds 400 --out schedules.json
    CUDA_VISIBLE_DEVICES=1 python -m bench.schedules regions.jsonl.xz --every 2 --start 1 --out odd.json
    python -m bench.schedules --show schedules.json

A row (suite `schedules`, case REGION/KERNEL) has every schedule that was tried with its microseconds, the chosen one first:
the median of three turns, each the median of some replays of a CUDA graph that begin with a flushed L2, without the replay's
own. `regret` is the chosen one's time over the least. Kernels are planned and compiled in processes of their own while
others are timed. What is learned here goes into the formulas of `dynafuse/lowering/triton/row_schedule.py` and its
neighbours.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.measure import replay_us, replayed_us
from bench.region_file import Region, read
from bench.report import Report, describe_machine, describe_versions
from bench.run import split
from bench.schedule_space import some_schedules
from bench.schedule_summary import summary
from dynafuse.fallback import attempted
from dynafuse.ir import Lowered, Spec
from dynafuse.lowering.triton.executor import TRITON
from dynafuse.lowering.triton.tiles import Schedule

SUITE = "schedules"
SAMPLES = 15
ROUNDS = 3
LONG_US, LONG_SAMPLES = 300.0, 7
"""A kernel of so many microseconds is timed by fewer replays."""

CAPABILITY = 90
"""What kernels are compiled for where there is no GPU."""

Binaries = list[tuple[dict[str, Any], bytes]]


@dataclass(frozen=True)
class Job:
    """A kernel under a schedule: what it computes, at which sizes, and for which row."""

    case: str
    key: str
    spec: Spec
    code: Spec
    hints: Mapping[str, int]
    schedule: Schedule


@dataclass(frozen=True)
class Answer:
    """A compiled kernel, or why there is none."""

    lowered: Lowered | None = None
    binaries: Binaries | None = None
    error: str = ""


class Planned(BaseException):
    """Raised to end a compilation whose plan is known; no ``except Exception`` on the way holds it."""


# ------ in processes of their own
def jobs_of(region: Region, described_device: str, most: int) -> list[Job]:
    """Return the kernels of a region's plan, each under up to ``most`` schedules; none where planning fails."""
    import dynafuse.backend  # noqa: F401 (registers it)
    from dynafuse.runtime.observers import Compiled, listening

    plans: list[Compiled] = []

    def note(compiled: Compiled) -> None:
        plans.append(compiled)
        raise Planned

    module, inputs = region.module("cpu"), region.inputs("cpu", filled=False)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="dynafuse", options={"device": described_device})
    try:
        with torch.no_grad(), listening(note, plan_only=True):
            compiled(*inputs)
    except Planned:
        pass
    except Exception as error:  # a region that this torch does not take: others are to be measured all the same
        print(f"{region.name}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
    kernels = [bound for plan in plans for bound in plan.regions.regions if bound.region.executor == TRITON.name]
    return [Job(f"{region.name}/{bound.name}", bound.key, bound.spec, bound.code, bound.hints, schedule)
            for bound in kernels for schedule in some_schedules(bound.code, most, bound.key)]


def compiled_job(job: Job, capability: int) -> Answer:
    """Return the kernel of a job, or why there is none, be it that the compiler has ended the process.

    LLVM does so where an assertion fails, which an odd schedule may meet: the others are to be measured all the same.
    """
    context = multiprocessing.get_context("fork")  # which has imported all that it needs
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compile_into, args=(sender, job, capability))
    process.start()
    sender.close()
    try:
        answer: Answer = receiver.recv()
    except EOFError:
        answer = Answer(error="the compiler has ended its process")
    process.join()
    return answer


def _compile_into(sender: Connection, job: Job, capability: int) -> None:
    sender.send(compiled_here(job, capability))


def compiled_here(job: Job, capability: int) -> Answer:
    """Return the kernel of a job, compiled in this process, or why there is none."""
    from dynafuse.lowering.triton.compiler import compile_launch
    from dynafuse.lowering.triton.jobs import taken
    from dynafuse.lowering.triton.lower import lower
    from dynafuse.lowering.triton.worker import files_in_memory

    def compiled() -> Answer:
        lowered = lower(job.code, job.schedule)
        with files_in_memory():
            binaries = [taken(compile_launch(lowered.source, launch, capability)) for launch in lowered.launches]
        return Answer(lowered, binaries)

    return attempted(compiled, lambda error: Answer(error=_text(error)))


# ------ on the device
class Clock:
    """Times compiled kernels on random data."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.case = ""
        self.inputs: list[torch.Tensor] = []

    def us(self, job: Job, answer: Answer) -> float:
        """Return a kernel's microseconds. Raises whatever stands against running it."""
        from dynafuse.lowering.triton.binary import restored_all
        from dynafuse.lowering.triton.launch import Kernel
        from dynafuse.select.runners import runner

        assert answer.lowered is not None and answer.binaries is not None
        lowered = answer.lowered
        compiled = restored_all(lowered.launches, answer.binaries, CAPABILITY)
        kernel = Kernel(job.key, lowered.source, lowered.launches, lowered.workspaces, compiled, interpreted=False)
        run, inputs = runner(kernel, job.spec, job.hints, self.device), self._inputs(job)
        run(inputs)
        rough = replayed_us(lambda: run(inputs), 3)
        return replayed_us(lambda: run(inputs), SAMPLES if rough < LONG_US else LONG_SAMPLES) - replay_us()

    def _inputs(self, job: Job) -> list[torch.Tensor]:
        """Return random inputs, the same for all schedules of a kernel."""
        from dynafuse.select import data

        if self.case != job.case:
            self.inputs = []
            torch.cuda.empty_cache()
            self.inputs, self.case = data.inputs_for(job.spec, job.hints, self.device), job.case
        return self.inputs


@dataclass
class Trial:
    """A kernel under a schedule, and what it took."""

    job: Job
    answer: Answer
    us: list[float] = field(default_factory=list)
    error: str = ""

    def take(self, clock: Clock) -> None:
        """Time it once more; an error ends that."""
        self.error = self.error or self.answer.error
        if not self.error:
            attempted(lambda: self.us.append(clock.us(self.job, self.answer)), self._fail)

    def _fail(self, error: BaseException) -> None:
        self.error = _text(error)

    def entry(self) -> dict[str, Any]:
        """Return what a row says of it."""
        took: dict[str, Any] = {"error": self.error} if self.error else {"us": round(statistics.median(self.us), 4)}
        return {"schedule": str(self.job.schedule), **took}


@dataclass
class Search:
    """Kernels on their way: planned, compiled, and timed in the order in which they were planned."""

    options: argparse.Namespace
    report: Report
    pool: ProcessPoolExecutor
    deadline: float
    generator: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, regions: Sequence[Region]) -> None:
        """Measure the kernels of regions until the time is over."""
        planned = [self.pool.submit(jobs_of, region, self.options.describe, self.options.most) for region in regions]
        kernels: dict[str, list[tuple[Job, Future[Answer]]]] = {}
        case_of: dict[tuple[str, tuple[tuple[str, int], ...]], str] = {}  # of equal kernels the first is timed
        for plan in as_completed(planned):
            before = set(case_of)
            for job in plan.result():
                kernel = job.key, tuple(sorted(job.hints.items()))
                if kernel not in before and case_of.setdefault(kernel, job.case) == job.case:
                    kernels.setdefault(job.case, []).append((job, self.pool.submit(compiled_job, job, CAPABILITY)))
        clock = Clock(torch.device(self.options.device, 0))
        for case, schedules in kernels.items():
            if time.monotonic() < self.deadline:
                self.report.put(SUITE, case, "dynafuse", row_of(self._tried(clock, schedules)))

    def _tried(self, clock: Clock, schedules: Sequence[tuple[Job, Future[Answer]]]) -> list[dict[str, Any]]:
        """Return the microseconds of a kernel under each schedule, or an error, which says nothing of the others.

        They take turns in random order: what is timed first, when the device has waited for the compiler, takes up to 1.4 of
        the time that it takes later.
        """
        trials = [Trial(job, self._compiled(answer)) for job, answer in schedules]
        for _ in range(ROUNDS):
            for trial in self.generator.sample(trials, len(trials)):
                trial.take(clock)
        return [trial.entry() for trial in trials]

    def _compiled(self, answer: Future[Answer]) -> Answer:
        """Return a compiled kernel, or why there is none in time."""
        return attempted(lambda: answer.result(max(self.deadline - time.monotonic(), 1.0)),
                         lambda error: Answer(error=_text(error)))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def row_of(tried: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a kernel: what was tried, the chosen schedule first, and its regret if it was timed."""
    timed = [entry for entry in tried if "us" in entry]
    row: dict[str, Any] = {"class": tried[0]["schedule"].split()[0], "tried": tried}
    if timed and timed[0] is tried[0]:
        best = min(timed, key=lambda entry: entry["us"])
        row |= {"device_us": tried[0]["us"], "best_us": best["us"], "best": best["schedule"],
                "regret": tried[0]["us"] / max(best["us"], 1e-3)}
    return row


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.schedules", description="Time kernels under many schedules.")
    parser.add_argument("file", type=Path, nargs="?", help="regions, a JSON object a line; .xz if compressed")
    parser.add_argument("--show", type=Path, help="print what a results file says, and measure nothing")
    parser.add_argument("--names", default="", help="what names of regions begin with, comma-separated; default: all")
    parser.add_argument("--every", type=int, default=1, help="every how manyth region")
    parser.add_argument("--start", type=int, default=0, help="from which one on")
    parser.add_argument("--most", type=int, default=24, help="schedules of a kernel")
    parser.add_argument("--jobs", type=int, default=4, help="processes that plan and compile")
    parser.add_argument("--seconds", type=float, default=3600, help="after which nothing is timed")
    parser.add_argument("--describe", default="h200", help="the described device that is planned for")
    parser.add_argument("--device", default="cuda", choices=("cuda",))
    parser.add_argument("--out", type=Path, help="default: bench/results/schedules-DATE.json")
    options = parser.parse_args(arguments)
    if options.file is None and options.show is None:
        parser.error("a file of regions, or --show")
    options.out = options.out or Path("bench/results") / f"{SUITE}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or show what was measured."""
    options = parse(arguments)
    if options.show is not None:
        print(summary({row["case"]: row["metrics"] for row in json.loads(options.show.read_text())["rows"]}))
        return 0
    names = tuple(split(options.names))
    regions = read(options.file)
    regions = [region for region in regions if region.name.startswith(names)] if names else regions
    report = Report(options.out, describe_machine(), describe_versions())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        Search(options, report, pool, time.monotonic() + options.seconds).run(regions[options.start::options.every])
        pool.shutdown(cancel_futures=True)
    print(summary({case: row for (_, case, _), row in report.rows.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
