"""Recovery of constant attention masks in the Dynamo graph, before AOTAutograd picks kernels for attention.

A mask that depends on no input is a constant. One that keeps everything is dropped, one that is the causal triangle becomes
``is_causal=True``: then attention runs its causal kernel instead of reading a dense mask. Nothing is matched by name or
form: the mask's subgraph is evaluated, and its value decides. Another kernel may return other strides: a mask stays where
these reach a result of the graph.

Worked example: ``scaled_dot_product_attention(q, k, v, attn_mask=(arange(n)[None] <= arange(n)[:, None]))`` over static
``n`` becomes ``scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)``.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule, Node

from dynafuse.passes import strides

ATTENTION = (torch._C._nn.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
LARGEST_MASK = 2**28  # elements; a larger one is left as it is
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


Memory: TypeAlias = frozenset[int | None]
"""Numbers of storages of the tensors that a graph was traced with; None for those that are not known."""


def recover_constant_masks(module: GraphModule) -> None:
    """Replace constant attention masks by no mask, or by ``is_causal``, in place."""
    attentions = [n for n in module.graph.nodes if n.op == "call_function" and n.target in ATTENTION]
    if not attentions:
        return
    masks = Masks(module)
    for node in attentions:
        arguments = dict(zip(ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
        mask = arguments.get("attn_mask")
        if not isinstance(mask, Node) or arguments.get("is_causal"):
            continue
        meaning = masks.meaning(mask)
        if meaning == "other":
            continue
        with_mask = node.args, node.kwargs
        arguments |= {"attn_mask": None, "is_causal": meaning == "causal"}
        query, key, value = (arguments.pop(name) for name in ARGUMENTS[:3])
        node.args, node.kwargs = (query, key, value), arguments
        if _shows_strides(node):
            node.args, node.kwargs = with_mask
    masks.remove_unused()


class Masks:
    """The constant masks of one graph: what each does, and what computes it."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.written = _written_memory(module)
        self.meanings: dict[Node, str] = {}
        self.replaceable: set[Node] = set()  # what computes masks that attention does without

    def meaning(self, mask: Node) -> str:
        """Return what a mask does: ``full`` keeps everything, ``causal`` is the triangle, ``other`` is all else."""
        if mask not in self.meanings:
            ancestors = self._ancestors(mask) if _is_small(mask) else None
            meaning = "other" if ancestors is None else _told(self._value(mask, ancestors))
            self.meanings[mask] = meaning
            if ancestors is not None and meaning != "other":
                self.replaceable |= ancestors
        return self.meanings[mask]

    def remove_unused(self) -> None:
        """Remove what computes masks that are not needed, as far as nothing else reads it.

        Other calls whose results nobody reads stay: torch's own elimination does not know that methods such as ``add_``
        write.
        """
        if not self.replaceable:
            return
        for node in reversed(list(self.module.graph.nodes)):
            if node in self.replaceable and not node.users:
                self.module.graph.erase_node(node)
        self.module.recompile()

    def _ancestors(self, node: Node) -> set[Node] | None:
        """Return the nodes that a node is computed from, itself included; None if one is an input, random or written to."""
        ancestors: set[Node] = set()
        stack = [node]
        while stack:
            current = stack.pop()
            if current in ancestors:
                continue
            if current.op not in ("call_function", "call_method") or not _pure(current):
                return None
            if isinstance(current.meta.get("example_value"), torch.Tensor) and _memory(current) in self.written:
                return None
            ancestors.add(current)
            stack.extend(current.all_input_nodes)
        return ancestors

    def _value(self, node: Node, ancestors: set[Node]) -> Any:
        """Compute a node that depends on no input."""
        values: dict[Node, Any] = {}
        with torch.no_grad(), unset_fake_temporarily():
            for ancestor in (n for n in self.module.graph.nodes if n in ancestors):
                args, kwargs = torch.fx.map_arg((ancestor.args, ancestor.kwargs), values.__getitem__)
                values[ancestor] = _call(ancestor, args, kwargs)
        return values[node]


def _is_small(mask: Node) -> bool:
    """Return whether a mask's sizes are known, and few enough to look at each element."""
    shape = getattr(mask.meta.get("example_value"), "shape", ())
    return bool(shape) and all(isinstance(s, int) for s in shape) and math.prod(shape) <= LARGEST_MASK


def _told(constant: Any) -> str:
    """Return what a mask of a value does."""
    if not isinstance(constant, torch.Tensor) or constant.is_meta or constant.dtype is not torch.bool or constant.dim() < 2:
        return "other"
    if bool(constant.all()):
        return "full"
    rows, columns = constant.shape[-2:]
    triangle = torch.ones(rows, columns, dtype=torch.bool, device=constant.device).tril()
    return "causal" if rows == columns and bool((constant == triangle).all()) else "other"


def _shows_strides(changed: Node) -> bool:
    """Return whether a result of the graph has other strides since a call's arguments have changed; in doubt it has.

    All that reads the call is evaluated on fake tensors, as far as its own strides are others than before.
    """
    example = changed.meta.get("example_value")
    if not isinstance(example, FakeTensor):
        return True
    values: dict[Node, Any] = {}
    pending = [changed]
    with example.fake_mode:  # Dynamo's, which is not the one of whoever compiles
        while pending:
            node = pending.pop()
            if node.op == "output" or (node is not changed and not _pure(node)):
                return True
            try:
                args, kwargs = torch.fx.map_arg(
                    (node.args, node.kwargs), lambda n: values[n] if n in values else n.meta["example_value"])
                value = _call(node, args, kwargs)
                before = values[node] if node in values else node.meta["example_value"]
            except (KeyError, RuntimeError, ValueError):  # no value, or a view that the strides do not allow
                return True
            if strides.layout(value) != strides.layout(before):
                values[node] = value
                pending.extend(node.users)
    return False


def _call(node: Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _written_memory(module: GraphModule) -> Memory:
    """Return the memory that something in a graph writes to, directly or through a view, or may write to: the unknown, too.

    Tracing has counted what torch's own ops write; what a kernel or a graph inside an op does with its operands it has not.
    """
    written: set[int | None] = {None}
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module") and not _pure(node):
            written.update(map(_memory, node.all_input_nodes))
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and (value.is_inference() or value._version):
            written.add(_memory(node))
    return frozenset(written)


def _memory(node: Node) -> int | None:
    """Return the number of the memory that a node's tensor lies in; None where it is no tensor, or none that tells."""
    value = node.meta.get("example_value")
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    number: int = value.untyped_storage()._cdata
    return number


IN_PLACE_OPERATORS = frozenset({
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor", "ipow", "imod", "ilshift", "irshift", "imatmul",
    "setitem", "delitem",
})
IMPURE = ("rand", "dropout", "bernoulli", "multinomial", "empty", "vmap", "batch_dim", "copy_")


def _pure(node: Node) -> bool:
    """Return whether a call can be repeated without effects and with the same result, by its name; in doubt it cannot."""
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return False
    if getattr(node.target, "__module__", None) == "_operator":
        return node.target.__name__ not in IN_PLACE_OPERATORS  # type: ignore[union-attr]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    return not in_place and "out" not in node.kwargs and not any(word in name for word in IMPURE)
