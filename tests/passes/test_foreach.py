"""Ops over lists of tensors, one by one: each against eager; whole steps of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

import dynafuse
from dynafuse.passes.foreach import foreach_decompositions

OPS = foreach_decompositions()
SHAPES = ((3, 4), (5,), (), (2, 1, 3))


def tensors(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(shape, generator=generator) * 3 + 0.1).to(dtype) for shape in SHAPES]


def given(op: OpOverload, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments for an op over lists."""
    positional, named = [], {}
    for seed, argument in enumerate(op._schema.arguments):
        value: Any = {"List[Tensor]": tensors(dtype, seed), "List[number]": [2, 0.5, -1, 3], "Tensor": torch.tensor(1.5),
                      "number": 2 if argument.name == "ord" else 0.3, "bool": False}.get(str(argument.type))
        if value is None:
            continue
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    if op is torch.ops.aten._foreach_mm.default:
        positional = [[torch.ones(2, 3, dtype=dtype)], [torch.ones(3, 2, dtype=dtype)]]
    return positional, named


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_each(op: OpOverload, dtype: torch.dtype) -> None:
    positional, named = given(op, dtype)
    try:
        expected = op(*positional, **named)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"eager: {error}")
    got = OPS[op](*positional, **named)
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in expected]
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_scalars_that_are_a_tensor_stay_whole() -> None:
    assert torch.ops.aten._foreach_addcdiv.Tensor not in OPS
    assert torch.ops.aten._foreach_addcdiv.ScalarList in OPS


def test_nothing_is_left_of_a_list() -> None:
    def step(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(torch._foreach_addcdiv(torch._foreach_lerp(a, b, 0.1), a, b, value=0.5))

    a, b = tensors(torch.float32, 0), tensors(torch.float32, 1)
    made = make_fx(step, decomposition_table=OPS, tracing_mode="fake")(a, b)
    assert "foreach" not in made.code
    torch.testing.assert_close(made(a, b), step(a, b))


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((8, 4), (8,), (16, 8), (16,), (8, 4), (3, 5, 2))
    held = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in held:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return held


def clipped(held: Sequence[nn.Parameter]) -> Callable[[], object]:
    optimizer = torch.optim.Adam(held, lr=0.01)

    def step() -> None:
        nn.utils.clip_grad_norm_(held, 1.0)
        optimizer.step()

    return step


STEPS: dict[str, Callable[[Sequence[nn.Parameter]], Callable[[], object]]] = {
    "sgd": lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True).step,
    "adamw": lambda held: torch.optim.AdamW(held, lr=0.01, foreach=True).step,
    "amsgrad": lambda held: torch.optim.Adam(held, lr=0.01, amsgrad=True, weight_decay=0.1, foreach=True).step,
    "nadam": lambda held: torch.optim.NAdam(held, lr=0.01, foreach=True).step,
    "rmsprop": lambda held: torch.optim.RMSprop(held, lr=0.01, momentum=0.5, centered=True, foreach=True).step,
    "adagrad": lambda held: torch.optim.Adagrad(held, lr=0.01, foreach=True).step,
    "adadelta": lambda held: torch.optim.Adadelta(held, lr=0.1, foreach=True).step,
    "clipped": clipped,
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_optimizers(name: str) -> None:
    """Three compiled steps leave the parameters that eager's leave, in place, and call nothing of eager's over lists."""
    ours, eagers = parameters(), parameters()
    compiled, step = torch.compile(STEPS[name](ours), backend="dynafuse"), STEPS[name](eagers)
    places = [parameter.data_ptr() for parameter in ours]
    for _ in range(3):
        compiled()
        step()
    torch.testing.assert_close(ours, eagers)
    assert [parameter.data_ptr() for parameter in ours] == places
    report = str(dynafuse.process_report())
    assert "triton" in report
    assert "foreach" not in report
