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
    """The value of an op on arguments by name. A copy's is what it writes: where to is the store's to say."""
    made: torch.Tensor
    if target is aten.copy_.default:
        into: torch.Tensor = given["self"]
        made = prims.convert_element_type.default(given["src"], into.dtype).expand(into.shape)
    elif target in RESHAPES:
        made = given["self"].reshape(given["size"])
    elif target is aten.index_select.default:
        made = _index_select(given["self"], given["dim"], given["index"])
    else:  # the arguments that a spec leaves out and an op cannot do without
        placed = {argument.name: device for argument in target._schema.arguments if argument.name == "device"}
        made = target(**given, **placed)
    return made


def _index_select(table: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """As a gather: what Inductor makes of an ``index_select`` takes negative indices, which eager does not."""
    if not table.dim():
        return table.reshape(1).gather(0, index.to(torch.int64).reshape(1)).reshape(())
    dim %= table.dim()
    alone = [1] * table.dim()
    alone[dim] = index.numel()
    sizes = [*table.shape[:dim], index.numel(), *table.shape[dim + 1 :]]
    return table.gather(dim, index.to(torch.int64).reshape(alone).expand(sizes))
