"""Decomposes ops over lists of tensors, of which optimizers and the clipping of gradients consist, into ops on each tensor.

Worked example: ``_foreach_add.List([a, b], [c, d], alpha=2)`` becomes ``[add(a, c, alpha=2), add(b, d, alpha=2)]``, so that
all that a step does to a parameter is one region, which reads and writes it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

aten = torch.ops.aten
PREFIX = "_foreach_"

NAMED_OTHERWISE: Mapping[str, OpOverloadPacket] = {
    "_foreach_maximum.Scalar": aten.clamp_min,
    "_foreach_maximum.ScalarList": aten.clamp_min,
    "_foreach_minimum.Scalar": aten.clamp_max,
    "_foreach_minimum.ScalarList": aten.clamp_max,
    "_foreach_norm.Scalar": aten.linalg_vector_norm,
    "_foreach_zero": aten.zeros_like,
}
"""The op on one tensor for an op on lists, where it is not the one with the same name."""

BY_NAME = frozenset({"alpha", "dtype", "memory_format", "non_blocking", "value"})
"""Arguments that ops on one tensor take by name."""

VALUED = frozenset({"addcdiv", "addcmul"})
"""Ops on one tensor whose number is called ``value``, whatever it is called in ops on lists."""


def foreach_decompositions() -> dict[OpOverload, Callable[..., list[torch.Tensor]]]:
    """Return decompositions of all functional ops on lists whose numbers are known without reading a tensor's data."""
    return {op: _each(op, single) for op in _overloads() if (single := _on_one_tensor(op)) is not None}


def _overloads() -> list[OpOverload]:
    """Return the functional overloads of ops on lists of tensors."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names())
    parted = sorted(name.partition(".") for name in names if name.startswith(PREFIX))
    return [getattr(getattr(aten, base), overload or "default") for base, _, overload in parted
            if not base.endswith("_") and not overload.endswith("out")]


def _on_one_tensor(op: OpOverload) -> OpOverloadPacket | None:
    """Return the op that does to one tensor what another does to each of a list; None if there is none."""
    schema = op._schema
    if any(argument.name == "scalars" and str(argument.type) == "Tensor" for argument in schema.arguments):
        return None
    name = schema.name.removeprefix("aten::")
    qualified = ".".join(filter(None, (name, schema.overload_name)))
    return NAMED_OTHERWISE.get(qualified) or getattr(aten, name.removeprefix(PREFIX), None)


def _each(op: OpOverload, single: OpOverloadPacket) -> Callable[..., list[torch.Tensor]]:
    """Return a function that calls ``single`` on every tensor of the lists that ``op`` is given."""
    arguments = op._schema.arguments
    lists = {argument.name for argument in arguments if "List" in str(argument.type)}
    is_valued = single.__name__ in VALUED

    def each(*given: Any, **named: Any) -> list[torch.Tensor]:
        values = {argument.name: value for argument, value in zip(arguments, given, strict=False)} | named
        count = max(len(values[name]) for name in lists)
        return [_call(single, {name: value[i] if name in lists else value for name, value in values.items()}, is_valued)
                for i in range(count)]

    return each


def _call(single: OpOverloadPacket, arguments: Mapping[str, Any], is_valued: bool) -> torch.Tensor:
    named = {("value" if is_valued and name == "scalars" else name): value for name, value in arguments.items()}
    positional = [value for name, value in named.items() if name not in BY_NAME]
    result: torch.Tensor = single(*positional, **{name: value for name, value in named.items() if name in BY_NAME})
    return result
