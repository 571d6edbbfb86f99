"""From generated source to something that can be launched, on a GPU or in Triton's interpreter.

Worked example::

    kernels = load(lower(spec), None)          # TRITON_INTERPRET=1: Python functions
    kernels = load(lower(spec), 90)            # compiled for compute capability 9.0
"""

from __future__ import annotations

from typing import Any

from dynafuse.ir import ALIGNED, Launch, Lowered
from dynafuse.lowering.triton.dependent import WAITS
from dynafuse.lowering.triton.jobs import Job, compile_job, target_of

DEPENDENT_FROM = 90
"""The capability from which on kernels can wait for the one before (PTX's ``griddepcontrol``)."""


def module_of(source: str) -> Any:
    """Return the module of a source text, written to torch's code cache so that tracebacks and debuggers show it."""
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.load(source)


def path_of(source: str) -> str:
    """Return where the module of a source text lies, which its binaries name."""
    from torch._inductor.codecache import PyCodeCache

    path: str = PyCodeCache.write(source)[1]
    return path


def interpreting() -> bool:
    """Return whether Triton runs kernels in its interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def use_torchs_assembler() -> None:
    """Have Triton take the ptxas that torch brings along, as Inductor does: here, and in processes that start later."""
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()


def gpu_target(capability: int) -> Any:
    """Return what Triton is to compile for, with the assembler that it takes."""
    use_torchs_assembler()
    return target_of(capability)


def constants_of(launch: Launch, capability: int) -> dict[str, int]:
    """Return the constants that a launch's kernel is compiled with for a capability."""
    return dict(launch.constants) | {WAITS: capability >= DEPENDENT_FROM}


def job_of(launch: Launch, capability: int) -> Job:
    """Return what is to be compiled for a launch, for a compute capability such as 90."""
    less = dict(launch.alignments)
    multiples = ((i, less.get(name, ALIGNED)) for i, (name, kind) in enumerate(launch.signature) if kind[0] == "*")
    return Job(launch.entry, launch.signature, tuple(constants_of(launch, capability).items()), tuple(multiples),
               launch.warps, launch.stages, launch.asserts, capability)


def compile_launch(source: str, launch: Launch, capability: int) -> Any:
    """Compile one kernel in this process; Triton keeps the binary in its own cache folder. No GPU is needed.

    Args:
        source: The text of all kernels of the region.
        launch: The kernel's launch.
        capability: The compute capability that it is compiled for, as 90.
    """
    use_torchs_assembler()
    return compile_job(job_of(launch, capability), module_of(source))


def load(lowered: Lowered, capability: int | None) -> tuple[Any, ...]:
    """Return what can be launched: compiled kernels for a capability, or (None) the interpreter's functions.

    Args:
        lowered: Source and launches.
        capability: The compute capability, as 90; None where nothing runs natively.

    Returns:
        One per launch, in order.
    """
    if capability is None:
        module = module_of(lowered.source)
        return tuple(getattr(module, launch.entry) for launch in lowered.launches)
    return tuple(compile_launch(lowered.source, launch, capability) for launch in lowered.launches)
