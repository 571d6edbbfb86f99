"""Whether what a call of a Dynamo graph returns may lie in memory otherwise than as it was traced."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from dynafuse.fallback import answered
from dynafuse.passes import strides
from dynafuse.passes.constants import is_pure


def shows_strides(changed: Node) -> bool:
    """Return whether a result of the graph has other strides since a call has changed; in doubt it has.

    Args:
        changed: The call, with the value of before.
    """
    return answered(lambda: _strides_reach_results(changed)) is not False


def _strides_reach_results(changed: Node) -> bool:
    """Return whether a result has other strides; what reads the call is evaluated as far as its own strides have changed."""
    values: dict[Node, Any] = {}
    pending = [changed]
    with changed.meta["example_value"].fake_mode:  # Dynamo's, which is not the one of whoever compiles
        while pending:
            node = pending.pop()
            if node.op == "output" or (node is not changed and not is_pure(node)):
                return True
            args, kwargs = torch.fx.map_arg(
                (node.args, node.kwargs), lambda n: values[n] if n in values else n.meta["example_value"])
            value = called(node, args, kwargs)
            before = values[node] if node in values else node.meta["example_value"]
            if strides.layout(value) != strides.layout(before):
                values[node] = value
                pending.extend(node.users)
    return False


def called(node: Node, args: Any, kwargs: Any) -> Any:
    """Return what a call of a Dynamo graph returns.

    Args:
        node: The call.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
