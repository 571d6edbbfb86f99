"""The kernel cache on disk: what is kept comes back as it was, once for all processes, and for the right kernel only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from dynafuse import backend, config, ops
from dynafuse.cache import archive, folder, kernels, launches, sources
from dynafuse.cache.canonical import CanonicalRegion, canonical
from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Entry, pack, unpack
from dynafuse.cache.lock import Lock
from dynafuse.cache.once import Codec, Traffic, once
from dynafuse.errors import CacheError
from dynafuse.fallback import STRICT
from dynafuse.ir import Launch, Workspace
from dynafuse.lowering.base import Compilation
from dynafuse.lowering.nvfuser import executor as NVFUSER_EXECUTOR
from dynafuse.lowering.nvfuser import lower as nvfuser
from dynafuse.lowering.nvfuser.executor import NVFUSER
from dynafuse.lowering.nvfuser.kernel import FusionKernel
from dynafuse.lowering.registry import executor
from dynafuse.lowering.triton import binary
from dynafuse.select import MeasurementStore, Timing, stored
from dynafuse.tools import cli
from tests.support import graphs
from tests.support.processes import ROOT, environment, python

MB = 1 << 20
Capture = pytest.CaptureFixture[str]


def key(number: int) -> str:
    return f"{number:08x}"


def entry(number: int = 1, size: int = 10) -> Entry:
    return Entry("triton", key(number), {"launches": [[1, None, "x"]], "inf": float("inf")},
                 {"source": b"s" * size, "cubin0": bytes(range(256))})


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "kernels", MB)


# Entries --------------------------------------------------------------------------------------------------------------


def test_an_entry_comes_back_as_it_was(disk: Disk) -> None:
    assert disk.read(key(1)) is None
    assert disk.write(entry()) and disk.read(key(1)) == entry()
    assert Disk(disk.folder, MB).read(key(1)) == entry()
    assert pack(unpack(pack(entry()))) == pack(entry())


def test_only_the_user_can_read_them(disk: Disk) -> None:
    previous = os.umask(0)
    try:
        disk.write(entry())
    finally:
        os.umask(previous)
    assert disk.folder.stat().st_mode & 0o777 == 0o700
    assert disk.path(key(1)).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_can_enter_is_closed(disk: Disk) -> None:
    disk.folder.mkdir(mode=0o755)
    disk.write(entry())
    assert disk.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["", "../../x", "a/b", "KEY", "ab", ".lock", "0" * 65, "abcd\n"])
def test_what_is_no_key_is_no_path(disk: Disk, name: str) -> None:
    with pytest.raises(ValueError, match="is no key"):
        disk.read(name)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size = len(pack(entry(1, 10_000)))
    disk = Disk(tmp_path / "kernels", 10 * size)
    for number in range(10):
        disk.write(entry(number, 10_000))
        os.utime(disk.path(key(number)), (number, number))
    assert disk.read(key(0)) is not None  # used just now
    disk.write(entry(10, 10_000))
    left = {file.key for file in disk.files()}
    assert sum(file.bytes for file in disk.files()) <= 0.9 * disk.limit
    assert left == {key(n) for n in (0, 3, 4, 5, 6, 7, 8, 9, 10)}


def test_looking_for_an_entry_does_not_use_it(disk: Disk) -> None:
    assert not disk.has(key(1))
    disk.write(entry())
    os.utime(disk.path(key(1)), (5, 5))
    assert disk.has(key(1)) and not disk.has(key(2)) and disk.files()[0].used == 5


def test_looking_at_all_entries_uses_none(disk: Disk) -> None:
    disk.write(entry())
    os.utime(disk.path(key(1)), (5, 5))
    assert [found for _, found in disk.entries()] == [entry()]
    assert disk.files()[0].used == 5


def test_an_entry_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "kernels", 1000)
    assert not disk.write(entry(1, 2000)) and disk.write(entry(2)) and [file.key for file in disk.files()] == [key(2)]


def test_old_remains_of_interrupted_writes_are_removed(disk: Disk) -> None:
    disk.write(entry())
    old, new = disk.folder / ".x.partial", disk.folder / ".y.partial"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (5, 5))
    disk.trim()
    assert not old.exists() and new.exists() and disk.read(key(1)) is not None


# One compile ----------------------------------------------------------------------------------------------------------


def test_a_lock_is_one_process_s_and_any_thread_s(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    first = Lock.take(path)
    assert first is not None and Lock.take(path) is None
    thread = threading.Thread(target=first.release)
    thread.start()
    thread.join()
    assert not path.exists()
    again = Lock.take(path)
    assert again is not None
    first.release()  # once more does no harm
    assert Lock.take(path) is None
    again.release()


def test_threads_never_hold_a_lock_together(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "a.lock", [0], [0]

    def work() -> None:
        for _ in range(200):
            while (lock := Lock.take(path)) is None:
                pass
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            inside[0] -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def workers(count: int, folder: Path, log: Path, sleep_s: float, keys: list[str]) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.disk_worker", str(folder), str(log), str(sleep_s)]
    rotated = [keys[k % len(keys):] + keys[:k % len(keys)] for k in range(count)]
    return [subprocess.Popen([*command, *mine], env=environment(), stdout=subprocess.PIPE, text=True) for mine in rotated]


def test_sixteen_processes_compile_each_key_once(tmp_path: Path) -> None:
    keys = [key(n) for n in range(6)]
    started = workers(16, tmp_path / "kernels", tmp_path / "log", 0.1, keys)
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in started]
    assert all(set(got) == {f"kernel {k}" for k in keys} and hits + misses == 6 for got, hits, misses in answers)
    made = Counter(line.split()[1] for line in (tmp_path / "log").read_text().splitlines())
    assert made == dict.fromkeys(keys, 1)
    assert sum(misses for _, _, misses in answers) == 6
    assert {path.name for path in (tmp_path / "kernels").iterdir()} == set(keys), "no lock and no partial file is left"


TEXTS: Codec[str] = Codec(lambda text: Entry("triton", key(1), {}, {"t": text.encode()}), lambda e: e.blobs["t"].decode())


def result(value: str | Exception) -> Future[str]:
    future: Future[str] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def test_a_failure_is_not_kept_and_frees_the_lock(disk: Disk) -> None:
    traffic = Traffic()
    for make in (lambda: result(ValueError("no")), lambda: result("kernel")):
        future = once(disk, key(1), TEXTS, make, traffic)
        if future.exception() is not None:
            assert not list(disk.folder.iterdir())
    assert once(disk, key(1), TEXTS, lambda: pytest.fail("compiled again"), traffic).result() == "kernel"
    assert (traffic.hits, traffic.misses) == (1, 2)


def test_a_failure_to_begin_frees_the_lock(disk: Disk) -> None:
    def make() -> Future[str]:
        raise ValueError("cannot be lowered")

    for _ in range(2):
        with pytest.raises(ValueError, match="lowered"):
            once(disk, key(1), TEXTS, make, Traffic())


def test_the_lock_is_held_until_a_worker_has_compiled(disk: Disk) -> None:
    slow: Future[str] = Future()
    first = once(disk, key(1), TEXTS, lambda: slow, Traffic())
    second = once(disk, key(1), TEXTS, lambda: pytest.fail("compiled twice"), Traffic())
    assert not first.done() and not second.done()
    slow.set_result("kernel")
    assert first.result(1) == "kernel" and second.result(5) == "kernel"


def test_who_waits_compiles_if_the_other_gives_up(disk: Disk) -> None:
    slow: Future[str] = Future()
    once(disk, key(1), TEXTS, lambda: slow, Traffic())
    second = once(disk, key(1), TEXTS, lambda: result("mine"), Traffic())
    slow.set_exception(MemoryError())
    assert second.result(5) == "mine"


def test_nobody_waits_for_ever(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynafuse.cache.once.PATIENCE_S", 0.1)
    hanging: Future[str] = Future()
    once(disk, key(1), TEXTS, lambda: hanging, Traffic())
    assert once(disk, key(1), TEXTS, lambda: result("mine"), Traffic()).result(5) == "mine"


def test_a_kernel_that_cannot_be_kept_is_a_kernel(disk: Disk) -> None:
    def encode(text: str) -> Entry:
        raise launches.NoEntry("not describable")

    assert once(disk, key(1), Codec(encode, TEXTS.decode), lambda: result("k"), Traffic()).result() == "k"


# Launches -------------------------------------------------------------------------------------------------------------

S0, S1 = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))


@pytest.mark.parametrize("size", [7, S0, S0 * S1 + 3, FloorDiv(S0 + 1023, 1024), FloorDiv(S0, 4) * S1**2])
def test_sizes_come_back(size: Any) -> None:
    launch = Launch("k", (("in0", "*fp32"), ("s0", "i64")), (size, 1, 1), (("XBLOCK", 8),), 4, 2, (("in0", 4),),
                    overwrites=(("out0", "in0"),))
    assert launches.launch_from_json(json.loads(json.dumps(launches.launch_to_json(launch)))) == launch
    space = Workspace("tmp0", torch.bfloat16, size)
    assert launches.workspace_from_json(json.loads(json.dumps(launches.workspace_to_json(space)))) == space


@pytest.mark.parametrize("size", [sympy.Symbol("s0"), sympy.Symbol("x", integer=True, positive=True), sympy.sin(S0),
                                  S0 / 3, True])
def test_other_sizes_are_not_kept(size: Any) -> None:
    with pytest.raises(launches.NoEntry):
        launches.size_to_json(size)


@pytest.mark.parametrize("plain", ["os", ["eval", "s0"], ["Add", "__import__"], None, [], {"s0": 1}, 1.5, "s0; s1"])
def test_no_text_is_evaluated(plain: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        launches.size_from_json(plain)


# Keys -----------------------------------------------------------------------------------------------------------------

X = torch.randn(6, 8)


def bound(executor: str = "triton", op: str = "aten.exp.default") -> CanonicalRegion:
    module = graphs.built(lambda b, x: b.op("aten.neg.default", b.op(op, x)), X)
    plan = graphs.planned(module)
    return canonical(plan.annotated, replace(plan.regions[0], executor=executor), config.resolve(environ={}).key(), "sm90")


def compiled_for(capability: int | None) -> Compilation:
    return Compilation(capability, config.resolve(environ={}), STRICT)


def key_on_disk(of: CanonicalRegion, capability: int | None) -> str:
    return kernels.key_of(of, executor(of.region.executor), compiled_for(capability))


def test_what_makes_binaries_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Region, executor, capability, our sources, Triton with its settings."""
    keys = [key_on_disk(bound(), None), key_on_disk(bound("nvfuser"), None), key_on_disk(bound(), 90),
            key_on_disk(bound(), 100), key_on_disk(bound(op="aten.sin.default"), 90)]
    binary.fingerprint.cache_clear()
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    keys.append(key_on_disk(bound(), 90))
    binary.fingerprint.cache_clear()
    monkeypatch.setattr(sources, "digest", lambda: "other sources")
    keys.append(key_on_disk(bound(), 90))
    keys.append(key_on_disk(bound(), None))
    assert len(set(keys)) == len(keys)


