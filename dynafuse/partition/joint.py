"""Splits a joint graph into forward and backward.

Random ops become seeds and counters first (torch's own pass), so that the backward draws a mask again instead of
keeping it. What is kept and what is computed again is torch's min-cut.

Worked example: the backward of ``dropout(relu(x))`` receives ``x`` and a seed, no mask.
"""

from __future__ import annotations

from typing import Any

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch.fx import GraphModule


def split_joint(joint: GraphModule, joint_inputs: Any, *, fallback_random: bool, **kwargs: Any) -> Any:
    """The forward and the backward graph of a joint graph."""
    if not fallback_random:
        replace_random(joint)
    kwargs["compiler"] = "inductor"
    return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


def replace_random(module: GraphModule) -> None:
    """Replace random ops by draws from a seed and a counter."""
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in module.graph.nodes]
    with V.set_fake_mode(detect_fake_mode(values)):  # where the pass makes the values of the seeds
        if replace_random_passes(module):
            module.recompile()
