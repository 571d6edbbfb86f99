"""Who compiles kernels: workers that are ready, and threads of this process while they start."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import triton
from torch._inductor.runtime import compile_tasks

from dynafuse import backend
from dynafuse.ir import Launch, Lowered
from dynafuse.lowering.triton import pool, scratch, worker
from dynafuse.lowering.triton.compiler import gpu_target, job_of, load, path_of
from dynafuse.lowering.triton.scratch import MEMORY
from dynafuse.lowering.triton.worker import Task
from dynafuse.lowering.triton.workers import WorkerError, Workers, WorkersEnded
from tests.support.processes import ROOT, environment, python

KERNEL, FINISH = (Launch(name, (), (sympy.Integer(1),) * 3, (), 2, 1) for name in ("kernel", "finish"))
ONE, TWO = Lowered("source", (KERNEL,)), Lowered("source", (KERNEL, FINISH))
PATIENCE_S = 60.0
SCALE = """
import triton
import triton.language as tl


@triton.jit
def scale(x, n, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, i < n) * 3, i < n)
"""
SCALE_LAUNCH = Launch("scale", (("x", "*fp32"), ("n", "i32")), (sympy.Integer(1),) * 3, (("BLOCK", 64),), 2, 1)


class Stand:
    """Stands for workers: remembers what it is given, and has it at once or never."""

    def __init__(self) -> None:
        self.given: list[Task] = []
        self.error: Exception | None = None

    def submit(self, task: Task) -> Future[Any]:
        self.given.append(task)
        done: Future[Any] = Future()
        if self.error is None:
            done.set_result((task.job.entry, b"binary"))
        else:
            done.set_exception(self.error)
        return done


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Workers that are not ready."""
    stand = Stand()
    monkeypatch.setattr(pool, "load", lambda lowered, capability: (threading.current_thread().name,))
    monkeypatch.setattr(pool, "compile_launch", lambda source, launch, capability: threading.current_thread().name)
    monkeypatch.setattr(pool, "restored", lambda launch, metadata, binary, capability: f"{metadata} of workers")
    monkeypatch.setattr(pool, "_ready", lambda count: None)
    return stand


