"""Small models of real architectures: loss and every gradient, in float32 and bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.differential import _rms, compiled, regions
from tests.support.graphs import recorded

VOCABULARY, TOKENS, BATCH = 96, 17, 2


class Convolutions(nn.Module):
    """Batch norm, pooling, dropout, a residual: the parts of an image classifier."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(),
                                   nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(32, 10))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        return F.cross_entropy(self.head(F.relu(x + self.inner(x))), labels)


class Causal(nn.Module):
    """The loss of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Causal(LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, attn_implementation="sdpa")))


def neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return Causal(GPTNeoXForCausalLM(GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
        hidden_dropout=0.0, attention_dropout=0.0, attn_implementation="sdpa")))


def tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (BATCH, TOKENS)),)


def images() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 3, 12, 12), torch.randint(0, 10, (4,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "llama": (llama, tokens), "neox": (neox, tokens), "convolutions": (lambda: Convolutions(0.0), images),
}


def step(model: nn.Module, call: Callable[..., Any], arguments: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Loss, gradients and buffers after one training step, in float64."""
    model.zero_grad()
    loss = call(*arguments)
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b for name, b in model.named_buffers() if b.is_floating_point()}
    return {name: value.detach().double().cpu() for name, value in found.items()}


def train(build: Callable[[], nn.Module], arguments: tuple[torch.Tensor, ...], dtype: torch.dtype, compile: bool, device: str = "cpu") -> dict[str, torch.Tensor]:
    """One training step of the same model in a dtype."""
    torch.manual_seed(0)
    model = build().to(device, dtype).train()
    cast = tuple((a.to(dtype) if a.is_floating_point() else a).to(device) for a in arguments)
    return step(model, compiled(model) if compile else model, cast)


def check_model(name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """The compiled step is as near to float64 as eager's."""
    build, make = MODELS[name]
    torch.manual_seed(1)
    arguments = make()
    truth = train(build, arguments, torch.float64, False, device)
    eager = train(build, arguments, dtype, False, device)
    with recorded() as graphs:
        ours = train(build, arguments, dtype, True, device)
    assert regions(graphs, "forward") and regions(graphs, "backward")
    assert ours.keys() == eager.keys()
    unit = torch.finfo(dtype).eps
    ratios: list[float] = []
    for key, value in truth.items():
        wrong, usual, size = _rms(ours[key] - value), _rms(eager[key] - value), _rms(value)
        # A gradient of eight numbers, each a sum that cancels, is a few units off by luck: no single one may be far off, ...
        assert wrong <= 2 * usual + 8 * unit * size + unit * 1e-2, f"{key}: error {wrong:.3e}, eager's {usual:.3e}, magnitude {size:.3e}"
        ratios.append(math.log((wrong + unit * size / 8 + 1e-30) / (usual + unit * size / 8 + 1e-30)))
    worse = math.exp(sum(ratios) / len(ratios))
    assert worse <= 2, f"errors are {worse:.2f} times eager's in the geometric mean"  # ... and all together at most twice as far


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("neox", torch.float32),
                                             ("convolutions", torch.float32), ("convolutions", torch.bfloat16)], ids=str)
def test_training_step(name: str, dtype: torch.dtype) -> None:
    check_model(name, dtype)


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str) -> None:
    build, make = MODELS[name]
    arguments = make()
    model = build().eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(*arguments), model(*arguments), rtol=1e-5, atol=1e-6)


def test_several_steps_reach_eagers_loss() -> None:
    torch.manual_seed(1)
    arguments = images()
    losses = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = Convolutions(0.0)
        call = compiled(model) if compile else model
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            loss = call(*arguments)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_dropout_trains() -> None:
    torch.manual_seed(1)
    arguments = images()
    model = Convolutions(0.5)
    call = compiled(model)
    first, second = (step(model, call, arguments)["loss"] for _ in range(2))
    assert first != second
    torch.manual_seed(7)
    again = step(model, call, arguments)["loss"]
    torch.manual_seed(7)
    assert step(model, call, arguments)["loss"] == again
