"""Split of a joint graph into forward and backward.

Random ops become draws from a seed first (torch's own pass), so that the backward can draw a mask again instead of keeping
it. Torch's min-cut decides what the backward keeps, or with ``rematerialize="cost"`` the cost model (``rematerialize.py``).

Worked example: the backward of ``sin(cos(x))`` receives ``x`` and computes both again; that of ``dropout(sin(x))``
receives ``x`` and, of a byte an element, the mask.
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
from dynafuse.passes.clones import remove_clones
from dynafuse.passes.duplicates import merge_duplicates
from dynafuse.passes.host_tensors import make_on_device
from dynafuse.passes.normalize import settle_strides
from dynafuse.passes.overwritten import save_before_overwriting
from dynafuse.passes.permutations import gather_by_inverses
from dynafuse.passes.pool_gradients import use_offsets
from dynafuse.passes.remade import make_again
from dynafuse.passes.rematerialize import Sides
from dynafuse.passes.snapshot import Snapshot

Cut = Callable[[GraphModule, Sides], list[Node]]
Join = Callable[[GraphModule], None]


class NotSplit(Exception):
    """Raised if a joint graph could not be split into a forward and a backward that can be trusted."""


def split_joint(joint: GraphModule, joint_inputs: Any, *, fallback_random: bool, forcing: Forcing = NOTHING,
                cut: Cut | None = None, join: Join | None = None, guard: Guard = STRICT, **kwargs: Any) -> Any:
    """Return the forward and the backward graph of a joint graph, as AOTAutograd's ``partition_fn``.

    Args:
        joint: The joint graph, which is changed.
        joint_inputs: Its inputs, for torch's partitioner.
        fallback_random: Whether random ops stay eager's own.
        forcing: What the user has forced; random ops that are forced to eager stay.
        cut: Returns the values that the backward keeps; without it, or if it fails, torch's min-cut does.
        join: Has libraries compute in the joint graph, in place, what they are predicted to compute faster.
        guard: Says how far a failure reaches: torch's default partition splits instead.
        **kwargs: What AOTAutograd passes on to torch's partitioner.

    Raises:
        NotSplit: The default partition fails too, and the ``guard`` does not raise the failure itself.
    """
    before, results = Snapshot.of(joint), kwargs["num_fwd_outputs"]

    def min_cut() -> tuple[GraphModule, GraphModule]:
        settle_strides(joint)  # while forward and backward are one: what one keeps, the other is to know in the same strides
        make_on_device(joint)
        if not fallback_random:
            replace_random(joint, forcing)
        keep_written_casts(joint)  # before equal casts are merged
        use_offsets(joint.graph)
        joint.graph.eliminate_dead_code()
        merge_duplicates(joint.graph)
        if join is not None:
            join(joint)
        gather_by_inverses(joint.graph, forcing.forced_to_eager(joint.graph))
        remove_clones(joint)
        merged_already = torch._functorch.config.patch(cse=False)
        with merged_already, _cutting(joint, cut, guard) if cut else nullcontext():
            return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **kwargs)

    def default() -> tuple[GraphModule, GraphModule]:
        restored = before.restored()
        settle_strides(restored)
        keep_written_casts(restored)
        return partitioners.default_partition(restored, joint_inputs, **kwargs)

    split = "split into forward and backward"
    forward, backward = guard.stage(split, min_cut, lambda: guard.stage(split, default, _not_split))
    guard.stage("what is made again", lambda: make_again(forward, backward, results), _not_split)
    guard.stage("inputs saved for the backward", lambda: save_before_overwriting(forward, backward, results), _not_split)
    return forward, backward


def _not_split() -> NoReturn:
    raise NotSplit


@contextmanager
def _cutting(joint: GraphModule, cut: Cut, guard: Guard) -> Iterator[None]:
    """Have torch's partitioner keep what ``cut`` returns, unless the user has set a memory budget.

    The partitioner has no argument for this, so its function is replaced inside the block.
    """
    original = partitioners.choose_saved_values_set

    def choose(joint_graph: Graph, node_info: Any, memory_budget: float = 1) -> list[Node]:
        def torchs_choice() -> list[Node]:
            saved: list[Node] = original(joint_graph, node_info, memory_budget)
            return saved

        if memory_budget != 1:
            return torchs_choice()
        return guard.stage("what the backward keeps", lambda: cut(joint, node_info), torchs_choice)

    partitioners.choose_saved_values_set = choose
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = original


def replace_random(module: GraphModule, forcing: Forcing = NOTHING) -> None:
    """Replace random ops by draws from a seed, except those that are forced to eager.

    Eager runs the op itself: a draw from a seed would not be the same in the backward.

    Args:
        module: The graph, which is changed in place.
        forcing: What the user has forced.
    """
    if not any(_is_random(node) for node in module.graph.nodes):
        return
    # Inductor's passes are private, and take a good part of a second to import.
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in module.graph.nodes]
    forced = [node for node in forcing.forced_to_eager(module.graph) if _is_random(node)]
    with _hidden(forced), V.set_fake_mode(detect_fake_mode(values)):  # the mode in which the pass makes the seeds' values
        if replace_random_passes(module):
            module.recompile()


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


@contextmanager
def _hidden(nodes: Sequence[Node]) -> Iterator[None]:
    """Give nodes a target that no pattern matches, inside the block."""
    targets = [node.target for node in nodes]
    for node in nodes:
        node.target = _hidden
    try:
        yield
    finally:
        for node, target in zip(nodes, targets, strict=True):
            node.target = target
