"""libdevice for Triton's interpreter: the functions that :mod:`dynafuse.lowering.triton.libm` calls, on NumPy data.

It is imported only under ``TRITON_INTERPRET=1``. An interpreted tensor is a handle that holds a NumPy array; a scalar's
array has shape ``(1,)``.

Worked example: ``exp(tl_tensor)`` is ``torch.exp`` of the handle's array, as a new handle of the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

from dynafuse.errors import IndexOutOfRange

Array = np.ndarray[Any, Any]

_VECTORS = 64
"""A multiple of how many elements torch computes at once: for the rest it calls other functions, of other last bits."""


def _array(value: Any, like: tl.tensor) -> Array:
    """Return the data of a tensor, or a number in the dtype of ``like``."""
    return value.handle.data if isinstance(value, tl.tensor) else np.asarray([value], _get_np_dtype(like.dtype))


def _tensor(data: Array, dtype: tl.dtype, *, block: bool) -> tl.tensor:
    """Return data as an interpreted tensor: a block, or else a scalar."""
    data = np.asarray(data).astype(_get_np_dtype(dtype), copy=False)
    if not block:
        return tl.tensor(TensorHandle(data.reshape(1), dtype), dtype)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., tl.tensor]:
    """Return a function of torch tensors as one of interpreted tensors and numbers, in the first tensor's dtype."""

    def call(*operands: Any) -> tl.tensor:
        tensors = [operand for operand in operands if isinstance(operand, tl.tensor)]
        arrays = np.broadcast_arrays(*(_array(operand, tensors[0]) for operand in operands))
        count, shape = arrays[0].size, arrays[0].shape
        result = function(*(torch.from_numpy(np.resize(array, -(-count // _VECTORS) * _VECTORS)) for array in arrays))
        data = result[:count].numpy().reshape(shape)
        return _tensor(data, tensors[0].dtype, block=any(tensor.type.is_block() for tensor in tensors))

    return call


def _splat(builder: InterpreterBuilder, block: tl.block_type, scalar: TensorHandle) -> TensorHandle:
    """Return a scalar spread over a block, in its data's dtype.

    Triton's own function takes the handle's dtype, which for a comparison is that of the operands.
    """
    return TensorHandle(np.full(block.shape, scalar.data[0], dtype=scalar.data.dtype), scalar.dtype.scalar)


InterpreterBuilder.create_splat = _splat
_triton_cast = InterpreterBuilder.cast_impl


def _rounding_cast(builder: InterpreterBuilder, src: TensorHandle, dest: tl.dtype) -> TensorHandle:
    """Return values converted to another dtype, rounding a float32 to the nearest bfloat16 as a GPU does.

    Triton's own function cuts off the low bits.
    """
    if src.dtype.scalar == tl.float32 and dest.scalar == tl.bfloat16:
        rounded = torch.from_numpy(src.data.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(rounded, tl.bfloat16)
    return _triton_cast(builder, src, dest)


InterpreterBuilder.cast_impl = _rounding_cast
_triton_fp_to_fp = InterpreterBuilder.create_fp_to_fp
EIGHT_BITS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _cast_of_eight_bits(builder: InterpreterBuilder, src: TensorHandle, dest: tl.dtype, mode: Any) -> TensorHandle:
    """Return a float32 as an 8-bit float, or one as a float32, as a GPU does. Triton's own function knows no NaN there."""
    data = torch.from_numpy(np.ascontiguousarray(src.data))
    if src.dtype.scalar == tl.float32 and dest.scalar in EIGHT_BITS:
        return TensorHandle(data.to(EIGHT_BITS[dest.scalar]).view(torch.uint8).numpy(), dest.scalar)
    if src.dtype.scalar in EIGHT_BITS and dest.scalar == tl.float32:
        return TensorHandle(data.view(EIGHT_BITS[src.dtype.scalar]).float().numpy(), tl.float32)
    return _triton_fp_to_fp(builder, src, dest, mode)


InterpreterBuilder.create_fp_to_fp = _cast_of_eight_bits
_triton_atomic = InterpreterBuilder.create_atomic_rmw


def _atomic(builder: InterpreterBuilder, operation: Any, pointer: TensorHandle, value: TensorHandle, mask: TensorHandle,
            *rest: Any) -> TensorHandle:
    """Combine values with memory. Triton's own function reads beyond a value that is spread over a tile without a copy."""
    copied = (TensorHandle(np.ascontiguousarray(handle.data), handle.dtype) for handle in (pointer, value, mask))
    result: TensorHandle = _triton_atomic(builder, operation, *copied, *rest)
    return result


InterpreterBuilder.create_atomic_rmw = _atomic


def device_assert(condition: tl.tensor, message: str) -> None:
    """Check a condition of a kernel. Triton's own check does nothing in the interpreter.

    Args:
        condition: Bools, each of which has to hold.
        message: What is wrong where one does not.

    Raises:
        IndexOutOfRange: One does not hold.
    """
    if not condition.handle.data.all():
        raise IndexOutOfRange(message)


def _fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return ``x * y + z`` with one rounding, if the sum needs no more bits than float64 has."""
    return (x.double() * y.double() + z.double()).to(x.dtype)


def _rsqrt(x: torch.Tensor) -> torch.Tensor:
    return 1 / x.sqrt()


def _cbrt(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.cbrt(x.numpy()))


exp = _elementwise(torch.exp)
exp2 = _elementwise(torch.exp2)
expm1 = _elementwise(torch.expm1)
log = _elementwise(torch.log)
log1p = _elementwise(torch.log1p)
log2 = _elementwise(torch.log2)
log10 = _elementwise(torch.log10)
sin = _elementwise(torch.sin)
cos = _elementwise(torch.cos)
tan = _elementwise(torch.tan)
asin = _elementwise(torch.asin)
acos = _elementwise(torch.acos)
atan = _elementwise(torch.atan)
sinh = _elementwise(torch.sinh)
cosh = _elementwise(torch.cosh)
tanh = _elementwise(torch.tanh)
asinh = _elementwise(torch.asinh)
acosh = _elementwise(torch.acosh)
atanh = _elementwise(torch.atanh)
erf = _elementwise(torch.erf)
erfc = _elementwise(torch.erfc)
erfinv = _elementwise(torch.erfinv)
lgamma = _elementwise(torch.lgamma)
trunc = _elementwise(torch.trunc)
fmod = _elementwise(torch.fmod)
pow = _elementwise(torch.pow)
hypot = _elementwise(torch.hypot)
atan2 = _elementwise(torch.atan2)
copysign = _elementwise(torch.copysign)
nextafter = _elementwise(torch.nextafter)
signbit = _elementwise(torch.signbit)
erfcx = _elementwise(torch.special.erfcx)
rint = _elementwise(torch.round)
sqrt_rn = _elementwise(torch.sqrt)
div_rn = _elementwise(torch.true_divide)
rcp_rn = _elementwise(torch.reciprocal)
fma = _elementwise(_fma)
rsqrt = _elementwise(_rsqrt)
cbrt = _elementwise(_cbrt)


def to_float32(x: tl.tensor) -> tl.tensor:
    """Return an integer as float32."""
    return x.to(tl.float32)


def to_float16(x: tl.tensor) -> tl.tensor:
    """Return a float32 as float16."""
    return x.to(tl.float16)


def to_bfloat16(x: tl.tensor) -> tl.tensor:
    """Return a float32 as bfloat16."""
    return x.to(tl.bfloat16)


def _reduction(function: Callable[..., Array]) -> Callable[..., tl.tensor]:
    """Return a reduction of NumPy arrays as one of interpreted tensors."""

    def call(x: tl.tensor, axis: int, keep_dims: bool = False) -> tl.tensor:
        data = function(x.handle.data, axis=axis, keepdims=keep_dims)
        return _tensor(data, x.dtype, block=np.ndim(data) > 0)

    return call


amax = _reduction(np.max)
amin = _reduction(np.min)
prod = _reduction(np.prod)
any_of = _reduction(np.bitwise_or.reduce)
all_of = _reduction(np.bitwise_and.reduce)


def _scan(combine: Callable[..., Array]) -> Callable[..., tl.tensor]:
    """Return a scan of interpreted tensors by a function of two NumPy arrays.

    As on a GPU, every step combines twice as many elements: one after the other they would be rounded more often.
    """

    def call(x: tl.tensor, axis: int) -> tl.tensor:
        data = np.moveaxis(x.handle.data, axis, 0).copy()
        step = 1
        while step < len(data):
            with np.errstate(all="ignore"):  # lanes beyond the end hold anything
                data[step:] = combine(data[:-step], data[step:])
            step *= 2
        return _tensor(np.moveaxis(data, 0, axis), x.dtype, block=True)

    return call


cumsum = _scan(np.add)
cumprod = _scan(np.multiply)
logcumsumexp = _scan(np.logaddexp)


def _arg_reduction(pick: Callable[..., Array]) -> Callable[..., tuple[tl.tensor, tl.tensor]]:
    """Return NumPy's argmax or argmin as a reduction of (value, index) pairs.

    Where the indices ascend along the axis, NumPy has torch's rules: the first NaN, else the first of equals.
    """

    def call(x: tl.tensor, at: tl.tensor, axis: int, keep_dims: bool = False) -> tuple[tl.tensor, tl.tensor]:
        values, indices = np.broadcast_arrays(x.handle.data, at.handle.data)
        order = np.argsort(indices, axis=axis, kind="stable")
        values, indices = (np.take_along_axis(data, order, axis) for data in (values, indices))
        places = np.expand_dims(pick(values, axis=axis), axis)
        return (_take(values, places, axis, keep_dims, x.dtype), _take(indices, places, axis, keep_dims, at.dtype))

    return call


def _take(data: Array, places: Array, axis: int, keep_dims: bool, dtype: tl.dtype) -> tl.tensor:
    elements = np.take_along_axis(data, places, axis)
    elements = elements if keep_dims else np.squeeze(elements, axis)
    return _tensor(elements, dtype, block=elements.ndim > 0)


argmax = _arg_reduction(np.argmax)
argmin = _arg_reduction(np.argmin)
