"""Which gradients a recorded backward hands over, instead of copying them out: those of parameters.

They are in memory that their pool lends (``lending.py``), so that the next forward computes there: mostly they are set to
None before it runs. If they turn out to be held for longer, both are recorded anew, with gradients in memory that is no
pool's, as far as steps can be told to write there: others are copied out. Nothing but the next replay of the same backward
writes there, and that does not run as long as somebody holds one of them: the call is launched then, and later ones copy.

Worked example: of a linear layer of 4096 × 4096 in bfloat16 the gradient of the weight is 34 MB, which a copy would read and
write in each step, and have in memory twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from dynafuse.cost.products import PRODUCTS
from dynafuse.ir import Plan, Region


def handed_gradients(module: GraphModule, plan: Plan, parameters: Collection[Any]) -> Mapping[int, Node]:
    """Return the outputs of a backward that it may hand over, by position, each with the value whose memory it is in.

    All outputs that share memory are handed over together or not at all. In memory that is no pool's only those can be that
    are :func:`writable`.

    Args:
        module: The graph, whose outputs AOTAutograd has described.
        plan: Its plan.
        parameters: AOTAutograd's descriptions of the forward's inputs that stay where they are.
    """
    described = module.graph.output_node().meta.get("desc") or ()
    listed = plan.annotated.graph.output_node().args[0]
    assert isinstance(listed, (list, tuple))
    bases = {i: plan.annotated.memory(node) for i, node in enumerate(listed) if isinstance(node, Node)}
    leaving = {base for i, base in bases.items() if base.op in ("placeholder", "get_attr") or i >= len(described)
               or getattr(described[i], "grad_of", None) not in parameters}
    return {i: base for i, base in bases.items() if base not in leaving}


def writable(plan: Plan) -> set[Node]:
    """Return the values of known sizes that steps write to memory which they can be given: kernels' and products'."""
    writing = (step for step in plan.steps if isinstance(step, Region) or step.target in PRODUCTS)
    return {node for step in writing for node, tensor in plan.made_by(step).items()
            if all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride))}
