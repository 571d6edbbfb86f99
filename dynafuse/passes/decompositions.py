"""The decomposition table for AOTAutograd: Inductor's, without the ops that are better kept whole.

Worked example: ``layer_norm`` becomes ``var_mean``, ``sub``, ``rsqrt``, ``mul``; ``max_pool2d`` stays one op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._decomp.decompositions import pw_cast_for_opmath, upsample_compute_output_size
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import suggest_memory_format

from dynafuse.ops.literals import opmath
from dynafuse.ops.pooling import maxima_and_offsets
from dynafuse.ops.table import Call
from dynafuse.ops.upsampling import BACKWARD, by_dimension
from dynafuse.passes.foreach import foreach_decompositions

aten = torch.ops.aten

WHOLE = {
    aten.addcmul: "the decomposition of older torch refuses a float as the factor of integers, which eager truncates",
    aten.clamp: "the decomposition gives integers where a bound is a float that is known at run time only",
    aten.embedding_dense_backward: "eager's kernel may be faster; embedding_gradients.py makes scatters of the others",
    aten.index_copy: "negative indices are out of range in eager; in the decomposition they are not",
    aten.index_fill: "made of index_copy, which takes no negative indices",
    aten.index_select: "negative indices are out of range in eager; in the decomposition they are not",
    aten.logit_backward: "NaN where the input is NaN; 0 in the decomposition",
    aten.max_pool2d_with_indices: "one kernel of eager's makes both results; decomposed only where kernels do so too",
    aten.max_pool3d_with_indices: "as in two dimensions",
    aten.max_unpool2d: "keeps channels-last strides; the decomposition does not",
    aten.take: "decomposed, an index without dimensions would be asked for its value while tracing",
    aten.eye: "the decomposition compares positions in 8 bits, and ptxas loses numbers that are added to pairs of such",
    aten.frac: "it subtracts its operand's rounded value: both have to be as they are in 16 bits",
    aten.round: "the decomposition multiplies by a reciprocal where eager divides by a power of ten",
    aten.sgn: "in 16 bits it has to look at the rounded value",
    aten.soft_margin_loss_backward: "the decomposition subtracts nearly equal numbers",
    aten.max_pool2d_with_indices_backward: "gathers; the decomposition scatters",
}
"""Ops that Inductor would decompose, with the reason why they are kept whole here."""

DRAWN = (aten.bernoulli.default, aten.rrelu_with_noise_functional.default, aten.rand_like.default, aten.randn_like.default,
         aten.randint_like.default, aten.randint_like.low_dtype)
"""Ops whose decompositions draw other random numbers than they do, on a GPU, of some strides or with older torch."""

OF_THE_INPUT = (aten.mish_backward.default, aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default)
"""Derivatives that have in eager the dtype of the op's input, and in the decomposition that of the gradient."""

MEAN = 1  # of a loss's ``reduction``

PROMOTED = (aten.hardtanh_backward.default, aten.threshold_backward.default)
"""Derivatives that have in eager the common dtype of gradient and input, and in the decomposition that of the gradient."""

TRUNCATING = (aten.threshold.default, aten.threshold_backward.default)
"""Ops whose numbers eager truncates where their tensors are of integers, and the decomposition does not."""

UPSAMPLING = (
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d, aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d, aten.upsample_linear1d, aten.upsample_bilinear2d,
    aten.upsample_trilinear3d, aten.upsample_bicubic2d,
)
"""Ops that torch decomposes before autograd, so that their gradients are scatters; the gradients of whole ops gather."""

EARLY = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
"""Where torch asks an op for a decomposition before autograd sees it."""


