"""The runner: cases × systems, interleaved, into one JSON file.

Example:
    python -m bench.run --suite models --case llama,gpt_neox --systems eager,inductor,dynafuse --layers 8 --out llm.json
    python -m bench.run --suite micro --case rms_norm,softmax --systems eager,inductor,dynafuse --out micro.json
    python -m bench.run --suite layers --systems inductor,dynafuse --out layers.json
    python -m bench.run --suite residual --case residual/128,growing/64 --out residual.json
    python -m bench.run --suite models --case llama --systems eager,aot_eager --scale tiny --device cpu --out tiny.json

A system that fails leaves `{"error": ...}` in its row and the run goes on. The file is rewritten after each row. Every
case starts one process per system; compiles run one after the other, then rounds of warm steps go round the systems.
"""
from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import host, systems
from bench.report import Report, describe_machine, describe_versions, settled
from bench.worker import Failed, Inside, Process, Worker

DEFAULT_CASES = {"models": "llama,gpt_neox,vit_b,resnet50", "layers": "llama", "micro": "", "host": "", "residual": ""}
LAYERS = (8, 32)


class Deadline:
    """Seconds left of the budget."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, negative when over."""
        return self.end - time.monotonic()


class Runner:
    """What the suites share: options, the report, how to start a worker, and a line of progress per event."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options = options
        self.report = report
        self.suite: str = options.suite
        self.names: list[str] = split(options.systems)
        self.deadline = Deadline(options.budget)
        self.started = time.monotonic()

    def start(self, name: str, case: str | None = None) -> Worker:
        """A worker for a system, which imports what `case` needs before anything is timed."""
        return Inside() if self.options.in_process else Process(systems.find(name), case)

    def say(self, *words: object) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self.started:6.1f}s]", *words, flush=True)

    def put(self, case: str, system: str, metrics: dict[str, Any]) -> None:
        """Record and report."""
        self.report.put(self.suite, case, system, metrics)
        shown = ((key, metrics[key]) for key in SHOWN if metrics.get(key) is not None)
        self.say(case, system, *(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown))

    def ask(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        """The answer within the budget."""
        if self.deadline.left <= 0:
            raise Failed("skipped: the budget of this run was spent")
        return worker.ask(request, self.deadline.left)

    def request(self, **extra: Any) -> dict[str, Any]:
        """What every request carries."""
        return {"device": self.options.device, "scale": self.options.scale, "dtype": self.options.dtype, **extra}


# What a progress line shows of a row.
SHOWN = ("error", "skipped", "cold_s", "right", "kernels", "loss_difference", "grad_norm_max", "grad_rmse",
         "eager_grad_rmse", "step_ms", "host_us", "device_ms", "triton_ms", "peak_gb", "device_us", "wall_us",
         "predicted_us", "output_vs_eager", "tb_per_s", "rmse", "eager_rmse")


# ------ models
def run_models(runner: Runner) -> None:
    """Whole models, training and inference as asked for."""
    for case in split(runner.options.case):
        for mode in split(runner.options.modes):
            request = {"case": case, "train": mode == "train", "layers": runner.options.layers}
            measure_case(runner, f"{case}/{mode}", request)


def run_layers(runner: Runner) -> None:
    """The same model with few and many layers: compiled kernels must not grow, compile seconds should grow little."""
    for case in split(runner.options.case):
        for layers in LAYERS if runner.options.layers is None else (runner.options.layers,):
            request = {"case": case, "train": True, "layers": layers, "reference": False}
            measure_case(runner, f"{case}/{layers}", request)


def measure_case(runner: Runner, label: str, request: dict[str, Any]) -> None:
    """One case under all systems: prepare each, alternate rounds, then profile each."""
    if runner.options.in_process:
        # One at a time: several in one process would share compiled code and memory.
        for name in runner.names:
            measure_together(runner, label, request, [name])
    else:
        measure_together(runner, label, request, runner.names)


def measure_together(runner: Runner, label: str, request: dict[str, Any], names: list[str]) -> None:
    """One case under systems whose rounds alternate."""
    workers = {name: runner.start(name, request["case"]) for name in names}
    try:
        # All import at once; no compile is timed while another process is still importing.
        each(runner, label, workers, lambda name: workers[name].ready(runner.deadline.left))
        in_rounds(runner, label, workers, request)
    finally:
        for worker in workers.values():
            worker.close()


def in_rounds(runner: Runner, label: str, workers: dict[str, Worker], request: dict[str, Any]) -> None:
    """Prepare every worker, alternate rounds, then profile each; `workers` keeps those that live."""
    each(runner, label, workers, lambda name: prepare(runner, workers[name], name, request))
    alternate(runner, label, workers)
    each(runner, label, workers, lambda name: runner.ask(workers[name], {"do": "profile", "steps": 3}))


def prepare(runner: Runner, worker: Worker, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Build, compile and check."""
    asked = runner.request(do="prepare", system=name, **request)
    if systems.find(name).second and isinstance(worker, Process):
        runner.ask(worker, asked)
        worker.again(runner.deadline.left)
    return runner.ask(worker, asked)


def each(runner: Runner, label: str, workers: dict[str, Worker], do: Callable[[str], dict[str, Any]]) -> None:
    """Do something with every worker that still lives; one that fails is recorded, closed and left out from then on."""
    for name in list(workers):
        try:
            metrics = do(name)
        except Failed as failure:
            workers.pop(name).close()
            metrics = {"error": str(failure)}
        if metrics:
            runner.put(label, name, metrics)


