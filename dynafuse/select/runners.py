"""Compiled kernels as functions of their input tensors, to be measured: allocation, launch and all, as graphs run them.

Worked example: ``runner(kernel, spec, {"s0": 8}, torch.device("cuda", 0))([x, y])`` returns the stored tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from dynafuse.cache.canonical import code_of
from dynafuse.cache.fold_families import Member
from dynafuse.ir import ARRIVED, Launch, Spec
from dynafuse.lowering.interpret import size_at, sizes_at
from dynafuse.lowering.triton.counters import counters_on
from dynafuse.lowering.triton.launch import Kernel, Launcher, stream_of

Runner = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Allocate = Callable[[], torch.Tensor]


def runner(kernel: Any, spec: Spec, hints: Mapping[str, int], device: torch.device, member: Member | None = None,
           classes: bool = False) -> Runner:
    """Return a kernel as a function of the spec's inputs.

    Args:
        kernel: One of Triton's launches, one of the protocol ``lowering.base.Kernel``, or a function, which is called with
            the inputs as a list.
        spec: The region's own spec.
        hints: The values of its size symbols, by name.
        device: Where it runs.
        member: The spec as a member of its fold family, if the kernel, of Triton, is that of the family.
        classes: Whether the kernel, of Triton, is that of the spec's class of sizes, if it has one.
    """
    index = device.index or 0 if device.type == "cuda" else None
    if isinstance(kernel, Kernel):
        return _triton(kernel, spec, hints, device, index, member, classes)
    if hasattr(kernel, "scalars"):  # a lowering.base.Kernel; others are what tests measure
        sizes = [hints[spec.symbols[position]] for position in kernel.scalars]
        return lambda inputs: kernel.run([*inputs, *sizes], index)
    return lambda inputs: kernel(list(inputs))


def _triton(kernel: Kernel, spec: Spec, hints: Mapping[str, int], device: torch.device, index: int | None,
            member: Member | None, classes: bool) -> Runner:
    code = code_of(spec, classes, member)
    hints = {**hints, **dict(zip(code.spec.symbols[len(spec.symbols):], code.sizes, strict=True))}
    new = [_allocation(s.layout.dtype, sizes_at(s.layout.shape, hints), sizes_at(s.layout.stride, hints), device)
            for s in spec.stores if s.into is None]
    spaces = [_allocation(w.dtype, (size_at(w.size, hints),), (1,), device) for w in kernel.workspaces]
    pick = _picker(member.inputs) if member else tuple
    places = _places(kernel, code.spec)
    calls = [_call(launcher, launch, places, hints, counters_on(index))
             for launcher, launch in zip(kernel.bound(index), kernel.launches, strict=True)]
    calls = [call for call in calls if call is not None]
    constant = [*(hints[name] for name in code.spec.symbols), *code.hoisted, *([member.terms] if member else [])]
    stored = _picker([places[f"out{i}"] for i in range(len(spec.stores))])

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        held = [*pick(inputs), *constant, *[allocate() for allocate in new], *[allocate() for allocate in spaces]]
        stream = None if index is None else stream_of(index)
        for call in calls:
            call(stream, held)
        return stored(held)

    return run


def _places(kernel: Kernel, code: Spec) -> dict[str, int]:
    """Return where each argument of a kernel is: inputs, sizes, numbers, a count, new tensors, workspaces, in that order."""
    places = {f"in{i}": i for i in range(len(code.inputs))}
    for name in (*code.symbols, *code.hoisted, *code.counts):
        places[name] = len(places)
    free = len(places)
    for i, store in enumerate(code.stores):
        places[f"out{i}"] = free if store.into is None else store.into
        free += store.into is None
    for number_of, space in enumerate(kernel.workspaces):
        places[space.name] = free + number_of
    return places


def _call(launcher: Launcher, launch: Launch, places: Mapping[str, int], hints: Mapping[str, int],
          counters: Callable[[object, int], torch.Tensor]) -> Any:
    """Return a launch as ``(stream, all that there is)``; None for one without programs."""
    grid = sizes_at(launch.grid, hints)
    if 0 in grid:
        return None
    names = [name for name, _ in launch.signature]
    pick = _picker([places[name] for name in names if name != ARRIVED])
    if ARRIVED in names:  # the last argument
        return lambda stream, held: launcher(stream, *grid, *pick(held), counters(stream, grid[0]))
    return lambda stream, held: launcher(stream, *grid, *pick(held))


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(positions) == 1:
        return lambda held: (held[positions[0]],)
    return itemgetter(*positions)


def _allocation(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], device: torch.device) -> Allocate:
    if device.type == "cuda":
        empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
        return lambda: empty(shape, stride, dtype)
    return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)
