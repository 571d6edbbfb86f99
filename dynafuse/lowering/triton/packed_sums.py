"""Sums of two 16-bit integers at a time, which ptxas gets wrong: a kernel's PTX is assembled without them.

LLVM adds up small positions two at a time (``add.s16x2``, from compute capability 9.0 on). Where one operand is a constant,
and the halves of the sum are used in different blocks, ptxas (12.8 to 13.0) emits additions of 0: the kernel reads other
elements, silently.

Source: PTX ISA, "Integer Arithmetic Instructions: add".

Worked example: ``add.s16x2 %r3, %r1, %r2;`` becomes two ``add.s16`` of the halves of ``%r1`` and ``%r2``: those of ``%r3``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PACKED_SUM = re.compile(r"\badd\.[su]16x2\s+(%\w+),\s*(%\w+),\s*(%\w+);")
APART = """{{
	.reg .b16 left_low, left_high, right_low, right_high;
	mov.b32 {{left_low, left_high}}, {left};
	mov.b32 {{right_low, right_high}}, {right};
	add.s16 left_low, left_low, right_low;
	add.s16 left_high, left_high, right_high;
	mov.b32 {sum}, {{left_low, left_high}};
	}}"""


def apart(ptx: str) -> str:
    """Return a kernel's PTX with each sum of two integers at a time as two sums."""
    return PACKED_SUM.sub(lambda match: APART.format(sum=match[1], left=match[2], right=match[3]), ptx)


def assembled_apart(compiled: Any, target: Any, options: Mapping[str, Any]) -> Any:
    """Return a compiled kernel, assembled anew if its PTX adds two integers at a time.

    Args:
        compiled: What Triton has compiled.
        target: What for.
        options: Triton's options that it was compiled with.
    """
    from triton.compiler.compiler import make_backend

    ptx = compiled.asm.get("ptx", "")
    if PACKED_SUM.search(ptx):
        backend, sums_apart = make_backend(target), apart(ptx)
        binary = backend.make_cubin(sums_apart, {}, backend.parse_options(dict(options)), target.arch)
        compiled.asm["ptx"], compiled.asm["cubin"], compiled.kernel = sums_apart, binary, binary
    return compiled
