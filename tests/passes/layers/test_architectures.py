"""Real architectures in pieces: what layers hand on there, and in which layout, is more than small models show."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from dynafuse import backend
from dynafuse.config import Config
from dynafuse.cost.device import Device
from tests.support.graphs import recorded

VOCABULARY, TOKENS = 97, 16


def encoder_decoder() -> nn.Module:
    """T5: two kinds of layers, keys behind an empty cache, and dropout in attention alone."""
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(
        vocab_size=VOCABULARY, d_model=32, d_ff=64, d_kv=8, num_layers=4, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.1, use_cache=False))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def test_a_step_in_pieces_is_eagers() -> None:
    torch.manual_seed(0)
    model = encoder_decoder().double().train()
    twin, ids = copy.deepcopy(model), torch.randint(VOCABULARY, (2, TOKENS))
    torch._dynamo.reset()
    options = {"reuse_layers": "always", "executors": "eager", "fallback_random": True}
    compiled = torch.compile(model, backend=backend.dynafuse, fullgraph=True, options=options)

    def step(call: Callable[..., Any]) -> torch.Tensor:
        torch.manual_seed(1)  # what is dropped
        loss: torch.Tensor = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    with recorded() as graphs:
        ours = step(compiled)
    torch.testing.assert_close(ours, step(twin), rtol=1e-6, atol=0)  # norms are in float32
    assert sum(graph.calls > 1 for graph in graphs) == 4  # forward and backward of an encoder's layer and of a decoder's
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None), name
        if got.grad is not None and wanted.grad is not None:
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_a_graph_without_inputs_is_priced_for_the_device_that_it_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and tables of positions are made of nothing: what the graph computes says where it runs."""
    seen: list[Any] = []
    device_of = backend.device_of

    def watched(values: Iterable[Any], config: Config) -> Device:
        seen.extend(values := list(values))
        return device_of(values, config)

    monkeypatch.setattr(backend, "device_of", watched)
    made = torch.compile(lambda: torch.arange(4.0).cos(), backend="dynafuse")()
    torch.testing.assert_close(made, torch.arange(4.0).cos())
    assert any(isinstance(value, torch.Tensor) for value in seen)
