"""Kernels, plans and measurements on disk: which are kept, under which key, as what.

Worked example: the region that process 1 compiled in half a second is, in process 2, ``kernel(bound, 90, config, make)``
without a call of ``make``: its source, its launches and its binary come from one file.

Kept are Triton's kernels (source, launches, binaries; in the interpreter, source and launches), nvFuser's recipes, plans
of graphs that are not small, and what was measured. What Inductor makes is in Inductor's own cache. Nothing is kept that
has an op whose row of the op table was registered at run time: no key describes the function behind such a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from dynafuse import config as options
from dynafuse.cache import launches, plans, sources
from dynafuse.cache.canonical import Bound, versions
from dynafuse.cache.disk import KERNELS, Disk
from dynafuse.cache.entry import Damaged, Entry, unpack
from dynafuse.cache.once import Codec, Traffic, once, read
from dynafuse.config import Config
from dynafuse.cost import calibration
from dynafuse.cost.device import Device
from dynafuse.fallback import STRICT, Guard
from dynafuse.fx import user_line
from dynafuse.ir import Annotated, Launch, Lowered, Plan
from dynafuse.lowering.nvfuser import recipe
from dynafuse.lowering.nvfuser.kernel import FusionKernel
from dynafuse.lowering.triton import binary, compiler
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.ops import shipped
from dynafuse.partition.executors import Executors
from dynafuse.partition.grow import partition
from dynafuse.select import VERDICTS, Measured, Verdict, VerdictStore

log = logging.getLogger(__name__)

ARTIFACT = "dynafuse"
LEAST_NODES = 64
"""Nodes of a graph from which its plan is kept: smaller ones are planned as fast as an entry is read."""

Fuse: TypeAlias = Callable[[recipe.Recipe], FusionKernel]

TRAFFIC = Traffic()
"""What this process has found on disk, and what it compiled."""


# The disk -------------------------------------------------------------------------------------------------------------


@cache
def _disk(folder: str, limit_mb: int) -> Disk:
    return Disk(Path(folder), limit_mb << 20, _record)


def disk(config: Config) -> Disk | None:
    """The cache on disk; None where an option, or torch, says that there is to be none."""
    if not config.cache or not config.cache_size_mb or torch.compiler.config.force_disable_caches:
        return None
    return _disk(str(folder()), config.cache_size_mb)


def folder() -> Path:
    """Where kernels are kept."""
    return calibration.cache_folder() / KERNELS


def _record(key: str, packed: bytes) -> None:
    """For ``torch.compiler.save_cache_artifacts``."""
    CacheArtifactManager.record_artifact(ARTIFACT, key, packed)


class KernelArtifact(CacheArtifact):
    """An entry in torch's bundle of caches."""

    def populate_cache(self) -> None:
        """Keep it, if it is sound."""
        kept = disk(options.resolve())
        try:
            unpack(self.content, self.key)
            if kept is not None:
                kept.put(self.key, self.content)
        except (Damaged, ValueError) as error:
            log.warning("ignored %s of torch's cache artifacts: %s", self.key, error)

    @staticmethod
    def type() -> str:
        """Its name among torch's kinds of artifacts."""
        return ARTIFACT


with contextlib.suppress(AssertionError):  # registered before: this module was loaded anew
    CacheArtifactFactory.register(KernelArtifact)


# Kernels --------------------------------------------------------------------------------------------------------------


def kernel(bound: Bound, capability: int | None, config: Config, make: Callable[[], Future[Any]], fuse: Fuse,
           guard: Guard = STRICT) -> Future[Any]:
    """A region's kernel from the disk, or made and kept there. ``fuse`` makes nvFuser's kernel of a recipe."""
    def looked_up() -> tuple[Disk, str, Codec[Any]] | None:
        kept = disk(config) if _describable(bound) else None
        codec: Codec[Any] = _fusions(bound, fuse) if bound.region.executor == "nvfuser" else _kernels(bound, capability)
        return None if kept is None else (kept, key_of(bound, capability), codec)

    place = guard.stage("kernels on disk", looked_up, lambda: None)
    return _counted(make)() if place is None else once(*place, _counted(make), TRAFFIC, guard)


def has(bound: Bound, capability: int | None, config: Config) -> bool:
    """Whether a region's kernel is on disk, as far as can be told without reading it."""
    kept = disk(config) if _describable(bound) else None
    return kept is not None and kept.has(key_of(bound, capability))


def _describable(bound: Bound) -> bool:
    """Whether the key and the sources say all that the kernel depends on."""
    return bound.region.executor != "inductor" and all(shipped(op.target) for op in bound.spec.ops)


def _counted(make: Callable[[], Future[Any]]) -> Callable[[], Future[Any]]:
    def counted() -> Future[Any]:
        TRAFFIC.count("compiled")
        return make()

    return counted


def key_of(bound: Bound, capability: int | None) -> str:
    """The key on disk: of the region's key, of our sources and, for binaries, of the compiler and its settings."""
    native = bound.region.executor == "triton" and capability is not None
    made_by = binary.fingerprint(capability) if native and capability is not None else ""
    return _digest(bound.region.executor, bound.key, sources.digest(), made_by)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


