"""Inputs that a forward overwrites and whose old values its backward needs.

Torch's min-cut passes an input itself to the backward, although the forward overwrites it at its end. The backward may need
two things of such an input, which are not the same memory: its old values, to compute with, and the input itself, to write
into it as well.

Worked example: of ``y = total * x; total += 1`` the backward gets a copy of the old ``total``. If the backward itself runs
``total += 1``, it gets ``total`` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.fx import shares_memory
from dynafuse.ops.overloads import COPIES_INTO
from dynafuse.passes.saved import describe_times, saved_tensors

aten = torch.ops.aten
NO_VERSION = "saved_tensor_with_no_vc_check"
"""Torch's mark of saved tensors whose version autograd does not check; they are the last that are saved."""


def save_before_overwriting(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """Pass the backward copies of the inputs that the forward, or torch after it, overwrites, where it reads old values.

    Inputs that the backward itself overwrites are passed too, and those that it reads through a view as copies.

    Args:
        forward: The forward graph, which is changed.
        backward: The backward graph, which is changed.
        results: How many of the forward's outputs come before the saved ones.
    """
    overwritten = _overwritten(forward)
    output = forward.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    copies, saved = Copies(forward), saved_tensors(values, results, backward)
    written_back = {values[position] for position, given in saved if any(_only_writes(user, given) for user in given.users)}
    for position, given in reversed(saved):
        *views, source = _viewed(values[position])
        if source not in overwritten and not (views and source in written_back):
            continue
        readers = [user for user in given.users if not _only_writes(user, given)]
        if len(readers) == len(given.users):
            values[position] = copies.viewed(source, views)
        elif readers:
            values.insert(position, copies.viewed(source, views))
            describe_times(output, position, 2)
            _read_old_values(given, readers)
    output.args = (tuple(values),)
    forward.recompile()
    backward.recompile()


def _overwritten(forward: GraphModule) -> set[Node]:
    """Return the inputs that the forward overwrites at its end, and those that torch overwrites with what it returns.

    Torch does so where autograd has to see the write, and autograd then refuses the input's old values to the backward.
    """
    inside = {node.args[0] for node in forward.graph.nodes if node.target is COPIES_INTO}
    described = forward.graph.output_node().meta.get("desc") or ()
    outside = [result.mutated_input for result in described if isinstance(result, InputMutationAOTOutput)]
    return inside | {node for node in forward.graph.find_nodes(op="placeholder") if node.meta.get("desc") in outside}


def _only_writes(user: Node, given: Node) -> bool:
    """Return whether a user of an input overwrites it without reading it."""
    return user.target is COPIES_INTO and user.args[0] is given and user.args[1] is not given


def _viewed(node: Node) -> list[Node]:
    """Return a value, its base, and so on up to the tensor that owns the memory."""
    chain = [node]
    while shares_memory(chain[-1]):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    return chain


def _read_old_values(given: Node, readers: Sequence[Node]) -> None:
    """Insert an input before another, and have the readers of that one read it instead."""
    with given.graph.inserting_before(given):
        old = given.graph.placeholder(f"{given.name}_before")
    old.meta = dict(given.meta)
    for reader in readers:
        reader.replace_input_with(given, old)


class Copies:
    """Copies of a forward's inputs, one of each, made before anything is overwritten."""

    def __init__(self, forward: GraphModule) -> None:
        self.graph = forward.graph
        self._first = next(node for node in forward.graph.nodes if node.op not in ("placeholder", "get_attr"))
        self._copies: dict[Node, Node] = {}

    def viewed(self, source: Node, views: Sequence[Node]) -> Node:
        """Return ``views`` of an input, the outermost first, over a copy of the input."""
        node = self._copy(source)
        with self.graph.inserting_before(self.graph.output_node()):
            for view in reversed(views):
                node = self._call(view.target, (node, *view.args[1:]), view.kwargs)
        return node

    def _copy(self, source: Node) -> Node:
        """Return a copy with the strides of an input, gaps included: the backward is compiled for those."""
        if source not in self._copies:
            value = source.meta["val"]
            with self.graph.inserting_before(self._first):
                if aten.clone.default(value).stride() == value.stride():
                    copy = self._call(aten.clone.default, (source,))
                else:
                    strides = [stride if isinstance(stride, int) else self._call(aten.sym_stride.int, (source, d))
                               for d, stride in enumerate(value.stride())]
                    copy = self._call(torch.ops.prims.copy_strided.default, (source, strides))
            self._copies[source] = copy
        return self._copies[source]

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
        node = self.graph.call_function(target, args, kwargs or {})
        values, named = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        node.meta["val"] = target(*values, **named)
        if args[0].meta.get(NO_VERSION):
            node.meta[NO_VERSION] = True
        return node
