"""Products in padded sizes, as graphs: what is padded and sliced, what is shared, and when it pays on an H200."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from dynafuse.cost import device as devices
from dynafuse.passes.normalize import normalize
from dynafuse.passes.padded_products import PADDED, pad_products
from tests.passes.test_normalize import text
from tests.support import graphs
from tests.support.graphs import Builder

aten = torch.ops.aten
H200 = devices.describe("h200")
ALWAYS = H200.overridden({f"contraction_share_{name}": 1e-9 for name in ("2", "4", "8", "tf32")})
BF16 = torch.bfloat16


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def sized(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor of a size that takes no memory: for prices alone."""
    return torch.empty(1, dtype=dtype, device="meta").expand(shape).new_empty(shape)


def priced(write: Callable[..., Any], *inputs: torch.Tensor, device: devices.Device = H200, captured: bool = False,
           kind: str = "inference", dynamic: bool = False) -> GraphModule:
    """A graph after the pass."""
    module = normalize(graphs.built(write, *inputs, dynamic=dynamic))
    pad_products(kind, module, device, inputs[0].device.type, captured)
    module.graph.lint()
    return module


def after(write: Callable[..., Any], *inputs: torch.Tensor) -> str:
    """The text of a graph whose products are all padded that can be; it computes what it did, in the same strides."""
    module = normalize(graphs.built(write, *inputs))
    expected = module(*inputs)
    pad_products("inference", module, ALWAYS, "cpu", False)
    module.graph.lint()
    module.recompile()
    for found, want in zip(module(*inputs), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
        assert found.stride() == want.stride()
    for node, value in values_of(module, *inputs).items():
        assert node.meta["val"].stride() == value.stride(), node
    return text(module)


def values_of(module: GraphModule, *inputs: torch.Tensor) -> dict[Node, torch.Tensor]:
    """What each call of a graph returns."""
    found: dict[Node, torch.Tensor] = {}

    class Noting(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if n.op == "call_function":
                found[n] = result
            return result

    Noting(module).run(*inputs)
    return found


def padded(module: GraphModule) -> list[str]:
    """What the report says of each product in padded sizes."""
    return [node.meta[PADDED] for node in module.graph.nodes if PADDED in node.meta]


def linear(b: Builder, x: Node, w: Node) -> Node:
    return b.op("aten.mm.default", x, b.op("aten.permute.default", w, [1, 0]))


def read(b: Builder, x: Node, w: Node) -> Node:
    """A product that a kernel reads."""
    return b.op("aten.exp.default", linear(b, x, w))


# ---------------------------------------------------------------------- what becomes of a graph


def test_the_weight_of_a_head_is_padded_in_its_own_order() -> None:
    assert after(read, random(4, 16), random(13, 16)) == (
        "constant_pad_nd_default = aten.constant_pad_nd.default(arg1, [0, 0, 0, 3])\n"
        "permute_default_1 = aten.permute.default(constant_pad_nd_default, [1, 0])\n"
        "mm_default_1 = aten.mm.default(arg0, permute_default_1)\n"
        "slice_tensor = aten.slice.Tensor(mm_default_1, 1, 0, 13)\n"
        "exp_default = aten.exp.default(slice_tensor)\n"
        "return exp_default")


def test_both_operands_get_zeros_along_the_inner_size() -> None:
    found = after(lambda b, x, y: b.op("aten.mm.default", x, y), random(5, 13), random(13, 16))
    assert "aten.constant_pad_nd.default(arg0, [0, 3])" in found and "aten.constant_pad_nd.default(arg1, [0, 0, 0, 3])" in found
    assert "slice" not in found


def test_sizes_that_memory_does_not_run_along_stay() -> None:
    assert "constant_pad_nd" not in after(read, random(5, 16), random(8, 16))


def test_rows_are_sliced_without_a_copy() -> None:
    found = after(lambda b, g, x: b.op("aten.mm.default", b.op("aten.permute.default", g, [1, 0]), x),
                  random(6, 13), random(6, 16))
    assert found.endswith("slice_tensor = aten.slice.Tensor(mm_default_1, 0, 0, 13)\nreturn slice_tensor")


def test_products_share_what_is_padded() -> None:
    def write(b: Builder, g: Node, w: Node, x: Node) -> tuple[Node, Node]:
        wide = b.op("aten.exp.default", g)
        turned = b.op("aten.permute.default", wide, [1, 0])
        return b.op("aten.mm.default", wide, w), b.op("aten.mm.default", turned, x)

    assert after(write, random(6, 13), random(13, 16), random(6, 16)).count("constant_pad_nd.default(exp") == 1


def test_an_operand_without_a_transpose_behind_it_is_turned() -> None:
    x = random(13, 6).t()
    found = after(lambda b, x, y: b.op("aten.mm.default", x, y), x, random(13, 16))
    assert "constant_pad_nd" not in found.split("mm_default")[0] or "permute" in found
    found = after(lambda b, x, y: b.op("aten.mm.default", x, y), random(16, 13).t(), random(16, 8))
    assert "aten.permute.default(arg0, [1, 0])" in found and "constant_pad_nd.default(permute_default, [0, 3])" in found


def test_batches_and_what_is_added_to_them() -> None:
    inputs = random(13), random(3, 6, 9), random(3, 9, 13)
    found = after(lambda b, c, x, y: b.op("aten.exp.default", b.op("aten.baddbmm.default", c, x, y, beta=2, alpha=3)), *inputs)
    for pad in ("arg0, [0, 3]", "arg1, [0, 7]", "arg2, [0, 3, 0, 7]"):
        assert f"constant_pad_nd.default({pad})" in found
    assert "beta=2, alpha=3" in found


def test_what_is_broadcast_is_not_padded() -> None:
    found = after(lambda b, c, x, y: b.op("aten.exp.default", b.op("aten.addmm.default", c, x, y)),
                  random(6, 1), random(6, 8), random(8, 13))
    assert "constant_pad_nd.default(arg0" not in found


def test_a_result_is_copied_once_for_the_caller_and_read_in_place() -> None:
    def write(b: Builder, x: Node, w: Node) -> tuple[Node, ...]:
        y = linear(b, x, w)
        apart = b.op("aten.view.default", y, [2, 3, 13])
        return b.op("aten.exp.default", apart), y, apart

    found = after(write, random(6, 16), random(13, 16))
    assert found.count("aten.clone") == 1
    assert "exp_default = aten.exp.default(view_default)" in found and "aten.view.default(slice_tensor, [2, 3, 13])" in found


def test_a_view_of_all_in_one_row_reads_a_copy() -> None:
    found = after(lambda b, x, w: b.op("aten.exp.default", b.op("aten.view.default", linear(b, x, w), [-1])),
                  random(6, 16), random(13, 16))
    assert found.count("aten.clone") == 1


def test_eagers_random_numbers_are_drawn_from_a_copy() -> None:
    """Eager's dropout on a GPU draws several numbers at a time where there are no gaps."""
    def write(b: Builder, x: Node, w: Node) -> Node:
        return b.op(operator.getitem, b.op("aten.native_dropout.default", linear(b, x, w), 0.4, True), 0)

    module = normalize(graphs.built(write, random(6, 16), random(13, 16)))
    pad_products("inference", module, ALWAYS, "cpu", False)
    drawn, = module.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    assert padded(module) and drawn.all_input_nodes[0].meta["val"].stride() == (13, 1)


def test_rows_and_columns_of_two_products() -> None:
    def write(b: Builder, x: Node, w: Node, y: Node, z: Node) -> tuple[Node, ...]:
        return linear(b, x, w), b.op("aten.mm.default", b.op("aten.permute.default", y, [1, 0]), z)

    found = after(write, random(6, 16), random(13, 16), random(8, 13), random(8, 16))
    assert found.count("aten.constant_pad_nd") == 2


def test_a_product_of_a_product() -> None:
    def write(b: Builder, x: Node, w: Node, v: Node) -> Node:
        return b.op("aten.mm.default", linear(b, x, w), b.op("aten.exp.default", v))

    assert after(write, random(6, 16), random(13, 16), random(13, 8)).count("aten.constant_pad_nd") == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float32])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    module = priced(linear, sized(64, 16, dtype=dtype), sized(13, 16, dtype=dtype), device=ALWAYS)
    assert padded(module) == []


