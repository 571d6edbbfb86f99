"""Recovery of constant attention masks in the Dynamo graph, before AOTAutograd picks kernels for attention.

A mask that depends on no input is a constant. One that keeps everything is dropped, one that is the causal triangle becomes
``is_causal=True``: then attention runs its causal kernel instead of reading a dense mask. Nothing is matched by name or
form: the mask's subgraph is evaluated, and its value decides. With dynamic sizes its elements are asked for as functions of
their place (``functions_of_place.py``), which hold for all sizes; what holds up to some size only, as of a window that is
longer than the examples, torch checks before each call. Another kernel may return other strides: a mask stays where
these reach a result of the graph. It stays as well where the kernel without masks cannot take the operands.

Worked example: ``scaled_dot_product_attention(q, k, v, attn_mask=(arange(n)[None] <= arange(n)[:, None]))``
becomes ``scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule, Node

from dynafuse.fallback import answered
from dynafuse.ops.indexing_math import as_expr, known_equal
from dynafuse.passes.constants import Constants, are_handed_on, bodies
from dynafuse.passes.masks.cases import is_everywhere
from dynafuse.passes.masks.functions_of_place import element
from dynafuse.passes.masks.size_checks import SizeChecks
from dynafuse.passes.shown_strides import shows_strides

ATTENTION = (torch._C._nn.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
WIDTH = 8  # of heads: the kernel without masks takes multiples of it, others are padded
LARGEST_MASK = 2**28  # elements; a larger one is left as it is
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def recover_constant_masks(module: GraphModule) -> None:
    """Replace constant attention masks by no mask, or by ``is_causal``, in place, in graphs inside the graph as well."""
    attentions = [n for n in module.graph.nodes if n.op == "call_function" and n.target in ATTENTION]
    inner = bodies(module)
    readers = [*inner, module.graph.output_node()]
    given = [n for reader in readers for n in reader.all_input_nodes if _is_like_mask(n)]
    if not (attentions or inner or given or are_handed_on()):
        return
    constants = Constants(module, inner)
    masks = Masks(constants)
    for node in attentions:
        _recover(node, masks)
    for node in given:
        constants.hand_on(node)
    for body in inner.values():
        recover_constant_masks(body)
    masks.remove_unused()


def _recover(node: Node, masks: Masks) -> None:
    """Replace the mask of one attention if it is constant."""
    arguments = dict(zip(ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    mask = arguments.get("attn_mask")
    if not isinstance(mask, Node) or arguments.get("is_causal"):
        return
    meaning = masks.meaning(mask)
    if meaning == "other":
        return
    with_mask = node.args, node.kwargs
    arguments |= {"attn_mask": None, "is_causal": meaning == "causal"}
    query, key, value = (arguments.pop(name) for name in ARGUMENTS[:3])
    if any(map(_is_padded_across, (query, key, value))):
        return
    node.args, node.kwargs = (query, key, value), arguments
    if shows_strides(node):
        node.args, node.kwargs = with_mask
    else:
        masks.rely_on(mask)


def _is_padded_across(operand: Any) -> bool:
    """Return whether padded heads of an operand do not lie along its last dimension, in which the kernel wants them.

    Padding keeps the format that strides suggest, and torch looks at the operand's strides only before it pads.
    """
    value = operand.meta["example_value"] if isinstance(operand, Node) else operand
    return (isinstance(value, torch.Tensor) and value.shape[-1] % WIDTH != 0
            and suggest_memory_format(value) is torch.channels_last)


class Masks:
    """The constant masks of one graph: what each does, and what computes it."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.meanings: dict[Node, str] = {}
        self.checks: dict[Node, SizeChecks] = {}  # which what masks mean depends on
        self.replaceable: set[Node] = set()  # what computes masks that attention does without

    def meaning(self, mask: Node) -> str:
        """Return what a mask does: ``full`` keeps everything, ``causal`` is the triangle, ``other`` is all else."""
        if mask not in self.meanings:
            sources = self.constants.sources(mask) if _is_like_mask(mask) else None
            meaning = "other" if sources is None else self._told(mask, sources)
            self.meanings[mask] = meaning
            if sources is not None and meaning != "other":
                self.replaceable |= sources
        return self.meanings[mask]

    def _told(self, mask: Node, sources: set[Node]) -> str:
        sizes = self.constants.sizes(sources)
        if sizes:
            self.checks[mask] = SizeChecks(sizes[0].node.shape_env)
            return answered(lambda: self._told_for_all_sizes(mask, sources)) or "other"
        return _told(self.constants.value(mask, sources)) if _is_small(mask.meta["example_value"]) else "other"

    def _told_for_all_sizes(self, mask: Node, sources: set[Node]) -> str:
        with mask.meta["example_value"].fake_mode:
            place, cases = element(self.constants.recipe(mask, sources), self.constants.sizes(sources), self.checks[mask])
        if is_everywhere(cases, True):
            return "full"
        rows, columns = map(as_expr, mask.meta["example_value"].shape[-2:])
        row, column = place[-2:]
        is_triangle = is_everywhere(cases, True, row - column) and is_everywhere(cases, False, column - row - 1)
        return "causal" if is_triangle and known_equal(rows, columns) else "other"

    def rely_on(self, mask: Node) -> None:
        """Have torch check before each call what a mask's meaning depends on."""
        if mask in self.checks:
            self.checks[mask].ask()

    def remove_unused(self) -> None:
        """Remove what computes masks that are not needed, as far as nothing else reads it.

        Other calls whose results nobody reads stay: torch's own elimination does not know that methods such as ``add_``
        write.
        """
        if not self.replaceable:
            return
        module = self.constants.module
        for node in reversed(list(module.graph.nodes)):
            if node in self.replaceable and not node.users and node.op != "placeholder":
                module.graph.erase_node(node)
        module.recompile()


def _is_like_mask(node: Node) -> bool:
    """Return whether a node has the dtype and dimensions of masks."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() >= 2


def _is_small(mask: torch.Tensor) -> bool:
    """Return whether a mask has sizes that are known, and not too many elements to look at."""
    return all(isinstance(size, int) for size in mask.shape) and math.prod(mask.shape) <= LARGEST_MASK


def _told(constant: Any) -> str:
    """Return what a mask of a value does."""
    if not isinstance(constant, torch.Tensor) or constant.is_meta:
        return "other"
    if bool(constant.all()):
        return "full"
    rows, columns = constant.shape[-2:]
    triangle = torch.ones(rows, columns, dtype=torch.bool, device=constant.device).tril()
    return "causal" if rows == columns and bool((constant == triangle).all()) else "other"
