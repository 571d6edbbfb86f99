"""What attention costs by torch's kernels, which do without a matrix of scores.

A program of such a kernel takes a tile of 128 queries through all tiles of 128 keys, loads and stores included as long as
it takes it to go through another tile of keys for every 64 elements of a head.

Source of the shares: 90 cases in bfloat16 on an H200, with torch 2.11, within a quarter for three out of four of them.

Worked example, on an H200: of 4 × 16 heads of 1024 queries and keys of 64 elements, forward and backward take 175 µs, 253
with a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynafuse.cost.device import Device
from dynafuse.cost.model import LEAST

TILE = 128
"""Queries and keys of a tile."""

WIDTH = 64
"""Elements of which the width of a head is a multiple in a tile."""

SHARES = {64: 0.59, 128: 0.92}
"""Share of the rate of products that a tile reaches, by the width of a head; narrow ones wait for exponentials."""

BIASED = 1.6
"""How many times as long a tile of keys takes to which a bias is added."""

BACKWARD, BACKWARD_BIASED = 3.0, 2.7
"""How many times as long as forward the gradient takes."""

KERNELS = {"cudnn": 1.0, "flash": 1.5, "efficient": 3.2, "cpu": 1.5}
"""How many times as long as cuDNN's kernel each kernel takes."""


@dataclass(frozen=True)
class Attention:
    """The sizes of an attention: ``batch`` heads of ``rows`` queries and ``columns`` keys of ``width`` elements.

    Values have ``value_width`` elements; ``biased`` tells whether something is added to scores before the softmax, and
    ``causal`` whether keys behind a query are left out.
    """

    batch: int
    rows: int
    columns: int
    width: int
    value_width: int
    dtype: torch.dtype
    biased: bool = False
    causal: bool = False


def forward_us(attention: Attention, kernel: str, device: Device) -> float:
    """Predict the microseconds that a kernel of torch's takes.

    Args:
        attention: The sizes.
        kernel: One of KERNELS.
        device: The device that is priced.
    """
    width = WIDTH * max(-(-max(attention.width, attention.value_width) // WIDTH), 1)
    processors = max(device.processors, 1.0)
    rate = SHARES.get(width, SHARES[128]) * device.contraction_tflops * 1e6 / processors
    tile_us = 4.0 * TILE * TILE * width / max(rate, LEAST)
    programs = attention.batch * -(-attention.rows // TILE)
    tiles: float = -(-attention.columns // TILE)
    if attention.causal:
        tiles = (tiles + 1) / 2
    tiles = tiles * (BIASED if attention.biased else 1.0) + width / WIDTH
    return max(programs / processors, 1.0) * tiles * tile_us * KERNELS[kernel]


def backward_us(attention: Attention, kernel: str, device: Device) -> float:
    """Predict the microseconds that a kernel's gradient takes.

    Args:
        attention: The sizes.
        kernel: One of KERNELS.
        device: The device that is priced.
    """
    return (BACKWARD_BIASED if attention.biased else BACKWARD) * forward_us(attention, kernel, device)
