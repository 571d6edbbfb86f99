"""What a disk, other processes and other users can do to the kernel cache: a miss and a line of log, never more."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dynafuse.cache import disk as disk_module
from dynafuse.cache import entry as entry_module
from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import FORMAT, HEADER, Damaged, Entry, pack, unpack
from dynafuse.cache.lock import Lock
from dynafuse.cache.once import Codec, Traffic, once
from tests.support.processes import environment, python

KEY = "0123abcd"
MB = 1 << 20
ENTRY = Entry("triton", KEY, {"launches": [["k", 1]]}, {"source": b"def k(): ...", "cubin0": b"\x7fELF\x00\x01"})
TEXTS: Codec[str] = Codec(lambda text: Entry("triton", KEY, {}, {"t": text.encode()}), lambda e: e.blobs["t"].decode())


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "kernels", MB)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of log, warnings and worse, of the package."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("dynafuse") and r.levelno >= logging.WARNING]


def result(value: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(value)
    return future


def works_without(disk: Disk) -> None:
    """Whatever is wrong with the disk, kernels are there: asked for several times, each is made."""
    for number in range(3):
        assert once(disk, KEY, TEXTS, lambda number=number: result(f"made {number}"), Traffic()).result(5) == f"made {number}"
        assert disk.read(KEY) is None and not disk.write(ENTRY)


# Damaged entries ------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_noticed() -> None:
    packed = pack(ENTRY)
    assert len(packed) < 300
    for position in range(len(packed)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(packed)
            damaged[position] ^= flip
            with pytest.raises(Damaged):
                unpack(bytes(damaged), KEY)


def test_every_flipped_bit_and_every_cut_is_a_miss_on_disk(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.write(ENTRY)
    packed, path = pack(ENTRY), disk.path(KEY)
    variants = [packed[:length] for length in range(len(packed))] + [packed + b"\0", packed * 2]
    for position in range(len(packed)):
        variants += [packed[:position] + bytes([packed[position] ^ (1 << bit)]) + packed[position + 1:] for bit in range(8)]
    for damaged in variants:
        path.write_bytes(damaged)
        caplog.clear()
        assert disk.read(KEY) is None
        assert len(told(caplog)) == 1
    path.write_bytes(packed)
    assert disk.read(KEY) == ENTRY


def test_every_pair_of_swapped_bytes_is_noticed() -> None:
    packed = pack(ENTRY)
    for position in range(len(packed) - 1):
        swapped = bytearray(packed)
        swapped[position], swapped[position + 1] = packed[position + 1], packed[position]
        if bytes(swapped) != packed:
            with pytest.raises(Damaged):
                unpack(bytes(swapped), KEY)


@pytest.mark.parametrize("version", [0, FORMAT + 1, 2**32 - 1])
def test_another_format_is_a_miss(disk: Disk, version: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also one whose digest fits it."""
    disk.write(ENTRY)
    packed = pack(ENTRY)
    magic, _, nothing, length, digest = HEADER.unpack_from(packed)
    disk.path(KEY).write_bytes(HEADER.pack(magic, version, nothing, length, digest) + packed[HEADER.size:])
    assert disk.read(KEY) is None
    assert [line for line in told(caplog) if f"it has format {version}, not {FORMAT}" in line] == told(caplog) != []


