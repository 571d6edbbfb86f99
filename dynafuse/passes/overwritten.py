"""What a forward writes into its inputs, and what its backward still needs of them.

Torch's min-cut hands an input itself to the backward, although the forward overwrites it at its end. Two things may be
wanted of such an input, and they are not the same memory: what it held before, which the backward computes with, and the
input itself, which the backward writes into as well.

Worked example: ``y = total * x; total += 1`` is given to the backward as a copy of the old ``total``. Where a backward says
``total += 1``, it is given ``total`` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.fx.node import map_arg

from dynafuse.fx import shares_memory
from dynafuse.ops.overloads import COPIES_INTO

aten = torch.ops.aten
NO_VERSION = "saved_tensor_with_no_vc_check"
"""Torch's mark of what autograd hands on without a look at its version; such tensors are the last that are saved."""


def save_before_overwriting(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """Have the backward get a copy of an input that the forward overwrites, or torch after it, where it asks for old values.

    What the backward itself overwrites it gets too, and what it wants of that through a view is a copy. ``results`` is the
    number of outputs in front of what is saved.
    """
    overwritten = _overwritten(forward)
    output = forward.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    copies, saved = Copies(forward), _saved(values, results, backward)
    written_back = {values[position] for position, given in saved if any(_only_writes(user, given) for user in given.users)}
    for position, given in reversed(saved):
        *views, source = _viewed(values[position])
        if source not in overwritten and not (views and source in written_back):
            continue
        old = [user for user in given.users if not _only_writes(user, given)]
        if len(old) == len(given.users):
            values[position] = copies.viewed(source, views)
        elif old:
            values.insert(position, copies.viewed(source, views))
            _describe_again(output, position)
            _read_apart(given, old)
    output.args = (tuple(values),)
    forward.recompile()
    backward.recompile()


def _overwritten(forward: GraphModule) -> set[Node]:
    """The inputs that the forward overwrites at its end, and those that torch overwrites with what it returns.

    Torch does so itself where autograd has to see it, and would then refuse the input's old values to the backward.
    """
    inside = {node.args[0] for node in forward.graph.nodes if node.target is COPIES_INTO}
    described = forward.graph.output_node().meta.get("desc") or ()
    outside = [result.mutated_input for result in described if isinstance(result, InputMutationAOTOutput)]
    return inside | {node for node in forward.graph.find_nodes(op="placeholder") if node.meta.get("desc") in outside}


def _saved(values: Sequence[Any], results: int, backward: GraphModule) -> list[tuple[int, Node]]:
    """Where the forward returns each saved tensor, and the backward's input that it becomes.

    The forward returns tensors first and numbers last, the backward takes numbers first.
    """
    saved = range(results, len(values))
    numbers = [i for i in saved if isinstance(values[i].meta.get("val"), py_sym_types)]
    inputs = backward.graph.find_nodes(op="placeholder")[len(numbers):]
    return list(zip([i for i in saved if i not in numbers], inputs, strict=False))


def _only_writes(user: Node, given: Node) -> bool:
    """Whether a user of an input overwrites it without a look at what it holds."""
    return user.target is COPIES_INTO and user.args[0] is given and user.args[1] is not given


def _viewed(node: Node) -> list[Node]:
    """A value, what it is a view of, and so on up to what has the memory."""
    chain = [node]
    while shares_memory(chain[-1]):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    return chain


def _describe_again(output: Node, position: int) -> None:
    """Give one more result of a graph the description of the one whose place it takes."""
    for key in ("desc", "output_stack_traces"):
        if output.meta.get(key):
            described = list(output.meta[key])
            output.meta[key] = [*described[:position], *described[position:position + 1], *described[position:]]


def _read_apart(given: Node, readers: Sequence[Node]) -> None:
    """Have some users of an input read another one, in front of it."""
    with given.graph.inserting_before(given):
        old = given.graph.placeholder(f"{given.name}_before")
    old.meta = dict(given.meta)
    for reader in readers:
        reader.replace_input_with(given, old)


class Copies:
    """Copies of a forward's inputs, made before anything is overwritten, each once."""

    def __init__(self, forward: GraphModule) -> None:
        self.graph = forward.graph
        self._first = next(node for node in forward.graph.nodes if node.op not in ("placeholder", "get_attr"))
        self._made: dict[Node, Node] = {}

    def viewed(self, source: Node, views: Sequence[Node]) -> Node:
        """Views, the outermost first, of a copy of an input instead of the input."""
        node = self._copy(source)
        with self.graph.inserting_before(self.graph.output_node()):
            for view in reversed(views):
                node = self._call(view.target, (node, *view.args[1:]), view.kwargs)
        return node

    def _copy(self, source: Node) -> Node:
        """A copy with the very strides of an input, gaps included: the backward is compiled for those."""
        if source not in self._made:
            value = source.meta["val"]
            with self.graph.inserting_before(self._first):
                if aten.clone.default(value).stride() == value.stride():
                    copy = self._call(aten.clone.default, (source,))
                else:
                    strides = [stride if isinstance(stride, int) else self._call(aten.sym_stride.int, (source, d))
                               for d, stride in enumerate(value.stride())]
                    copy = self._call(torch.ops.prims.copy_strided.default, (source, strides))
            self._made[source] = copy
        return self._made[source]

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
        node = self.graph.call_function(target, args, kwargs or {})
        values, named = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        node.meta["val"] = target(*values, **named)
        if args[0].meta.get(NO_VERSION):
            node.meta[NO_VERSION] = True
        return node
