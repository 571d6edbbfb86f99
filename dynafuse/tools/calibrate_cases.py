"""The kernels that ``dynafuse calibrate`` measures, with the work that the cost model sees in each.

Fusing executors get a few ops that make one kernel; eager gets a single op of torch that does similar work.

Worked example: ``bandwidth_cases("triton", "row", 4096, torch.bfloat16, 512_000_000)`` are a softmax and a LayerNorm of
``bfloat16[31250, 4096]``, which read and write 512 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse.cost.model import Work, streaming
from dynafuse.cost.products import ALIGNED
from dynafuse.lowering.registry import executor as executor_of

BF16 = torch.bfloat16
TINY = 256  # elements of a tensor that takes no time
FEW_ROWS = 16
COLUMNS = 16384
PRODUCT = (8192, 1024, 8192)  # m, k, n
NO_WORK = Work(0, 0.0, 1, "pointwise")

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A function to be run by an executor on random inputs of these shapes; ``work`` is what one call does."""

    name: str
    executor: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    work: Work = NO_WORK


# ---------------------------------------------------------------------- the functions


def _gate(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (F.silu(x) * y,)


def _add(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x + y,)


def _copy(x: Tensor) -> tuple[Tensor, ...]:
    return (x.clone(),)


def _softmax(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.softmax(x, -1),)


def _layer_norm(x: Tensor) -> tuple[Tensor, ...]:
    return (F.layer_norm(x, x.shape[-1:]),)


def _product(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x @ y.t(),)


def _column_squares(x: Tensor) -> tuple[Tensor, ...]:
    return ((x * x).sum(0),)


def _column_sum(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sum(0),)


def _row_squares(x: Tensor) -> tuple[Tensor, ...]:
    return ((x * x).sum(1),)


def _row_sum(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sum(1),)


def _norm_backward(x: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the backward of a norm: the gradient of the input needs sums of rows, that of the weight a sum of columns."""
    wide, scaled = x.float(), grad.float() * weight.float()
    dx = scaled - wide * (scaled * wide).mean(-1, keepdim=True)
    return dx.to(x.dtype), (grad.float() * wide).sum(0).to(x.dtype)


def _layer_norm_backward(x: Tensor, grad: Tensor, weight: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
    mean = mean.float() if x.is_cuda else mean  # each device's kernel accepts only its own dtype
    wanted = [True, True, False]
    dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, mean, weight, weight, wanted)
    return dx, dweight


# ---------------------------------------------------------------------- as cases


def copied(moved: int) -> Case:
    """Return a case of eager that reads and writes ``moved`` bytes in all."""
    elements = moved // 4
    work = Work(4 * elements, 0.0, _programs(elements), "pointwise")
    return Case("copy", "eager", _copy, ((elements,),), BF16, work)


def product(alignment: int) -> Case:
    """Return a case of eager: a matrix product whose result has rows of a multiple of so many bytes, and of no more."""
    m, k, n = PRODUCT
    n += alignment // BF16.itemsize if alignment < ALIGNED else 0
    work = streaming(0, 2.0 * m * k * n)
    return Case(f"product of {m} × {k} × {n}", "eager", _product, ((m, k), (n, k)), BF16, work)


def chain(executor: str, count: int) -> Case:
    """Return a case of ``count`` tiny kernels that have nothing to do with each other: their sizes differ."""
    def all_gates(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple((_gate(x, x) if executor_of(executor).fuses else _add(x, x))[0] for x in inputs)

    return Case(f"{count} tiny", executor, all_gates, tuple((TINY * (i + 1),) for i in range(count)), BF16)


def bandwidth_cases(executor: str, kind: str, length: int, dtype: torch.dtype, moved: int) -> Sequence[Case]:
    """Return cases of a kernel class that each move about as many bytes.

    Args:
        executor: The executor that they are for.
        kind: The kernel class.
        length: The elements of a row.
        dtype: The dtype of the elements.
        moved: The bytes that each case moves.
    """
    width = dtype.itemsize
    elements = moved // width
    make = {"pointwise": _pointwise, "row": _rows, "rowcol": _rowcol,
            "column": _column, "split": _split}[kind]
    return [
        Case(f"{kind} {function.__name__.strip('_')}", executor, function, shapes, dtype,
             Work(units, 0.0, programs, kind, launches, width, length if kind in ("row", "rowcol") else 0))
        for function, shapes, units, programs, launches in make(not executor_of(executor).fuses, elements, length, width)
    ]


Sketch = tuple[Function, tuple[tuple[int, ...], ...], int, int, int]
"""Function, input shapes, bytes moved, programs, launches of Triton's."""


def _programs(elements: int) -> int:
    return max(elements // 256, 1)


def _pointwise(eager: bool, elements: int, length: int, width: int) -> list[Sketch]:
    size = elements // 3 // 4096 * 4096  # no vector divides other sizes: their masks would be measured as well
    return [(_add if eager else _gate, ((size,), (size,)), 3 * size * width, _programs(size), 1)]


def _rows(eager: bool, elements: int, length: int, width: int) -> list[Sketch]:
    rows = elements // 2 // length
    return [(function, ((rows, length),), 2 * rows * length * width, rows, 1) for function in (_softmax, _layer_norm)]


def _rowcol(eager: bool, elements: int, length: int, width: int) -> list[Sketch]:
    rows = elements // 3 // length
    shapes = ((rows, length), (rows, length), (length,))
    moved = (3 * rows * length + 2 * length) * width
    if eager:
        return [(_layer_norm_backward, (*shapes, (rows, 1)), moved, rows, 2)]
    return [(_norm_backward, shapes, moved, rows, 2)]


def _column(eager: bool, elements: int, length: int, width: int) -> list[Sketch]:
    rows = elements // COLUMNS
    moved = (rows + 1) * COLUMNS * width
    return [(_column_sum if eager else _column_squares, ((rows, COLUMNS),), moved, COLUMNS // 32, 1)]


def _split(eager: bool, elements: int, length: int, width: int) -> list[Sketch]:
    long = elements // FEW_ROWS
    moved = FEW_ROWS * (long + 1) * width
    return [(_row_sum if eager else _row_squares, ((FEW_ROWS, long),), moved, FEW_ROWS * (long // 1024), 2)]
