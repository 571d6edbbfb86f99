"""Whole models as a table of cases: random weights, one module whose forward gives the loss (training) or the output.

Example:
    >>> work = CASES["llama"].build(Build(device="cpu", scale="tiny", layers=2))
    >>> work.module(*work.inputs).backward()

Sizes at scale "full":
  llama         LlamaForCausalLM: hidden 2048, intermediate 5632, 16 heads / 4 key-value heads, vocabulary 32000, batch
                4 x 2048 tokens, SDPA attention, no key-value cache; about 45 M parameters a layer
  gpt_neox      GPTNeoXForCausalLM: the same widths with the family's own MLP (8192 = 4 x 2048, GELU), rotary on 25% of
                each head, LayerNorm and biases; vocabulary 32000 instead of the family's 50432, so that the loss weighs
                what it weighs in llama
  vit_b         torchvision vit_b_16, batch 64, 224 x 224
  resnet50      torchvision resnet50, batch 64, 224 x 224, contiguous; `resnet50_channels_last` differs in layout alone,
                which tells how much of a difference to Inductor is layout (it moves convolutions to channels-last)
All weights and activations are bfloat16 (no autocast) unless asked otherwise. Scale "tiny" keeps the structure at sizes
that a CPU runs in a second.
"""
from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Skip(Exception):
    """A case that cannot run here; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Build:
    """What a case is built with; `layers` None means the case's own number, `dropout` that models drop what they do."""

    device: str = "cuda"
    scale: str = "full"
    layers: int | None = None
    train: bool = True
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    dropout: bool = False


@dataclasses.dataclass(frozen=True)
class Workload:
    """A module and its inputs; `module(*inputs)` is a scalar loss in training and the model's output in inference."""

    module: nn.Module
    inputs: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Language:
    """Sizes of a decoder-only language model."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    batch: int
    tokens: int
    layers: int


@dataclasses.dataclass(frozen=True)
class Vision:
    """Sizes of an image model's batch."""

    batch: int
    image: int
    classes: int = 1000


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: a name, how to build the model, and its sizes by scale."""

    name: str
    make: Callable[[Any, Build], nn.Module]
    sizes: dict[str, Any]
    channels_last: bool = False

    def build(self, how: Build) -> Workload:
        """The workload on `how.device`, the same for the same seed; raises Skip when a package is missing."""
        size = self.size(how)
        torch.manual_seed(how.seed)
        with torch.device(how.device):
            model = self.make(size, how)
            inputs = inputs_of(size, how)
        if self.channels_last:
            # The overload for memory formats alone is missing from nn.Module.to's stub.
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            inputs = (inputs[0].to(memory_format=torch.channels_last), *inputs[1:])
        model.train(how.train)
        return Workload(WRAPPERS[type(size), how.train](model), inputs)

    def size(self, how: Build) -> Any:
        """The sizes at `how.scale`, with the number of layers replaced where one is asked for."""
        size = self.sizes[how.scale]
        if how.layers is None or not isinstance(size, Language):
            return size
        return dataclasses.replace(size, layers=how.layers)


class LanguageLoss(nn.Module):
    """Next-token loss of a causal language model, as its own forward computes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class LanguageLogits(nn.Module):
    """All logits of a causal language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


class VisionLoss(nn.Module):
    """Cross-entropy of an image classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(images), labels)


class VisionLogits(nn.Module):
    """Class scores of an image classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        scores: Tensor = self.model(images)
        return scores


WRAPPERS: dict[tuple[type, bool], Callable[[nn.Module], nn.Module]] = {
    (Language, True): LanguageLoss,
    (Language, False): LanguageLogits,
    (Vision, True): VisionLoss,
    (Vision, False): VisionLogits,
}


def inputs_of(size: Language | Vision, how: Build) -> tuple[Tensor, ...]:
    """Random token ids and labels, or random images and classes."""
    if isinstance(size, Language):
        ids = torch.randint(size.vocab, (size.batch, size.tokens))
        return ids, ids.clone()
    images = torch.randn(size.batch, 3, size.image, size.image, dtype=how.dtype)
    return images, torch.randint(size.classes, (size.batch,))


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Skip(f"needs {package}, which is not installed here")


def _causal(config: Any, how: Build) -> nn.Module:
    from transformers import AutoModelForCausalLM

    # from_config, not .to(dtype): it keeps the rotary frequencies in float32, as a loaded checkpoint has them.
    build: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
    return build(config, dtype=how.dtype, attn_implementation="sdpa")


def _common(size: Language) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden, "intermediate_size": size.intermediate, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "vocab_size": size.vocab, "max_position_embeddings": size.tokens,
        "use_cache": False,
    }


def make_llama(size: Language, how: Build) -> nn.Module:
    """Llama with grouped key-value heads."""
    _need("transformers")
    from transformers import LlamaConfig

    return _causal(LlamaConfig(num_key_value_heads=size.kv_heads, **_common(size)), how)


def make_gpt_neox(size: Language, how: Build) -> nn.Module:
    """GPT-NeoX with rotary embedding on a quarter of each head (the configuration's default)."""
    _need("transformers")
    from transformers import GPTNeoXConfig

    return _causal(GPTNeoXConfig(**_common(size)), how)


def _cast(model: nn.Module, how: Build) -> nn.Module:
    return model.to(how.dtype)


def make_vit(size: Vision, how: Build) -> nn.Module:
    """vit_b_16, or two narrow layers of the same class at another image size."""
    _need("torchvision")
    from torchvision.models import VisionTransformer, vit_b_16

    if size.image == 224:
        return _cast(vit_b_16(), how)
    narrow = {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    return _cast(VisionTransformer(image_size=size.image, **narrow), how)


def make_resnet50(size: Vision, how: Build) -> nn.Module:
    """resnet50 with the batch statistics of random images; tiny differs in batch and image alone."""
    _need("torchvision")
    from torchvision.models import resnet50

    return _cast(calibrated(resnet50(), size.image), how)


def calibrated(model: nn.Module, image: int) -> nn.Module:
    """`model` with the batch statistics of random images, where it has any.

    With a fresh model's statistics (mean 0, variance 1) batch norm multiplies by 0.999995. Eager rounds that away; a fused
    residual add does not, and lands below the tie that two bfloat16 numbers' sum often is, always on the same side.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            model.train()(torch.randn(16, 3, image, image))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model


_TINY = Language(hidden=64, intermediate=128, heads=4, kv_heads=2, vocab=256, batch=2, tokens=32, layers=2)
_LLAMA = Language(hidden=2048, intermediate=5632, heads=16, kv_heads=4, vocab=32000, batch=4, tokens=2048, layers=8)
_NEOX = dataclasses.replace(_LLAMA, intermediate=8192, kv_heads=16)
_VIT = {"full": Vision(64, 224), "tiny": Vision(2, 32)}
_RESNET = {"full": Vision(64, 224), "tiny": Vision(4, 32)}

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("llama", make_llama, {"full": _LLAMA, "tiny": _TINY}),
        Case("gpt_neox", make_gpt_neox, {"full": _NEOX, "tiny": _TINY}),
        Case("vit_b", make_vit, _VIT),
        Case("resnet50", make_resnet50, _RESNET),
        Case("resnet50_channels_last", make_resnet50, _RESNET, channels_last=True),
    )
}
