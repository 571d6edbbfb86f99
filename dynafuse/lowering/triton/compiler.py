"""From generated source to something that can be launched, on a GPU or in Triton's interpreter.

Worked example::

    kernels = load(lower(spec), None)          # TRITON_INTERPRET=1: Python functions
    kernels = load(lower(spec), 90)            # compiled for compute capability 9.0
"""

from __future__ import annotations

from typing import Any

from dynafuse.ir import ALIGNED, Launch, Lowered
from dynafuse.lowering.triton.dependent import WAITS
from dynafuse.lowering.triton.packed_sums import assembled_apart

DEPENDENT_FROM = 90
"""The capability from which on kernels can wait for the one before (PTX's ``griddepcontrol``)."""


def module_of(source: str) -> Any:
    """Return the module of a source text, written to torch's code cache so that tracebacks and debuggers show it."""
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.load(source)


def interpreting() -> bool:
    """Return whether Triton runs kernels in its interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def gpu_target(capability: int) -> Any:
    """Return what Triton is to compile for, with the ptxas that torch brings along, which its workers take."""
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
    from triton.backends.compiler import GPUTarget

    _set_triton_ptxas_path()
    return GPUTarget("cuda", capability, 32)


def constants_of(launch: Launch, capability: int) -> dict[str, int]:
    """Return the constants that a launch's kernel is compiled with for a capability."""
    return dict(launch.constants) | {WAITS: capability >= DEPENDENT_FROM}


def compile_launch(source: str, launch: Launch, capability: int) -> Any:
    """Compile one kernel; Triton keeps the binary in its own cache folder. No GPU is needed.

    Args:
        source: The text of all kernels of the region.
        launch: The kernel's launch.
        capability: The compute capability that it is compiled for, as 90.
    """
    import triton
    from triton.compiler import ASTSource

    function = getattr(module_of(source), launch.entry)
    names = [name for name, _ in launch.signature]
    constants = constants_of(launch, capability)
    signature = dict(launch.signature) | dict.fromkeys(constants, "constexpr")
    less = dict(launch.alignments)
    attributes = {(i,): [["tt.divisibility", less.get(name, ALIGNED)]]
                  for i, (name, kind) in enumerate(launch.signature) if kind[0] == "*"}
    assert names == function.arg_names[:len(names)], (names, function.arg_names)
    built = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages,
               "enable_reflect_ftz": False}  # libdevice keeps subnormal numbers, as eager's functions do
    if launch.asserts:  # without it Triton leaves them out; it would also check integers for overflow
        options |= {"debug": True, "sanitize_overflow": False}
    target = gpu_target(capability)
    return assembled_apart(triton.compile(built, target=target, options=options), target, options)


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
