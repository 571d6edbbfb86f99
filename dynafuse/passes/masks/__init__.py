"""Attention masks that depend on no input, recovered as what they keep: everything, or the causal triangle.

``recovery`` finds them in a Dynamo graph and evaluates them. With dynamic sizes ``functions_of_place`` tells their elements
for all sizes: as numbers that differ by ``cases``, made by the rules for ops in ``pointwise_cases``; and ``size_checks`` has
torch check what holds of the examples alone.

Worked example: attention under ``arange(n)[None] <= arange(n)[:, None]`` becomes causal attention, whatever ``n`` is.
"""

from dynafuse.passes.masks.recovery import recover_constant_masks

__all__ = ["recover_constant_masks"]