@cache
def decompositions(fallback_random: bool = False, kernels: bool = False) -> dict[OpOverload, Callable[..., Any]]:
    """Return the decomposition table.

    Args:
        fallback_random: Whether ops that draw random numbers stay eager's own.
        kernels: Whether there are kernels of windows and of many tensors: max pooling then keeps the places of its maxima in
            their windows, in int8, instead of indices in int64, and ops over lists become ops on each tensor.
    """
    from torch._inductor.decomposition import decompositions as plain  # slow to import, and private to torch
    from torch._inductor.decomposition import fast_random_decomps

    table = dict(plain if fallback_random else fast_random_decomps())
    for packet in WHOLE:
        for name in packet.overloads():
            table.pop(getattr(packet, name), None)
    if kernels:
        table.update(foreach_decompositions())
        table[aten.max_pool2d_with_indices.default] = _max_pool(2)
        table[aten.max_pool3d_with_indices.default] = _max_pool(3)
    if fallback_random:
        for target in DRAWN:
            table.pop(target, None)
    for packet in UPSAMPLING:
        table[packet.default] = decomposition_table[packet.default]
    for target in BACKWARD:
        table[target] = _by_dimension(target)
    table[aten.convolution.default] = _convolution
    table[aten.cat.default] = _cat(table[aten.cat.default])
    table[aten.smooth_l1_loss_backward.default] = pw_cast_for_opmath(_smooth_l1_loss_backward)
    for target in OF_THE_INPUT:
        table[target] = _of_the_input(table[target])
    for target in PROMOTED:
        table[target] = _promoted(table[target])
    for target in TRUNCATING:
        table[target] = _truncating(table[target])
    table[aten.lerp.Scalar] = _lerp(table[aten.lerp.Scalar])
    table[aten.index_add.default] = _index_add(table[aten.index_add.default])
    table[aten.linalg_vector_norm.default] = _vector_norm(table[aten.linalg_vector_norm.default])
    return table


