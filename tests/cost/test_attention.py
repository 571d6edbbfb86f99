"""What attention is predicted to cost: nearer to what was measured than the difference of its two forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynafuse.cost.attention import KERNELS, Attention, forward_us
from dynafuse.cost.device import describe
from dynafuse.cost.library_calls import op_prediction
from dynafuse.passes.attention.price import joined_us, written_us

H200 = describe("h200")
MEASURED = [  # heads, rows, width, biased, trained; microseconds by cuDNN's kernel, and written out, on an H200
    (128, 512, 64, False, False, 26, 86), (128, 512, 64, False, True, 115, 241), (128, 512, 64, True, True, 154, 238),
    (384, 197, 64, False, True, 110, 310), (32, 2048, 64, False, True, 298, 788), (32, 2048, 64, True, True, 454, 792),
    (32, 4096, 128, False, False, 406, 1161), (32, 4096, 128, True, True, 2600, 3088), (256, 784, 32, False, True, 486, 942),
    (6144, 49, 32, True, True, 607, 414), (3072, 64, 32, False, True, 186, 157)]


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_the_faster_form_is_predicted(row: tuple[int, int, int, bool, bool, float, float]) -> None:
    heads, rows, width, biased, trained, joined, written = row
    attention = Attention(heads, rows, rows, width, width, torch.bfloat16, biased)
    ours = joined_us(attention, trained, "cudnn", H200), written_us(attention, trained, H200)
    assert (ours[0] < ours[1]) == (joined < written)
    assert 0.6 < ours[0] / joined < 1.6 and (rows < 256 or 0.8 < ours[1] / written < 1.1)


def test_what_takes_longer() -> None:
    plain = Attention(64, 1024, 1024, 64, 64, torch.bfloat16)
    for change in ({"biased": True}, {"columns": 2048}, {"rows": 2048}, {"batch": 256}, {"width": 128}):
        changed = replace(plain, **change)
        assert joined_us(changed, False, "cudnn", H200) > joined_us(plain, False, "cudnn", H200)
        assert written_us(changed, False, H200) >= written_us(plain, False, H200)
    assert joined_us(plain, True, "cudnn", H200) > joined_us(plain, False, "cudnn", H200)
    assert forward_us(replace(plain, causal=True), "cudnn", H200) < 0.7 * forward_us(plain, "cudnn", H200)
    by_kernel = [joined_us(plain, True, kernel, H200) for kernel in KERNELS]
    assert min(by_kernel) == joined_us(plain, True, "cudnn", H200)


def test_calls_are_priced_by_the_dtype_of_their_operands() -> None:
    """The gradient is given sums of exponentials in float32 as well: it is no product of float32."""
    aten = torch.ops.aten
    q, k, v = (torch.empty(8, 16, 512, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    lse = torch.empty(8, 16, 512, device="meta")
    forward = op_prediction(aten._scaled_dot_product_flash_attention.default, (q, k, v), {}, (q, lse), q.nbytes * 4, H200)
    backward = op_prediction(aten._scaled_dot_product_flash_attention_backward.default,
                             (q, q, k, v, q, lse, None, None, 512, 512, 0.0, False, lse, lse), {}, (q, k, v), q.nbytes * 8, H200)
    assert 30 < forward.device_us < 50 and 80 < backward.device_us < 150
