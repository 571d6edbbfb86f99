"""One process per system: the runner asks, the worker answers, one JSON line each way.

Example:
    worker = Process(find("eager"), "llama")
    worker.ready(timeout=60)
    worker.ask({"do": "prepare", "case": "llama", ...}, timeout=120)

A process of its own makes a cold compile cold, keeps one system's crash or illegal access away from the others, and
lets rounds of several systems alternate. `Inside` has the same `ask` without a process, for debugging and quick tests.
"""
from __future__ import annotations

import compileall
import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

from bench import systems

ROOT = Path(__file__).resolve().parent.parent


class Failed(Exception):
    """The system could not do what was asked; the message is what a results row records."""


class Worker(Protocol):
    """Who answers the runner."""

    def ready(self, timeout: float) -> dict[str, Any]:
        """Wait for imports; Failed when they do."""

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The reply, or Failed."""

    def close(self) -> None:
        """End it; asking afterwards is a mistake."""


class Inside:
    """Answers in this process. Cold compile times are honest for the first case alone."""

    def __init__(self) -> None:
        from bench.subject import Dispatch

        self.dispatch = Dispatch()

    def ready(self, timeout: float) -> dict[str, Any]:
        """Nothing to wait for."""
        return {}

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The reply; `timeout` cannot be held without a process to end."""
        reply = _reply(self.dispatch, request)
        return _unwrap(reply)

    def close(self) -> None:
        """Drop the subject."""
        self.dispatch.subject = None


@functools.cache
def compile_package() -> None:
    """Have the package's modules as bytecode, as an installation has them: a cold start is not to pay for that."""
    package = importlib.util.find_spec("dynafuse")
    for folder in (package and package.submodule_search_locations) or ():
        compileall.compile_dir(folder, quiet=2)


class Process:
    """Answers in a child process with its own environment and empty caches."""

    def __init__(self, system: systems.System, case: str | None = None, catalog: str | None = None) -> None:
        self.system, self.case, self.catalog = system, case, catalog
        self.caches = systems.fresh_cache_env()
        self.log = tempfile.NamedTemporaryFile(prefix="bench-worker-", suffix=".log")  # noqa: SIM115
        self._start()

    def _start(self) -> None:
        compile_package()
        mine, its = socket.socketpair()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker", str(its.fileno())],
            env={**os.environ, **self.caches, **self.system.env, "PYTHONPATH": path},
            pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            start_new_session=True,  # so that compile workers end with it
        )
        its.close()
        self.channel, self.pending, self.greeted = mine, b"", False
        self._send({"do": "hello", "case": self.case, "catalog": self.catalog})

    def again(self, timeout: float) -> None:
        """A new child process in the place of this one, which finds its caches."""
        self._end()
        self._start()
        self.ready(timeout)

    def ready(self, timeout: float) -> dict[str, Any]:
        """Nothing, once it has imported what its case needs."""
        return self._answer("hello", timeout)

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The reply within `timeout` seconds; otherwise the process is ended."""
        if not self.greeted:
            self.ready(timeout)
        self._send(request)
        return self._answer(request["do"], timeout)

    def _send(self, request: dict[str, Any]) -> None:
        # A dead process is noticed, and reported with its log, where the answer is read.
        with contextlib.suppress(ConnectionError):
            self.channel.sendall(json.dumps(request).encode() + b"\n")

    def _answer(self, do: str, timeout: float) -> dict[str, Any]:
        self.greeted = True
        try:
            return _unwrap(json.loads(self._line(time.monotonic() + timeout)))
        except TimeoutError:
            self.close()
            raise Failed(f"no answer to {do!r} within {timeout:.0f} s") from None
        except (ConnectionError, EOFError):
            raise Failed(f"the process ended with {self.process.wait()}: {self._log_tail()}") from None

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self.pending:
            self.channel.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = self.channel.recv(1 << 16)
            if not chunk:
                raise EOFError
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def _log_tail(self) -> str:
        return Path(self.log.name).read_text(errors="replace")[-2000:].strip()

    def close(self) -> None:
        """End the child and its compile workers, and remove its caches."""
        self._end()
        shutil.rmtree(self.caches["BENCH_CACHE_ROOT"], ignore_errors=True)

    def _end(self) -> None:
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):  # it and its children are gone already
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _unwrap(reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply:
        raise Failed(reply["error"])
    ok: dict[str, Any] = reply["ok"]
    return ok


def _reply(dispatch: Any, request: dict[str, Any]) -> dict[str, Any]:
    # Whatever the measured system raises is a result of the benchmark, not an end of it.
    try:
        return {"ok": dispatch.answer(request)}
    except Exception as error:
        where = "".join(traceback.format_exception(error)[-4:])
        return {"error": f"{type(error).__name__}: {error}"[:1500], "trace": where[-3000:]}


def serve(fd: int) -> None:
    """Answer requests from a socket until it closes."""
    from bench.subject import Dispatch

    dispatch = Dispatch()
    with socket.socket(fileno=fd) as channel, channel.makefile("rwb") as lines:
        for line in lines:
            reply = _reply(dispatch, json.loads(line))
            if "trace" in reply:
                print(reply["trace"], file=sys.stderr, flush=True)
            lines.write(json.dumps(reply).encode() + b"\n")
            lines.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