def test_an_entry_under_another_key_is_a_miss(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.write(ENTRY)
    disk.path(KEY).rename(disk.path("ffffffff"))
    assert disk.read("ffffffff") is None and f"it is the entry of {KEY}" in told(caplog)[0]


def sealed(body: bytes) -> bytes:
    """A body with a header that fits it."""
    digest = entry_module._digest(len(body), body)
    return HEADER.pack(entry_module.MAGIC, FORMAT, 0, len(body), digest) + body


def body(text: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<I", len(text)) + text + rest


@pytest.mark.parametrize("content", [
    b"", b"\0\0\0", struct.pack("<I", 99) + b"{}", body(b""), body(b"[]"), body(b"{}"), body(b"\xff\xfe"), body(b"null"),
    body(b'{"kind": "triton", "key": "0123abcd", "data": {}, "blobs": [["source", 5]]}', b"four"),
    body(b'{"kind": "triton", "key": "0123abcd", "data": {}, "blobs": [["source", -1]]}'),
    body(b'{"kind": "triton", "key": "0123abcd", "data": {}, "blobs": [["source"]]}'),
    body(b'{"kind": "triton", "key": "0123abcd", "data": {}, "blobs": 3}'),
    body(b'{"kind": "triton", "key": "0123abcd", "data": {}, "blobs": [["source", "4"]]}', b"four"),
    body(b'{"kind": "triton", "key": "0123abcd", "data": {}, "blobs": []}', b"left over"),
    body(b"[" * 5000), body(b"1" * 5000),
], ids=lambda content: repr(content[:24]))
def test_a_fitting_digest_around_nonsense_is_a_miss(disk: Disk, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    disk.write(ENTRY)
    disk.path(KEY).write_bytes(sealed(content))
    assert disk.read(KEY) is None and len(told(caplog)) == 1


def test_a_damaged_entry_is_made_anew(disk: Disk) -> None:
    disk.write(ENTRY)
    disk.path(KEY).write_bytes(b"damaged")
    traffic = Traffic()
    assert once(disk, KEY, TEXTS, lambda: result("made"), traffic).result() == "made"
    assert once(disk, KEY, TEXTS, lambda: pytest.fail("made again"), traffic).result() == "made"
    assert (traffic.hits, traffic.misses) == (1, 1)


# What is in an entry's place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["folder", "link", "dangling link", "pipe"])
def test_what_is_no_plain_file_is_a_miss(disk: Disk, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    disk.write(ENTRY)
    path = disk.path(KEY)
    path.rename(tmp_path / "entry")
    makers: dict[str, Callable[[], Any]] = {
        "folder": path.mkdir, "link": lambda: path.symlink_to(tmp_path / "entry"),
        "dangling link": lambda: path.symlink_to(tmp_path / "nowhere"), "pipe": lambda: os.mkfifo(path),
    }
    makers[what]()
    assert disk.read(KEY) is None and len(told(caplog)) == 1
    assert once(disk, KEY, TEXTS, lambda: result("made"), Traffic()).result() == "made"
    disk.clear()


def test_an_entry_of_another_user_is_a_miss(disk: Disk, monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    disk.write(ENTRY)
    real = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[4] += 1
        return os.stat_result(found)

    monkeypatch.setattr(disk_module.os, "fstat", foreign)
    assert disk.read(KEY) is None and disk.read(KEY) is None
    assert len(told(caplog)) == 1 and "belongs to another user" in told(caplog)[0]


# The folder -----------------------------------------------------------------------------------------------------------


def test_another_user_s_folder_is_not_used(disk: Disk, monkeypatch: pytest.MonkeyPatch,
                                           caplog: pytest.LogCaptureFixture) -> None:
    disk.write(ENTRY)
    before = sorted(disk.folder.iterdir())
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    works_without(disk)
    assert sorted(disk.folder.iterdir()) == before
    assert len(told(caplog)) == 1 and "belongs to another user" in told(caplog)[0]


def test_a_file_in_the_folder_s_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").write_text("a file")
    disk = Disk(tmp_path / "kernels", MB)
    works_without(disk)
    assert disk.files() == [] and disk.clear() == 0 and disk.trim() == 0
    works_without(Disk(tmp_path / "kernels" / "below", MB))
    assert (tmp_path / "kernels").read_text() == "a file"
    assert 1 <= len(told(caplog)) <= 4


def test_a_folder_that_goes_away_is_made_anew(disk: Disk) -> None:
    disk.write(ENTRY)
    for path in disk.folder.iterdir():
        path.unlink()
    disk.folder.rmdir()
    assert disk.read(KEY) is None and disk.write(ENTRY) and disk.read(KEY) == ENTRY


def refuse(monkeypatch: pytest.MonkeyPatch, number: int, *names: str) -> None:
    """Calls of the operating system that write fail as on a disk with that error."""
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    for name in names:
        module, _, function = name.rpartition(".")
        monkeypatch.setattr(f"{module}.{function}", fail)


FAULTS = {
    "read-only folder": (errno.EACCES, ["tempfile.mkstemp", "dynafuse.cache.lock.Lock.take"]),
    "read-only file system": (errno.EROFS, ["tempfile.mkstemp", "dynafuse.cache.lock.Lock.take", "os.makedirs"]),
    "no room for a file": (errno.ENOSPC, ["tempfile.mkstemp"]),
    "no room to rename": (errno.ENOSPC, ["os.replace"]),
    "over quota": (errno.EDQUOT, ["os.replace"]),
    "no locks": (errno.ENOLCK, ["fcntl.flock", "os.replace"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_cannot_be_written(disk: Disk, fault: str, monkeypatch: pytest.MonkeyPatch,
                                       caplog: pytest.LogCaptureFixture) -> None:
    disk.folder.mkdir(mode=0o700)
    number, names = FAULTS[fault]
    refuse(monkeypatch, number, *names)
    works_without(disk)
    assert len(told(caplog)) == 1 and os.strerror(number) in told(caplog)[0]
    assert not [path for path in disk.folder.iterdir() if path.name.endswith(".partial")]


def test_what_is_there_is_read_from_a_read_only_folder(disk: Disk, monkeypatch: pytest.MonkeyPatch,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    disk.write(ENTRY)
    refuse(monkeypatch, errno.EROFS, "tempfile.mkstemp", "os.utime", "os.chmod")
    assert disk.read(KEY) == ENTRY and not told(caplog)


def test_where_there_are_no_locks_kernels_are_kept_all_the_same(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.ENOLCK, "fcntl.flock")
    assert once(disk, KEY, TEXTS, lambda: result("made"), Traffic()).result() == "made"
    assert once(disk, KEY, TEXTS, lambda: pytest.fail("made again"), Traffic()).result() == "made"


FULL = """
import logging, resource, signal, sys
from pathlib import Path
from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Entry
logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
disk = Disk(Path(sys.argv[1]), 1 << 24)
print(disk.write(Entry("triton", "0000", {}, {"source": b"x" * 1000})))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
print(disk.write(Entry("triton", "0001", {}, {"source": b"x" * 100_000})))
print(disk.write(Entry("triton", "0001", {}, {"source": b"x" * 100_000})))
print(disk.read("0001"), disk.read("0000") is not None, len(list(disk.folder.iterdir())))
"""


def test_the_system_refuses_to_write_in_the_middle_of_a_file(tmp_path: Path) -> None:
    printed = python("-c", FULL, str(tmp_path / "kernels"), env=environment())
    lines = printed.splitlines()
    assert [line for line in lines if not line.startswith("LOG")] == ["True", "False", "False", "None True 1"]
    assert len([line for line in lines if line.startswith("LOG")]) == 1 and "File too large" in printed


# Processes that die ---------------------------------------------------------------------------------------------------


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    code = ("import sys, time; from pathlib import Path; from dynafuse.cache.lock import Lock; "
            "held = Lock.take(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)")
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment(), stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    assert Lock.take(path) is None
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    lock = Lock.take(path)
    assert lock is not None
    lock.release()
    assert not path.exists()


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The child of a fork has the open file as well; it lives on when the parent releases the lock."""
    path = tmp_path / "a.lock"
    held = Lock.take(path)
    assert held is not None
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    try:
        held.release()
        again = Lock.take(path)
        assert again is not None
        again.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def dice() -> Iterator[random.Random]:
    yield random.Random(20260101)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_processes_killed_at_any_moment_leave_a_usable_cache(tmp_path: Path, dice: random.Random) -> None:
    """Sixty processes that compile and write are killed at random; then one finds or makes all, and all is sound."""
    folder, log = tmp_path / "kernels", tmp_path / "log"
    disk, keys = Disk(folder, 1 << 30), [f"{n:08x}" for n in range(40)]
    command = [sys.executable, "-m", "tests.support.disk_worker", str(folder), str(log), "0.002"]
    written = 0
    for _ in range(20):
        mixed = [dice.sample(keys, len(keys)) for _ in range(3)]
        running = [subprocess.Popen([*command, *mine], env=environment(), stdout=subprocess.DEVNULL) for mine in mixed]
        begun = size_of(log)
        while size_of(log) == begun and any(process.poll() is None for process in running):
            time.sleep(0.001)
        time.sleep(0.1 * dice.random())  # the first has begun to compile: some are before that, some in the middle
        for process in running:
            process.kill()
            process.wait()
        assert all(isinstance(found, Entry) for _, found in disk.entries())
        left, written = disk.files(), written + len(disk.files())
        for held in dice.sample(left, len(left) // 2):
            held.path.unlink()  # so that there is something to write in every round
    assert written, "they were killed too early"
    last = subprocess.run([*command, *keys], env=environment(), capture_output=True, text=True, check=True, timeout=60)
    got, hits, misses = json.loads(last.stdout)
    assert got == [f"kernel {key}" for key in keys] and hits + misses == len(keys)
    assert {file.key for file in disk.files()} == set(keys)
    for path in folder.iterdir():
        if path.name.endswith(".partial"):
            os.utime(path, (5, 5))
    disk.trim()
    assert {path.name for path in folder.iterdir() if not path.name.endswith(".lock")} == set(keys)


def test_entries_removed_while_they_are_read(disk: Disk) -> None:
    """Another process removes entries, or all of them, at any time: misses, no errors."""
    for number in range(50):
        disk.write(Entry("triton", f"{number:08x}", {}, {"s": b"x" * 1000}))
    other = Disk(disk.folder, 10_000)
    held = disk.files()
    other.trim()
    assert 0 < len(disk.files()) <= 10
    found = [disk.read(one.key) for one in held]
    assert sum(one is not None for one in found) == len(disk.files())
    assert len(list(disk.entries())) == len(disk.files()) and other.clear() == sum(one is not None for one in found)


def test_the_limit_of_open_files_is_survived(disk: Disk) -> None:
    disk.write(ENTRY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        assert disk.read(KEY) is None and not disk.write(ENTRY)
        assert once(disk, KEY, TEXTS, lambda: result("made"), Traffic()).result() == "made"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert disk.read(KEY) == ENTRY
