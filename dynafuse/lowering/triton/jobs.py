"""Kernels to be compiled, and the one function that compiles them, whichever process it runs in.

Nothing here needs torch, without which a process is ready to compile within a second.

Worked example::

    compiled = compile_job(Job("scale", (("x", "*fp32"),), (("BLOCK", 64),), ((0, 16),), 4, 1, False, 90), module)
    metadata, cubin = taken(compiled)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from dynafuse.lowering.triton.packed_sums import assembled_apart

BINARY = "cubin"
ELF = b"\x7fELF"

Taken: TypeAlias = tuple[Mapping[str, Any], bytes]
"""What is kept of a compiled kernel: what Triton says of it, and the content of a cubin."""


@dataclass(frozen=True)
class Job:
    """A kernel of a module to compile, and for what."""

    entry: str  # the function's name
    signature: tuple[tuple[str, str], ...]  # argument, Triton type
    constants: tuple[tuple[str, int], ...]  # constexpr arguments
    multiples: tuple[tuple[int, int], ...]  # arguments by position, each with the bytes that it is a multiple of
    warps: int
    stages: int
    asserts: bool  # whether it checks something on the device
    capability: int  # as 90

    def parameters(self) -> dict[str, str]:
        """Return the Triton type of each argument, by name."""
        return dict(self.signature) | {name: "constexpr" for name, _ in self.constants}


def target_of(capability: int) -> Any:
    """Return what Triton compiles for."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability, 32)


def compile_job(job: Job, module: Any) -> Any:
    """Compile a kernel; Triton keeps the binary in its own cache folder. No GPU is needed.

    Args:
        job: The kernel.
        module: Has the function, of which Triton reads the source.
    """
    import triton
    from triton.compiler import ASTSource

    function = getattr(module, job.entry)
    names = [name for name, _ in job.signature]
    assert names == function.arg_names[:len(names)], (names, function.arg_names)
    attributes = {(position,): [["tt.divisibility", multiple]] for position, multiple in job.multiples}
    built = ASTSource(fn=function, signature=job.parameters(), constexprs=dict(job.constants), attrs=attributes)
    options = {"num_warps": job.warps, "num_stages": job.stages,
               "enable_reflect_ftz": False}  # libdevice keeps subnormal numbers, as eager's functions do
    if job.asserts:  # without it Triton leaves them out; it would also check integers for overflow
        options |= {"debug": True, "sanitize_overflow": False}
    target = target_of(job.capability)
    return assembled_apart(triton.compile(built, target=target, options=options), target, options)


def taken(compiled: Any) -> Taken:
    """Return metadata and binary of a compiled kernel.

    Raises:
        ValueError: It has no such binary.
    """
    binary = compiled.asm.get(BINARY)
    if not isinstance(binary, bytes) or not binary.startswith(ELF):
        raise ValueError(f"{compiled.name} has no {BINARY}")
    metadata = compiled.metadata._asdict()
    metadata["extern_libs"] = []  # where this machine's libdevice lies; it is linked in
    plain: dict[str, Any] = json.loads(json.dumps({**metadata, "target": vars(metadata["target"])}, default=vars))
    return plain, binary
