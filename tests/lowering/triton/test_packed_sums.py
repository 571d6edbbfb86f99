"""PTX without sums of two 16-bit integers at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from triton.backends.compiler import GPUTarget

from dynafuse.lowering.triton.packed_sums import PACKED_SUM, apart, assembled_apart

SUMS = """
	mov.b32 	%r2, 9830550;
	add.s16x2 	%r3, %r1, %r2;
	add.u16x2 	%r4, %r3, %r3;
"""
KERNEL = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 k_param_0) {
	.reg .b32 %r<5>;
	.reg .b64 %rd<2>;
	ld.param.b64 	%rd1, [k_param_0];
	ld.global.b32 	%r1, [%rd1];""" + SUMS + """	st.global.b32 	[%rd1], %r4;
	ret;
}
"""


def test_sums_are_taken_apart() -> None:
    text = apart(SUMS)
    assert not PACKED_SUM.search(text) and text.count("add.s16 ") == 4
    assert "mov.b32 {left_low, left_high}, %r1;" in text and "mov.b32 %r3, {left_low, left_high};" in text
    assert apart("add.s16 %rs1, %rs2, %rs3;") == "add.s16 %rs1, %rs2, %rs3;"


@pytest.mark.parametrize("holds_sums", [True, False])
def test_only_what_holds_such_sums_is_assembled_anew(holds_sums: bool) -> None:
    ptx = KERNEL if holds_sums else apart(KERNEL)
    compiled = SimpleNamespace(asm={"ptx": ptx, "cubin": b"old"}, kernel=b"old")
    assert assembled_apart(compiled, GPUTarget("cuda", 90, 32), {"num_warps": 4}) is compiled
    assert not PACKED_SUM.search(compiled.asm["ptx"])
    assert compiled.kernel == compiled.asm["cubin"]
    assert compiled.asm["cubin"].startswith(b"\x7fELF" if holds_sums else b"old")