def _kernels(bound: Bound, capability: int | None) -> Codec[Kernel]:
    """Triton's kernels: for a capability with their binaries, for the interpreter without."""
    kind, key = ("interpreter" if capability is None else "triton"), key_of(bound, capability)

    def encode(made: Kernel) -> Entry | None:
        data: dict[str, Any] = {
            "region": bound.key,
            "launches": [launches.launch_to_json(launch) for launch in made.launches],
            "workspaces": [launches.workspace_to_json(space) for space in made.workspaces],
        }
        blobs = {"source": made.source.encode()}
        if capability is not None:
            binaries = [binary.taken(compiled) for compiled in made.compiled]
            data["metadata"] = [metadata for metadata, _ in binaries]
            blobs |= {f"{binary.BINARY}{k}": content for k, (_, content) in enumerate(binaries)}
        return Entry(kind, key, data, blobs)

    def decode(entry: Entry) -> Kernel:
        _expect(entry, kind, bound)
        source = entry.blobs["source"].decode()
        found = tuple(map(launches.launch_from_json, entry.data["launches"]))
        spaces = tuple(map(launches.workspace_from_json, entry.data["workspaces"]))
        compiled = (compiler.load(Lowered(source, found, spaces), None) if capability is None
                    else _restored(entry, found, capability))
        return Kernel(bound.key, source, found, spaces, compiled, capability is None)

    return Codec(encode, decode)


def _restored(entry: Entry, found: tuple[Launch, ...], capability: int) -> tuple[Any, ...]:
    binaries = [entry.blobs[f"{binary.BINARY}{k}"] for k in range(len(found))]
    return binary.restored_all(found, zip(entry.data["metadata"], binaries, strict=True), capability)


def _fusions(bound: Bound, fuse: Fuse) -> Codec[FusionKernel]:
    """nvFuser's kernels: their recipes. nvFuser itself compiles them in every process."""
    key = key_of(bound, None)

    def encode(made: FusionKernel) -> Entry:
        return Entry("nvfuser", key, {"region": bound.key}, {"recipe": recipe.encode(made.recipe).encode()})

    def decode(entry: Entry) -> FusionKernel:
        _expect(entry, "nvfuser", bound)
        return fuse(recipe.decode(entry.blobs["recipe"].decode()))

    return Codec(encode, decode)


def _expect(entry: Entry, kind: str, bound: Bound) -> None:
    if entry.kind != kind or entry.data["region"] != bound.key:
        raise ValueError(f"it is a {entry.kind} entry of region {entry.data.get('region')}")


# Plans ----------------------------------------------------------------------------------------------------------------


def plan(config: Config, guard: Guard, annotated: Annotated, device: Device, executors: Executors, **settings: Any) -> Plan:
    """What :func:`partition` answers, from the disk or kept there. ``settings`` are its keyword arguments."""
    def decode(entry: Entry) -> Plan:
        if entry.kind != "plan":
            raise ValueError(f"it is a {entry.kind} entry")
        return plans.plan_from_json(entry.data, annotated, user_line)

    def looked_up() -> tuple[Disk | None, str | None, Plan | None]:
        kept = disk(config) if len(annotated.facts) >= LEAST_NODES else None
        key = None if kept is None else _plan_key(annotated, device, executors, settings)
        return kept, key, None if kept is None or key is None else read(kept, key, decode)

    def keep(kept: Disk, key: str, made: Plan) -> None:
        with contextlib.suppress(launches.NoEntry):
            kept.write(Entry("plan", key, plans.plan_to_json(made, user_line)))

    kept, key, found = guard.stage("plans on disk", looked_up, lambda: (None, None, None))
    if found is not None:
        return found
    made = partition(annotated, device, executors, **settings)
    if kept is not None and key is not None:
        guard.stage("plans on disk", lambda: keep(kept, key, made), lambda: None)
    return made


def _plan_key(annotated: Annotated, device: Device, executors: Executors, settings: dict[str, Any]) -> str | None:
    """The key of a graph's plan; None for a graph that no key describes."""
    told = device.capability, sorted(device.constants.items()), str(executors), sorted(settings.items())
    try:
        graph = plans.described(annotated)
    except launches.NoEntry as error:
        log.info("a plan is not kept: %s", error)
        return None
    return _digest("plan", graph, repr(told), sources.digest(sources.PLANNERS), *versions())


# Measurements ---------------------------------------------------------------------------------------------------------


class Verdicts(VerdictStore):
    """The process's measurements, with those on disk behind them."""

    def __init__(self, kept: Disk | None, held: VerdictStore = VERDICTS) -> None:
        super().__init__()
        self.kept, self.held = kept, held

    def __len__(self) -> int:
        return len(self.held)

    def get(self, key: str) -> dict[str, Measured]:
        """What was measured under a key, by this process or by one before it."""
        found = self.held.get(key)
        if found or self.kept is None:
            return found
        verdict = _verdict(self.kept, key)
        if verdict is not None:
            self.held.add(verdict)
        return self.held.get(key)

    def put(self, key: str, executor: str, measured: Measured) -> None:
        """Keep a measurement, on disk if it is one for others too."""
        self.held.put(key, executor, measured)
        verdict = self.held.lasting(key)
        if self.kept is not None and verdict is not None:
            self.kept.write(Entry("verdict", _verdict_key(key), verdict.to_dict()))


def verdicts(config: Config) -> VerdictStore:
    """Where the tuner looks for measurements and leaves them."""
    return Verdicts(disk(config))


def _verdict_key(key: str) -> str:
    return _digest("verdict", key, sources.digest())


def _verdict(kept: Disk, key: str) -> Verdict | None:
    def decode(entry: Entry) -> Verdict:
        found = Verdict.from_dict(entry.data)
        if entry.kind != "verdict" or found.key != key:
            raise ValueError(f"it is a {entry.kind} entry of {found.key}")
        return found

    return read(kept, _verdict_key(key), decode)
