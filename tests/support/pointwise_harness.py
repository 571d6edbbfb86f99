"""One-off kernels that evaluate a pointwise row's expression as the lowering does: load, cast, compute, store."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from triton import knobs

from dynafuse.ops import Cast, Context, Row
from dynafuse.ops.literals import conversion, literal, opmath, triton_type

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
"""Where operands must be."""

_HEADER = """\
import triton
import triton.language as tl
from dynafuse.lowering.triton import libm as lm


@triton.jit
def kernel({pointers}, out_pointer, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
{lines}
    tl.store(out_pointer + at, out)
"""
_counter = itertools.count()


def bind(row: Row, args: list[Any]) -> list[Any]:
    """``args`` with the schema's defaults for those that are not given."""
    rest = row.target._schema.arguments[len(args) :]
    return [*args, *(argument.default_value for argument in rest)]


def compute_dtype(row: Row, args: list[Any], out: torch.Tensor) -> torch.dtype:
    """The dtype in which the lowering evaluates the row."""
    if row.cast is not Cast.PROMOTED:
        return opmath(out.dtype)
    operands = [arg for arg in args if isinstance(arg, torch.Tensor | bool | int | float)]
    promoted = operands[0].dtype
    for operand in operands[1:]:
        promoted = torch.result_type(torch.empty(1, dtype=promoted), operand)
    return opmath(promoted)


def source_of(row: Row, args: list[Any], out: torch.Tensor) -> str:
    """The kernel's text."""
    dtype = compute_dtype(row, args, out)
    lines, names = [], []
    for position, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            names.append(arg)
            continue
        name, loaded = f"x{position}", opmath(arg.dtype)
        lines.append(f"{name} = tl.load({name}_pointer + at)")
        if loaded is not arg.dtype or arg.dtype is torch.bool:  # a bool is a byte in memory
            lines.append(f"{name} = {name}.to({triton_type(loaded)})")
        if row.cast is not Cast.NONE and position not in row.raw:
            lines.append(f"{name} = {conversion(name, arg.dtype, dtype)}")
        names.append(name)
    operands = tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
    lines.append(f"out = {expression(row, Context(dtype, out.dtype, operands), names)}")
    pointers = ", ".join(f"x{k}_pointer" for k, arg in enumerate(args) if isinstance(arg, torch.Tensor))
    return _HEADER.format(pointers=pointers, lines="\n".join(f"    {line}" for line in lines))


def expression(row: Row, context: Context, names: list[Any]) -> str:
    """The row's expression over operand names and numbers."""
    if callable(row.emit):
        return row.emit(context, *names)
    shown = [literal(arg, context.dtype) if isinstance(arg, bool | int | float) else arg for arg in names]
    return str(row.emit).format(*shown)


def load(text: str, folder: Path) -> ModuleType:
    """Triton reads a kernel's source from its file."""
    path = folder / f"kernel_{next(_counter)}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def evaluate(row: Row, args: list[Any], out: torch.Tensor, folder: Path) -> torch.Tensor:
    """The row's value for contiguous operands of one power-of-two size; ``out`` gives size and dtype."""
    args = bind(row, args)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    result = torch.empty_like(out)
    load(source_of(row, args, out), folder).kernel[(1,)](*tensors, result, BLOCK=out.numel())
    return result
