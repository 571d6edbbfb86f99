"""Who compiles kernels: workers that are ready, and threads of this process while they start."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
import threading
import time
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
from dynafuse.lowering.triton import pool, scratch
from dynafuse.lowering.triton.compiler import gpu_target, load
from dynafuse.lowering.triton.scratch import MEMORY
from tests.support.processes import ROOT, environment, python

KERNEL, FINISH = (Launch(name, (), (sympy.Integer(1),) * 3, (), 2, 1) for name in ("kernel", "finish"))
ONE, TWO = Lowered("source", (KERNEL,)), Lowered("source", (KERNEL, FINISH))
SCALE = """
import triton
import triton.language as tl


@triton.jit
def scale(x, n, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, i < n) * 3, i < n)
"""
SCALE_LAUNCH = Launch("scale", (("x", "*fp32"), ("n", "i32")), (sympy.Integer(1),) * 3, (("BLOCK", 64),), 2, 1)


class Workers:
    """Stands for torch's pool: remembers what it is given, and has it at once or never."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.error: Exception | None = None

    def submit(self, *call: Any) -> Future[Any]:
        self.given.append(call)
        done: Future[Any] = Future()
        if self.error is None:
            done.set_result((call[2].entry, b"binary"))
        else:
            done.set_exception(self.error)
        return done


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    """A pool that is not ready."""
    found = Workers()
    monkeypatch.setattr(pool, "load", lambda lowered, capability: (threading.current_thread().name,))
    monkeypatch.setattr(pool, "compile_launch", lambda source, launch, capability: threading.current_thread().name)
    monkeypatch.setattr(pool, "restored", lambda launch, metadata, binary, capability: f"{metadata} of workers")
    monkeypatch.setattr(pool, "_workers", lambda: found)
    monkeypatch.setattr(pool, "_are_ready", lambda: False)
    return found


def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_are_ready", lambda: True)


def submitted(number: int, capability: int | None = 90, count: int | None = None) -> list[Future[tuple[Any, ...]]]:
    return [pool.submit(ONE, capability, count) for _ in range(number)]


def made(kernels: list[Future[tuple[Any, ...]]]) -> set[str]:
    """The threads that have compiled them."""
    return {name.split("_")[0] for kernel in kernels for name in kernel.result(timeout=20)}


def test_while_workers_start_threads_compile(workers: Workers) -> None:
    assert made(submitted(6)) == {"dynafuse-compile"}
    assert not workers.given


def test_workers_that_are_ready_compile_all(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(monkeypatch)
    assert [kernel.result(timeout=20) for kernel in submitted(3)] == [("kernel of workers",)] * 3
    assert len(workers.given) == 3


def test_kernels_of_one_source_are_compiled_side_by_side(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=20)

    def meets(source: str, launch: Launch, capability: int) -> str:
        both.wait()
        return launch.entry

    monkeypatch.setattr(pool, "compile_launch", meets)
    assert pool.submit(TWO, 90, None).result(timeout=40) == ("kernel", "finish")
    ready(monkeypatch)
    assert pool.submit(TWO, 90, None).result(timeout=20) == ("kernel of workers", "finish of workers")
    assert [given[1:3] for given in workers.given] == [("source", KERNEL), ("source", FINISH)]


def test_workers_take_what_no_thread_has_begun(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(source: str, launch: Launch, capability: int) -> str:
        begun.release()
        assert go_on.wait(20)
        return "slow"

    monkeypatch.setattr(pool, "compile_launch", slow)
    kernels = submitted(pool.THREADS + 3)
    for _ in range(pool.THREADS):
        assert begun.acquire(timeout=20)
    ready(monkeypatch)
    go_on.set()
    assert [kernel.result(timeout=20) for kernel in kernels] == [("slow",)] * pool.THREADS + [("kernel of workers",)] * 3
    assert len(workers.given) == 3


def test_workers_that_are_gone_are_not_waited_for(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(monkeypatch)
    monkeypatch.setattr(workers, "submit", None)
    assert made(submitted(2)) == {"dynafuse-compile"}


def test_who_waits_for_a_kernel_gets_its_failure(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("here")

    monkeypatch.setattr(pool, "load", fails)
    monkeypatch.setattr(pool, "compile_launch", fails)
    with pytest.raises(ValueError, match="here"):
        pool.submit(ONE, 90, None).result(timeout=20)
    with pytest.raises(ValueError, match="here"):
        pool.submit(ONE, 90, 0).result(timeout=20)
    ready(monkeypatch)
    workers.error = RuntimeError("there")
    with pytest.raises(RuntimeError, match="there"):
        pool.submit(ONE, 90, None).result(timeout=20)


@pytest.mark.parametrize(("capability", "count"), [(90, 0), (None, None)])
def test_without_workers_and_in_the_interpreter_nobody_else_compiles(
        capability: int | None, count: int | None, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(monkeypatch)
    assert made(submitted(3, capability, count)) == {threading.current_thread().name}
    assert not workers.given


WORKERS = """
import json, os, sys
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from tests.lowering.triton.test_pool import SCALE, SCALE_LAUNCH, loaded
from dynafuse.lowering.triton.worker import Pickler, compiled_bytes

workers = SubprocPool(1, Pickler(is_parent=False))
before = workers.submit(loaded).result()
metadata, cubin = workers.submit(compiled_bytes, SCALE, SCALE_LAUNCH, 90).result()
print(json.dumps({"before": before, "after": workers.submit(loaded).result(), "name": metadata["name"], "size": len(cubin)}))
workers.shutdown()
"""


def loaded() -> list[str]:
    """What this process has imported of what compiles kernels."""
    return sorted(name for name in sys.modules if name.startswith(("triton.", "dynafuse.lowering.", "torch._inductor.runtime.")))


def test_workers_are_born_with_what_compiles_kernels_and_leave_no_files(tmp_path: Path) -> None:
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    others = set(MEMORY.glob("dynafuse-*"))
    found = json.loads(python("-c", WORKERS, env=environment(interpreted=False, **variables)).splitlines()[-1])
    assert found["name"] == "scale" and found["size"] > 1000
    assert "triton.compiler.code_generator" in found["before"]
    assert found["after"] == found["before"]
    assert not list((tmp_path / "triton").rglob("*.cubin"))
    assert set(MEMORY.glob("dynafuse-*")) <= others


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
    while not pool._are_ready():
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
