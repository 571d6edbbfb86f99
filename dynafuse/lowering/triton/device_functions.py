"""What makes a device function: Triton's compiler, or nothing where its interpreter runs the function as it is.

Worked example: a function under ``@jit`` is called by generated kernels and by other such functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton import knobs

if knobs.runtime.interpret:

    def jit(function: Callable[..., Any]) -> Any:
        """Return a device function as it is, with the ``fn`` that ``tl.reduce`` expects of a combine function."""
        function.fn = function  # type: ignore[attr-defined]
        return function

else:
    jit = triton.jit
