"""Triton as an executor: kernels generated from specs, compiled in worker processes, or interpreted without a GPU."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dynafuse.cache import launches
from dynafuse.cache.entry import Entry
from dynafuse.futures import then
from dynafuse.ir import Launch, Lowered
from dynafuse.lowering.base import AVAILABLE, Availability, Compilation, Executor, Use
from dynafuse.lowering.triton import binary, compiler, jobs
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.lowering.triton.lower import lowerings
from dynafuse.lowering.triton.room import roomiest
from dynafuse.lowering.triton.schedule import candidates

if TYPE_CHECKING:
    import torch

    from dynafuse.cache.canonical import CanonicalRegion


class Triton(Executor):
    """Kernels of our own. Its entries on disk hold source, launches and, for a GPU, binaries."""

    name = "triton"
    default_on = frozenset({"cuda", "cpu"})
    remedy = "for CPU tensors there is `inductor`"
    takes_arguments = True
    draws_random = True
    scatters = True
    pools = True
    allocates = False
    splits = True
    joins = True
    compiles_aside = True
    kept = True

    def available(self, use: Use) -> Availability:
        """Return whether there is a GPU, a plan for one, or the interpreter."""
        if use.on_gpu or compiler.interpreting():
            return AVAILABLE
        return Availability(False, "Triton runs on CUDA devices, and slowly anywhere with TRITON_INTERPRET=1")

    def notice(self, use: Use) -> str:
        """Return that CPU tensors are interpreted."""
        if use.on_gpu:
            return ""
        return "TRITON_INTERPRET=1: CPU tensors run in Triton's interpreter, slowly, instead of in C++ kernels"

    def target(self, device: torch.device, capability: int | None) -> str:
        """Return the compute capability, which is None in the interpreter."""
        return f"sm{capability}"

    def compile(self, region: CanonicalRegion, compilation: Compilation) -> Future[Kernel]:
        """Generate the kernel here and compile it in a worker process, if there are some."""
        native = compilation.capability is not None
        chosen = roomiest(lowerings(region.code), compilation.capability, compilation.config.workers)
        return then(chosen, lambda pair: Kernel(
            region.key, pair[0].source, pair[0].launches, pair[0].workspaces, pair[1], not native))

    def variants(self, region: CanonicalRegion) -> tuple[str, ...]:
        """Return the schedules of a pointwise kernel of known sizes: other kernels' decide the order of their sums."""
        code = region.code
        if code.of_rows or code.symbols or code.nests or any(store.scatters for store in code.stores):
            return ()
        return tuple(map(str, candidates(code)))

    def launches(self, kernel: Kernel) -> int:
        """Return how many launches a call of a kernel takes."""
        return len(kernel.launches)

    def fingerprint(self, compilation: Compilation) -> str:
        """Return the compiler and its settings, on which binaries depend."""
        return "" if compilation.capability is None else binary.fingerprint(compilation.capability)

    def encode(self, kernel: Kernel, region: CanonicalRegion, key: str, compilation: Compilation) -> Entry:
        """Return source and launches, with binaries unless they are interpreted.

        Args:
            kernel: The kernel.
            region: The region that it was made for.
            key: The key of the entry.
            compilation: What it was compiled for.
        """
        data: dict[str, Any] = {
            "region": region.key,
            "launches": [launches.launch_to_json(launch) for launch in kernel.launches],
            "workspaces": [launches.workspace_to_json(space) for space in kernel.workspaces],
        }
        blobs = {"source": kernel.source.encode()}
        if compilation.capability is not None:
            binaries = [jobs.taken(compiled) for compiled in kernel.compiled]
            data["metadata"] = [metadata for metadata, _ in binaries]
            blobs |= {f"{jobs.BINARY}{k}": content for k, (_, content) in enumerate(binaries)}
        return Entry(_kind(compilation), key, data, blobs)

    def decode(self, entry: Entry, region: CanonicalRegion, compilation: Compilation) -> Kernel:
        """Return the kernel of an entry, loaded.

        Args:
            entry: What :meth:`encode` returned.
            region: A region with the key of the one that it was made for.
            compilation: What it has to be compiled for; without a capability the source is interpreted.
        """
        entry.expect(_kind(compilation), region.key)
        source = entry.blobs["source"].decode()
        planned = tuple(map(launches.launch_from_json, entry.data["launches"]))
        spaces = tuple(map(launches.workspace_from_json, entry.data["workspaces"]))
        if compilation.capability is None:
            compiled = compiler.load(Lowered(source, planned, spaces), None)
        else:
            compiled = _restored(entry, planned, compilation.capability)
        return Kernel(region.key, source, planned, spaces, compiled, compilation.capability is None)


def _kind(compilation: Compilation) -> str:
    return "interpreter" if compilation.capability is None else "triton"


def _restored(entry: Entry, planned: tuple[Launch, ...], capability: int) -> tuple[Any, ...]:
    """Return the binaries of an entry, ready to be launched."""
    binaries = [entry.blobs[f"{jobs.BINARY}{k}"] for k in range(len(planned))]
    return binary.restored_all(planned, zip(entry.data["metadata"], binaries, strict=True), capability)


TRITON = Triton()
