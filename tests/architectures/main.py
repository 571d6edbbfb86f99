"""The sweep: every architecture small, compiled strictly beside eager, in processes of their own.

Example:
    python -m tests.architectures --device cuda --jobs 14 --seconds 300 --out found.json
    TRITON_INTERPRET=1 python -m tests.architectures --names transformers/causal --modes train,autocast,static
    python -m tests.architectures --list

Nothing is wrong where transformers or timm is not installed: there are no architectures then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.architectures.catalog import names
from tests.architectures.modes import MODES
from tests.support import interpreter
from tests.support.pool import PATIENCE, Pool

LIFETIME = 12
"""Architectures after which a worker is replaced: compiled code is never freed."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description="Compile every architecture beside eager.")
    parser.add_argument("--names", default="", help="what names begin with, comma-separated; default: all")
    parser.add_argument("--modes", default="train,infer", help=f"any of {', '.join(MODES)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one architecture, by the clock")
    parser.add_argument("--seconds", type=float, help="after which no more are compared")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are taken")
    parser.add_argument("--out", type=Path, help="a JSON file of what was found")
    parser.add_argument("--list", action="store_true", help="print the names, and compare nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print what is not right, and return whether anything is not."""
    options = parse(arguments)
    if options.worker:
        return work(options.device)
    chosen = [name for name in names() if name.startswith(tuple(options.names.split(",")))]
    if options.list:
        print("\n".join(chosen))
        return 0
    jobs = [{"name": name, "mode": mode} for mode in options.modes.split(",") for name in chosen]
    random.Random(options.seed).shuffle(jobs)
    found = run(jobs, options)
    counts = Counter(entry["status"] for entry in found)
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()) or "nothing is installed")
    return int(any(entry["status"] not in ("right", "skipped") for entry in found))


def run(jobs: Sequence[dict[str, str]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Hand the architectures to workers; return what came of each, printed as it comes unless it is right."""
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    errors = options.out.with_suffix(".log") if options.out else Path(os.devnull)
    pool = Pool(options.jobs, ["tests.architectures", "--worker", "--device", options.device],
                {"DYNAFUSE_WORKERS": "0", "OMP_NUM_THREADS": "1"}, options.limit / PATIENCE, errors, LIFETIME, deque(jobs))
    found: list[dict[str, Any]] = []
    for answer in pool.answers(deadline):
        found.append(answer)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
        if answer["status"] not in ("right", "skipped"):
            print(f"{answer['status']:7s} {answer['name']} {answer['mode']}: {str(answer['detail']).splitlines()[0][:200]}", flush=True)
    return found


def work(device: str) -> int:
    """Answer jobs, a line of JSON each, until there are no more."""
    import torch

    from tests.architectures.compare import check

    interpreter.install()
    torch.backends.cudnn.allow_tf32 = False  # other layouts run on other algorithms, not all of which round so
    answers, sys.stdout = sys.stdout, sys.stderr  # models print, too
    for line in sys.stdin:
        job, start = json.loads(line), time.monotonic()
        try:
            verdict = check(job["name"], job["mode"], device)
            answer = {"status": verdict.status, "detail": verdict.detail, "error": verdict.error}
        except Exception:  # of the comparison itself
            answer = {"status": "raises", "detail": traceback.format_exc()[-1500:], "error": 0.0}
        is_last = device != "cpu" and answer["status"] == "raises"  # a device may be unusable then
        print(json.dumps({**job, **answer, "seconds": round(time.monotonic() - start, 1), "last": is_last}), file=answers, flush=True)
    return 0
