"""What attention costs in both forms: written out as products and a softmax, or joined in a kernel of torch's.

Written out, scores are computed, read, written as probabilities, and read again; the gradient has four products more, and
reads and writes scores three times. Joined, queries that masks leave no key are looked for (``bias.py``).

Worked example, on an H200: of 4 × 16 heads of 1024 queries and keys of 64 elements, forward and backward take 428 µs
written out, 175 by cuDNN's kernel.
"""

from __future__ import annotations

import math

from dynafuse.cost.attention import Attention, backward_us, forward_us
from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import product_prediction
from dynafuse.cost.model import streaming, work_us
from dynafuse.cost.products import COLUMNS, Product
from dynafuse.lowering.registry import EAGER


def joined_us(attention: Attention, trained: bool, kernel: str, device: Device) -> float:
    """Predict the microseconds that a kernel of torch's takes, with what comes before it.

    Args:
        attention: The sizes.
        trained: Whether its gradient is computed as well.
        kernel: The kernel.
        device: The device that is priced.
    """
    queries = math.prod((attention.batch, attention.rows, attention.width)) * attention.dtype.itemsize
    masked = _moving_us((4 if trained else 2) * queries, device) if attention.biased else 0.0
    return masked + forward_us(attention, kernel, device) + (backward_us(attention, kernel, device) if trained else 0.0)


def written_us(attention: Attention, trained: bool, device: Device) -> float:
    """Predict the microseconds that products and kernels of the softmax take.

    Args:
        attention: The sizes.
        trained: Whether the gradient is computed as well.
        device: The device that is priced.
    """
    a = attention
    sizes = [(a.rows, a.width, a.columns), (a.rows, a.columns, a.value_width)]
    passes = 2
    if trained:
        sizes += [(a.rows, a.value_width, a.columns), (a.columns, a.rows, a.value_width),
                  (a.rows, a.columns, a.width), (a.columns, a.rows, a.width)]
        passes += 3
    products = (Product(a.batch, m, k, n, (COLUMNS, COLUMNS), (k, n), a.dtype) for m, k, n in sizes)
    scores = math.prod((a.batch, a.rows, a.columns)) * a.dtype.itemsize
    return _moving_us(passes * scores, device) + sum(product_prediction(product, device).device_us for product in products)


def _moving_us(moved: int, device: Device) -> float:
    return work_us(streaming(moved), device, EAGER)
