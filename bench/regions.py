"""Fusible regions from a file, each under Inductor and dynafuse: time, prediction, agreement with eager, cold start.

Example:
    python -m bench.regions regions.jsonl.xz --out regions.json                          # all, one after the other
    python -m bench.regions regions.jsonl.xz --gpus 4 --every 6 --start 2 --seconds 500 --out sample.json
    python -m bench.regions regions.jsonl.xz --names amax_a1,sum_ --profile --out some.json
    python -m bench.regions regions.jsonl.xz --names amax_a1 --plan h200                 # the plans; no GPU is needed

`bench/region_file.py` says what such a file holds; `python -m bench.capture` makes one of any model. Every GPU takes one
region after the other, or with `--lanes 3` has three under way, one of which is timed. Every system has a process of its
own in each lane, with empty caches at the start. What a region was compiled to in a process is forgotten before the next.
Regions that draw random numbers are skipped, as eager draws others; `--random` times them, and compares norms.
"""
from __future__ import annotations

import argparse
import dataclasses
import os
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import systems, table
from bench.measure import Metrics
from bench.region_file import Region, read
from bench.region_summary import BASE, summary_of
from bench.report import Report, describe_machine, describe_versions
from bench.run import Runner, default_device, split
from bench.worker import Failed, Inside, Process, Worker

SUITE = "regions"
SAMPLES = 20


class Lane:
    """One GPU, or a share of its time: a worker for each system, and the regions that it takes from all lanes' queue.

    ``turn`` is a file that the workers of the lanes of a GPU lock while they time something.
    """

    def __init__(self, runner: Runner, gpu: str | None, turn: str) -> None:
        self.runner = runner
        self.turn = turn
        self.env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self.workers = {name: self.start(name) for name in runner.names}

    def start(self, name: str) -> Worker:
        """Return a new worker for a system."""
        if self.runner.options.in_process:
            return Inside()
        system = systems.find(name)
        return Process(dataclasses.replace(system, env=system.env | self.env))

    def run(self, regions: queue.SimpleQueue[Region]) -> None:
        """Measure regions until none is left, or no time."""
        try:
            while self.runner.deadline.left > 0:
                region = regions.get_nowait()
                for name in self.runner.names:
                    self.runner.put(region.name, name, {"models": region.models, **self.measure(region, name)})
        except queue.Empty:
            pass
        finally:
            for worker in self.workers.values():
                worker.close()

    def measure(self, region: Region, name: str) -> Metrics:
        """Return the metrics of a region under a system, or its error; a worker that dies of it is replaced."""
        options = self.runner.options
        request = {"do": "region", "system": name, "file": str(options.file), "name": region.name, "device": options.device,
                   "samples": options.samples, "profile": options.profile, "turn": self.turn}
        try:
            return self.workers[name].ask(request, options.limit)
        except Failed as failure:
            self.workers[name].close()
            self.workers[name] = self.start(name)
            return {"error": str(failure)}


def measure(options: argparse.Namespace, regions: Sequence[Region]) -> Report:
    """Measure regions on all GPUs, and return the report."""
    report = Report(options.out, describe_machine(), describe_versions())
    runner = Runner(options, report)
    waiting: queue.SimpleQueue[Region] = queue.SimpleQueue()
    for region in regions:
        waiting.put(region)
    with tempfile.TemporaryDirectory() as turns:
        numbered = [(gpu, f"{turns}/{number}") for number, gpu in enumerate(gpus(options))]
        lanes = [Lane(runner, gpu, turn) for gpu, turn in numbered for _ in range(options.lanes)]
        with ThreadPoolExecutor(len(lanes)) as threads:
            list(threads.map(lambda lane: lane.run(waiting), lanes))
    if left := waiting.qsize():
        print(f"out of time: {left} regions were not measured")
    return report


def gpus(options: argparse.Namespace) -> list[str | None]:
    """Return what the processes of each lane may see: one GPU each of those that this process may; None for all."""
    if options.gpus == 1:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [*(visible.split(",") if visible else map(str, range(options.gpus)))][:options.gpus]


