"""Ranks that train a small Llama every way there is of spreading it, eager and compiled; run by ``tests/training/test_distributed.py``.

    python -m tests.support.ranks RANKS FOLDER

Each writes a line of JSON for each way to the folder's file of its number: the way's name, then the losses by system. All ways
share a process, and the ranks are forks of one that has imported torch, because most of a process's time is spent on that.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from bench import distributed
from bench.models import CASES, Language
from tests.support import interpreter, quick_dynamo

IMPORTED = ("dynafuse.backend", "torch._dynamo.convert_frame", "torch._functorch.aot_autograd", "torch.distributed.fsdp",
            "torch.distributed.tensor.parallel", "transformers.models.llama.modeling_llama", "triton")
"""What every rank would import by and by."""

SYSTEMS = ("eager", "dynafuse")
LIMIT_S = 280
STEPS = 2  # the second has the loss of what the first one's gradients made of the weights
# The interpreter takes its time for each element.
SMALL = Language(hidden=16, intermediate=24, heads=4, kv_heads=2, vocab=32, batch=1, tokens=8, layers=1)


def losses(way: str, system: str) -> list[float]:
    """Those of a few steps, from the same weights every time."""
    torch._dynamo.reset()
    options = distributed.parse(["--ways", way, "--systems", system, "--device", "cpu", "--dtype", "float32",
                                 "--scale", "tiny", "--steps", "1"])
    found: list[float] = distributed.train(options)["losses"]
    return found


def rank(number: int, ranks: int, folder: Path) -> NoReturn:
    """Join the others, train, write."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=number, world_size=ranks)
    with open(folder / str(number), "w") as file:
        for way in distributed.WAYS:
            print(json.dumps([way, {system: losses(way, system) for system in SYSTEMS}]), file=file, flush=True)
    distributed.leave()


def main() -> None:
    """Fork every rank; a status other than 0 says that one failed."""
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    for name in IMPORTED:
        importlib.import_module(name)
    interpreter.install()
    quick_dynamo.install()
    torch.set_num_threads(1)
    CASES["llama"].sizes["tiny"] = SMALL
    distributed.CHECKED = STEPS
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank, args=(number, ranks, folder)) for number in range(ranks)]
    for process in processes:
        process.start()
    sys.exit(not all_succeed(processes))


def all_succeed(processes: Sequence[ForkProcess]) -> bool:
    """Wait until all processes have ended, and end those that would wait for one that failed."""
    while running := [process for process in processes if process.is_alive()]:
        if not wait([process.sentinel for process in running], LIMIT_S) or any(process.exitcode for process in processes):
            for process in running:
                process.kill()
    return not any(process.exitcode for process in processes)


if __name__ == "__main__":
    main()
