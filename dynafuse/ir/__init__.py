"""What the steps of the pipeline hand to each other: frozen values, each with a ``__str__`` worth reading.

The way of a graph: ``Annotated`` (an FX graph plus facts per node) → ``Plan`` (regions, eager calls and views in
order) → ``Spec`` per region (canonical, without names: what a kernel is made from and keyed by) → ``Lowered`` (generated
source and its launches).

Worked example: ``relu(x) + 1`` over ``float32[8, 4]`` becomes one region, whose spec prints as::

    in0: float32[8, 4] (4, 1)
    %0 = aten.relu.default(self=in0) : float32[8, 4]
    %1 = aten.add.Tensor(self=%0, other=1, alpha=1) : float32[8, 4]
    store %1 float32[8, 4] (4, 1)
"""

from dynafuse.fx import Size
from dynafuse.ir.graph import (
    ALIGNED,
    Accuracy,
    Annotated,
    Axis,
    Dims,
    Facts,
    Role,
    Tensor,
    is_piece,
    returns_new,
)
from dynafuse.ir.kernel import (
    ARRIVED,
    Launch,
    Lowered,
    Workspace,
)
from dynafuse.ir.nests import Apart, nests_apart
from dynafuse.ir.plan import (
    MAX_TENSORS,
    Decision,
    FoldFamily,
    FoldFit,
    Option,
    Override,
    Plan,
    Refusal,
    RefusalKind,
    Region,
)
from dynafuse.ir.spec import (
    COUNT,
    INT32_LIMIT,
    Classed,
    Layout,
    Nest,
    OpSpec,
    Ref,
    Spec,
    Store,
    iter_instances,
    references,
)

__all__ = [
    "ALIGNED", "ARRIVED", "COUNT", "INT32_LIMIT", "MAX_TENSORS", "Accuracy", "Annotated", "Apart", "Axis",
    "Classed", "Decision", "Dims", "Facts", "FoldFamily", "FoldFit", "Launch", "Layout", "Lowered", "Nest", "OpSpec",
    "Option", "Override", "Plan", "Ref", "Refusal", "RefusalKind", "Region", "Role", "Size", "Spec", "Store", "Tensor",
    "Workspace", "is_piece", "iter_instances", "nests_apart", "references", "returns_new",
]
