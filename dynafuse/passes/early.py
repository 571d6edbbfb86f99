"""The rewrites of a Dynamo graph, in order: what needs ops as the user called them, before AOTAutograd takes them apart.

Worked example: of ``rewrite(module)`` the calls of ``scaled_dot_product_attention`` come back without masks that keep all.
"""

from __future__ import annotations

from torch.fx import GraphModule

from dynafuse.passes.attention_masks import recover_constant_masks


def rewrite(module: GraphModule) -> GraphModule:
    """Run the rewrites of the Dynamo graph in place, and return the module."""
    recover_constant_masks(module)
    return module
