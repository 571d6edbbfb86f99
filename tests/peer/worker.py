"""A process that runs one test after the other: a request is a line of JSON on stdin, its answer one on stdout.

Worked example::

    {"mode": "base"}                          -> {"tests": ["test_add_complex", ...]}
    {"mode": "base", "test": "test_bool"}     -> {"status": "passed", "seconds": 0.4, "reason": ""}
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

LONGEST_REASON = 6000
OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "triton": {"executors": "triton"}, "cuda": {}, "torch": {}}


def main() -> None:
    """Answer until stdin ends. What tests print goes to the log, which is what stderr is."""
    executor, folder = sys.argv[1:]
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = _prepared(executor, Path(folder))
    for line in sys.stdin:
        request = json.loads(line)
        if "test" in request:
            answer: dict[str, Any] = _run(peer, request["mode"], request["test"])
        else:
            answer = _names(peer, request["mode"])
        channel.write(json.dumps(answer) + "\n")
    os._exit(0)  # threads that tests left behind keep nobody waiting


def _prepared(executor: str, folder: Path) -> Any:
    """The suite, with the environment that Triton and dynafuse look at when they are imported."""
    if executor == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(DYNAFUSE_CACHE="0", DYNAFUSE_WORKERS=os.environ.get("DYNAFUSE_WORKERS", "0"))
    warnings.simplefilter("ignore")
    if importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = _expecttest()
    import torch
    import torch._dynamo.guards

    from tests.support import interpreter

    interpreter.install()

    torch.set_num_threads(1)
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # flushes the processor's caches to time guards for a log
    from .internals import Settings
    from .modes import Peer

    return Peer(folder, "cuda" if executor == "cuda" else "cpu", Settings(OPTIONS[executor]), executor != "torch")


def _expecttest() -> ModuleType:
    """What torch's own test case derives from, where it is not installed."""
    class TestCase(unittest.TestCase):
        def assertExpectedInline(self, actual: str, expect: str, skip: int = 0) -> None:
            self.assertEqual(actual.strip(), expect.strip())

        def assertExpectedRaisesInline(self, kind: type[Exception], call: Callable[..., Any], expect: str, *args: Any,
                                       **kwargs: Any) -> None:
            with self.assertRaises(kind) as caught:
                call(*args, **kwargs)
            self.assertExpectedInline(str(caught.exception), expect)

    module: Any = ModuleType("expecttest")
    module.TestCase, module.ACCEPT = TestCase, False
    return module


def _names(peer: Any, mode: str) -> dict[str, Any]:
    """The names of a mode's tests, or why they cannot be loaded: tests of another torch import what this one may lack."""
    try:
        return {"tests": list(peer.tests(mode))}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _run(peer: Any, mode: str, test: str) -> dict[str, Any]:
    case, method = peer.tests(mode)[test]
    result = unittest.TestResult()
    peer.compared.asked = peer.compared.count = 0
    start = time.monotonic()
    unittest.TestSuite([case(method)]).run(result)
    status, reason = _status(result)
    if getattr(case, "compares", False) and not (peer.compared.count if status == "passed" else peer.compared.asked):
        status, reason = "skipped", "nothing to compare in this mode: as in base"
    return {"status": status, "seconds": round(time.monotonic() - start, 2), "reason": reason}


def _status(result: unittest.TestResult) -> tuple[str, str]:
    bad = result.errors + result.failures
    if bad:
        return "failed", _plain(bad[0][1])[-LONGEST_REASON:]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if result.expectedFailures:
        return "skipped", "the suite itself expects this test to fail"
    return "passed", ""


def _plain(text: str) -> str:
    """Without the lines that torch adds to every failure."""
    return re.sub(r"\n\nTo execute this test.*|\nSet TORCHDYNAMO_VERBOSE=1.*", "", text, flags=re.DOTALL).strip()


if __name__ == "__main__":
    main()
