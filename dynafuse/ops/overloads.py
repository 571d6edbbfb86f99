"""Op overloads by name, across the torch versions that have them.

    >>> [str(op) for op in overloads("aten.add.Tensor aten.not_an_op.default prims.neg.default")]
    ['aten.add.Tensor', 'prims.neg.default']
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch._inductor.inductor_prims
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from dynafuse.fx import in_place

COPIES_INTO: OpOverload = torch.ops.aten.copy_.default
"""The op that overwrites its first operand: functional graphs end in it where the user's code wrote into an input."""

UNDECLARED = {"inductor.resize_storage_bytes_.default": "variable"}
"""Ops whose schema does not say what they change, with the name of the argument that they do."""


def overload(name: str) -> OpOverload | None:
    """Return the overload called ``namespace.op.overload``, or None where this torch lacks it."""
    space, op, variant = name.split(".")
    packet = getattr(getattr(torch.ops, space), op, None)
    return getattr(packet, variant, None) if packet is not None else None


def overloads(names: str) -> Iterator[OpOverload]:
    """Return those of the whitespace-separated overloads that exist."""
    return (op for op in map(overload, names.split()) if op is not None)


def written_to(node: Node) -> Iterator[Node]:
    """Return the arguments that a call changes: their values, or their sizes (``resize_``, ``set_``).

    Its schema says so; of a scatter that runs in place it is the base.
    """
    target = node.target
    if in_place(node):
        yield from node.all_input_nodes[:1]
    if not isinstance(target, OpOverload):
        return
    undeclared = UNDECLARED.get(str(target))
    if not target._schema.is_mutable and undeclared is None:
        return
    for position, parameter in enumerate(target._schema.arguments):
        if parameter.name == undeclared or (parameter.alias_info is not None and parameter.alias_info.is_write):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name)
            values = given if isinstance(given, (list, tuple)) else (given,)
            yield from (value for value in values if isinstance(value, Node))


def in_place_variant(target: object) -> OpOverload | None:
    """Return the overload that does in its first operand's memory what another does in a copy: ``index_put_``; else None."""
    if not isinstance(target, OpOverload):
        return None
    return overload(f"{target.namespace}.{target.overloadpacket.__name__.removeprefix('_unsafe_')}_.{target._overloadname}")


def is_done(copy: Node) -> bool:
    """Return whether a copy into an input has nothing to do, because a scatter in place has computed the value there."""
    if copy.target is not COPIES_INTO or not isinstance(copy.args[1], Node) or not in_place(copy.args[1]):
        return False
    source = copy.args[1]
    while in_place(source):
        source = source.all_input_nodes[0]
    return source is copy.args[0]


def moves_generator(node: Node) -> bool:
    """Return whether a call advances a random generator's state; attention does so only with dropout."""
    target = node.target
    if isinstance(target, HigherOrderOperator):  # dropout that the backward computes again
        return bool(target.name() == "run_and_save_rng_state")
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [parameter.name for parameter in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    probability = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(probability != 0)