def _max_pool(rank: int) -> Callable[..., Any]:
    """Return a decomposition of max pooling in ``rank`` dimensions, for windows that kernels write out.

    It makes maxima, and their indices of their places in the windows.
    """
    def max_pool(self: torch.Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
                 dilation: Sequence[int] = (1,), ceil_mode: bool = False) -> Any:
        from torch._inductor import inductor_prims  # noqa: F401  (registers the two ops; slow to import)

        given = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        if maxima_and_offsets(given, self.dtype) is None:
            return NotImplemented
        window = [list(sizes) * (rank // len(sizes)) for sizes in (kernel_size, stride or kernel_size, padding, dilation)]
        maxima, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(self, *window, ceil_mode)
        size, *places = window
        indices = torch.ops.prims._low_memory_max_pool_offsets_to_indices(offsets, size, self.shape[-rank:], *places)
        return maxima, indices

    return max_pool


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> Any:
    """Return a convolution and the sum with its bias, on a GPU: eager's library launches a kernel for that sum as well."""
    if bias is None or x.device.type != "cuda":
        return NotImplemented
    return aten.convolution.default(x, weight, None, *rest) + bias.view(-1, *[1] * (weight.dim() - 2))


def _by_dimension(target: OpOverload) -> Callable[..., Any]:
    """Return a decomposition of a gradient of upsampling: dimension by dimension, where many outputs read an element.

    For a step, the other dimensions are not upsampled: they have as many outputs as elements, and each reads its own.
    """
    names = [argument.name for argument in target._schema.arguments]

    def backward(*given: Any, **others: Any) -> Any:
        args = {**dict.fromkeys(names), **dict(zip(names, given, strict=False)), **others}
        grad: torch.Tensor = args["grad_output"]
        if not by_dimension(Call(target, args, (), grad.dtype)):
            return NotImplemented
        outputs, sizes = list(args["output_size"]), list(args["input_size"])
        scales = [name for name in names if name.startswith("scales")]
        result = grad.to(opmath(grad.dtype))
        for d, name in enumerate(scales):
            before, outputs[d] = [*outputs], sizes[d - len(outputs)]
            step = {"grad_output": result, "output_size": before, "input_size": [*sizes[:-len(outputs)], *outputs]}
            result = target(**{**args, **step, **dict.fromkeys(scales), name: args[name]})
        return result.to(grad.dtype)

    return backward


def _cat(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's decomposition, which drops empty tensors, with results in eager's strides and dtype."""
    def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
        result = decomposition(tensors, dim)
        if result is NotImplemented:
            return result
        formats = {suggest_memory_format(tensor) for tensor in tensors}
        result = result.contiguous(memory_format=formats.pop() if len(formats) == 1 else torch.contiguous_format)
        return result.to(reduce(torch.promote_types, (tensor.dtype for tensor in tensors)))

    return cat


def _of_the_input(decomposition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch's decomposition of a derivative, with results in the dtype of the op's own input."""
    def backward(grad_output: torch.Tensor, self: torch.Tensor, *rest: Any) -> torch.Tensor:
        return decomposition(grad_output, self, *rest).to(self.dtype)

    return backward


def _smooth_l1_loss_backward(grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int,
                             beta: float) -> torch.Tensor:
    """Return the gradient of a smooth L1 loss: NaN where the difference is NaN, where torch's decomposition gives 0."""
    difference = self - target
    scaled = grad_output / self.numel() if reduction == MEAN else grad_output
    return torch.where(difference.abs() > beta, scaled * difference.sign(), scaled * difference / beta)


def _promoted(decomposition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch's decomposition of a derivative, with results in the dtype that gradient and input have in common."""
    def backward(grad_output: torch.Tensor, self: torch.Tensor, *rest: Any) -> torch.Tensor:
        return decomposition(grad_output, self, *rest).to(torch.result_type(grad_output, self))

    return backward


def _truncating(decomposition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch's decomposition, called with numbers of the tensors' kind."""
    def threshold(*arguments: Any) -> torch.Tensor:
        if not any(isinstance(argument, torch.Tensor) and argument.is_floating_point() for argument in arguments):
            arguments = tuple(int(argument) if isinstance(argument, float) else argument for argument in arguments)
        return decomposition(*arguments)

    return threshold


def _lerp(decomposition: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a decomposition that keeps the op whole where its weight is known only once it runs: it asks for its size."""
    def lerp(start: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
        if isinstance(weight, (torch.SymInt, torch.SymFloat)) and not weight.node.has_hint():
            return NotImplemented
        return decomposition(start, end, weight)

    return lerp


def _index_add(decomposition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch's decomposition, called with an index of one dimension: one of none would drop the source's dimension."""
    def index_add(x: torch.Tensor, dim: int, index: torch.Tensor, tensor: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
        return decomposition(x, dim, index.reshape(-1), tensor, alpha=alpha)

    return index_add


def _vector_norm(decomposition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch's decomposition, called with dimensions counted from the front.

    Up to torch 2.11 it does not reduce a dimension of size 1 that is counted from the end.
    """
    def vector_norm(x: torch.Tensor, ord: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *,
                    dtype: torch.dtype | None = None) -> torch.Tensor:
        front = None if dim is None else [d % max(x.ndim, 1) for d in dim]
        return decomposition(x, ord, front, keepdim, dtype=dtype)

    return vector_norm


@contextmanager
def whole_in_autograd() -> Iterator[None]:
    """Have autograd, while a graph is traced, take upsampling for one op: it is decomposed after that, by the table.

    Torch asks the ops themselves for decompositions before autograd, so they have none meanwhile; Dynamo compiles one graph
    at a time. Tensors with dynamic sizes or without elements are decomposed nevertheless: torch cannot trace the gradients.
    """
    ops = [op for packet in UPSAMPLING for op in (packet.vec, packet.default)]
    before = [dict(op.py_kernels) for op in ops]
    for packet in UPSAMPLING:
        packet.vec.py_kernels.update(dict.fromkeys(EARLY, _with_sizes(packet)))
        for key in EARLY:
            packet.default.py_kernels.pop(key, None)
    _forget_dispatch(ops)
    try:
        yield
    finally:
        for op, kernels in zip(ops, before, strict=True):
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
        _forget_dispatch(ops)


def _forget_dispatch(ops: Sequence[OpOverload]) -> None:
    for op in ops:
        op._dispatch_cache.clear()


def _with_sizes(packet: OpOverloadPacket) -> Callable[..., torch.Tensor]:
    """Return the overload of an upsampling op that users call, by way of the one that takes sizes and has a gradient."""
    decomposed = packet.vec.py_kernels[DispatchKey.Autograd]

    def upsample(x: torch.Tensor, output_size: Sequence[int] | None, *rest: Any) -> torch.Tensor:
        *options, factors = rest
        sizes = upsample_compute_output_size(x.size(), output_size, factors)
        if not all(isinstance(size, int) for size in (*x.shape, *sizes)) or x.numel() == 0:
            result: torch.Tensor = decomposed(x, output_size, *rest)
        else:
            result = packet.default(x, sizes, *options, *(factors or [None] * len(sizes)))
        return result

    return upsample
