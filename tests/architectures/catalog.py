"""Small models of every architecture, by name, with inputs.

Worked example: ``build("transformers/causal/llama", "cpu")`` is a Llama of two layers and width 64 with 2 × 24 token ids,
which returns its loss; ``build("timm/convnext", "cpu")`` is the smallest ConvNeXt that timm has.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.zoo_models import without_dropout

TASKS = {"causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
         "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"}
"""What models of transformers do, with the name of the table of its classes."""

MOST_PARAMETERS = 50_000_000

MOST_MEMBERS = 12
"""Of a family of timm, those that are asked for their size: making all would take a minute."""

BATCH, TOKENS, FIRST_ID, VOCABULARY = 2, 24, 5, 120
HEADS, HEAD_SIZE, LAYERS = 4, 16, 2
WIDTH = HEADS * HEAD_SIZE

WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size", "word_embed_proj_dim",
          "encoder_hidden_size", "decoder_hidden_size", "attention_hidden_size", "d_embed")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(WIDTHS, WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner",
                     "ffn_hidden_size"), 2 * WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
                     "decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
                     "num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "kv_channels"), HEAD_SIZE),
    **dict.fromkeys(KEY_HEADS, HEADS // 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "mamba_d_head": HEAD_SIZE, "mamba_n_heads": 2 * HEADS, "mamba_d_state": 16, "state_size": 16,
    "image_size": 64, "use_cache": False,
}
"""What configurations call their sizes; those that a configuration does not have are left out."""


@dataclass(frozen=True)
class Subject:
    """A model with what it is called with, and whether that makes a loss."""

    module: nn.Module
    inputs: Mapping[str, torch.Tensor]


class Skipped(Exception):
    """Raised where an architecture cannot be made small or run by itself; the message says why."""


def names() -> Iterator[str]:
    """Yield the names of all architectures that are installed."""
    auto = _module("transformers.models.auto.modeling_auto")
    for task, table in TASKS.items():
        yield from (f"transformers/{task}/{kind}" for kind in getattr(auto, table, ()))
    timm = _module("timm")
    yield from (f"timm/{family}" for family in (timm.list_modules() if timm else ()))


def build(name: str, device: str) -> Subject:
    """Return the architecture of a name on a device, the same every time, without anything that drops values at random.

    Raises:
        Skipped: It needs what is not installed, or sizes that nobody knows.
    """
    torch.manual_seed(0)
    library, *path = name.split("/")
    try:
        with torch.device(device):
            subject = _of_transformers(*path) if library == "transformers" else _of_timm(*path)
    except Skipped:
        raise
    except Exception as error:  # configurations have rules of their own; what they refuse is no concern of a compiler
        raise Skipped(f"{type(error).__name__}: {error}") from error
    without_dropout(subject.module)
    return subject


def _module(name: str) -> Any:
    """Return a module; None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# ---------------------------------------------------------------------- transformers


def _of_transformers(task: str, kind: str) -> Subject:
    """Return a model of transformers with random weights and inputs."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    transformers = importlib.import_module("transformers")
    named = getattr(auto, TASKS[task])[kind]
    model_class = getattr(transformers, named if isinstance(named, str) else named[0])
    config = small(model_class.config_class)
    if task == "seq2seq":
        config.decoder_start_token_id = SIZES["decoder_start_token_id"]  # not in every configuration that models ask for it
    _expect_small(lambda: model_class(config))
    model = model_class(config)
    for parameter in model.parameters():  # many are made as zeros or ones, which hide what is computed from them
        if parameter.is_floating_point() and parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if bool((parameter == 1).all()) else 0.0, 0.1)
    return Subject(model, _images(config) if task == "images" else _tokens(model, config))


def _expect_small(make: Callable[[], nn.Module]) -> None:
    """Raise Skipped for a model that stays large: the names of its sizes are not known."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in make().parameters())
    if count > MOST_PARAMETERS:
        raise Skipped(f"it has {count / 1e6:.0f} million parameters")


def small(config_class: Any) -> Any:
    """Return a configuration with small sizes, where it has names for them that are known; so of its parts."""
    usual = config_class()
    known = usual.to_dict()
    accepted = {**known, **inspect.signature(config_class.__init__).parameters}
    sizes = {key: value for key, value in SIZES.items() if key in accepted and not isinstance(known.get(key), (list, tuple, dict))}
    if isinstance(known.get("depths"), list):
        sizes["depths"] = [1] * len(known["depths"])
    if isinstance(known.get("num_heads"), list):  # by stage; the widths go with them
        sizes = {key: size for key, size in sizes.items() if key not in WIDTHS}
    if "kv_lora_rank" in sizes:  # keys for all heads are made of a latent one
        sizes |= {key: HEADS for key in KEY_HEADS if key in sizes}
    parts = {key: small(type(part)) for key, part in vars(usual).items() if hasattr(part, "to_dict") and key in accepted}
    return config_class(**sizes, **parts)


def _tokens(model: nn.Module, config: Any) -> dict[str, torch.Tensor]:
    """Return token ids, and as labels the same: the loss of every task over tokens is one over every place."""
    ids = torch.randint(FIRST_ID, getattr(config, "vocab_size", VOCABULARY), (BATCH, TOKENS))
    accepted = inspect.signature(model.forward).parameters
    return {"input_ids": ids, **({"labels": ids.clone()} if "labels" in accepted else {})}


def _images(config: Any) -> dict[str, torch.Tensor]:
    """Return images of the size that a configuration says, and their classes."""
    size = getattr(config, "image_size", None) or 64
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.randn(BATCH, getattr(config, "num_channels", 3), height, width),
            "labels": torch.arange(BATCH)}


# ---------------------------------------------------------------------- timm


class _Classifier(nn.Module):
    """A model of timm, called as those of transformers are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _of_timm(family: str) -> Subject:
    """Return the smallest model of a family, by the number of its parameters."""
    timm = importlib.import_module("timm")
    with torch.device("meta"):
        made = {name: timm.create_model(name, num_classes=10) for name in timm.list_models(module=family)[:MOST_MEMBERS]}
    name = min(made, key=lambda name: sum(parameter.numel() for parameter in made[name].parameters()))
    _expect_small(lambda: made[name])
    model = timm.create_model(name, num_classes=10)
    channels, height, width = model.default_cfg["input_size"]
    return Subject(_Classifier(model), {"pixel_values": torch.randn(BATCH, channels, height, width), "labels": torch.arange(BATCH)})


