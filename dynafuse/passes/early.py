"""The rewrites of a Dynamo graph, in order: what needs ops as the user called them, before AOTAutograd takes them apart.

Worked example: of ``rewrite(module)`` the calls of ``scaled_dot_product_attention`` come back without masks that keep all.
"""

from __future__ import annotations

from torch._guards import TracingContext
from torch.fx import GraphModule

from dynafuse.passes.equal_sizes import equate_factors
from dynafuse.passes.masks import recover_constant_masks


def rewrite(module: GraphModule) -> GraphModule:
    """Run the rewrites of the Dynamo graph in place, and return the module."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None and context.fake_mode.shape_env is not None:
        equate_factors(context.fake_mode.shape_env)
    recover_constant_masks(module)
    return module
