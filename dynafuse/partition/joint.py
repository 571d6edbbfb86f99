"""Splits a joint graph into forward and backward.

Random ops become seeds and counters first (torch's own pass), so that the backward draws a mask again instead of
keeping it. What is kept and what is computed again is torch's min-cut.

Worked example: the backward of ``dropout(relu(x))`` receives ``x`` and a seed, no mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node

from dynafuse.partition.force import NOTHING, Forcing


def split_joint(joint: GraphModule, joint_inputs: Any, *, fallback_random: bool, forcing: Forcing = NOTHING,
                **kwargs: Any) -> Any:
    """The forward and the backward graph of a joint graph."""
    if not fallback_random:
        replace_random(joint, forcing)
    kwargs["compiler"] = "inductor"
    return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


def replace_random(module: GraphModule, forcing: Forcing = NOTHING) -> None:
    """Replace random ops by draws from a seed and a counter, but for those that are forced to eager.

    Run eager, a draw from a seed would not be the same in the backward.
    """
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in module.graph.nodes]
    kept = [node for node in forcing.forced_to_eager(module.graph) if _is_random(node)]
    with _out_of_sight(kept), V.set_fake_mode(detect_fake_mode(values)):  # where the pass makes the values of the seeds
        if replace_random_passes(module):
            module.recompile()


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


@contextmanager
def _out_of_sight(nodes: Sequence[Node]) -> Iterator[None]:
    """Give nodes a target that no pattern matches, for a while."""
    targets = [node.target for node in nodes]
    for node in nodes:
        node.target = _out_of_sight
    try:
        yield
    finally:
        for node, target in zip(nodes, targets, strict=True):
            node.target = target
