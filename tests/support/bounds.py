"""Kernels in Triton's interpreter that touch nothing but their arguments: an access beyond them is an error, not a wrong number.

Nor do views that compiled graphs make of memory reach beyond it: what eager ops read of such a view nobody else could check.

Worked example: after ``install()``, a kernel of a vector of 10 floats that loads ``x + 12`` without a mask raises an
InterpreterError that tells ``OutOfBounds('a load of 4 bytes at 48 of 40')``. Memory counts as an argument's as far as its
storage goes. Without this, a load beyond it reads what happens to lie there, and a store overwrites it.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch._C._dynamo import guards

Addresses = np.ndarray[Any, np.dtype[np.uint64]]


class OutOfBounds(Exception):
    """A kernel touches memory that none of its arguments has."""


class _Launch(threading.local):
    """The memory of the arguments of the kernel that a thread interprets: first address, first address behind it."""

    ranges: tuple[tuple[int, int], ...] = ()


_launch = _Launch()


def install() -> None:
    """Check every view that compiled graphs make, and every kernel that this process interprets; it may have no Triton, or compile."""
    guards._reinterpret_tensor = checked_view
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, _get_np_dtype

    def width(pointers: Any) -> int:
        return int(np.dtype(_get_np_dtype(pointers.get_element_ty())).itemsize)

    run, load = GridExecutor.__call__, InterpreterBuilder.create_masked_load
    store, update = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_atomic_rmw

    def checked_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, _launch.ranges = _launch.ranges, tuple(sorted(set(_ranges((*args, *kwargs.values())))))
        try:
            return run(self, *args, **kwargs)
        finally:
            _launch.ranges = outer

    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        check("load", ptrs.data, mask.data, width(ptrs))
        return load(self, ptrs, mask, *rest)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("store", ptrs.data, mask.data, width(ptrs))
        return store(self, ptrs, value, mask, *rest)

    def checked_update(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        check("atomic", ptr.data, mask.data, width(ptr))
        return update(self, operation, ptr, val, mask, *rest)

    GridExecutor.__call__ = checked_run
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = checked_load, checked_store
    InterpreterBuilder.create_atomic_rmw = checked_update


_view = guards._reinterpret_tensor


def checked_view(base: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Return a view of a tensor's memory.

    Raises:
        OutOfBounds: It reaches beyond the memory.
    """
    view: torch.Tensor = _view(base, sizes, strides, offset)
    last = view.storage_offset() + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    if view.numel() and (last + 1) * view.itemsize > view.untyped_storage().nbytes():
        raise OutOfBounds(f"a view of sizes {(*sizes,)} and strides {(*strides,)} of {view.untyped_storage().nbytes()} bytes")
    return view


def _ranges(arguments: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            storage = argument.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _is_within(addresses: Addresses, width: int) -> bool:
    """Return whether all are in the memory of one argument, which nearly every access is."""
    first, last = int(addresses.min()), int(addresses.max()) + width
    return any(begin <= first and last <= end for begin, end in _launch.ranges)


def check(what: str, addresses: Addresses, mask: Any, width: int) -> None:
    """Check the addresses that a mask lets through, each of ``width`` bytes.

    Raises:
        OutOfBounds: One is in no argument's memory.
    """
    if _is_within(addresses, width):  # what the mask keeps out, too: most tiles end before their tensors do
        return
    touched = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
    if not touched.size or _is_within(touched, width):
        return
    inside = np.zeros(touched.shape, bool)
    for begin, end in _launch.ranges:
        inside |= (touched >= begin) & (touched <= max(end - width, 0))
    if not inside.all():
        wrong = int(touched[~inside][0])
        nearest = min(_launch.ranges, key=lambda one: min(abs(wrong - one[0]), abs(wrong - one[1])), default=(0, 0))
        raise OutOfBounds(f"a {what} of {width} bytes at {wrong - nearest[0]} of {nearest[1] - nearest[0]}")
