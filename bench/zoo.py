"""A zoo of whole models, each trained and run under every system: right, step, device time, cold start, peak memory.

Example:
    python -m bench.zoo --gpus 2 --seconds 540 --out zoo.json
    python -m bench.zoo --cases bert,swin/train --systems inductor,dynafuse --out two.json
    python -m bench.zoo --cases bert --scale tiny --device cpu --systems eager,dynafuse --out tiny.json

`bench/zoo_models.py` has the architectures; a case is ARCHITECTURE/train or ARCHITECTURE/infer. What is not installed is
skipped with a message. Each GPU takes one case after the other, and every system has a process of its own for each case,
with empty caches. They build the model and run it by eager at once, compile one after the other, and then take turns; while
one case is compiled, the processes of the next import their packages. The file is rewritten after each row. With `--lanes 2`
a GPU has two cases under way, of which one compiles while the other is timed: more cases an hour, and less quiet ones.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import systems
from bench.measure import Metrics
from bench.regions import gpus
from bench.report import Report, describe_machine, describe_versions, settled
from bench.run import Runner, alternate, default_device, each, split, unknown_cases
from bench.worker import Inside, Process, Worker
from bench.zoo_models import CASES, DROPOUT, MODES
from bench.zoo_summary import CLOCKS, summary_of

SUITE = "zoo"
ENOUGH_S = 20.0
"""Seconds that must be left for a case to begin."""

BOUND = 2.0
"""How many times as far from the wider reference as eager a system may be."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A case, and the systems that run it side by side."""

    architecture: str
    mode: str
    systems: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the case."""
        return f"{self.architecture}/{self.mode}"


class Lane(Runner):
    """One GPU, or a share of its time, and the jobs that it takes from all lanes' queue."""

    def __init__(self, options: argparse.Namespace, report: Report, gpu: str | None, turn: threading.Lock) -> None:
        super().__init__(options, report)
        self.turn = turn
        self.env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}

    def start(self, name: str, case: str | None = None) -> Worker:
        """Return a worker that imports what `case` needs."""
        if self.options.in_process:
            return Inside()
        system = systems.find(name)
        return Process(dataclasses.replace(system, env=system.env | self.env), case, SUITE)

    def ask(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer within the limit, which ends soon after the budget."""
        return worker.ask(request, min(self.options.limit, max(0.0, self.deadline.left) + ENOUGH_S))

    def put(self, case: str, system: str, metrics: dict[str, Any]) -> None:
        """Record metrics with their verdict; what is not installed is no error."""
        metrics = settled(metrics)
        self.report.put(SUITE, case, system, {**metrics, **judged(metrics)})

    def run(self, jobs: queue.SimpleQueue[Job]) -> None:
        """Measure jobs until none is left, or no time."""
        workers: dict[str, Worker] = {}
        try:
            job, workers = self.begin(jobs)
            while job is not None:
                if self.deadline.left < ENOUGH_S:
                    jobs.put(job)
                    return
                job, workers = self.measure(job, workers, jobs)
        finally:
            close(workers)

    def begin(self, jobs: queue.SimpleQueue[Job]) -> tuple[Job | None, dict[str, Worker]]:
        """Return the next job and its workers, which have begun to import."""
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return None, {}
        return job, {name: self.start(name, job.architecture) for name in job.systems}

    def measure(
        self, job: Job, workers: dict[str, Worker], jobs: queue.SimpleQueue[Job],
    ) -> tuple[Job | None, dict[str, Worker]]:
        """Measure a job, and begin the next meanwhile."""
        following: tuple[Job | None, dict[str, Worker]] = None, {}
        begun = dict(workers)
        try:
            request = self.request(do="build", case=job.architecture, catalog=SUITE,
                                   train=job.mode != "infer", dropout=job.mode == DROPOUT)
            self.at_once(job.label, workers, lambda name: workers[name].ready(self.options.limit))
            with self.turn:
                self.at_once(job.label, workers, lambda name: self.ask(workers[name], {**request, "system": name}))
            following = self.begin(jobs)
            each(self, job.label, workers, lambda name: self.ask(workers[name], {"do": "compile"}))
            with self.turn:
                alternate(self, job.label, workers)
                each(self, job.label, workers, lambda name: self.ask(workers[name], {"do": "profile", "steps": 1}))
        finally:
            close(begun)
        rows = {name: self.report.rows.get((SUITE, job.label, name), {}) for name in job.systems}
        self.say(job.label, *(f"| {name} {said_of(row)}" for name, row in rows.items()))
        return following

    def at_once(self, label: str, workers: dict[str, Worker], do: Callable[[str], Metrics]) -> None:
        """Do something with all workers at the same time."""
        if not workers:
            return
        with ThreadPoolExecutor(len(workers)) as threads:
            answers = {name: threads.submit(do, name) for name in workers}
        each(self, label, workers, lambda name: answers[name].result())


def said_of(row: Metrics) -> str:
    """Return what a progress line says of a row."""
    if text := row.get("error") or row.get("skipped"):
        return str(text).strip().splitlines()[0][:200]
    numbers = " ".join(f"{key.rpartition('_')[0]} {row[key]:.4g}" for key in CLOCKS if row.get(key) is not None)
    return f"{numbers} {'right' if row.get('right') else 'wrong'} {row.get('distance', math.nan):.3g}"


def close(workers: Mapping[str, Worker]) -> None:
    """End workers; those that have ended already, too."""
    for worker in workers.values():
        worker.close()


def judged(metrics: Metrics) -> Metrics:
    """Return the verdict and the distance it is by: error against the wider reference over eager's own, the larger of all
    gradients' and the median parameter's in training, the output's in inference."""
    if "right" not in metrics:
        return {}
    kinds = ("grad_rmse", "grad_rmse_median") if "grad_rmse" in metrics else ("output_rmse",)
    ratios = [metrics[kind] / max(metrics[f"eager_{kind}"], 1e-9) for kind in kinds if kind in metrics]
    if metrics["right"] is False or not ratios:
        return {"right": int(bool(metrics["right"])), **({"distance": max(ratios)} if ratios else {})}
    return {"right": int(max(ratios) <= BOUND), "distance": max(ratios)}


def chosen(options: argparse.Namespace) -> list[Job]:
    """Return the cases that are asked for, in the order of the zoo: one mode of all, then the other."""
    wanted = split(options.cases)
    names = tuple(split(options.systems))
    together = [(name,) for name in names] if options.in_process else [names]
    jobs = [Job(case.name, mode, group) for case in CASES.values() for mode in split(options.modes) if mode in case.modes
            for group in together]
    kept = [job for job in jobs if not wanted or any(matches(job, pattern) for pattern in wanted)]
    if not kept:
        raise unknown_cases(wanted, CASES)
    return kept


def matches(job: Job, pattern: str) -> bool:
    """Return whether a pattern names a case, or its architecture."""
    return fnmatch.fnmatchcase(job.label, pattern) or fnmatch.fnmatchcase(job.architecture, pattern)


def measure(options: argparse.Namespace, jobs: Sequence[Job]) -> Report:
    """Measure jobs on all GPUs, and return the report."""
    report = Report(options.out, describe_machine(), describe_versions())
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    turns = [(gpu, threading.Lock()) for gpu in gpus(options)]
    lanes = [Lane(options, report, gpu, turn) for gpu, turn in turns for _ in range(options.lanes)]
    with ThreadPoolExecutor(len(lanes)) as threads:
        list(threads.map(lambda lane: lane.run(waiting), lanes))
    left = [waiting.get().label for _ in range(waiting.qsize())]
    if left:
        print(f"out of time: {len(left)} cases were not measured: {', '.join(dict.fromkeys(left))}")
    return report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.zoo", description="Measure many architectures, few layers each.")
    parser.add_argument("--cases", default="", help="patterns of ARCHITECTURE or ARCHITECTURE/MODE, comma-separated")
    parser.add_argument("--modes", default=",".join(MODES), help=",".join((*MODES, DROPOUT)))
    parser.add_argument("--systems", default="eager,inductor,dynafuse",
                        help="names, each with or without @VAR=VALUE;VAR=VALUE")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--gpus", type=int, default=1, help="how many GPUs take cases in turn")
    parser.add_argument("--lanes", type=int, default=1, help="how many cases are under way on a GPU; one of them is timed")
    parser.add_argument("--seconds", dest="budget", type=float, default=3600, help="after which no case begins")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one answer of one system")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per system, over all rounds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before each round")
    parser.add_argument("--in-process", action="store_true", help="no process per system (debugging)")
    parser.add_argument("--list", action="store_true", help="print the cases that are asked for, and measure nothing")
    parser.add_argument("--out", type=Path, help="default: bench/results/zoo-DATE.json")
    options = parser.parse_args(arguments)
    for name in split(options.systems):
        systems.find(name)
    if unknown := set(split(options.modes)) - {*MODES, DROPOUT}:
        raise SystemExit(f"bench: unknown mode {', '.join(sorted(unknown))}; known: {', '.join((*MODES, DROPOUT))}")
    options.suite = SUITE
    options.device = options.device or default_device()
    options.out = options.out or Path("bench/results") / f"{SUITE}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 unless a case failed or is wrong under some system."""
    options = parse(arguments)
    jobs = chosen(options)
    if options.list:
        print(*dict.fromkeys(job.label for job in jobs), sep="\n")
        return 0
    with systems.cold_process({}) if options.in_process else contextlib.nullcontext():
        report = measure(options, jobs)
    rows = {(case, system): row for (_, case, system), row in report.rows.items()}
    for name in split(options.systems):
        print(f"{name}: {summary_of(name, rows)}")
    wrong = [f"{case} {system}: {complaint(row)}" for (case, system), row in rows.items() if complaint(row)]
    print(*wrong, f"{len(rows)} rows in {options.out}, {len(wrong)} failed or wrong", sep="\n", flush=True)
    return 1 if wrong else 0


def complaint(row: Metrics) -> str:
    """Return what is wrong with a row, or nothing."""
    if "error" in row:
        return str(row["error"]).strip().splitlines()[0]
    return f"wrong, at a distance of {row.get('distance')}" if row.get("right") == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
