"""Where compile time goes: cProfile of a cold compile of a deep, narrow Llama.

Example:
    python -m bench.profile_compile --layers 32 --system dynafuse --top 40

Three views. torch's own phases (nested: a backend's time lies inside Dynamo's). Own time by the file that a function
lives in: Dynamo, AOTAutograd (with fake tensors and symbolic shapes), FX, ours (`dynafuse/`), Inductor, Triton, others;
these add up to the whole, and a built-in function counts for its caller. The longest functions, all and ours.
Compiles that run in worker processes show up as waiting. `--system aot_only` is the floor: Dynamo and AOTAutograd.
"""
from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import sys
import time
from collections import defaultdict
from typing import Any

from bench import measure, systems

Function = tuple[str, int, str]
# First match wins.
OWNERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dynafuse", ("/dynafuse/",)),
    ("dynamo", ("/torch/_dynamo/",)),
    ("inductor", ("/torch/_inductor/",)),
    ("triton", ("/triton/",)),
    ("aotautograd", ("/torch/_functorch/", "/torch/_subclasses/", "/torch/_higher_order_ops/", "/torch/_ops.py")),
    ("aotautograd", ("/torch/_decomp/", "/torch/_refs/", "/torch/_prims", "/torch/_meta_registrations")),
    ("aotautograd", ("/torch/fx/experimental/",)),
    ("fx", ("/torch/fx/",)),
    ("torch", ("/torch/",)),
    ("sympy", ("/sympy/", "/mpmath/")),
)


def owner(filename: str) -> str:
    """Who a source file belongs to."""
    path = filename.replace(os.sep, "/")
    return next((name for name, parts in OWNERS if any(part in path for part in parts)), "other")


def split(stats: pstats.Stats) -> dict[str, float]:
    """Own seconds by owner; a built-in's go to those who call it, in the shares that the profile knows."""
    totals: dict[str, float] = defaultdict(float)
    table: dict[Function, Any] = stats.stats  # type: ignore[attr-defined]
    for (filename, _, _), (_, _, own, _, callers) in table.items():
        if filename != "~" or not callers:
            totals[owner(filename)] += own
            continue
        for (caller, _, _), (_, _, share, _) in callers.items():
            totals[owner(caller)] += share
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def profile_compile(system: systems.System, layers: int, device: str) -> tuple[pstats.Stats, float]:
    """Profile of the first training step, and its seconds."""
    from bench.models import CASES, Build

    work = CASES["llama"].build(Build(device=device, scale="tiny", layers=layers))
    work.module(*work.inputs).backward()
    runner = system.compile(work.module)
    profile = cProfile.Profile()
    start = time.perf_counter()
    profile.runcall(lambda: runner(*work.inputs).backward())
    return pstats.Stats(profile), time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """Print the split and the longest functions."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile_compile", description="Where compile time goes.")
    parser.add_argument("--system", default="dynafuse")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--top", type=int, default=40)
    parser.add_argument("--save", help="write the profile there, for snakeviz and the like")
    options = parser.parse_args(arguments)
    system = systems.find(options.system)
    with systems.cold_process(system.env):
        report(options, *profile_compile(system, options.layers, options.device or default_device()))
    return 0


def report(options: argparse.Namespace, stats: pstats.Stats, seconds: float) -> None:
    """Everything that the command prints."""
    print(f"{options.system}, {options.layers} layers: first step {seconds:.1f} s under the profiler")
    for name, own in split(stats).items():
        print(f"  {name:12} {own:7.2f} s own")
    print("torch's phases, nested:")
    for name, spent in itertools.islice(measure.compile_phases().items(), 20):
        print(f"  {name:60.60} {spent:7.2f} s")
    stats.sort_stats("cumulative").print_stats(options.top)
    stats.sort_stats("tottime").print_stats(options.top // 2)
    stats.sort_stats("cumulative").print_stats("/dynafuse/", options.top)
    if options.save:
        stats.dump_stats(options.save)


def default_device() -> str:
    """cuda where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