def ready(workers: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_ready", lambda count: workers)


def submitted(number: int, capability: int | None = 90, count: int | None = None) -> list[Future[tuple[Any, ...]]]:
    return [pool.submit(ONE, capability, count) for _ in range(number)]


def made(kernels: list[Future[tuple[Any, ...]]]) -> set[str]:
    """The threads that have compiled them."""
    return {name.split("_")[0] for kernel in kernels for name in kernel.result(timeout=20)}


def test_while_workers_start_threads_compile(workers: Stand) -> None:
    assert made(submitted(6)) == {"dynafuse-compile"}
    assert not workers.given


def test_workers_that_are_ready_compile_all(workers: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(workers, monkeypatch)
    assert [kernel.result(timeout=20) for kernel in submitted(3)] == [("kernel of workers",)] * 3
    assert len(workers.given) == 3


def test_kernels_of_one_source_are_compiled_side_by_side(workers: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=20)

    def meets(source: str, launch: Launch, capability: int) -> str:
        both.wait()
        return launch.entry

    monkeypatch.setattr(pool, "compile_launch", meets)
    assert pool.submit(TWO, 90, None).result(timeout=40) == ("kernel", "finish")
    ready(workers, monkeypatch)
    assert pool.submit(TWO, 90, None).result(timeout=20) == ("kernel of workers", "finish of workers")
    assert {(task.text, task.job.entry) for task in workers.given} == {("source", "kernel"), ("source", "finish")}


def test_workers_take_what_no_thread_has_begun(workers: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(source: str, launch: Launch, capability: int) -> str:
        begun.release()
        assert go_on.wait(20)
        return "slow"

    monkeypatch.setattr(pool, "compile_launch", slow)
    kernels = submitted(pool.THREADS + 3)
    for _ in range(pool.THREADS):
        assert begun.acquire(timeout=20)
    ready(workers, monkeypatch)
    go_on.set()
    assert [kernel.result(timeout=20) for kernel in kernels] == [("slow",)] * pool.THREADS + [("kernel of workers",)] * 3
    assert len(workers.given) == 3


@pytest.mark.parametrize("how", ["before", "meanwhile"])
def test_what_workers_that_are_gone_have_not_compiled_threads_do(how: str, workers: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(workers, monkeypatch)
    workers.error = WorkersEnded()
    if how == "before":
        monkeypatch.setattr(workers, "submit", None)
    assert made(submitted(2)) == {"dynafuse-compile"}


def test_who_waits_for_a_kernel_gets_its_failure(workers: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("here")

    monkeypatch.setattr(pool, "load", fails)
    monkeypatch.setattr(pool, "compile_launch", fails)
    with pytest.raises(ValueError, match="here"):
        pool.submit(ONE, 90, None).result(timeout=20)
    with pytest.raises(ValueError, match="here"):
        pool.submit(ONE, 90, 0).result(timeout=20)
    ready(workers, monkeypatch)
    workers.error = RuntimeError("there")
    with pytest.raises(RuntimeError, match="there"):
        pool.submit(ONE, 90, None).result(timeout=20)


@pytest.mark.parametrize(("capability", "count"), [(90, 0), (None, None)])
def test_without_workers_and_in_the_interpreter_nobody_else_compiles(
        capability: int | None, count: int | None, workers: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(workers, monkeypatch)
    assert made(submitted(3, capability, count)) == {threading.current_thread().name}
    assert not workers.given


def task_of(text: str, launch: Launch) -> Task:
    """What workers are given of a kernel."""
    return Task(text, path_of(text), job_of(launch, 90))


@pytest.fixture
def process() -> Iterator[Workers]:
    """Two workers."""
    workers = Workers(2)
    workers.ready.result(timeout=PATIENCE_S)
    yield workers
    workers.stop()


ALONE = """
import json, sys
from dynafuse.lowering.triton.worker import Task, compiled_text, _compile_first
from dynafuse.lowering.triton.jobs import Job

def loaded():
    return sorted(name for name in sys.modules if name.startswith(("torch", "triton.", "dynafuse.")))

_compile_first()
before = loaded()
metadata, cubin = compiled_text(Task(sys.argv[1], "/nowhere/scale.py", Job(
    "scale", (("x", "*fp32"), ("n", "i32")), (("BLOCK", 64), ("WAITS", 1)), ((0, 16),), 2, 1, False, 90)))
print(json.dumps({"before": before, "after": loaded(), "name": metadata["name"], "size": len(cubin)}))
"""


def test_workers_are_born_with_what_compiles_kernels_and_leave_no_files(tmp_path: Path) -> None:
    """They never have torch, without which they are ready in a fraction of the time."""
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    others = set(MEMORY.glob("dynafuse-*"))
    seen = json.loads(python("-c", ALONE, SCALE, env=environment(interpreted=False, **variables)).splitlines()[-1])
    assert seen["name"] == "scale" and seen["size"] > 1000
    assert "triton.compiler.code_generator" in seen["before"]
    assert seen["after"] == seen["before"]
    assert "torch" not in seen["after"]
    assert not list((tmp_path / "triton").rglob("*.cubin"))
    assert set(MEMORY.glob("dynafuse-*")) <= others


COMPARED = """
from dynafuse.lowering.triton.compiler import compile_launch, path_of, job_of
from dynafuse.lowering.triton.jobs import taken
from dynafuse.lowering.triton.worker import Task
from dynafuse.lowering.triton.workers import Workers
from tests.lowering.triton.test_pool import SCALE, SCALE_LAUNCH

workers = Workers(1)
theirs = workers.submit(Task(SCALE, path_of(SCALE), job_of(SCALE_LAUNCH, 90))).result()
mine = taken(compile_launch(SCALE, SCALE_LAUNCH, 90))
print(theirs[1] == mine[1], {name for name in mine[0] if mine[0][name] != theirs[0][name]} <= {"hash"})
workers.stop()
"""


def test_workers_compile_to_the_bits_that_threads_do() -> None:
    assert python("-c", COMPARED, env=environment(interpreted=False)) == "True True\n"


def test_what_a_worker_cannot_compile_fails_with_its_reason_and_others_go_on(process: Workers) -> None:
    with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'nowhere'"):
        process.submit(task_of("import nowhere\n", SCALE_LAUNCH)).result(timeout=PATIENCE_S)
    with pytest.raises(WorkerError, match="has no attribute 'scale'"):
        process.submit(task_of("import math\n", SCALE_LAUNCH)).result(timeout=PATIENCE_S)


def test_workers_that_have_ended_take_nothing_and_let_nobody_wait(process: Workers) -> None:
    waits = process.submit(task_of("import time\ntime.sleep(600)\n", SCALE_LAUNCH))
    process._process.kill()
    assert isinstance(waits.exception(timeout=PATIENCE_S), WorkersEnded)
    with pytest.raises(WorkersEnded):
        process.submit(task_of(SCALE, SCALE_LAUNCH))


def test_a_worker_that_is_killed_ends_all_of_them(process: Workers) -> None:
    """As the kernel does where memory runs out; what they were about is then compiled elsewhere."""
    waits = process.submit(task_of("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", SCALE_LAUNCH))
    assert isinstance(waits.exception(timeout=PATIENCE_S), WorkersEnded)
    assert process._process.wait(PATIENCE_S) == 1


def test_workers_end_with_who_has_started_them() -> None:
    """Also with one that is killed while they compile."""
    program = """
import os, signal, sys, time
from dynafuse.lowering.triton.worker import Task
from dynafuse.lowering.triton.compiler import job_of
from dynafuse.lowering.triton.workers import Workers
from tests.lowering.triton.test_pool import SCALE_LAUNCH

workers = Workers(2)
text = f"import os, time\\nopen({sys.argv[1]!r}, 'w').write(str(os.getpid()))\\ntime.sleep(600)\\n"
workers.submit(Task(text, "/nowhere/text.py", job_of(SCALE_LAUNCH, 90)))
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pid"
        subprocess.run([sys.executable, "-c", program, str(file)], env=environment(), check=False, timeout=PATIENCE_S)
        assert eventually(lambda: not is_running(int(file.read_text())))


def test_workers_that_nobody_asks_for_anything_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come back: the server is run here, in a thread."""
    monkeypatch.setattr(worker, "RESTING_S", 0.1)
    ours, theirs = multiprocessing.Pipe()
    server = worker._Server(theirs, 1)
    monkeypatch.setattr(server, "_end", lambda: None)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    for number in range(2):
        ours.send((number, task_of("import nowhere\n", SCALE_LAUNCH)))
        assert ours.poll(PATIENCE_S) and ours.recv()[0] == number
        assert eventually(lambda: server.workers is None)
    ours.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def eventually(check: Callable[[], bool]) -> bool:
    """Whether something becomes true before long."""
    end = time.monotonic() + PATIENCE_S
    while not check() and time.monotonic() < end:
        time.sleep(0.05)
    return check()


def is_running(process: int) -> bool:
    """Whether a process does anything: one that has ended may wait for somebody to ask how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_where_memory_is_full_files_lie_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scratch, "MEMORY", tmp_path)
    with scratch.scratch_folder() as folder:
        assert Path(folder).parent == tmp_path
    monkeypatch.setattr(scratch, "LEAST_FREE", 1 << 62)
    with scratch.scratch_folder() as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())
    monkeypatch.setattr(scratch, "MEMORY", tmp_path / "none")
    with scratch.scratch_folder() as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())


@pytest.mark.gpu
def test_what_workers_have_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool.warm(None)
    while pool._ready(None) is None:
        time.sleep(0.1)
    with monkeypatch.context() as patched:
        patched.setattr(triton, "compile", None)
        (theirs,) = pool.submit(Lowered(SCALE, (SCALE_LAUNCH,), ()), 90, None).result(timeout=60)
    (mine,) = load(Lowered(SCALE, (SCALE_LAUNCH,), ()), 90)
    assert theirs.asm["cubin"] == mine.asm["cubin"]
    assert theirs.metadata.shared == mine.metadata.shared


def test_kernels_are_compiled_with_the_assembler_that_workers_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = tmp_path / "bin" / "ptxas"
    beside.parent.mkdir()
    beside.write_text("#!/bin/sh\necho release 99.1\n")
    beside.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # so that what is there now, or nothing, is there again afterwards
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.setattr(compile_tasks, "__file__", str(tmp_path / "runtime" / "compile_tasks.py"))
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", compile_tasks._set_triton_ptxas_path.__wrapped__)  # not cached
    assert gpu_target(90).arch == 90
    assert triton.knobs.nvidia.ptxas.version == "99.1"


@pytest.mark.parametrize("there_is_a_gpu", [False, True])
def test_workers_start_when_torch_loads_the_backend(there_is_a_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_is_a_gpu)
    monkeypatch.setattr(pool, "warm", started.append)
    monkeypatch.setenv("DYNAFUSE_WORKERS", "3")
    monkeypatch.delitem(sys.modules, "dynafuse.entry", raising=False)
    assert importlib.import_module("dynafuse.entry").dynafuse is backend.dynafuse
    assert started == ([3] if there_is_a_gpu else [])


def test_the_entry_point_is_there() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    given = re.search(r'torch_dynamo_backends\]\ndynafuse = "(.+)"', project)
    assert given is not None
    assert EntryPoint("dynafuse", given[1], "torch_dynamo_backends").load().__name__ == "dynafuse"
