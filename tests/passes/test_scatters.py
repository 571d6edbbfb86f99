"""Bases of scatters, before and after: what is copied, what is not, what is added in a wider dtype, what is chained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from dynafuse.fx import owns_base
from dynafuse.passes.normalize import normalize
from dynafuse.passes.scatters import give_bases
from tests.passes.test_normalize import text
from tests.support import graphs

X, V = torch.randn(6, 8), torch.randn(3, 8)
AT = torch.tensor([4, 1, 4])
ONCE = torch.tensor([4, 1, 5])


def after(write: Any, *inputs: Any, device_type: str | None = "cpu") -> GraphModule:
    """The graph with bases, which computes what it did before."""
    module = normalize(graphs.built(write, *inputs))
    expected = module(*inputs)
    given = give_bases(module, device_type)
    given.recompile()
    for found, want in zip(given(*inputs), expected, strict=True):
        rounding = {} if want.dtype.itemsize > 2 or not want.is_floating_point() else {  # eager rounds after every addition
            "rtol": 3 * torch.finfo(want.dtype).eps, "atol": torch.finfo(want.dtype).eps}
        torch.testing.assert_close(found, want, **rounding)
    return given


def owners(module: GraphModule) -> list[str]:
    """The scatters that may write into their bases."""
    return [node.name for node in module.graph.nodes if owns_base(node)]


def put(build: graphs.Builder, base: Any, at: Any, values: Any) -> Any:
    return build.op("aten.index_put.default", base, [at], values, True)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_an_input_is_copied() -> None:
    module = after(put, X, AT, V)
    assert text(module) == ("clone_default = aten.clone.default(arg0)\n"
                            "index_put_default = aten.index_put.default(clone_default, [arg1], arg2, True)\n"
                            "return index_put_default")
    assert owners(module) == ["index_put_default"]


def test_what_nothing_else_reads_is_overwritten() -> None:
    module = after(lambda b, x, i, v: put(b, b.op("aten.exp.default", x), i, v), X, AT, V)
    assert "clone" not in text(module)
    assert owners(module) == ["index_put_default"]


@pytest.mark.parametrize("reader", ["another op", "the scatter's values", "the caller"])
def test_what_is_read_elsewhere_is_copied(reader: str) -> None:
    def write(build: graphs.Builder, x: Any, at: Any) -> Any:
        base = build.op("aten.exp.default", x)
        rows = build.op("aten.slice.Tensor", base, 0, 0, 3) if reader == "another op" else base
        where = build.op("aten.arange.default", 6) if reader == "the scatter's values" else at
        result = put(build, base, where, build.op("aten.slice.Tensor", x, 0, 0, 3) if reader == "the caller" else rows)
        return (result, base) if reader == "the caller" else result

    module = after(write, X, AT)
    assert text(module).count("aten.clone.default") == 1
    assert owners(module) == ["index_put_default"]


def test_zeros_are_made_for_each_scatter() -> None:
    def write(build: graphs.Builder, at: Any, values: Any) -> Any:
        zeros = build.op("aten.full.default", [6, 8], 0.0)
        return put(build, zeros, at, values), put(build, zeros, at, build.op("aten.neg.default", values))

    module = after(write, AT, V)
    assert text(module).count("aten.full.default") == 2
    assert len(owners(module)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_added_in_16_bits_is_added_in_float32(dtype: torch.dtype) -> None:
    module = after(put, X.to(dtype), AT, V.to(dtype))
    (scatter,) = [node for node in module.graph.nodes if owns_base(node)]
    assert scatter.meta["val"].dtype is torch.float32
    assert {operand.meta["val"].dtype for operand in scatter.all_input_nodes} == {torch.float32, torch.int64}
    (result,) = module.graph.output_node().all_input_nodes
    assert result.meta["val"].dtype is dtype


def test_what_replaces_elements_of_16_bits_stays_so() -> None:
    module = after(lambda b, x, i, v: b.op("aten.index_put.default", x, [i], v), X.bfloat16(), ONCE, V.bfloat16())
    assert "convert" not in text(module)
    assert owners(module) == ["index_put_default"]


def test_a_sum_of_scatters_into_zeros_is_a_chain() -> None:
    def write(build: graphs.Builder, *inputs: Any) -> Any:
        first, second, third = (put(build, build.op("aten.full.default", [6, 8], 0.0), at, inputs[3]) for at in inputs[:3])
        total = build.op("aten.add.Tensor", first, second)
        return build.op("aten.add.Tensor", third, total)

    module = after(write, AT, ONCE, ONCE - 1, V)
    assert "aten.add.Tensor" not in text(module)
    assert text(module).count("aten.full.default") == 1
    assert len(owners(module)) == 3


@pytest.mark.parametrize("other", ["a base that is not 0", "a factor", "a reader of one", "a scatter that replaces"])
def test_other_sums_are_not(other: str) -> None:
    def write(build: graphs.Builder, at: Any, values: Any) -> Any:
        first = put(build, build.op("aten.full.default", [6, 8], 0.0), at, values)
        base = build.op("aten.full.default", [6, 8], 1.0 if other == "a base that is not 0" else 0.0)
        second = build.op("aten.index_put.default", base, [at], values, other != "a scatter that replaces")
        factor = {"alpha": 2} if other == "a factor" else {}
        total = build.op("aten.add.Tensor", first, second, **factor)
        return (total, second) if other == "a reader of one" else total

    assert "aten.add.Tensor" in text(after(write, ONCE, V))


def test_one_row_is_computed_from_the_other_side() -> None:
    module = after(lambda b, x, i: b.op("aten.scatter.value", x, 1, i, 2.0), X, torch.ones(6, 1, dtype=torch.int64))
    assert not owners(module)
    assert "clone" not in text(module)


@pytest.mark.parametrize("what", ["another device", "an empty index", "a mask", "a mean"])
def test_what_no_kernel_takes_is_left(what: str) -> None:
    calls: dict[str, tuple[Any, ...]] = {
        "another device": (put, X, AT, V), "an empty index": (put, X, AT[:0], V[:0]),
        "a mask": (lambda b, x, i, v: b.op("aten.index_put.default", x, [i], v), X, torch.rand(6) < 0.5, X[0]),
        "a mean": (lambda b, x, i, v: b.op("aten.scatter_reduce.two", x, 0, i, v, "mean"), X, AT[:, None].expand(3, 8), V),
    }
    module = after(*calls[what], device_type=None if what == "another device" else "cpu")
    assert not owners(module)
    assert "clone" not in text(module)


@pytest.mark.parametrize(("dtype", "accumulate", "fuses"), [
    (torch.float32, True, False), (torch.float32, False, False), (torch.int64, True, True), (torch.int64, False, False)])
def test_the_order_of_values_is_eagers_where_users_ask_for_it(dtype: torch.dtype, accumulate: bool, fuses: bool) -> None:
    def write(build: graphs.Builder, x: Any, at: Any, values: Any) -> Any:
        return build.op("aten.index_put.default", x, [at], values, accumulate)

    with deterministic():
        assert bool(owners(after(write, X.to(dtype), ONCE, V.to(dtype)))) == fuses


def test_a_result_in_other_strides_gets_a_base_in_them() -> None:
    def write(build: graphs.Builder, x: Any, at: Any, values: Any) -> Any:
        return build.op("aten.scatter_add.default", x, 1, at, values)

    at = torch.randint(8, (6, 5))
    module = after(write, torch.randn(8, 6).t(), at, torch.randn(6, 5))
    (scatter,) = [node for node in module.graph.nodes if owns_base(node)]
    assert scatter.args[0].meta["val"].stride() == scatter.meta["val"].stride()