def chosen(regions: Sequence[Region], options: argparse.Namespace) -> list[Region]:
    """Return the regions that are asked for, without those that cannot be compared; says which those are."""
    names = tuple(split(options.names))
    named = [region for region in regions if region.name.startswith(names)]
    asked = named if names else regions[options.start::options.every]
    if not asked:
        raise SystemExit(f"bench: no region is asked for: {options.file} has {len(regions)}")
    kept = []
    for region in asked:
        if (op := region.random_op) and not options.random:
            print(f"skipped: {region.name} draws random numbers ({op})")
        else:
            kept.append(region)
    return kept


def show_plans(options: argparse.Namespace, regions: Sequence[Region]) -> None:
    """Print what dynafuse plans for each region; one that fails prints its error."""
    import torch

    import dynafuse

    end = time.monotonic() + options.budget
    for region in regions:
        if time.monotonic() > end:
            print(f"out of time before {region.name}")
            return
        print(f"===== {region.name} ({region.models})")
        # Whatever planning raises is a result of the benchmark, not an end of it.
        try:
            with torch.no_grad():
                print(dynafuse.explain(region.module(options.device), *region.inputs(options.device), device=options.plan))
        except Exception as error:
            print(f"{type(error).__name__}: {error}")


def show_steps(rows: table.Rows) -> None:
    """Print measured beside predicted time of the steps that were profiled."""
    for (case, system), row in rows.items():
        for line in row.get("by_step", ()):
            how = " ".join(filter(None, (line["executor"], line["kernel_class"])))
            print(f"{case} {system}: {line['steps']} ({how}): {table.number(line, 'measured_us')} µs in {line['kernels']} "
                  f"kernels, predicted {table.number(line, 'predicted_us')}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.regions", description="Measure the fusible regions of a file.")
    parser.add_argument("file", type=Path, help="regions, a JSON object a line; .xz if compressed")
    parser.add_argument("--systems", default=f"{BASE},dynafuse", help="names, each with or without @VAR=VALUE;VAR=VALUE")
    parser.add_argument("--names", default="", help="what names begin with, comma-separated; default: all")
    parser.add_argument("--every", type=int, default=1, help="every how manyth region, without --names")
    parser.add_argument("--start", type=int, default=0, help="from which one on")
    parser.add_argument("--seconds", dest="budget", type=float, default=3600, help="after which no region begins")
    parser.add_argument("--limit", type=float, default=90, help="seconds for one region under one system")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--gpus", type=int, default=1, help="how many GPUs take regions in turn")
    parser.add_argument("--lanes", type=int, default=1, help="how many regions are under way on a GPU; one of them is timed")
    parser.add_argument("--random", action="store_true", help="also regions that draw random numbers")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="timed replays of each region")
    parser.add_argument("--profile", action="store_true", help="time by kernel, and by step beside what was predicted")
    parser.add_argument("--plan", nargs="?", const="h200", metavar="DEVICE",
                        help="print plans for a device that is described, h200 by default, and measure nothing")
    parser.add_argument("--in-process", action="store_true", help="no process per system (debugging)")
    parser.add_argument("--out", type=Path, help="default: bench/results/regions-DATE.json")
    options = parser.parse_args(arguments)
    for name in split(options.systems):
        systems.find(name)
    options.suite = SUITE
    options.device = options.device or ("cpu" if options.plan else default_device())
    options.out = options.out or Path("bench/results") / f"{SUITE}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or plan; 0 unless a region failed on some system."""
    options = parse(arguments)
    regions = chosen(read(options.file), options)
    if options.plan:
        show_plans(options, regions)
        return 0
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (_, case, system), row in measure(options, regions).rows.items():
        rows[case, system] = row
    show_steps(rows)
    for name in split(options.systems):
        if name != BASE:
            print(f"{name}: {summary_of(name, rows)}")
    failed = [f"{case} {system}: {row['error'].splitlines()[0]}" for (case, system), row in rows.items() if "error" in row]
    print(*failed, f"{len(rows)} rows in {options.out}, {len(failed)} failed", sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
