"""What attention is predicted to cost: nearer to what was measured than the difference of its two forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynafuse.cost.attention import KERNELS, Attention, joined_us, written_us
from dynafuse.cost.device import describe

H200 = describe("h200")
MEASURED = [  # heads, rows, width, biased, trained; microseconds by cuDNN's kernel, and written out, on an H200
    (128, 512, 64, False, False, 26, 86), (128, 512, 64, False, True, 115, 241), (128, 512, 64, True, True, 154, 238),
    (384, 197, 64, False, True, 110, 310), (32, 2048, 64, False, True, 298, 788), (32, 2048, 64, True, True, 454, 792),
    (32, 4096, 128, False, False, 406, 1161), (32, 4096, 128, True, True, 2600, 3088), (256, 784, 32, False, True, 486, 942),
    (6144, 49, 32, True, True, 607, 414), (3072, 64, 32, False, True, 186, 157)]


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_the_faster_form_is_predicted(row: tuple[int, int, int, bool, bool, float, float]) -> None:
    heads, rows, width, biased, trained, joined, written = row
    attention = Attention(heads, rows, rows, width, width, torch.bfloat16, biased, trained)
    ours = joined_us(attention, "cudnn", H200), written_us(attention, H200)
    assert (ours[0] < ours[1]) == (joined < written)
    assert 0.6 < ours[0] / joined < 1.6 and (rows < 256 or 0.8 < ours[1] / written < 1.1)


def test_what_takes_longer() -> None:
    plain = Attention(64, 1024, 1024, 64, 64, torch.bfloat16, biased=False, trained=False)
    for change in ({"biased": True}, {"trained": True}, {"columns": 2048}, {"rows": 2048}, {"batch": 256}, {"width": 128}):
        changed = replace(plain, **change)
        assert joined_us(changed, "cudnn", H200) > joined_us(plain, "cudnn", H200)
        assert written_us(changed, H200) >= written_us(plain, H200)
    by_kernel = [joined_us(plain, kernel, H200) for kernel in KERNELS]
    assert min(by_kernel) == joined_us(plain, "cudnn", H200)
