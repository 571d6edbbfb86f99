"""Normalized graphs as text, beside what they compute.

Worked example: ``after(lambda build, x: build.op("aten.relu.default", x), torch.randn(2))`` is
``"relu_default = aten.relu.default(arg0)\nreturn relu_default"``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dynafuse.passes.normalize import normalize
from tests.support import graphs


def text(module: GraphModule) -> str:
    """One line per call: its name, its overload, its arguments."""
    lines = [_line(node) for node in module.graph.nodes if node.op == "call_function"]
    return "\n".join([*lines, f"return {', '.join(map(_shown, module.graph.output_node().args[0]))}"])


def _line(node: Node) -> str:
    target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__  # type: ignore[union-attr]
    given = [*map(_shown, node.args), *(f"{k}={_shown(v)}" for k, v in node.kwargs.items())]
    return f"{node.name} = {target}({', '.join(given)})"


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Node) else str(value)


def after(write: Any, *inputs: Any) -> str:
    """The normalized graph's text; the graph computes what it did before."""
    module = graphs.built(write, *inputs)
    expected = module(*inputs)
    normalized = normalize(module)
    normalized.recompile()
    for found, want in zip(normalized(*inputs), expected, strict=True):
        torch.testing.assert_close(found, want)
    for node in normalized.graph.nodes:
        assert node.op == "output" or "val" in node.meta, node
    return text(normalized)