def test_known_sizes_are_padded_beside_dynamic_ones() -> None:
    def write(b: Builder, x: Node) -> Node:
        w = b.op("aten.full.default", [13, 16], 1.0, dtype=BF16, device="cpu", pin_memory=False)
        wide = b.op("aten.full.default", [16, 16], 1.0, dtype=BF16, device="cpu", pin_memory=False)
        return read(b, b.op("aten.mm.default", b.op("aten.expand.default", x, [-1, 16]), wide), w)

    module = priced(write, random(6, 1), device=ALWAYS, dynamic=True)
    assert len(padded(module)) == 1 and "×13" in padded(module)[0]


def softmax(b: Builder, x: Node) -> Node:
    weights = b.op("aten.exp.default", x)
    return b.op("aten.div.Tensor", weights, b.op("aten.sum.dim_IntList", weights, [-1], True))


def test_what_rows_are_reduced_for_is_computed_once_more() -> None:
    found = after(lambda b, x, y: b.op("aten.mm.default", softmax(b, x), y), random(6, 13), random(13, 16))
    assert found.startswith("exp_default = aten.exp.default(arg0)\n"
                            "sum_dim_int_list = aten.sum.dim_IntList(exp_default, [-1], True)\n"
                            "exp_default_1 = aten.exp.default(arg0)\n"
                            "div_tensor_1 = aten.div.Tensor(exp_default_1, sum_dim_int_list)\n"
                            "constant_pad_nd_default = aten.constant_pad_nd.default(div_tensor_1, [0, 3])\n")


