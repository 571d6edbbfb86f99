"""The ways in which a model is run, and what it leaves: outputs, loss, gradients and buffers, or tokens.

Worked example: ``MODES["train"](subject, lambda module: torch.compile(module))`` is ``{"['loss']": tensor(4.8), "grad of …": …}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from tests.architectures.catalog import Skipped, Subject

Results = dict[str, torch.Tensor]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What compiles a model, or its forward; or leaves it as it is."""

Run = Callable[[Subject, Wrap], Results]

NEW_TOKENS = 5
FEWER_TOKENS = 7
"""How much shorter the sequences of a second batch are."""


def train(subject: Subject, wrap: Wrap) -> Results:
    """Return what a step of training leaves."""
    subject.module.train()
    return _step(subject.module, wrap(subject.module), subject.inputs)


def infer(subject: Subject, wrap: Wrap) -> Results:
    """Return what a call without gradients returns."""
    module = subject.module.eval()
    with torch.no_grad():
        return _tensors(wrap(module)(**subject.inputs))


def autocast(subject: Subject, wrap: Wrap) -> Results:
    """Return what a step of training in mixed precision leaves."""
    with torch.autocast(next(subject.module.parameters()).device.type, torch.bfloat16):
        return train(subject, wrap)


def resized(subject: Subject, wrap: Wrap) -> Results:
    """Return what a second step leaves, of more and shorter sequences, or more images: sizes are dynamic from then on."""
    module = subject.module.train()
    call = wrap(module)
    _step(module, call, subject.inputs)
    module.zero_grad()
    return _step(module, call, {name: _resized(tensor) for name, tensor in subject.inputs.items()})


def checkpoint(subject: Subject, wrap: Wrap) -> Results:
    """Return what a step of training leaves whose layers are computed again in the backward.

    Buffers are left out: in eager the second computation updates the statistics of batch norms once more, traced by torch it does not.
    """
    module: Any = subject.module
    if hasattr(module, "gradient_checkpointing_enable"):  # transformers'
        if not module.supports_gradient_checkpointing:
            raise Skipped("it does not checkpoint its layers")
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif hasattr(module, "set_grad_checkpointing"):  # timm's
        module.set_grad_checkpointing()
    else:
        raise Skipped("it does not checkpoint its layers")
    return {name: value for name, value in train(subject, wrap).items() if not name.startswith("buffer ")}


def generate(subject: Subject, wrap: Wrap) -> Results:
    """Return the tokens that transformers' ``generate`` takes, and their logits, with a cache that grows."""
    return _generated(subject, wrap)


def static(subject: Subject, wrap: Wrap) -> Results:
    """Return the same with a cache that has its size from the start, and that the model writes into."""
    return _generated(subject, wrap, cache_implementation="static")


@dataclass(frozen=True)
class Mode:
    """A way of running a model.

    Attributes:
        run: It.
        exact: The way whose results, in float64 where the model has that, are the right ones.
        allowed: Relative error that is none, besides twice that of eager.
    """

    run: Run
    exact: Run
    allowed: float = 1e-4  # of float32 in many layers


MODES: Mapping[str, Mode] = {
    **{run.__name__: Mode(run, run) for run in (train, infer, resized, checkpoint, generate, static)}, "autocast": Mode(autocast, train, 5e-2)}


def _step(module: nn.Module, call: Callable[..., Any], inputs: Mapping[str, torch.Tensor]) -> Results:
    outputs = call(**inputs)
    results = _tensors(outputs)
    _loss(outputs, results).backward()
    results = {name: tensor.detach() for name, tensor in results.items()}
    results |= {f"grad of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return results | {f"buffer {name}": buffer for name, buffer in module.named_buffers()}


def _generated(subject: Subject, wrap: Wrap, **how: Any) -> Results:
    module: Any = subject.module.eval()
    ids = subject.inputs.get("input_ids")
    if ids is None or not hasattr(module, "generate"):
        raise Skipped("it makes no tokens")
    module.forward = wrap(module.forward)
    told = module.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1, use_cache=True,
                           output_logits=True, return_dict_in_generate=True, disable_compile=True, **how)
    return {"tokens": told.sequences, **{f"logits {n}": logits for n, logits in enumerate(told.logits)}}


def _resized(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its first row again, and of token ids the first ones alone."""
    more = torch.cat([tensor, tensor[:1]])
    return more[:, :-FEWER_TOKENS].contiguous() if more.dim() == 2 and not more.is_floating_point() else more


def _tensors(outputs: Any) -> Results:
    """Return the tensors of what a model returns, by where they are."""
    leaves, _ = tree_flatten_with_path(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    return {"".join(map(str, path)): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _loss(outputs: Any, results: Results) -> torch.Tensor:
    """Return the loss that a model returns, else one over its outputs."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss
    return torch.stack([value.float().square().mean() for value in results.values() if value.requires_grad]).sum()
