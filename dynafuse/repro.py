"""A region as a script that compiles it again: what a user sends when a region has failed.

Worked example, for ``sin(x) + 1``::

    def region(arg0):
        sin = torch.ops.aten.sin.default(arg0);  arg0 = None
        ...
    inputs = [tensor((8, 8), (8, 1), torch.float32, "cuda:0")]
    torch.compile(region, backend="dynafuse", options={"strict": True})(*inputs)
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dynafuse.ir import Region

SCRIPT = '''"""{summary}

{failure}"""

import torch
from torch import device, inf, nan  # noqa: F401


def tensor(size, stride, dtype, where):
    """Random numbers in the layout of the tensor that the region read; zeros for integers, which may be indices."""
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if all(size) else 0
    memory = torch.zeros(extent, dtype=dtype, device=where)
    return (memory.normal_() if dtype.is_floating_point else memory).as_strided(size, stride)


{code}

options = {options}
inputs = [
{inputs}
]
print(torch.compile(region, backend="dynafuse", options=options)(*inputs))
'''


def script(region: Region, error: BaseException, options: Mapping[str, Any]) -> str:
    """The script's text; run, it fails as the region did, or tells that it no longer does."""
    graph, inputs = Graph(), list(dict.fromkeys((*region.inputs, *_outside(region))))
    copied = {node: graph.placeholder(f"arg{i}") for i, node in enumerate(inputs)}
    for node in region.nodes:
        copied[node] = graph.node_copy(node, lambda used: copied[used])
    graph.output(tuple(copied[node] for node in region.outputs))
    code = GraphModule(torch.nn.Module(), graph).code.strip().replace("def forward(self, ", "def region(").replace(
        "def forward(self)", "def region()")
    failure = "".join(traceback.format_exception(error)).replace('"""', "'''").replace("\\", "\\\\")
    return SCRIPT.format(summary=str(region).replace("\\", "\\\\"), failure=failure, code=code,
                         options=repr({**options, "strict": True}), inputs="\n".join(map(_input, inputs)))


def _outside(region: Region) -> Sequence[Node]:
    """Sizes and other numbers that the region takes from the host."""
    inside = {*region.nodes, *region.inputs}
    return [used for node in region.nodes for used in node.all_input_nodes if used not in inside]


def _input(node: Node) -> str:
    """A line that makes an argument like the one in the graph; dynamic sizes as they were."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return f"    {_number(value)},"
    size, stride = tuple(map(_number, value.shape)), tuple(map(_number, value.stride()))
    return f"    tensor({size}, {stride}, {value.dtype}, {str(value.device)!r}),"


def _number(value: Any) -> Any:
    """A size of the example as a number."""
    node = getattr(value, "node", None)
    return value if node is None else node.hint if node.has_hint() else 8
