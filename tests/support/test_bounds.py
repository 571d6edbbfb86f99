"""The net itself: a kernel that reaches beyond its arguments is told, one that masks what it does not have is not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="only interpreted kernels are checked")


@triton.jit
def loads(x, out, n, first):
    i = tl.arange(0, 16)
    tl.store(out + i, tl.load(x + first + i, i + first < n), i < 10)


@triton.jit
def stores(x, out, n, first):
    i = tl.arange(0, 16)
    tl.store(out + first + i, tl.load(x + i, i < 10), i < n)


@triton.jit
def adds(x, out, n, first):
    i = tl.arange(0, 16)
    tl.atomic_add(out + first + i, tl.load(x + i, i < 10), i < n)


KERNELS = {"load": loads, "store": stores, "atomic": adds}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("n", "first", "is_inside"), [(10, 0, True), (0, 900, True), (11, 0, False), (10, 1 << 20, False), (1, -(1 << 20), False)])
def test_what_reaches_beyond_is_told(name: str, n: int, first: int, is_inside: bool) -> None:
    x, out = torch.randn(10), torch.zeros(10)
    n += first if name == "load" and n else 0
    if is_inside:
        KERNELS[name][(1,)](x, out, n, first)
        return
    with pytest.raises(triton.runtime.errors.InterpreterError, match=f"OutOfBounds.*a {name} of 4 bytes"):
        KERNELS[name][(1,)](x, out, n, first)
    assert torch.equal(out, torch.zeros(10))


def test_a_view_has_the_memory_of_its_storage() -> None:
    memory, out = torch.randn(30), torch.zeros(10)
    loads[(1,)](memory[10:20], out, 16, 0)
    assert torch.equal(out, memory[10:20])
