"""The rewrites of a Dynamo graph, in order: what needs ops as the user called them, before AOTAutograd takes them apart.

Worked example: of ``rewrite(module)`` the calls of ``scaled_dot_product_attention`` come back without masks that keep all.
"""

from __future__ import annotations

from collections.abc import Collection

from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from dynafuse.cost.device import Device
from dynafuse.passes.attention import join_attention
from dynafuse.passes.equal_sizes import equate_factors
from dynafuse.passes.masks import recover_constant_masks


def rewrite(module: GraphModule, device: Device | None = None, forced: Collection[Node] = ()) -> GraphModule:
    """Run the rewrites of the Dynamo graph in place, and return the module.

    Args:
        module: The graph.
        device: The device that attention is priced for; None to leave it as it is written.
        forced: Calls that are no part of attention that is joined.
    """
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None and context.fake_mode.shape_env is not None:
        equate_factors(context.fake_mode.shape_env)
    if device is not None:
        join_attention(module, device, forced)
    recover_constant_masks(module)
    return module
