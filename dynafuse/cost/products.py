"""Rates of matrix products by how their sizes lie in memory.

The tensor cores' kernels of cuBLAS load 16 bytes at a time. Where rows of an operand or of the result in memory are no
multiple of that many bytes long, cuBLAS falls back to kernels that reach a fraction of the rate; how small a fraction says
the largest power of two that divides the row. Rows count by their sizes: longer strides between odd rows help little.

Worked example: ``mm`` of ``bfloat16[8192, 768]`` and the transpose of ``bfloat16[50257, 768]`` returns rows of 100514 bytes,
a multiple of 2. At 0.1 of 780 TFLOP/s it takes 8.1 ms. In the sizes ``[8192, 50264]`` it takes 0.8 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynafuse.cost.device import Device
from dynafuse.fx import hint

aten = torch.ops.aten
PRODUCTS: Mapping[Any, tuple[str, str]] = {
    aten.mm.default: ("self", "mat2"), aten.bmm.default: ("self", "mat2"),
    aten.addmm.default: ("mat1", "mat2"), aten.baddbmm.default: ("batch1", "batch2"),
}
"""Names of the left and the right operand, by op."""

ALIGNED = 16
"""Bytes of which rows in memory have to be a multiple."""

SHARES: Mapping[int, str] = {8: "contraction_share_8", 4: "contraction_share_4", 2: "contraction_share_2"}
"""The constant with the share of the rate that is left, by the largest power of two that divides rows of 16-bit elements."""

ROWS, COLUMNS = -2, -1
"""Dimensions of a matrix, in a batch of them."""

ACROSS = {ROWS: COLUMNS, COLUMNS: ROWS}


@dataclass(frozen=True)
class Product:
    """A batch of products of matrices ``[m, k]`` and ``[k, n]``; sizes that are dynamic count as their examples.

    ``runs`` are the dimensions, ROWS or COLUMNS, along which the memory of the operands runs; that of the result runs along
    its columns. ``pitches`` are the distances in memory from each run of an operand to the next, in elements.
    """

    batch: int
    m: int
    k: int
    n: int
    runs: tuple[int, int]
    pitches: tuple[int, int]
    dtype: torch.dtype

    @staticmethod
    def of(left: torch.Tensor, right: torch.Tensor) -> Product:
        """Return the product of two matrices or batches of them."""
        (m, k), n = (hint(size) for size in left.shape[ROWS:]), hint(right.shape[COLUMNS])
        runs = (runs_along(left), runs_along(right))
        pitches = (hint(left.stride(ACROSS[runs[0]])), hint(right.stride(ACROSS[runs[1]])))
        return Product(math.prod(map(hint, left.shape[:ROWS])), m, k, n, runs, pitches, left.dtype)

    def padded(self, m: int, k: int, n: int) -> Product:
        """Return the product in larger sizes. In operands that change one run lies behind the other.

        Args:
            m: Rows of the left operand and of the result.
            k: Columns of the left operand, rows of the right one.
            n: Columns of the right operand and of the result.
        """
        left = (k if self.runs[0] == COLUMNS else m) if (m, k) != (self.m, self.k) else self.pitches[0]
        right = (n if self.runs[1] == COLUMNS else k) if (k, n) != (self.k, self.n) else self.pitches[1]
        return replace(self, m=m, k=k, n=n, pitches=(left, right))

    @property
    def along(self) -> tuple[bool, bool, bool]:
        """Return whether memory runs along m, k and n, in an operand or in the result."""
        return self.runs[0] == ROWS, self.runs[0] == COLUMNS or self.runs[1] == ROWS, True

    @property
    def flops(self) -> float:
        """Count multiplications and additions."""
        return 2.0 * self.batch * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        """Count the bytes of the operands and of the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """Return the largest power of two, up to 16, that divides the bytes of all runs and of their distances."""
        sizes = (size for size, runs in zip((self.m, self.k, self.n), self.along, strict=True) if runs)
        return math.gcd(ALIGNED, *(size * self.dtype.itemsize for size in (*sizes, *self.pitches)))

    def __str__(self) -> str:
        return "×".join(map(str, (*((self.batch,) if self.batch != 1 else ()), self.m, self.k, self.n)))


def runs_along(matrix: torch.Tensor) -> int:
    """Return along which dimension memory runs: COLUMNS or ROWS. A library copies what has neither; then COLUMNS."""
    def is_one(stride: int | torch.SymInt) -> bool:
        return isinstance(stride, int) and stride == 1

    return ROWS if is_one(matrix.stride(ROWS)) and not is_one(matrix.stride(COLUMNS)) else COLUMNS


def product_of(target: Any, given: Mapping[str, Any]) -> Product | None:
    """Return the product that a call computes; None for any op that computes none.

    Args:
        target: The op's overload.
        given: Its arguments by schema name, with tensors, fake or real.
    """
    if target not in PRODUCTS:
        return None
    left, right = (given[name] for name in PRODUCTS[target])
    return Product.of(left, right)


def aligned_dtype(dtype: torch.dtype) -> bool:
    """Return whether a dtype's products run on tensor cores, which want aligned rows: 16-bit floats, float32 as TF32."""
    return dtype in (torch.float16, torch.bfloat16) or (dtype is torch.float32 and uses_tf32())


def uses_tf32() -> bool:
    """Return whether matrix products of float32 may run in TensorFloat-32. Dynamo guards on it: a change compiles anew."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def product_tflops(product: Product, device: Device) -> float:
    """Return the rate of a product, in TFLOP/s, of an ``aligned_dtype`` by the alignment of its rows.

    Args:
        product: A product of floats.
        device: The device that is priced.
    """
    if not aligned_dtype(product.dtype):
        return device.contraction_tflops_float32
    is_aligned = product.alignment == ALIGNED
    if product.dtype is torch.float32:
        return device.contraction_tflops_tf32 * (1.0 if is_aligned else device.contraction_share_tf32)
    return device.contraction_tflops * (1.0 if is_aligned else device.constants[SHARES[product.alignment]])
