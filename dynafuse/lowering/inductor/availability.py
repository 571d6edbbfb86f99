"""Whether Inductor can compile for a device here: it comes with torch, the compilers that it calls do not.

Worked example: ``find("cpu")`` is ``Availability(True, "g++")``, or on a machine without one
``Inductor is not available: no C++ compiler: install g++, or name one in CXX``, with what CXX names if it is set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec


@dataclass(frozen=True)
class Availability:
    """Whether Inductor can be used, and why (not): the compiler that it calls, or what is missing."""

    available: bool
    reason: str

    def __str__(self) -> str:
        return self.reason if self.available else f"Inductor is not available: {self.reason}"


@cache
def find(device_type: str = "cpu") -> Availability:
    """Return the answer for tensors on a type of device, for this process; asked once."""
    if device_type == "cpu":
        return _for_cpu()
    if device_type == "cuda":
        has_triton = find_spec("triton") is not None
        return Availability(has_triton, "triton" if has_triton else "no module triton")
    return Availability(False, f"tensors on {device_type} are not delegated")


def _for_cpu() -> Availability:
    """Ask Inductor's own search, which tries what CXX names."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return Availability(True, get_cpp_compiler())
    except InvalidCxxCompiler:
        named = os.environ.get("CXX")
        return Availability(False, f"{named!r}, which CXX names, does not run: name another or unset it" if named else
                            "no C++ compiler: install g++, or name one in CXX")
