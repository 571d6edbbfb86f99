"""Random inputs in a spec's layouts, to run its kernels on.

Floats are standard normal, booleans fair, integers small; those that index stay within what they index (``indices``).
Memory is laid out as the layout says: an expanded dimension is stored once, a permuted one stays permuted.

Worked example: for an input ``bfloat16[8, 4] (0, 1)`` four random numbers are drawn, and seen as eight equal rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from dynafuse.fx import extent
from dynafuse.ir import ALIGNED, Layout, Spec
from dynafuse.lowering.interpret import operands_of, sizes_at
from dynafuse.select import indices

LARGEST = 128  # integers that do not index are below it: it fits every dtype
SEED = 0x5EED


class NoData(Exception):
    """Raised if no data can be made up for a region; the message says why."""


def extent_at(layout: Layout, hints: Mapping[str, int]) -> int:
    """Return how many elements of memory a layout spans at given sizes."""
    return int(extent(sizes_at(layout.shape, hints), sizes_at(layout.stride, hints)))


def needed_bytes(spec: Spec, hints: Mapping[str, int]) -> int:
    """Return the bytes of a spec's inputs and outputs, and of its computed indices, which are evaluated beforehand."""
    tensors = [*spec.inputs, *(store.layout for store in spec.stores if store.into is None)]
    total = sum(extent_at(layout, hints) * layout.dtype.itemsize for layout in tensors)
    checks = indices.rules(spec, hints).checks
    for op in (spec.ops[i] for i in {i for use in checks for i in operands_of(spec, use.index)}):
        total += math.prod(sizes_at(op.shape, hints)) * max(op.dtype.itemsize, 8)
    return total


def inputs_for(spec: Spec, hints: Mapping[str, int], device: torch.device) -> list[torch.Tensor]:
    """Return a random tensor per input of a spec.

    Where random integers violate a computed index, all inputs that index are zeros. Torch's global generators are not used.

    Args:
        spec: The region.
        hints: The values of its size symbols, by name.
        device: Where the tensors are made.

    Raises:
        NoData: An index could leave what it indexes.
    """
    rules = indices.rules(spec, hints)
    if rules.reason:
        raise NoData(rules.reason)
    generator = torch.Generator(device=device)
    generator.manual_seed(SEED)
    inputs = [_random(layout, hints, device, generator, rules.limits.get(i, LARGEST))
              for i, layout in enumerate(spec.inputs)]
    violation = indices.violation(spec, hints, rules.checks, inputs, device)
    if violation:
        for i in rules.limits:
            inputs[i].zero_()
        violation = indices.violation(spec, hints, rules.checks, inputs, device)
    if violation:
        raise NoData(violation)
    return inputs


def _random(layout: Layout, hints: Mapping[str, int], device: torch.device, generator: torch.Generator,
            limit: int) -> torch.Tensor:
    """Return a random tensor of a layout; integers are in [0, limit)."""
    flat = _random_flat(extent_at(layout, hints), layout.dtype, device, generator, limit)
    return _strided(flat, layout, hints)


def _random_flat(count: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator,
                 limit: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), dtype=torch.uint8, device=device, generator=generator).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        plain = dtype if dtype.is_complex or dtype.itemsize > 1 else torch.float32
        return torch.randn(count, dtype=plain, device=device, generator=generator).to(dtype)
    most = max(1, min(limit, torch.iinfo(dtype).max))
    return torch.randint(0, most, (count,), device=device, generator=generator, dtype=torch.int64).to(dtype)


def _strided(flat: torch.Tensor, layout: Layout, hints: Mapping[str, int]) -> torch.Tensor:
    """Return flat memory in a layout; a tensor that is less aligned than memory starts as far within."""
    offset = layout.alignment // layout.dtype.itemsize if layout.alignment < ALIGNED and flat.numel() else 0
    if offset:
        flat = torch.cat([flat[:1].expand(offset), flat])
    return flat.as_strided(sizes_at(layout.shape, hints), sizes_at(layout.stride, hints), offset)


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors, each with the layout and the offset of its original."""
    return [_copy(tensor) for tensor in tensors]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return flat.clone().as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
