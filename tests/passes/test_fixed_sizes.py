"""Dynamo graphs of dynamic sizes, with numbers in the place of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from dynafuse.passes.fixed_sizes import fix_sizes, size_arguments


def graph_of(function: Callable[..., Any], *inputs: Any) -> tuple[GraphModule, Sequence[Any]]:
    """The Dynamo graph of a function with dynamic sizes, and the arguments of its call."""
    graphs: list[GraphModule] = []
    calls: list[Sequence[Any]] = []

    def backend(module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(module)
        return lambda *arguments: calls.append(arguments) or module.forward(*arguments)

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*inputs)
    return graphs[0], calls[0]


def shaped(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    doubled = x.shape[0] * 2
    return x.reshape(doubled, -1) + y[:doubled].sum() + torch.arange(doubled)[:, None], doubled + 1


def test_all_shapes_are_numbers() -> None:
    module, arguments = graph_of(shaped, torch.randn(4, 8), torch.randn(20, 6)[:, :4])
    positions = size_arguments(module)
    assert positions and all(isinstance(arguments[i], int) for i in positions)
    fix_sizes(module, positions, arguments, FakeTensorMode(allow_non_fake_inputs=True))
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    examples = [node.meta["example_value"] for node in module.graph.nodes if node.op != "output"]
    assert len(module.graph.find_nodes(op="placeholder")) == len(tensors) == 2
    assert all(type(size) is int for example in examples for size in (*example.shape, *example.stride()))
    result, number = module(*tensors)
    expected, doubled = shaped(*tensors)
    assert torch.equal(result, expected) and number == doubled == 9


def test_what_is_drawn_meanwhile_is_drawn_again() -> None:
    module, arguments = graph_of(lambda x: torch.dropout(x, 0.5, True) + 1, torch.randn(5, 7))
    state = torch.get_rng_state()
    fix_sizes(module, size_arguments(module), arguments, FakeTensorMode(allow_non_fake_inputs=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_sizes_that_depend_on_data_are_not_fixed() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        module, _ = graph_of(lambda x: x[x > 0].exp() + x.shape[0], torch.randn(40))
        assert size_arguments(module) == ()
        module, _ = graph_of(lambda x, n: x * n.item(), torch.randn(40), torch.tensor(3))
        assert size_arguments(module) == ()


def test_a_graph_of_fixed_sizes_has_none() -> None:
    graphs: list[GraphModule] = []
    torch._dynamo.reset()
    torch.compile(torch.sin, backend=lambda module, examples: graphs.append(module) or module.forward)(torch.randn(5))
    assert size_arguments(graphs[0]) == ()
