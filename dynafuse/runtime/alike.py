"""Results of one graph that share memory: related as eager relates them, so that autograd knows when one is written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Sharing: TypeAlias = Callable[[Tensor, Sequence[int], Sequence[int], int | torch.SymInt], Tensor]
"""Makes a tensor in the memory of another, of some sizes and strides, at an offset from where that begins."""


def sharing_of(kind: str) -> Sharing:
    """Return how results of a graph share memory: of an inference graph, nothing of which has gradients, as views."""
    return view_of if kind == "inference" else sibling_of


def view_of(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | torch.SymInt) -> Tensor:
    """Return a view as it is made where gradients are enabled: it may be written to later whatever mode this runs in.

    Args:
        tensor: What it is a view of.
        size: Its size.
        stride: Its strides, in elements.
        offset: Where it begins, in elements from the beginning of ``tensor``.
    """
    with torch.enable_grad():
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def sibling_of(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | torch.SymInt) -> Tensor:
    """Return a tensor with the same version, and no view: one of the two may have a gradient, and the other not.

    Args:
        tensor: What it shares memory with.
        size: Its size.
        stride: Its strides, in elements.
        offset: Where it begins, in elements from the beginning of ``tensor``.
    """
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset).detach()
