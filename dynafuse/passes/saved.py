"""What a forward saves for its backward: which of its results become which inputs, and what torch says of its results.

Worked example: of a forward that returns ``(y, x, s0)``, ``y`` being the result, and a backward that takes ``(s0, x, dy)``,
``saved_tensors`` returns position 1 with the backward's ``x``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import py_sym_types

DESCRIPTIONS = ("desc", "output_stack_traces")
"""Where torch says of each result of a graph what it is."""


def saved_tensors(values: Sequence[Any], results: int, backward: GraphModule) -> list[tuple[int, Node]]:
    """Return the position of each saved tensor in the forward's outputs, and the backward's input that it becomes.

    The forward returns tensors first and numbers last, the backward takes numbers first.

    Args:
        values: The forward's outputs.
        results: How many of these come before the saved ones.
        backward: The backward graph.
    """
    saved = range(results, len(values))
    numbers = [i for i in saved if isinstance(values[i].meta.get("val"), py_sym_types)]
    inputs = backward.graph.find_nodes(op="placeholder")[len(numbers):]
    return list(zip([i for i in saved if i not in numbers], inputs, strict=False))


def describe_times(output: Node, position: int, times: int) -> None:
    """Give the description of a result so many times: twice where one like it is inserted before it, never where it goes.

    Args:
        output: The node that returns the results.
        position: Which of them it is.
        times: How often its description is to be there.
    """
    for key in DESCRIPTIONS:
        if output.meta.get(key):
            described = list(output.meta[key])
            output.meta[key] = [*described[:position], *described[position:position + 1] * times, *described[position + 1:]]
