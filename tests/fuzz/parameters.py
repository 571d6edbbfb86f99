"""Arguments that stay where they are from call to call, as a model's parameters do, so that recordings read them in place.

Worked example: of ``(x, w)``, where ``w`` has a gradient, every call gets a new ``x`` and the same ``w``, with its values as at
first; a recorded backward may then hand its gradient over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor


class Parameters:
    """Makes a program's arguments."""

    def __init__(self, make: Callable[..., tuple[Any, ...]]) -> None:
        self._make = make
        self._kept: dict[tuple[Any, ...], dict[int, Tensor]] = {}

    def __call__(self, *call: Any) -> tuple[Any, ...]:
        """The arguments of a call: of those with gradients that share memory with no other the ones of the first such call."""
        arguments = list(self._make(*call))
        kept = self._kept.setdefault(call, {})
        tensors = {i: argument for i, argument in enumerate(arguments) if isinstance(argument, Tensor)}
        owners = Counter(_storage(tensor) for tensor in tensors.values())
        for i, tensor in tensors.items():
            if not tensor.requires_grad or not tensor.is_leaf or owners[_storage(tensor)] > 1 or _overlaps(tensor):
                continue
            if i in kept:
                with torch.no_grad():
                    arguments[i] = kept[i].copy_(tensor)
            else:
                torch._dynamo.mark_static_address(tensor)
                kept[i] = tensor
        return tuple(arguments)


def _overlaps(tensor: Tensor) -> bool:
    return torch._debug_has_internal_overlap(tensor) != 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