def test_a_changed_source_changes_the_digest(tmp_path: Path) -> None:
    for name in ("ir", "ops", "lowering/triton", "cache", "runtime", "report"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("x = 1\n")
    (tmp_path / "ir" / "plan.py").write_text("y = 1\n")
    found = [sources.digest_of(tmp_path)]
    for name in ("ops/a.py", "lowering/triton/a.py", "ir/plan.py", "lowering/triton/b.py"):
        (tmp_path / name).write_text("x = 2\n")
        found.append(sources.digest_of(tmp_path))
    assert len(set(found)) == len(found)
    (tmp_path / "report" / "a.py").write_text("x = 2\n")
    assert sources.digest_of(tmp_path) == found[-1]
    assert sources.digest() == sources.digest_of(ROOT / "dynafuse")


# Kernels --------------------------------------------------------------------------------------------------------------


def gelu(build: graphs.Builder, x: Any) -> Any:
    return build.op("aten.mul.Tensor", build.op("aten.sigmoid.default", x), build.op("aten.sum.dim_IntList", x, [1], True))


def run(dynamic: bool = False, **options: Any) -> tuple[graphs.Run, dict[str, int]]:
    """Compile and run a graph in this process as if it had just begun; its counters."""
    backend.reset()
    made = graphs.compiled(graphs.built(gelu, X, dynamic=dynamic), [X], config.resolve(options={"workers": 0, **options}))
    torch.testing.assert_close(made.call([X])[0], X.sigmoid() * X.sum(1, True))
    return made, backend.stats()


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_interpreter_s_kernels_are_kept(cached: Path, dynamic: bool) -> None:
    _, first = run(dynamic)
    assert first["compiled"] == first["disk_misses"] == len(list(cached.iterdir())) > 0 == first["disk_hits"]
    _, second = run(dynamic)
    assert second["disk_hits"] == first["compiled"] and second["compiled"] == second["disk_misses"] == 0


@pytest.mark.parametrize("off", ["option", "size", "environment", "torch"])
def test_the_cache_can_be_turned_off(cached: Path, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    if off == "environment":
        monkeypatch.setenv("DYNAFUSE_CACHE", "0")
    given: dict[str, dict[str, Any]] = {"option": {"cache": False}, "size": {"cache_size_mb": 0}}
    for _ in range(2):
        with torch.compiler.config.patch(force_disable_caches=off == "torch"):
            _, counted = run(**given.get(off, {}))
        assert counted["compiled"] > 0 == counted["disk_hits"] == counted["disk_misses"]
    assert not cached.exists()


def test_an_op_that_was_registered_is_not_kept(cached: Path) -> None:
    before = ops.lookup(torch.ops.aten.sigmoid.default)
    assert before is not None and ops.shipped("aten.sigmoid.default") and not ops.shipped("aten.no_such_op.default")
    ops.register(ops.pointwise(before.target, "1.0 / (1.0 + tl.exp(-{0}))"))
    try:
        _, counted = run()
        assert counted["compiled"] > 0 == counted["disk_misses"]
        assert not cached.exists()
    finally:
        ops.register(before)


def test_an_entry_that_cannot_be_loaded_is_compiled_anew(cached: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sound by its digest, but not what a kernel needs."""
    run()
    kept = Disk(cached, MB)
    (held,) = kept.files()
    whole = kept.read(held.key)
    assert whole is not None
    worse = [replace(whole, blobs={}), replace(whole, kind="triton"), replace(whole, data={}),
             replace(whole, data={**whole.data, "region": "another"}),
             replace(whole, blobs={"source": b"def broken(:"}), replace(whole, blobs={"source": b"\xff"}),
             replace(whole, data={**whole.data, "launches": [{**whole.data["launches"][0], "entry": "no_such_kernel"}]}),
             replace(whole, data={**whole.data, "launches": [{**whole.data["launches"][0], "grid": [["eval"], 1, 1]}]})]
    for bad in worse:
        kept.write(bad)
        caplog.clear()
        _, counted = run()
        assert (counted["disk_hits"], counted["disk_misses"], counted["compiled"]) == (0, 1, 1), bad
        assert [r for r in caplog.records if "ignored" in r.message]
        assert kept.read(held.key) == whole, "it was replaced"


def test_nvfuser_keeps_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    of = bound("nvfuser")
    recipe = nvfuser.lower(of.spec)
    monkeypatch.setattr(NVFUSER_EXECUTOR.replay, "define", lambda _: None)
    compilation = compiled_for(None)
    entry = NVFUSER.encode(FusionKernel(of.key, recipe, lambda _: None), of, "key", compilation)
    assert entry.kind == "nvfuser"
    assert NVFUSER.decode(unpack(pack(entry)), of, compilation).recipe == recipe
    with pytest.raises(ValueError, match="nvfuser entry of region"):
        NVFUSER.decode(entry, bound("nvfuser", "aten.sin.default"), compilation)


def natively(code: str, **variables: str) -> str:
    """What a process prints that compiles for a GPU, which need not be there."""
    return python("-c", code, env=environment(interpreted=False, **variables))


NATIVE = """
import json, triton
from tests.cache import test_disk
from dynafuse import config
from dynafuse.cache import kernels
from dynafuse.fallback import STRICT
from dynafuse.lowering.base import Compilation
from dynafuse.select.compile import request
compiles = []
compile_ = triton.compile
triton.compile = lambda *a, **k: compiles.append(1) or compile_(*a, **k)
found = []
for op in ("aten.exp.default", "aten.sigmoid.default"):
    compilation = Compilation(90, config.resolve(options={"workers": 0}), STRICT)
    kernel = request(test_disk.bound(op=op), compilation).result()
    (compiled,) = kernel.compiled
    source = compiled.src
    found.append([kernel.source, repr(kernel.launches), compiled.kernel.hex(), compiled.packed_metadata, compiled.name,
                  repr(compiled.metadata._replace(extern_libs=None)), list(source.signature.items()),
                  sorted(source.constants.items()), compiled.hash])
print(json.dumps([len(compiles), vars(kernels.TRAFFIC)["hits"], found]))
"""


def test_binaries_are_kept_for_other_processes(cached: Path, tmp_path: Path) -> None:
    """Compiled for capability 9.0 in one process; in the second Triton's own cache is empty, and nothing compiles."""
    outputs = [json.loads(natively(NATIVE, TRITON_CACHE_DIR=str(tmp_path / f"triton{k}"))) for k in range(2)]
    (compiles, hits, first), (none, found, second) = outputs
    assert (compiles, hits, none, found) == (2, 0, 0, 2)
    assert first == second
    assert not (tmp_path / "triton1").exists() or not list((tmp_path / "triton1").rglob("*.cubin"))


TWO = """
import sys, torch
from dynafuse import backend
from dynafuse.lowering.triton import compiler
from dynafuse.lowering.triton import executor as build
lowerings = build.lowerings
def slow(spec):
    import os, time
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.5)
    return lowerings(spec)
build.lowerings = slow
x = torch.randn(8, 16)
f = lambda x: torch.softmax(x * 2, -1)
print(torch.allclose(torch.compile(f, backend=backend.dynafuse, options={"executors": "triton"})(x), f(x)), backend.stats())
"""


def test_two_processes_compile_a_model_once(cached: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO, str(tmp_path / "log")]
    both = [subprocess.Popen(command, env=environment(TRITON_INTERPRET="1"), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert all(text.startswith("True") for text in said), said
    assert sorted("'disk_hits': 1" in text for text in said) == [False, True]
    assert len((tmp_path / "log").read_text().split()) == 1


ON_GPU = """
import torch
from dynafuse import backend
x = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16)
f = lambda x: (torch.softmax(x * 2, -1), x.t().contiguous() + 1, x.float().sum(0))
options = {"executors": "triton", "tune": "never"}
for got, right in zip(torch.compile(f, backend=backend.dynafuse, options=options)(x), f(x)):
    torch.testing.assert_close(got, right)
stats = backend.stats()
print(stats["disk_hits"], stats["compiled"], stats["disk_misses"])
"""


@pytest.mark.gpu
def test_a_second_process_launches_what_the_first_compiled(cached: Path, tmp_path: Path) -> None:
    said = [natively(ON_GPU, TRITON_CACHE_DIR=str(tmp_path / f"triton{k}")).split() for k in range(2)]
    (hits, compiled, misses), (hits2, compiled2, misses2) = (map(int, words) for words in said)
    assert hits == compiled2 == misses2 == 0 < compiled == misses == hits2


# Measurements ---------------------------------------------------------------------------------------------------------


def test_measurements_outlive_the_process(disk: Disk) -> None:
    first = stored.Measurements(disk, MeasurementStore())
    first.put("region", "triton", Timing(12.1, 6.4))
    first.put("region", "nvfuser", Timing(reason="out of memory", transient=True))
    first.put("region", "eager", Timing(reason="it fails"))
    second = stored.Measurements(disk, MeasurementStore())
    assert second.get("region") == {"triton": Timing(12.1, 6.4), "eager": Timing(reason="it fails")}
    assert len(second) == 1 and second.get("another") == {}
    second.put("region", "nvfuser", Timing(10.3, 11.9))
    assert set(stored.Measurements(disk, MeasurementStore()).get("region")) == {"triton", "nvfuser", "eager"}
    assert stored.Measurements(None, MeasurementStore()).get("region") == {}


@pytest.mark.parametrize("data", [{}, {"key": "other", "timings": {}, "executors": [], "reason": "", "exhausted": False},
                                  {"timings": {"triton": {"device_us": -1}}}, {"timings": 3}])
def test_a_measurement_that_is_none_is_ignored(disk: Disk, data: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    disk.write(Entry("measurement", stored._measurement_key("region"), data))
    assert stored.Measurements(disk, MeasurementStore()).get("region") == {}
    assert len([r for r in caplog.records if "ignored" in r.message]) == 1


# Moving ---------------------------------------------------------------------------------------------------------------


def test_export_and_import(disk: Disk, tmp_path: Path) -> None:
    for number in range(3):
        disk.write(entry(number))
    file, other = tmp_path / "all.dynafuse", Disk(tmp_path / "other", MB)
    assert archive.export_entries(disk, file) == 3
    other.write(entry(0))
    assert str(archive.import_entries(other, file)) == "2 taken in, 1 were there, 0 could not be used or kept"
    assert [other.read(key(n)) for n in range(3)] == [entry(n) for n in range(3)]


def test_import_checks_every_entry(disk: Disk, tmp_path: Path) -> None:
    good = pack(entry(1))
    blobs = {key(1): good, key(2): good, key(3): good[:-1], "../x": good, key(4): pack(entry(4, 2 * MB))}
    file = tmp_path / "all.dynafuse"
    file.write_bytes(pack(Entry("archive", "", {}, blobs)))
    assert archive.import_entries(disk, file) == archive.Imported(1, 0, 4)
    assert [file.key for file in disk.files()] == [key(1)]


@pytest.mark.parametrize("content", [b"", b"no cache at all" * 10, pack(entry(1)), pack(Entry("triton", "")),
                                     pack(Entry("archive", ""))[:-1]])
def test_what_is_no_export_is_refused(disk: Disk, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CacheError, match="cannot import"):
        archive.import_entries(disk, tmp_path / "file")
    with pytest.raises(CacheError, match="cannot import"):
        archive.import_entries(disk, tmp_path / "no such file")
    with pytest.raises(CacheError, match="cannot export"):
        archive.export_entries(disk, tmp_path / "no such folder" / "file")


def test_commands(cached: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def say(*argv: str) -> tuple[int, str]:
        return cli.main(["cache", *argv]), capsys.readouterr().out

    monkeypatch.setenv("DYNAFUSE_COST_LAUNCH_US", "3")  # none of the cache's business
    monkeypatch.setenv("DYNAFUSE_CACHE_SIZE_MB", "7")
    file = str(tmp_path / "all.dynafuse")
    assert say("stats") == (0, f"folder   {cached}\nentries  0\nsize     0.0 MB of 7 MB\n")
    assert say("verify") == (0, "0 entries sound, 0 damaged\n")
    kept = Disk(cached, MB)
    for made in (entry(1, 100_000), entry(2), Entry("measurement", key(3))):
        kept.write(made)
    assert say("stats") == (0, f"folder   {cached}\nentries  3: 2 triton, 1 measurement\nsize     0.1 MB of 7 MB\n")
    assert say("export", file) == (0, f"3 entries exported to {file}\n")
    kept.path(key(2)).write_bytes(b"damaged")
    status, said = say("verify")
    assert status == 1 and said.splitlines()[0] == f"{kept.path(key(2))}: 7 bytes are no entry"
    assert "1 damaged" in say("stats")[1]
    assert say("import", file) == (0, "1 taken in, 2 were there, 0 could not be used or kept\n")
    assert say("verify")[0] == 0
    assert say("clear") == (0, "3 entries removed\n") and not list(cached.iterdir())
    assert cli.main(["cache", "import", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("dynafuse: cannot import")


def test_the_command_starts_without_torch(cached: Path) -> None:
    code = "import sys; from dynafuse.tools.cli import main; main(['cache', 'stats']); sys.exit('torch' in sys.modules)"
    python("-c", code, env=environment())


def test_torch_s_bundle_of_caches_includes_kernels(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        _, counted = run()
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        content, info = saved
    assert len(info.artifacts["dynafuse"]) == counted["compiled"] > 0
    monkeypatch.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path / "elsewhere"))
    with CacheArtifactManager.with_fresh_cache():
        assert torch.compiler.load_cache_artifacts(content) is not None
        _, after = run()
    assert after["disk_hits"] == counted["compiled"] and after["compiled"] == 0
    folder.KernelArtifact("0123abcd", b"damaged").populate_cache()
    folder.KernelArtifact("../../x", pack(Entry("triton", "../../x"))).populate_cache()
    assert len(list((tmp_path / "elsewhere" / "kernels").iterdir())) == counted["compiled"]
