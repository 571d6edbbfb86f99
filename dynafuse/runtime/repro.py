"""Regions and graphs as scripts that compile them again: what a user sends when something has failed.

Worked example, for a region of ``sin(x) + 1``::

    class Graph(torch.nn.Module):
        def forward(self, primals_1):
            sin = torch.ops.aten.sin.default(primals_1);  primals_1 = None
            ...
    inputs = [tensor((8, 8), (8, 1), torch.float32, "cuda:0")]
    torch.compile(Graph(), backend="dynafuse", options={"strict": True})(*inputs)
"""

from __future__ import annotations

import operator
import re
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph_module import _format_import_block
from torch.package.importer import sys_importer

from dynafuse.config import OPTIONS, Config, resolve
from dynafuse.fallback import Guard
from dynafuse.fx import extract, user_line
from dynafuse.ir import Region
from dynafuse.passes.snapshot import Snapshot

SCRIPT = '''"""{summary}

{failure}"""

from torch.fx.graph_module import _assign_attr
from torch.utils._pytree import tree_leaves
{imports}


def tensor(size, stride, dtype, where, requires_grad=False):
    """Random numbers in the layout of the tensor that there was; zeros for integers, which may be indices."""
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if all(size) else 0
    memory = torch.zeros(extent, dtype=dtype, device=where)
    example = (memory.normal_() if dtype.is_floating_point else memory).as_strided(size, stride)
    return example.detach().requires_grad_(requires_grad)


{classes}


options = {options}
inputs = [
{inputs}
]
results = torch.compile(Graph(), backend="dynafuse", options=options, dynamic={dynamic})(*inputs)
print(results)
outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
if outputs:
    torch.autograd.backward(outputs, list(map(torch.ones_like, outputs)))
'''


def guard_of(config: Config, graph: Callable[[], GraphModule], differentiable: bool = False) -> Guard:
    """Return a guard whose warnings name the user's line, if the failure has a node, and a script that repeats the failure.

    Args:
        config: Whether failures raise (``strict``), and where scripts go.
        graph: Returns the graph that the stages worked on.
        differentiable: Whether inputs of that graph may require gradients.
    """
    def details(error: Exception) -> Sequence[str]:
        node = blamed(error)
        line = user_line(node) if node is not None else ""
        module = graph()
        summary = f"{len(module.graph.nodes)} nodes, of which a stage has failed"
        path = save(_text(module, summary, error, _given(config), differentiable), config.repro_dir)
        return [*([f"at {line}"] if line else []), f"repro: {path}"]

    return Guard(config.strict, details)


def save(text: str, folder: Path | None) -> Path:
    """Write a script to a new file and return its path.

    Args:
        text: The script.
        folder: Where, made if there is none; None: the system's temporary folder.
    """
    folder = folder or Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", prefix="dynafuse_repro_", suffix=".py", dir=folder, delete=False) as file:
        file.write(text)
    return Path(file.name)


def blamed(error: BaseException) -> Node | None:
    """Return the node that the innermost function on a traceback worked on, if any did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((value for frame in reversed(frames) for value in frame.f_locals.values() if isinstance(value, Node)), None)


def _given(config: Config) -> dict[str, Any]:
    """Return the options, without those that have their default both here and in the environment."""
    values, resolved = ({option.name: getattr(source, option.name) for option in OPTIONS} for source in (config, resolve()))
    changed = {option.name: values[option.name] for option in OPTIONS
               if not values[option.name] == option.default == resolved[option.name]}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in changed.items()}
    return {name: str(value) if isinstance(value, Path) else value for name, value in plain.items() if value != {}}


def script(region: Region, error: BaseException, options: Mapping[str, Any]) -> str:
    """Return a script that fails as the region did when it is run, or tells that it no longer does.

    Args:
        region: The region.
        error: Why it failed; its traceback is in the script's docstring.
        options: The options that the script compiles with; it adds ``strict``.
    """
    inputs = dict.fromkeys((*region.inputs, *_outside(region)))
    module, _ = extract(torch.nn.Module(), region.nodes, inputs, region.outputs)
    return _text(module, str(region), error, options, False)


def _text(module: GraphModule, summary: str, error: BaseException, options: Mapping[str, Any], differentiable: bool) -> str:
    """Return the script of a graph."""
    module = Snapshot.of(module).restored()  # types of arguments are taken from it
    classes, imports = list[str](), {"import torch": None}
    _add_class(module, "Graph", classes, imports)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    failure = "".join(traceback.format_exception(error)).replace('"""', "'''").replace("\\", "\\\\")
    return SCRIPT.format(
        summary=summary.replace("\\", "\\\\"), failure=failure, imports="\n".join(imports),
        classes="\n\n\n".join(classes), options=repr({**options, "strict": True}),
        inputs="\n".join(f"    {_value(node, differentiable)}," for node in placeholders),
        dynamic=any(map(_is_dynamic, placeholders)) or None)


def _add_class(module: GraphModule, name: str, classes: list[str], imports: dict[str, None]) -> None:
    """Add a module's class, after those of the modules inside it, and the imports of what they name."""
    for node in module.graph.nodes:
        node.type = None
    code = module.graph.python_code("self")
    named = {name: value for name, value in code.globals.items() if re.search(rf"\b{name}\b", code.src)}
    imports.update(dict.fromkeys(_format_import_block(named, sys_importer).splitlines()))
    statements = ["super().__init__()"]
    for target in dict.fromkeys(str(n.target) for n in module.graph.nodes if n.op in ("get_attr", "call_module")):
        inner, value = f"{name}_{target.replace('.', '_')}", operator.attrgetter(target)(module)
        if isinstance(value, GraphModule):
            _add_class(value, inner, classes, imports)
        example = f"{inner}()" if isinstance(value, GraphModule) else _example(value, False)
        statements.append(f"_assign_attr({example}, self, {target!r})")
    initial = "def __init__(self):\n" + textwrap.indent("\n".join(statements), "    ")
    body = textwrap.indent(f"{initial}\n\n{code.src.strip()}", "    ")
    classes.append(f"class {name}(torch.nn.Module):\n{body}")


def _outside(region: Region) -> Sequence[Node]:
    """Return the sizes and other numbers that a region takes from the host."""
    inside = {*region.nodes, *region.inputs}
    return [used for node in region.nodes for used in node.all_input_nodes if used not in inside]


def _value(node: Node, differentiable: bool) -> str:
    """Return the source of an argument like the one that a placeholder has in the graph."""
    return _example(node.meta.get("val", node.meta.get("example_value")), differentiable)


def _example(value: Any, differentiable: bool) -> str:
    """Return the source of a value of the same kind; dynamic sizes are those of the example."""
    if not isinstance(value, torch.Tensor):
        return repr(_number(value))
    size, stride = tuple(map(_number, value.shape)), tuple(map(_number, value.stride()))
    gradient = ", requires_grad=True" if differentiable and value.requires_grad else ""
    return f"tensor({size}, {stride}, {value.dtype}, {str(value.device)!r}{gradient})"


def _is_dynamic(node: Node) -> bool:
    """Return whether a placeholder has a size that is a symbol."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return any(hasattr(size, "node") for size in (*_sizes(value), value))


def _sizes(value: Any) -> Iterator[Any]:
    yield from value.shape if isinstance(value, torch.Tensor) else ()


def _number(value: Any) -> Any:
    """Return a size of the example as a number."""
    node = getattr(value, "node", None)
    return value if node is None else node.hint if node.has_hint() else 8
