"""One rank that trains a small Llama every way there is of spreading it, eager and compiled; run by ``tests/training/test_distributed.py``.

    python -m tests.support.ranks RANK RANKS FILE

Prints a line of JSON for each way: its name, then the losses by system. All ways share a process, because most of a
process's time is spent on importing torch.
"""

from __future__ import annotations

import json
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

from bench import distributed
from bench.models import CASES, Language

SYSTEMS = ("eager", "dynafuse")
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


def main() -> NoReturn:
    """Join the others, train, print."""
    rank, ranks, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    CASES["llama"].sizes["tiny"] = SMALL
    distributed.CHECKED = STEPS
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    for way in distributed.WAYS:
        print(json.dumps([way, {system: losses(way, system) for system in SYSTEMS}]), flush=True)
    distributed.leave()


if __name__ == "__main__":
    main()
