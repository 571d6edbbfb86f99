"""The command line: how many programs, for how long, on what."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.report import Report
from tests.support import interpreter
from tests.support.pool import Pool

ALIKE = 3
"""How many failures with one signature are made smaller; of wrong values, whose signatures say little, many more."""

ALIKE_WRONG = 40

LIFETIME = 250
"""Programs after which a worker is replaced."""


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="most minutes to run (no end, if --programs is given)")
    parser.add_argument("--programs", type=int, help="how many programs (no end, if --minutes is given)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first program")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--captured", action="store_true", help="record and replay every graph that can be")
    parser.add_argument("--executors", help="comma separated; each program gets one of them; on CPU triton is interpreted")
    parser.add_argument("--limit", type=float, default=60.0, help="most seconds for a program")
    parser.add_argument("--shrink", type=float, default=60.0, help="most seconds for making a failure smaller; 0: never")
    parser.add_argument("--out", type=Path, help="JSON lines of all that ran")
    parser.add_argument("--only", type=int, help="run one program, here, and print it")
    parser.add_argument("--text", type=Path, help="run the program of a file, here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run; 1 if anything failed."""
    given = arguments().parse_args()
    executors = tuple((given.executors or "triton").split(","))
    os.environ.update(environment(given.device))
    if given.worker:
        from tests.fuzz.worker import serve

        serve(given.seed, given.device, executors, given.limit, given.shrink, given.captured)
        return 0
    if given.only is not None or given.text is not None:
        return alone(given, executors)
    return many(given)


def environment(device: str) -> dict[str, str]:
    """Strict, one thread, no cache but that of programs that ask for it; what the caller has set stays."""
    wanted = {"DYNAFUSE_STRICT": "1", "DYNAFUSE_CACHE": "0", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
              "DYNAFUSE_WORKERS": "0"}
    if device == "cpu":
        wanted["TRITON_INTERPRET"] = "1"
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def alone(given: argparse.Namespace, executors: tuple[str, ...]) -> int:
    """One program, in this process."""
    from tests.fuzz.generate import generate
    from tests.fuzz.subject import examine

    interpreter.install()
    text = given.text.read_text(encoding="utf-8") if given.text else str(generate(given.seed, given.only, executors))
    print(text)
    verdict = examine(text, given.device, given.captured)
    print(f"{verdict.status} {verdict.kind} {verdict.where}\n{verdict.detail}")
    return int(verdict.failed)


def many(given: argparse.Namespace) -> int:
    """Programs in processes, until there were enough of them or time is up."""
    if given.programs is None and given.minutes is None:
        given.programs = 1000
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    report = Report(given.out or folder / "answers.jsonl")
    own = {"DYNAFUSE_CACHE_DIR": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
           "TRITON_CACHE_DIR": str(folder / "triton")}
    passed = ["--worker", "--seed", str(given.seed), "--device", given.device, "--limit", str(given.limit), "--shrink", str(given.shrink)]
    if given.captured:
        passed.append("--captured")
    if given.executors:
        passed += ["--executors", given.executors]
    pool = Pool(given.jobs, ["tests.fuzz", *passed], own, given.limit, folder / "errors.txt", LIFETIME)
    deadline = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    last = given.first + (given.programs if given.programs is not None else 10**9)
    following = given.first
    pool.queue.extend({"index": k} for k in range(following, min(last, following + given.jobs)))
    following += len(pool.queue)
    asked: Counter[str] = Counter()
    for answer in pool.answers(deadline):
        report.take(answer)
        if not answer.get("shrunk") and following < last:
            pool.queue.append({"index": following})
            following += 1
        if _worth_shrinking(answer, asked, given.shrink):
            pool.queue.appendleft({"index": answer["index"], "shrink": True, "seconds": given.shrink})
        report.progress(last - given.first - report.programs)
    print(report.summary())
    return int(report.failures > 0)


def _worth_shrinking(answer: dict[str, object], asked: Counter[str], seconds: float) -> bool:
    if answer.get("shrunk") or answer["status"] not in ("wrong", "raises") or not seconds:
        return False
    signature = str(answer["signature"])
    asked[signature] += 1
    return asked[signature] <= (ALIKE_WRONG if answer["status"] == "wrong" else ALIKE)
