"""Kernels by key: from the memory of this process, from the disk, or made.

Worked example: the region that process 1 compiled in half a second is, in process 2, ``get_or_make(region, executor,
compilation, make)`` without a call of ``make``: its source, its launches and its binary come from one file.

What an executor keeps on disk, and as what, is its own affair. Nothing is kept that has an op whose row of the op table was
registered at run time: no key describes the function behind such a row.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dynafuse.cache import sources
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Entry
from dynafuse.cache.folder import digest_of, disk
from dynafuse.cache.memory import Store
from dynafuse.cache.once import Codec, Traffic, once
from dynafuse.forks import in_child
from dynafuse.lowering.base import Compilation, Executor
from dynafuse.ops import shipped

STORE: Store[Any] = Store()
"""Compiled kernels of this process, by key."""
in_child(STORE.forget_pending)

ORIGINS: dict[str, str] = {}
"""Whether the kernels of the store were ``compiled`` or on ``disk``, by key."""

TRAFFIC = Traffic()
"""What this process has found on disk, and what it compiled."""


def get_or_make(region: CanonicalRegion, executor: Executor, compilation: Compilation, make: Callable[[], Future[Any]],
                prepare: Callable[[Any], Any]) -> Future[Any]:
    """Return the kernel of a region: from this process's store, from the disk, or made.

    Args:
        region: The region; its key is that of the store.
        executor: What makes the kernel, and says how it is kept.
        compilation: What the kernel is compiled for.
        make: Begins to make the kernel; it is called by one thread of one process, and only if there is none.
        prepare: Takes a kernel that was read from the disk, and returns it as it is to be used. If it raises, the kernel is
            made anew.

    Returns:
        A future, the same for every request of this process with an equal key.
    """
    def made() -> Future[Any]:
        ORIGINS[region.key] = "compiled"
        TRAFFIC.count("compiled")
        return make()

    def read_or_made() -> Future[Any]:
        ORIGINS[region.key] = "disk"  # unless it has to be made
        place = compilation.guard.stage(
            "kernels on disk", lambda: _place(region, executor, compilation, prepare), lambda: None)
        return made() if place is None else once(*place, made, TRAFFIC, compilation.guard)

    return STORE.request(region.key, read_or_made)


def is_there(region: CanonicalRegion, executor: Executor, compilation: Compilation) -> bool:
    """Return whether a kernel need not be made: this process has it, or it is on disk, as far as can be told unread.

    Args:
        region: The region.
        executor: What would make the kernel.
        compilation: What the kernel is compiled for.
    """
    asked = STORE.asked(region.key)
    if asked is not None:
        return asked.done() and asked.exception() is None
    target = disk(compilation.config) if _describable(region, executor) else None
    return target is not None and target.has(key_of(region, executor, compilation))


def key_of(region: CanonicalRegion, executor: Executor, compilation: Compilation) -> str:
    """Return the key on disk: of the region's key, of our sources and, for binaries, of the compiler and its settings.

    Args:
        region: The region.
        executor: What makes the kernel; its name and fingerprint are in the key.
        compilation: What the kernel is compiled for.
    """
    return digest_of(executor.name, region.key, sources.digest(), executor.fingerprint(compilation))


def clear() -> None:
    """Forget every kernel of this process, and what was counted."""
    STORE.clear()
    ORIGINS.clear()
    TRAFFIC.clear()


def _describable(region: CanonicalRegion, executor: Executor) -> bool:
    """Return whether the key and the sources say all that the kernel depends on."""
    return executor.kept and all(shipped(op.target) for op in region.spec.ops)


def _place(region: CanonicalRegion, executor: Executor, compilation: Compilation,
           prepare: Callable[[Any], Any]) -> tuple[Disk, str, Codec[Any]] | None:
    """Return where on disk a kernel is kept, and how; None where it is not."""
    target = disk(compilation.config) if _describable(region, executor) else None
    if target is None:
        return None
    key = key_of(region, executor, compilation)

    def encode(kernel: Any) -> Entry | None:
        return executor.encode(kernel, region, key, compilation)

    def decode(entry: Entry) -> Any:
        return prepare(executor.decode(entry, region, compilation))

    return target, key, Codec(encode, decode)
