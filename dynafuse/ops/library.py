"""Rows of ops that stay whole because a library's kernel is better than any fusion: contractions, attention, sorts.

Worked example: ``refusal(lookup(aten.mm.default), call)`` is ``contraction: stays with the vendor's library``.
"""

from __future__ import annotations

from dataclasses import replace

from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import eager, lookup, register

_WHOLE = {  # names: what the library computes, why
    "aten.mm.default aten.addmm.default aten.bmm.default aten.baddbmm.default aten.dot.default aten.mv.default "
    "aten.addmv.default aten._grouped_mm.default aten._scaled_mm.default aten._int_mm.default aten.addbmm.default "
    "aten.linear.default aten.matmul.default": ("contraction", "stays with the vendor's library"),
    "aten.convolution.default aten.convolution_backward.default aten.cudnn_convolution.default "
    "aten.mkldnn_convolution.default aten._slow_conv2d_forward.output":
        ("convolution", "stays with the vendor's library"),
    "aten._scaled_dot_product_flash_attention.default aten._scaled_dot_product_flash_attention_backward.default "
    "aten._scaled_dot_product_efficient_attention.default aten._scaled_dot_product_efficient_attention_backward.default "
    "aten._scaled_dot_product_cudnn_attention.default aten._scaled_dot_product_cudnn_attention_backward.default "
    "aten._scaled_dot_product_flash_attention_for_cpu.default "
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default":
        ("attention", "its own kernel keeps the scores out of memory"),
    "aten._fft_c2c.default aten._fft_r2c.default aten._fft_c2r.default": ("FFT", "stays with the vendor's library"),
}

for _names, (_what, _why) in _WHOLE.items():
    for _target in overloads(_names):
        register(replace(lookup(_target) or eager(_target, f"{_what}: {_why}"), library=_what))