def alternate(runner: Runner, label: str, workers: dict[str, Worker]) -> None:
    """Rounds of warm steps that go round the systems, so that drift of clocks and temperature meets all alike."""
    samples: dict[str, list[dict[str, list[float]]]] = {name: [] for name in workers}
    steps = max(1, runner.options.steps // runner.options.rounds)

    def one_round(name: str) -> dict[str, Any]:
        found = runner.ask(workers[name], {"do": "round", "steps": steps, "warmup": runner.options.warmup})
        samples[name].append(found)
        return pooled(samples[name])

    for _ in range(runner.options.rounds):
        each(runner, label, workers, one_round)


def pooled(rounds: Iterable[dict[str, list[float]]]) -> dict[str, Any]:
    """Medians over all samples, and of each round by the first clock, whose spread is the noise."""
    rounds = list(rounds)
    joined = {key: [value for one in rounds for value in one[key]] for key in rounds[0]}
    medians = {key: statistics.median(values) for key, values in joined.items() if values}
    clock = next(iter(joined))
    by_round = [statistics.median(one[clock]) for one in rounds]
    return {**medians, "samples": len(joined[clock]), "rounds": by_round}


# ------ host
def run_host(runner: Runner) -> None:
    """Small graphs whose time is the host's, graph by graph; a worker that dies is replaced for the next graph."""
    workers = {name: runner.start(name) for name in runner.names}
    try:
        for case in host.named(split(runner.options.case)):
            alive = dict(workers)
            in_rounds(runner, case, alive, {"suite": "host", "case": case})
            workers = {name: alive[name] if name in alive else runner.start(name) for name in workers}
    finally:
        for worker in workers.values():
            worker.close()


# ------ residual
def run_residual(runner: Runner) -> None:
    """The same layer once and many times, or ever larger ones, graph by graph in new processes: each compile is cold."""
    for case in host.named(split(runner.options.case), host.STACKS):
        measure_case(runner, case, {"suite": "residual", "case": case})


# ------ micro
def run_micro(runner: Runner) -> None:
    """Kernels: systems alternate case by case; a worker that dies is replaced for the next case."""
    workers = {name: runner.start(name) for name in runner.names}
    try:
        for case in micro_cases(split(runner.options.case)):
            for name in runner.names:
                runner.put(case, name, micro_row(runner, workers, name, case))
    finally:
        for worker in workers.values():
            worker.close()


def micro_row(runner: Runner, workers: dict[str, Worker], name: str, case: str) -> dict[str, Any]:
    """Metrics of one kernel, its error, or why the system has none; only an error costs the worker."""
    try:
        return runner.ask(workers[name], runner.request(do="micro", system=name, case=case, steps=runner.options.steps))
    except Failed as failure:
        row = settled({"error": str(failure)})
        if "error" in row:
            workers[name].close()
            workers[name] = runner.start(name)
        return row


def micro_cases(wanted: list[str]) -> list[str]:
    """Names of cases that begin with one of `wanted`; all without a wish."""
    from bench.micro import CASES

    found = [name for name in CASES if not wanted or any(name == w or name.startswith(w + "/") for w in wanted)]
    if not found:
        raise SystemExit(f"bench: no kernel is called {', '.join(wanted)}; known: {', '.join(CASES)}")
    return found


# ------ command line
SUITES: dict[str, Callable[[Runner], None]] = {"models": run_models, "layers": run_layers, "micro": run_micro,
                                               "host": run_host, "residual": run_residual}


def unknown_cases(names: Iterable[str], known: Iterable[str]) -> SystemExit:
    """The end of a run that was asked for cases that there are not, with those that there are."""
    return SystemExit(f"bench: no case is called {', '.join(names)}; known: {', '.join(known)}")


def split(text: str) -> list[str]:
    """Comma-separated names."""
    return [item for item in text.split(",") if item]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, with every name in it checked before anything starts."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Measure cases × systems into one file.")
    parser.add_argument("--suite", choices=SUITES, default="models")
    parser.add_argument("--case", help="comma-separated; default: the suite's own")
    parser.add_argument("--systems", default="eager,inductor,dynafuse",
                        help="names, each with or without @VAR=VALUE;VAR=VALUE")
    parser.add_argument("--modes", default="train", help="train,infer (suite models)")
    parser.add_argument("--layers", type=int, help="number of layers of language models")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                        help="of whole models; float32 checks results where bfloat16 is too coarse to tell")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per system, over all rounds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps before each round")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which nothing new starts")
    parser.add_argument("--in-process", action="store_true", help="no process per system (debugging)")
    parser.add_argument("--out", type=Path, help="default: bench/results/SUITE-DATE.json")
    return check(parser.parse_args(arguments))


def check(options: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults that depend on others; a wrong name ends the run with the list of right ones."""
    from bench.models import CASES

    for name in split(options.systems):
        systems.find(name)
    options.case = DEFAULT_CASES[options.suite] if options.case is None else options.case
    known = set(CASES)
    if options.suite in ("models", "layers") and (bad := set(split(options.case)) - known):
        raise SystemExit(f"bench: unknown case {', '.join(sorted(bad))}; known: {', '.join(sorted(known))}")
    if bad := set(split(options.modes)) - {"train", "infer"}:
        raise SystemExit(f"bench: unknown mode {', '.join(sorted(bad))}; known: train, infer")
    options.device = options.device or default_device()
    options.out = options.out or Path("bench/results") / f"{options.suite}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return options


def default_device() -> str:
    """cuda where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 when every row has numbers, 1 when some row has an error or wrong numbers."""
    options = parse(arguments)
    report = Report(options.out, describe_machine(), describe_versions())
    with systems.cold_process({}) if options.in_process else contextlib.nullcontext():
        SUITES[options.suite](Runner(options, report))
    wrong = [key for key, row in report.rows.items() if "error" in row or row.get("right") is False]
    print(f"{len(report.rows)} rows in {options.out}, {len(wrong)} failed or wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
