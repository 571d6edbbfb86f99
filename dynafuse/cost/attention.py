"""What attention costs: by torch's kernels that do without a matrix of scores, and written out as products and a softmax.

A program of such a kernel takes a tile of 128 queries through all tiles of 128 keys, loads and stores included as long as
it takes it to go through another tile of keys for every 64 elements of a head. Written out, scores are computed, read,
written as probabilities, and read again; the gradient has four products more, and reads and writes scores three times.

Source of the shares: 90 cases in bfloat16 on an H200, with torch 2.11, within a quarter for three out of four of them.

Worked example, on an H200: of 4 × 16 heads of 1024 queries and keys of 64 elements, forward and backward take 175 µs, 253
with a bias; written out 428.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import product_prediction
from dynafuse.cost.model import LEAST, Work, work_us
from dynafuse.cost.products import COLUMNS, Product
from dynafuse.lowering.registry import EAGER

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
    ``trained`` whether gradients are computed.
    """

    batch: int
    rows: int
    columns: int
    width: int
    value_width: int
    dtype: torch.dtype
    biased: bool
    trained: bool


def joined_us(attention: Attention, kernel: str, device: Device) -> float:
    """Predict the microseconds that a kernel of torch's takes, its gradient included if there is one.

    Args:
        attention: The sizes.
        kernel: One of KERNELS.
        device: The device that is priced.
    """
    width = WIDTH * max(-(-max(attention.width, attention.value_width) // WIDTH), 1)
    share = SHARES.get(width, SHARES[128])
    rate = share * device.contraction_tflops * 1e6 / max(device.processors, 1.0)
    tile_us = 4.0 * TILE * TILE * width / max(rate, LEAST)
    programs = attention.batch * -(-attention.rows // TILE)
    tiles = -(-attention.columns // TILE) * (BIASED if attention.biased else 1.0) + width / WIDTH
    forward = max(programs / max(device.processors, 1.0), 1.0) * tiles * tile_us * KERNELS[kernel]
    backward = BACKWARD_BIASED if attention.biased else BACKWARD
    return _masking_us(attention, device) + forward * (1.0 + backward if attention.trained else 1.0)


def _masking_us(attention: Attention, device: Device) -> float:
    """Predict the microseconds in which queries are read and written once more, because some may be left no key."""
    a = attention
    if not a.biased:
        return 0.0
    queries = math.prod((a.batch, a.rows, a.width)) * a.dtype.itemsize
    return work_us(Work((4 if a.trained else 2) * queries, 0.0, 1 << 30, "pointwise"), device, EAGER)


def written_us(attention: Attention, device: Device) -> float:
    """Predict the microseconds that products and kernels of the softmax take, gradients included if there are any.

    Args:
        attention: The sizes.
        device: The device that is priced.
    """
    a = attention
    sizes = [(a.rows, a.width, a.columns), (a.rows, a.columns, a.value_width)]
    passes = 2
    if a.trained:
        sizes += [(a.rows, a.value_width, a.columns), (a.columns, a.rows, a.value_width),
                  (a.rows, a.columns, a.width), (a.columns, a.rows, a.width)]
        passes += 3
    products = (Product(a.batch, m, k, n, (COLUMNS, COLUMNS), (k, n), a.dtype) for m, k, n in sizes)
    scores = math.prod((a.batch, a.rows, a.columns)) * a.dtype.itemsize
    softmax = work_us(Work(passes * scores, 0.0, 1 << 30, "pointwise"), device, EAGER)
    return softmax + sum(product_prediction(product, device).device_us for product in products)
