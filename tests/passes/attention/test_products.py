"""Products as models spell them: what is read of an equation multiplies as the equation does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from dynafuse.passes.attention.products import Operand, product_of

SIZES = {"b": 2, "h": 3, "i": 4, "j": 5, "d": 6}


def node_of(equation: str) -> tuple[Node, list[Tensor]]:
    graph = Graph()
    tensors = [torch.randn([SIZES[letter] for letter in term]) for term in equation.split("->")[0].split(",")]
    inputs = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    for node, tensor in zip(inputs, tensors, strict=True):
        node.meta["example_value"] = tensor
    return graph.call_function(torch.functional.einsum, (equation, *inputs)), tensors


def ordered(operand: Operand, tensors: list[Tensor]) -> Tensor:
    tensor = tensors[int(operand.node.name[1:])]
    if operand.order is None:
        return tensor
    tensor = tensor.permute([dim for dim in operand.order if dim is not None])
    for place, dim in enumerate(operand.order):
        tensor = tensor.unsqueeze(place) if dim is None else tensor
    return tensor


@pytest.mark.parametrize("equation", [
    "bhid,bhjd->bhij", "bihd,bjhd->bhij", "bhid,bjd->bhij", "jhbd,ihbd->bhij", "id,jd->ij", "bhij,bhjd->bhid", "bhij,bhjd->bihd",
    "bjhd,bhij->bihd", "bhij,bjd->bhid", "bid,bjd->bij", "bhij,hjd->bhid"])
def test_equations(equation: str) -> None:
    node, tensors = node_of(equation)
    product = product_of(node)
    assert product is not None
    found = ordered(product.left, tensors) @ ordered(product.right, tensors)
    found = found if product.order is None else found.permute([dim for dim in product.order if dim is not None])
    torch.testing.assert_close(found, torch.einsum(equation, *tensors))


@pytest.mark.parametrize("equation", [
    "bhid,bhjd->bhijd", "bhid,bhid->bhi", "bhid,bhjd->bij", "bii,bij->bij", "...id,...jd->...ij", "bhid,bhjd", "id,jh->idjh", "bhd,bhd->bh"])
def test_what_is_no_product_of_matrices(equation: str) -> None:
    graph = Graph()
    inputs = [graph.placeholder(name) for name in "xy"]
    for node, term in zip(inputs, equation.split("->")[0].split(","), strict=True):
        node.meta["example_value"] = torch.empty([SIZES.get(letter, 1) for letter in term])
    assert product_of(graph.call_function(torch.functional.einsum, (equation, *inputs))) is None
