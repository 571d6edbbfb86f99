"""What is said of every node of a graph: its role, and why it is not fused."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch.fx import Node

from dynafuse.fx import UNKNOWN_SIZE, hint
from dynafuse.partition.annotate import annotate, tensor_of
from tests.support import graphs

X = torch.randn(4, 6)


def facts(write: Any, *inputs: Any, device: str | None = "cpu", dynamic: bool = False) -> dict[str, tuple[str, str]]:
    """Per node its role and reason."""
    module = graphs.built(write, *inputs, dynamic=dynamic)
    return {node.name: (f.role, f.reason) for node, f in annotate(module, device).facts.items()}


def last(write: Any, *inputs: Any, device: str | None = "cpu") -> tuple[str, str]:
    """The role and reason of the last call."""
    return list(facts(write, *inputs, device=device).values())[-2]


def test_roles() -> None:
    def write(build: graphs.Builder, x: Node, w: Node) -> Node:
        return build.op("aten.mm.default", build.op("aten.relu.default", x), build.op("aten.t.default", w))

    assert facts(write, X, X) == {
        "arg0": ("input", ""), "arg1": ("input", ""), "relu_default": ("fused", ""), "t_default": ("view", ""),
        "mm_default": ("eager", "contraction: stays with the vendor's library"), "output": ("output", ""),
    }


@pytest.mark.parametrize(("write", "inputs", "reason"), [
    (lambda b, x: b.op("aten.sort.default", x), (X,), "sort: a selection over the whole dimension"),
    (lambda b, x: b.op("aten.cummax.default", x, 0), (X,), "scan: two outputs"),
    (lambda b, x: b.op("aten.cumsum.default", x, 1), (X[:, :1],), "reduces no more than one element"),
    (lambda b, x: b.op("aten.cumsum.default", x, 0), (torch.ones(()),), "reduces no more than one element"),
    (lambda b, x: b.op("aten.cumsum.default", x, 0, dtype=torch.bool), (X,), "a scan of bools"),
    (lambda b, x: b.op("aten.cumsum.default", x, 0), (X,), ""),
    (lambda b, x: b.op("aten.neg.default", x), (torch.empty(0, 3),), "an empty tensor"),
    (lambda b, x: b.op("aten.neg.default", x), (X.to(torch.complex64),), "dtype torch.complex64 is not fused"),
    (lambda b, x: b.op("aten.argmax.default", x, 1), (X[:, :1],), "reduces no more than one element"),
    (lambda b, x: b.op("aten.var.correction", x), (torch.ones(()),), "reduces no more than one element"),
    (lambda b, x: b.op("aten.neg.default", x), (X[:, ::2],), ""),
    (lambda b, x: b.op("aten.roll.default", x, [1], [0]), (X,), ""),
    (lambda b, x: b.op("prims.convert_element_type.default", x, torch.float8_e4m3fn), (X,), ""),
    (lambda b, x: b.op("prims.convert_element_type.default", x, torch.float8_e5m2fnuz), (X,), "torch.float8_e5m2fnuz"),
    (lambda b, x: b.op("aten.neg.default", x), (X.to(torch.float8_e4m3fn),), "dtype torch.float8_e4m3fn is not fused"),
], ids=range(15))
def test_reasons(write: Any, inputs: Any, reason: str) -> None:
    role, said = last(write, *inputs)
    assert role == ("eager" if reason else "fused")
    assert reason in said


def test_only_tensors_on_the_fused_device_are_fused() -> None:
    relu = lambda b, x: b.op("aten.relu.default", x)  # noqa: E731
    assert last(relu, X, device="cuda") == ("eager", "on cpu, fused kernels run on cuda")
    assert last(relu, X, device=None) == ("eager", "on cpu, nothing is fused")


def test_demoted_nodes_run_eager() -> None:
    module = graphs.built(lambda b, x: b.op("aten.relu.default", x), X)
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    found = annotate(module, "cpu", {node: "demoted"}).facts[node]
    assert (found.role, found.reason) == ("eager", "demoted")


def test_the_call_has_defaults_and_sizes() -> None:
    module = graphs.built(lambda b, x: b.op("aten.add.Tensor", x, 2), X)
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    call = annotate(module, "cpu").facts[node].call
    assert call is not None
    assert (call["other"], call["alpha"], call.shape, call.dtype) == (2, 1, (4, 6), torch.float32)


def test_symbolic_sizes_are_expressions_and_hints_are_for_costs() -> None:
    module = graphs.built(lambda b, x: b.op("aten.relu.default", x), X, dynamic=True)
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    tensor = annotate(module, "cpu").facts[node].tensor
    assert tensor is not None
    assert all(isinstance(size, sympy.Symbol) for size in tensor.shape)
    assert tensor.stride == (tensor.shape[1], 1)
    assert tensor.hint == 24 and tensor.bytes == 96


def test_repeated_elements_are_counted_once() -> None:
    assert tensor_of(torch.ones(5, 1).expand(5, 100)).bytes == 20


def test_a_size_known_only_at_run_time_has_a_default_hint() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    assert hint(ShapeEnv().create_unbacked_symint()) == UNKNOWN_SIZE
