"""What nvFuser is not asked to do, said of single calls in a graph, before there is a region."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import dynafuse.ops as ops
from dynafuse.fx import arguments
from dynafuse.ops import nvfuser_math
from tests.support import graphs


def refused(target: str, *args: Any, dynamic: bool = False, **kwargs: Any) -> str:
    """The refusal of a call; tensors among ``args`` become graph inputs."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def write(build: graphs.Builder, *nodes: Any) -> Any:
        rest = iter(nodes)
        return build.op(target, *(next(rest) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

    node = graphs.built(write, *tensors, dynamic=dynamic).graph.output_node().args[0][0]
    row, value = ops.lookup(node.target), node.meta["val"]
    assert row is not None
    call = ops.Call(node.target, arguments(node), tuple(value.shape), value.dtype)
    return ops.nvfuser_refusal(row, call, [n.meta["val"] for n in node.all_input_nodes])


X = torch.ones(4, 6)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_narrow_integers(dtype: torch.dtype) -> None:
    assert refused("aten.add.Tensor", X.to(dtype), X.to(dtype)) == f"nvFuser has no {dtype}"
    assert refused("prims.convert_element_type.default", X, dtype) == f"nvFuser has no {dtype}"


def test_ranks() -> None:
    assert refused("aten.neg.default", torch.ones([1] * 8)) == ""
    assert refused("aten.neg.default", torch.ones([1] * 9)) == "9 dimensions: nvFuser has at most 8"


@pytest.mark.parametrize(("target", "args", "reason"), [
    ("aten.argmax.default", (X, 1), "nvFuser has no argmax"),
    ("aten.flip.default", (X, [0]), "nvFuser has no flip"),
    ("aten.diagonal.default", (X,), "nvFuser has no diagonal"),
    ("aten.slice.Tensor", (X, 0, 0, 4, 2), "a slice of step 2: nvFuser's have step 1"),
    ("aten.slice.Tensor", (X, 0, 1, 3), ""),
    ("aten.hypot.default", (X, X), "nvFuser has no lm.hypot"),
    ("aten.pow.Tensor_Tensor", (X, X), ""),
    ("aten.pow.Tensor_Tensor", (X.long(), X.long()), "nvFuser has no lm.pow_int"),
    ("aten.pow.Tensor_Scalar", (X.long(), 2), ""),
    ("aten.signbit.default", (X,), ""),
    ("aten.lt.Scalar", (X.int(), 2.5), ""),
    ("aten.gather.default", (X, 1, torch.zeros(4, 2, dtype=torch.int64)), ""),
    ("aten.gather.default", (X, 1, torch.zeros(2, 2, dtype=torch.int64)), "a gather from a part of the tensor"),
    ("aten.mm.default", (X, X.t()), "contraction: stays with the vendor's library"),
])
def test_calls(target: str, args: tuple[Any, ...], reason: str) -> None:
    assert refused(target, *args) == reason


def test_a_size_known_at_run_time_is_a_number() -> None:
    """It takes part in promotion as one, and is no tensor operand."""
    def write(build: graphs.Builder, x: Any) -> Any:
        size = build.op(torch.ops.aten.sym_size.int, x, 0)
        return build.op("aten.pow.Tensor_Scalar", x, size), build.op("aten.pow.Tensor_Tensor", x, x)

    def asked(x: torch.Tensor) -> str:
        node = graphs.built(write, x, dynamic=True).graph.output_node().args[0][0]
        row, value = ops.lookup(node.target), node.meta["val"]
        assert row is not None and len(node.all_input_nodes) == 2
        call = ops.Call(node.target, arguments(node), tuple(value.shape), value.dtype)
        return ops.nvfuser_refusal(row, call, [x])

    assert asked(X) == ""
    assert asked(X.long()) == "nvFuser has no lm.pow_int"


def test_expressions_name_what_is_missing() -> None:
    assert nvfuser_math.missing("tl.where({0} > 0, lm.pow_int({0}, 2), lm.rand({0}, 1))") == ["lm.pow_int", "lm.rand"]
    assert all(nvfuser_math.missing(template) == [] for template in nvfuser_math.COMPOSED.values())


def test_asking_imports_no_nvfuser() -> None:
    code = "import sys, dynafuse.ops; sys.exit(any(name.startswith('nvfuser') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