def test_but_not_if_it_is_read_elsewhere_or_drawn() -> None:
    def kept(b: Builder, x: Node, y: Node) -> tuple[Node, Node]:
        weights = softmax(b, x)
        return weights, b.op("aten.mm.default", weights, y)

    def dropped(b: Builder, x: Node, y: Node) -> Node:
        seed = b.op("prims.inductor_seed.default", torch.device("cpu"))
        draws = b.op("prims.inductor_random.default", [6, 13], seed, "rand")
        mask = b.op("aten.gt.Scalar", draws, 0.5)
        return b.op("aten.mm.default", b.op("aten.mul.Tensor", softmax(b, x), b.op("prims.convert_element_type.default", mask, BF16)), y)

    for write in (kept, dropped):
        assert text(priced(write, random(6, 13), random(13, 16), device=ALWAYS)).count("aten.exp") == 1


# ---------------------------------------------------------------------- when it pays


HEADS = [(8192, 768, 50257), (8192, 768, 50265), (4096, 1024, 32001), (2048, 768, 3129), (8192, 1024, 1026), (8192, 1030, 1024)]


@pytest.mark.parametrize(("m", "k", "n"), HEADS)
def test_large_products_are_padded(m: int, k: int, n: int) -> None:
    assert len(padded(priced(read, sized(m, k), sized(n, k)))) == 1


@pytest.mark.parametrize(("m", "k", "n"), [(64, 1280, 1001), (16, 64, 33), (8192, 768, 50304), (1, 4096, 4097)])
@pytest.mark.parametrize("captured", [False, True])
def test_small_or_aligned_ones_are_not(m: int, k: int, n: int, captured: bool) -> None:
    assert padded(priced(read, sized(m, k), sized(n, k), captured=captured)) == []


def test_the_host_counts_where_it_bounds_the_graph() -> None:
    inputs = sized(512, 1000), sized(769, 1000)
    assert padded(priced(read, *inputs)) == []
    assert len(padded(priced(read, *inputs, captured=True))) == 1


def test_copies_for_the_caller_count() -> None:
    few, many = (sized(8192, 64), sized(50257, 64)), (sized(8192, 768), sized(50257, 768))
    assert len(padded(priced(read, *few))) == 1 and padded(priced(linear, *few)) == []
    assert "for copies" in padded(priced(linear, *many))[0]


