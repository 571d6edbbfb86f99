"""An op of a spec as a call of torch: for programs that Inductor compiles, and to evaluate a region where it is measured.

Worked example: ``torch_call(aten.view.default, {"self": x, "size": [4, 8]}, device)`` reshapes ``x``, whatever its strides:
a spec promises the sizes of what is between its ops, not the strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

aten, prims = torch.ops.aten, torch.ops.prims
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default})


def torch_call(target: torch._ops.OpOverload, given: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Return the value of an op; of a copy, what it writes, because the store says where to.

    Args:
        target: The op.
        given: Its arguments by schema name. Devices are left out.
        device: Where a tensor is made by an op that takes a device.
    """
    value: torch.Tensor
    if target is aten.copy_.default:
        written: torch.Tensor = given["self"]
        value = prims.convert_element_type.default(given["src"], written.dtype).expand(written.shape)
    elif target in RESHAPES:
        value = given["self"].reshape(given["size"])
    elif target is aten.index_select.default:
        value = _index_select(given["self"], given["dim"], given["index"])
    else:  # specs leave out devices, which creations cannot do without
        devices = {argument.name: device for argument in target._schema.arguments if argument.name == "device"}
        value = target(**given, **devices)
    return value


def _index_select(table: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Compute an ``index_select`` as a gather: Inductor's takes negative indices, which eager does not."""
    if not table.dim():
        return table.reshape(1).gather(0, index.to(torch.int64).reshape(1)).reshape(())
    dim %= table.dim()
    along_dim = [1] * table.dim()
    along_dim[dim] = index.numel()
    sizes = [*table.shape[:dim], index.numel(), *table.shape[dim + 1 :]]
    return table.gather(dim, index.to(torch.int64).reshape(along_dim).expand(sizes))
