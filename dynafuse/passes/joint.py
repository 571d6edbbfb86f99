"""Splits a joint graph into forward and backward.

Random ops become seeds and counters first (torch's own pass), so that the backward draws a mask again instead of
keeping it. What is kept and what is computed again is for torch's min-cut to say, or for the cost model (``cut.py``).

Worked example: the backward of ``dropout(relu(x))`` receives ``x`` and a seed, no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch._functorch.config
from torch._functorch import partitioners
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node

from dynafuse.fallback import STRICT, Guard
from dynafuse.partition.forcing import NOTHING, Forcing
from dynafuse.passes.casts import keep_written_casts
from dynafuse.passes.duplicates import merge_duplicates
from dynafuse.passes.overwritten import save_before_overwriting
from dynafuse.passes.rematerialize import Sides
from dynafuse.passes.snapshot import Snapshot

Cut = Callable[[GraphModule, Sides], list[Node]]


class NotSplit(Exception):
    """There is no forward and no backward that could be trusted."""


def split_joint(joint: GraphModule, joint_inputs: Any, *, fallback_random: bool, forcing: Forcing = NOTHING,
                cut: Cut | None = None, guard: Guard = STRICT, **kwargs: Any) -> Any:
    """The forward and the backward graph of a joint graph. ``cut`` says what the backward keeps, if not torch's min-cut.

    Raises NotSplit if that has failed, and the ``guard`` does not raise the failure itself.
    """
    before, results = Snapshot.of(joint), kwargs["num_fwd_outputs"]

    def own() -> tuple[GraphModule, GraphModule]:
        if not fallback_random:
            replace_random(joint, forcing)
        keep_written_casts(joint)  # before equal casts are merged
        joint.graph.eliminate_dead_code()
        merge_duplicates(joint.graph)
        own_merging = torch._functorch.config.patch(cse=False)
        with own_merging, _cutting(joint, cut, guard) if cut else nullcontext():
            return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **kwargs)

    def torchs() -> tuple[GraphModule, GraphModule]:
        again = before.restored()
        keep_written_casts(again)
        return partitioners.default_partition(again, joint_inputs, **kwargs)

    split = "split into forward and backward"
    forward, backward = guard.stage(split, own, lambda: guard.stage(split, torchs, _not_split))
    guard.stage("inputs saved for the backward", lambda: save_before_overwriting(forward, backward, results), _not_split)
    return forward, backward


def _not_split() -> NoReturn:
    raise NotSplit


@contextmanager
def _cutting(joint: GraphModule, cut: Cut, guard: Guard) -> Iterator[None]:
    """Have torch's partitioner ask ``cut`` what is kept; all else it does stays in force, a memory budget too.

    It has no argument for that.
    """
    torchs = partitioners.choose_saved_values_set

    def chosen(joint_graph: Graph, node_info: Any, memory_budget: float = 1) -> list[Node]:
        def torchs_choice() -> list[Node]:
            found: list[Node] = torchs(joint_graph, node_info, memory_budget)
            return found

        if memory_budget != 1:
            return torchs_choice()
        return guard.stage("what the backward keeps", lambda: cut(joint, node_info), torchs_choice)

    partitioners.choose_saved_values_set = chosen
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = torchs


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