def test_attention_of_images() -> None:
    def write(b: Builder, s: Node, v: Node) -> Node:
        return b.op("aten.bmm.default", softmax(b, s), v)

    assert len(padded(priced(write, sized(96, 577, 577), sized(96, 577, 64)))) == 1
    assert padded(priced(write, sized(128, 49, 49), sized(128, 49, 32))) == []


def test_what_a_kernel_makes_for_products_is_padded_for_nothing_or_a_read() -> None:
    def write(b: Builder, x: Node, y: Node, reads: bool = False) -> tuple[Node, ...]:
        wide = b.op("aten.exp.default", x)
        product = b.op("aten.mm.default", wide, y)
        return (product, b.op("aten.sin.default", wide)) if reads else (product,)

    def cost(*notes: str) -> list[float]:
        return [float(re.search(r"and ([\d.]+) for", note)[1]) for note in notes]  # type: ignore[index]

    inputs = sized(8192, 1026), sized(1026, 1024)
    alone, (elsewhere,) = padded(priced(write, *inputs)), padded(priced(lambda b, x, y: write(b, x, y, True), *inputs))
    assert cost(*alone, elsewhere) == [3.0, 9.2]
    scanned = padded(priced(lambda b, x, y: write(b, b.op("aten.cumsum.default", x, 1), y), *inputs))
    assert cost(*scanned)[0] > 9.2  # its kernel walks whole rows, so that another one has to copy what it returns


def head_gradients(b: Builder, x: Node, lse: Node, grad: Node, w: Node, h: Node, column: str = "sum") -> tuple[Node, ...]:
    """Of a head with a bias under cross-entropy: of what it read, of its weight and of its bias."""
    probabilities = b.op("aten.exp.default", b.op("aten.sub.Tensor", x, lse))
    logits = b.op("aten.mul.Tensor", probabilities, grad)
    bias = b.op("aten.sum.dim_IntList", logits, [0]) if column == "sum" else b.op("aten.histc.default", logits)
    return b.op("aten.mm.default", logits, w), b.op("aten.mm.default", b.op("aten.permute.default", logits, [1, 0]), h), bias


def test_a_bias_gradient_reads_what_is_padded() -> None:
    inputs = random(6, 13), random(6, 1), random(6, 1), random(13, 16), random(6, 16)
    found = after(head_gradients, *inputs)
    assert "slice_tensor = aten.slice.Tensor(constant_pad_nd_default, 1, 0, 13)" in found
    assert "aten.sum.dim_IntList(slice_tensor, [0])" in found and found.count("constant_pad_nd.default(mul_tensor,") == 1
    assert found.index("slice_tensor =") < found.index("aten.mm")


def test_but_a_library_reads_what_it_did() -> None:
    inputs = random(6, 13), random(6, 1), random(6, 1), random(13, 16), random(6, 16)
    found = after(lambda b, *inputs: head_gradients(b, *inputs, column="histc"), *inputs)
    assert "aten.histc.default(mul_tensor)" in found


def test_after_a_reduction_all_read_what_a_kernel_of_its_own_pads() -> None:
    def write(b: Builder, x: Node, y: Node) -> tuple[Node, ...]:
        weights = softmax(b, x)
        return b.op("aten.mm.default", weights, y), b.op("aten.sum.dim_IntList", weights, [0])

    found = after(write, random(6, 13), random(13, 16))
    assert found.count("aten.div") == 1 and "aten.sum.dim_IntList(slice_tensor, [0])" in found


def test_float32_only_as_tf32() -> None:
    inputs = sized(8192, 768, dtype=torch.float32), sized(50257, 768, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert len(padded(priced(read, *inputs))) == 1
        torch.set_float32_matmul_precision("highest")
        assert padded(priced(read, *inputs)) == []
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_cpu_pads_nothing() -> None:
    assert padded(priced(read, sized(8192, 768), sized(50257, 768), device=devices.describe("cpu"))) == []
