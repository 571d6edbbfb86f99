"""ATen graphs made by hand, through the whole pipeline: what tests of single ops and of single passes start from.

Worked example::

    graph = built(lambda g, x: g.op("aten.relu.default", x), torch.randn(3))     # placeholders, relu, output
    run = compiled(graph, [torch.randn(3)])                                      # its plan, kernels and function
    run.outputs(), run.launched(), run.plan
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map

from dynafuse import backend, pipeline
from dynafuse.config import Config, resolve
from dynafuse.cost import device as devices
from dynafuse.ir import Annotated, Plan
from dynafuse.ops.overloads import overload
from dynafuse.partition.annotate import annotate
from dynafuse.passes.decompositions import decompositions
from dynafuse.passes.normalize import normalize
from dynafuse.passes.scatters import give_bases


class Builder:
    """Adds calls to a graph and computes the fake value of each."""

    def __init__(self, dynamic: bool) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None, allow_non_fake_inputs=True)

    def placeholder(self, value: Any, name: str = "") -> Node:
        """An input whose fake value is that of ``value``; with a shape environment all its sizes are symbols."""
        node = self.graph.placeholder(name or f"arg{len(self.graph.nodes)}")
        node.meta["val"] = self._fake(value) if isinstance(value, torch.Tensor) else value
        return node

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        context = None
        if self.mode.shape_env is not None:
            sizes = [DimDynamic.STATIC if size <= 1 else DimDynamic.DYNAMIC for size in value.shape]
            context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return self.mode.from_tensor(value, symbolic_context=context)

    def op(self, target: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of an overload (by name) or function; arguments are nodes and constants."""
        function = overload(target) if isinstance(target, str) else target
        assert function is not None, target
        node = self.graph.call_function(function, args, kwargs)
        with self.mode:
            known = tree_map(lambda a: a.meta["val"] if isinstance(a, Node) else a, (args, kwargs))
            node.meta["val"] = function(*known[0], **known[1])
        return node


@contextmanager
def recorded() -> Iterator[list[backend.Compiled]]:
    """The graphs that are compiled meanwhile."""
    graphs: list[backend.Compiled] = []
    with backend.listening(graphs.append, plan_only=False):
        yield graphs


def built(write: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> GraphModule:
    """The graph that ``write(builder, *placeholders)`` makes; it returns the output node or a tuple of them."""
    builder = Builder(dynamic)
    result = write(builder, *(builder.placeholder(value) for value in inputs))
    builder.graph.output(tuple(result) if isinstance(result, (list, tuple)) else (result,))
    return GraphModule(torch.nn.Module(), builder.graph)


def annotated(module: GraphModule) -> Annotated:
    """Normalized, with facts; CPU tensors may be fused."""
    return annotate(give_bases(normalize(module), "cpu"), "cpu")


def traced(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> GraphModule:
    """The ATen graph of a function, decomposed as for the pipeline."""
    return make_fx(function, decomposition_table=decompositions(), tracing_mode="symbolic" if dynamic else "fake")(*inputs)


def changed(function: Callable[..., Any], change: Callable[[GraphModule], Any],
            *inputs: torch.Tensor) -> tuple[GraphModule, Any, Any]:
    """The graph of a function after a pass, without dead code, with its results after and before, whose values are the same."""
    module = traced(function, *inputs)
    expected = module(*inputs)
    change(module)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    found = module(*inputs)
    torch.testing.assert_close(found, expected, equal_nan=True)
    return module, found, expected


def planned(module: GraphModule, device: str = "h200") -> Plan:
    """The plan of a graph for a described device."""
    from dynafuse.partition.search import partition

    return partition(annotated(module), devices.describe(device))


@dataclass
class Run:
    """A compiled graph: its plan, its kernels by region, and its function."""

    plan: Plan
    bounds: dict[str, Any]
    call: Callable[[list[Any]], Any]

    @property
    def computed(self) -> list[Node]:
        """The plan's steps that are neither regions nor views nor sizes: what runs eager."""
        facts = self.plan.annotated.facts
        return [s for s in self.plan.steps if isinstance(s, Node) and facts[s].role == "eager"]

    @property
    def reasons(self) -> list[str]:
        """Why the eager steps run eager."""
        return [self.plan.annotated.facts[node].reason for node in self.computed]


def compiled(module: GraphModule, inputs: Sequence[Any] = (), config: Config | None = None,
             kind: str = "inference") -> Run:
    """A graph through the whole pipeline."""
    found: list[backend.Compiled] = []
    with backend.listening(found.append, plan_only=False):
        call = pipeline.compile_graph(kind, config or resolve(), module, list(inputs))
    return Run(found[-1].plan, dict(found[-1].bounds), call)
