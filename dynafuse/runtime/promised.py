"""Results of eager ops in the strides that the plan counts on: torch predicts strides, and is sometimes wrong.

Worked example: with some versions of torch a convolution by a channels-last weight is said to return channels-last, and
returns rows. ``as_planned(result, (2, 320, 8, 8), (20480, 1, 2560, 320), "aten.convolution.default")`` is a copy in
channels-last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_planned(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], op: str) -> torch.Tensor:
    """Return the result of an op in the planned strides: the tensor itself, or a copy if its strides are others.

    Args:
        tensor: What the op returned.
        sizes: The planned sizes.
        strides: The planned strides, in elements; those of dimensions of size 1 do not matter.
        op: The op's name, for the error.

    Raises:
        RuntimeError: The sizes are not the planned ones: kernels would read past the tensor's end.
    """
    if tuple(tensor.shape) != tuple(sizes):
        raise RuntimeError(
            f"{op} returned a tensor of sizes {tuple(tensor.shape)}; the graph was compiled for {tuple(sizes)}: either the "
            "program asserts of a size what the data does not hold, or the op's fake implementation is wrong, as "
            "torch.library.opcheck would tell")
    if all(size == 1 or have == want for size, have, want in zip(sizes, tensor.stride(), strides, strict=True)):
        return tensor
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
