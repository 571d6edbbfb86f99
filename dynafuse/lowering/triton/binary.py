"""Compiled kernels as bytes, and back to something that can be launched without compiling.

Triton's ``CompiledKernel`` is made from files: metadata as JSON, and the binary. Those two are what is kept, and it is
made from them again; of its source it needs the signature and the constants, and both are in the launch.

Worked example::

    metadata, cubin = taken(compile_launch(source, launch, 90))
    restored(launch, metadata, cubin, 90).run    # the launcher, once there is a GPU
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dynafuse.ir import Launch
from dynafuse.lowering.triton.compiler import gpu_target, job_of
from dynafuse.lowering.triton.jobs import BINARY, ELF, Taken
from dynafuse.lowering.triton.scratch import scratch_folder


@dataclass(frozen=True)
class Signature:
    """What Triton's launcher asks of a kernel's source: argument types in order, constants by position."""

    name: str
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], int]
    attrs: Mapping[tuple[int, ...], Any]
    fn: None = None  # the Python function: only compiling needs it

    @classmethod
    def of(cls, launch: Launch, capability: int) -> Signature:
        """Return the signature of a launch, as compiling for a capability made it."""
        job = job_of(launch, capability)
        constants: dict[tuple[int, ...], int] = {
            (len(job.signature) + k,): value for k, (_, value) in enumerate(job.constants)}
        return cls(job.entry, job.parameters(), constants, {})


def restored(launch: Launch, metadata: Mapping[str, Any], binary: bytes, capability: int) -> Any:
    """Return the compiled kernel of what :func:`dynafuse.lowering.triton.jobs.taken` returned.

    Args:
        launch: The kernel's launch.
        metadata: What Triton says of the binary.
        binary: The content of a cubin.
        capability: The device's compute capability, as 90.

    Raises:
        ValueError: It is another kernel's, or for another capability.
    """
    from triton.compiler import CompiledKernel

    wanted = launch.entry, launch.warps, capability
    if (metadata["name"], metadata["num_warps"], metadata["target"]["arch"]) != wanted or not binary.startswith(ELF):
        raise ValueError(f"it holds no kernel {launch.entry} of {launch.warps} warps for capability {capability}")
    with scratch_folder() as folder:  # read while it is made, not needed afterwards
        group = {name: Path(folder) / name for name in (f"kernel.{BINARY}", "kernel.json")}
        group[f"kernel.{BINARY}"].write_bytes(binary)
        group["kernel.json"].write_text(json.dumps(dict(metadata)), encoding="utf-8")
        files = {name: str(path) for name, path in group.items()}
        return CompiledKernel(Signature.of(launch, capability), files, metadata["hash"])


def restored_all(launches: Sequence[Launch], binaries: Iterable[Taken], capability: int) -> tuple[Any, ...]:
    """Return the compiled kernels of launches, each of what was kept of it. Raises what :func:`restored` does.

    Args:
        launches: The launches, in order.
        binaries: Metadata and binary of each.
        capability: The device's compute capability, as 90.
    """
    pairs = zip(launches, binaries, strict=True)
    return tuple(restored(launch, metadata, binary, capability) for launch, (metadata, binary) in pairs)


@cache
def fingerprint(capability: int) -> str:
    """Return a digest of all beside the source that changes a binary: Triton, its settings and ptxas."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend

    backend = make_backend(gpu_target(capability))
    settings = sorted(get_cache_invalidating_env_vars().items())
    text = repr((triton.__version__, backend.hash(), backend.parse_options({}).hash(), settings))
    return hashlib.sha256(text.encode()).hexdigest()
