"""The architectures of `bench.zoo`: real widths and vocabularies, few layers, random weights made on the device.

Example:
    >>> work = CASES["bert"].build(Build(device="cpu", scale="tiny"))
    >>> work.module(*work.inputs).backward()

Language models come from transformers (here), image models from timm and torchvision, diffusion models from diffusers
(`zoo_vision`). A package or a class that is not installed skips the case. Whatever draws random numbers while it trains is
off unless `Build.dropout` says so: dropout, stochastic depth, dropped labels. Everything is bfloat16, as `Build.dtype` says.
Scale "tiny" keeps the structure at widths that a CPU runs at once.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import zoo_vision
from bench.models import Build, Skip, Workload

Sizes = Mapping[str, Any]

FIRST_ID = 3
"""Random token ids begin here: those below are marks (padding, begin, end) in most vocabularies."""

MODES = ("train", "infer")
DROPOUT = "dropout"
"""The mode in which a model is trained with what it drops at random as it comes; in `train` it drops nothing."""


@dataclass(frozen=True)
class Architecture:
    """One row of the zoo: how to build a model, and whether it is trained, run, or both."""

    name: str
    make: Callable[[Build], Workload]
    modes: tuple[str, ...] = (*MODES, DROPOUT)

    def build(self, how: Build) -> Workload:
        """Return the workload on `how.device`, the same for the same seed; raises Skip when something is not installed."""
        torch.manual_seed(how.seed)
        with torch.device(how.device):
            work = self.make(how)
        if not how.dropout:
            without_dropout(work.module)
        work.module.train(how.train)
        return work


def without_dropout(module: nn.Module) -> None:
    """Switch off what drops values at random: two systems draw different numbers."""
    for part in module.modules():
        drops = any(word in type(part).__name__.lower() for word in ("drop", "stochasticdepth"))
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or (drops and name == "p")):
                setattr(part, name, 0.0)


class Keyword(nn.Module):
    """A model of transformers that is called by keyword, and one tensor of what it returns."""

    def __init__(self, model: nn.Module, names: Sequence[str], result: str) -> None:
        super().__init__()
        self.model, self.names, self.result = model, tuple(names), result

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs = self.model(**dict(zip(self.names, inputs, strict=True)))
        tensor: Tensor = getattr(outputs, self.result)
        return tensor


class Decode(nn.Module):
    """One step of generation with a static cache: the next token's logits after `past` tokens."""

    def __init__(self, model: nn.Module, cache: Any, past: int) -> None:
        super().__init__()
        self.model, self.cache, self.past = model, cache, past

    def forward(self, ids: Tensor) -> Tensor:
        position = torch.full((1,), self.past, device=ids.device)
        for layer in self.cache.layers:
            # Newer caches count for themselves; the count is set back, so that every step writes to the same place.
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.copy_(position[0])
        outputs = self.model(input_ids=ids, past_key_values=self.cache, cache_position=position,
                             position_ids=position[None].expand(ids.shape), use_cache=True)
        logits: Tensor = outputs.logits
        return logits

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Decode:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for layer in self.cache.layers:
            layer.keys, layer.values = fn(layer.keys), fn(layer.values)
        return self


@dataclass(frozen=True)
class Text:
    """A model of transformers: names of its classes, its sizes, and its batch."""

    config: str
    auto: str
    full: Sizes
    tiny: Sizes
    batch: int = 4
    tokens: int = 1024
    attention: str = "sdpa"
    fixed: Sizes = field(default_factory=dict)

    def model(self, how: Build) -> Any:
        """Return the model with its own initialization."""
        transformers = _package("transformers")
        sizes = {**self.full, **self.fixed, **(self.tiny if how.scale == "tiny" else {})}
        config = _attribute(transformers, self.config)(**sizes)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float) and not how.dropout:
                setattr(config, name, 0.0)
        # from_config, not .to(dtype): it keeps in float32 what a loaded checkpoint has in float32.
        return _attribute(transformers, self.auto).from_config(config, dtype=how.dtype, attn_implementation=self.attention)

    def shape(self, how: Build) -> tuple[int, int]:
        """Return batch and tokens."""
        return (2, 32) if how.scale == "tiny" else (self.batch, self.tokens)


def make_language(text: Text, how: Build) -> Workload:
    """Return a decoder or an encoder with a loss over every token."""
    model = text.model(how)
    ids = _ids(model, text.shape(how))
    if how.train:
        return Workload(Keyword(model, ("input_ids", "labels"), "loss"), (ids, ids.clone()))
    return Workload(Keyword(model, ("input_ids",), "logits"), (ids,))


def make_translation(text: Text, how: Build) -> Workload:
    """Return an encoder-decoder over tokens."""
    model = text.model(how)
    ids, target = _ids(model, text.shape(how)), _ids(model, text.shape(how))
    names = ("input_ids", "labels") if how.train else ("input_ids", "decoder_input_ids")
    return Workload(Keyword(model, names, "loss" if how.train else "logits"), (ids, target))


def make_speech(text: Text, how: Build) -> Workload:
    """Return an encoder of sound and a decoder of tokens."""
    model = text.model(how)
    batch, tokens = text.shape(how)
    features = torch.randn(batch, model.config.num_mel_bins, 2 * model.config.max_source_positions, dtype=how.dtype)
    names = ("input_features", "labels") if how.train else ("input_features", "decoder_input_ids")
    return Workload(Keyword(model, names, "loss" if how.train else "logits"), (features, _ids(model, (batch, tokens))))


def make_decode(text: Text, how: Build) -> Workload:
    """Return a step of generation, whose cache was filled by the tokens before it."""
    model = text.model(how).eval()
    batch, tokens = text.shape(how)
    cache = _attribute(_package("transformers"), "StaticCache")(config=model.config, max_cache_len=2 * tokens)
    with torch.no_grad():
        positions = torch.arange(tokens)
        model(input_ids=_ids(model, (batch, tokens)), past_key_values=cache, cache_position=positions, use_cache=True)
    return Workload(Decode(model, cache, tokens), (_ids(model, (batch, 1)),))


def _ids(model: Any, shape: tuple[int, int]) -> Tensor:
    return torch.randint(FIRST_ID, model.config.vocab_size, shape)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skip(f"needs {name}: {error}") from None


def _attribute(package: Any, name: str) -> Any:
    # The packages load their parts when they are asked for: what one needs may be missing.
    try:
        return getattr(package, name)
    except (AttributeError, ImportError):
        raise Skip(f"{package.__name__} {package.__version__} has no {name}") from None


# ------ the table
CAUSAL, MASKED, SEQ2SEQ, SPEECH = (
    f"AutoModelFor{task}" for task in ("CausalLM", "MaskedLM", "Seq2SeqLM", "SpeechSeq2Seq"))
NARROW: Sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
NARROW_GROUPED: Sizes = {**NARROW, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None}
NO_CACHE: Sizes = {"use_cache": False}


def widths(hidden: int, intermediate: int, heads: int, vocab: int, layers: int = 2, **more: Any) -> Sizes:
    """Return a configuration by the names that most of transformers use."""
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads, "vocab_size": vocab,
            "num_hidden_layers": layers, **more}


def causal(config: str, full: Sizes, tiny: Sizes = NARROW_GROUPED, **more: Any) -> Text:
    """Return a decoder."""
    return Text(config, CAUSAL, full, tiny, fixed=NO_CACHE, **more)


def masked(config: str, full: Sizes, tiny: Sizes = NARROW, **more: Any) -> Text:
    """Return an encoder, with sequences as long as encoders were trained on."""
    return Text(config, MASKED, full, tiny, batch=16, tokens=512, **more)


LLAMA = Text("LlamaConfig", CAUSAL, widths(2048, 8192, 32, 128256, num_key_value_heads=8, max_position_embeddings=8192),
             NARROW_GROUPED)

DECODERS: Mapping[str, Text] = {
    "gpt2": causal("GPT2Config", {"n_layer": 2}, {"vocab_size": 256, "n_embd": 64, "n_head": 4}, batch=8),
    "llama": causal("LlamaConfig", LLAMA.full),
    "llama_small": causal("LlamaConfig", widths(512, 1536, 8, 32000, layers=8, num_key_value_heads=4), batch=1, tokens=128),
    "gpt_neox": causal("GPTNeoXConfig", widths(2048, 8192, 16, 50304), NARROW),
    "gemma2": causal("Gemma2Config", widths(2304, 9216, 8, 256000, num_key_value_heads=4, head_dim=256), batch=2,
                     attention="eager"),
    "mixtral": causal("MixtralConfig", widths(4096, 14336, 32, 32000, layers=1, num_key_value_heads=8), batch=2),
    "mamba2": causal(
        "Mamba2Config",
        {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "n_groups": 1, "vocab_size": 50288, "num_hidden_layers": 2,
         "chunk_size": 256},
        {"vocab_size": 256, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 16}, batch=1,
        attention="eager"),
    "qwen3": causal("Qwen3Config", widths(2048, 6144, 16, 151936, num_key_value_heads=8, head_dim=128)),
    "bloom": causal("BloomConfig", {"hidden_size": 1536, "n_head": 16, "n_layer": 2, "vocab_size": 250880},
                    {"vocab_size": 256, "hidden_size": 64, "n_head": 4}, batch=2, attention="eager"),
    "opt": causal("OPTConfig", {"hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192, "num_attention_heads": 32,
                                "num_hidden_layers": 2},
                  {"vocab_size": 256, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128,
                   "num_attention_heads": 4}),
    "phi3": causal("Phi3Config", widths(3072, 8192, 32, 32064), {**NARROW, "num_key_value_heads": 4, "pad_token_id": None}),
    "mistral": causal("MistralConfig", widths(4096, 14336, 32, 32000, num_key_value_heads=8, sliding_window=512)),
    "qwen2": causal("Qwen2Config", widths(1536, 8960, 12, 151936, num_key_value_heads=2)),
    "olmoe": causal("OlmoeConfig", widths(2048, 1024, 16, 50304, num_key_value_heads=16, num_experts=64),
                    {**NARROW, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None}),
    # The scan in plain torch is a loop over tokens, which compilers see unrolled: few tokens.
    "mamba": causal("MambaConfig", {"hidden_size": 768, "vocab_size": 50280, "num_hidden_layers": 1},
                    {"vocab_size": 256, "hidden_size": 64, "time_step_rank": 4}, tokens=16, batch=16, attention="eager"),
    # State spaces beside attention, and attention without a softmax beside experts.
    "falcon_h1": causal(
        "FalconH1Config",
        widths(1024, 2048, 8, 32000, num_key_value_heads=2, mamba_d_ssm=1024, mamba_n_heads=32, mamba_d_head=32,
               mamba_chunk_size=128),
        {**NARROW_GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16}, batch=2,
        tokens=512),
    # Short convolutions of sequences.
    "lfm2": causal("Lfm2Config", widths(1024, 4096, 16, 32000, num_key_value_heads=8, full_attn_idxs=[1]),
                   {**NARROW, "num_key_value_heads": 2, "pad_token_id": None}),
    "minimax": causal(
        "MiniMaxConfig", widths(1024, 2048, 16, 32000, num_key_value_heads=8, head_dim=64, num_local_experts=4),
        {**NARROW_GROUPED, "num_local_experts": 4, "block_size": 16}, batch=2),
}
ENCODERS: Mapping[str, Text] = {
    "bert": masked("BertConfig", widths(768, 3072, 12, 30522)),
    "deberta_v2": masked("DebertaV2Config", widths(
        768, 3072, 12, 128100, relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False), attention="eager"),
    "modernbert": masked("ModernBertConfig", widths(768, 1152, 12, 50368),
                         {**NARROW, "pad_token_id": 1, "local_attention": 16}),
    "roberta": masked("RobertaConfig", widths(768, 3072, 12, 50265, max_position_embeddings=514)),
    "albert": masked("AlbertConfig", widths(768, 3072, 12, 30000)),
}
UNTUNED_ENCODERS: Mapping[str, Text] = {
    "electra": masked("ElectraConfig", widths(256, 1024, 4, 30522, embedding_size=128)),
    "distilbert": masked("DistilBertConfig", {"dim": 768, "hidden_dim": 3072, "n_heads": 12, "n_layers": 2},
                         {"vocab_size": 256, "dim": 64, "hidden_dim": 128, "n_heads": 4}),
    "megatron_bert": masked("MegatronBertConfig", widths(1024, 4096, 16, 29056), attention="eager"),
    "layoutlm": masked("LayoutLMConfig", widths(768, 3072, 12, 30522), attention="eager"),
    "convbert": masked("ConvBertConfig", widths(768, 3072, 12, 30522), attention="eager"),
    "roformer": masked("RoFormerConfig", widths(768, 3072, 12, 50000), attention="eager"),
    "longformer": masked("LongformerConfig", widths(768, 3072, 12, 30522, attention_window=256, max_position_embeddings=514),
                         {**NARROW, "attention_window": 16}, attention="eager"),
}
"""Models that nothing was tuned for: they say what a user with another one sees."""

T5 = Text("T5Config", SEQ2SEQ,
          {"d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": 2, "vocab_size": 32128,
           "decoder_start_token_id": 0, **NO_CACHE},
          {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 256}, batch=8, tokens=512,
          attention="eager")
BART = Text("BartConfig", SEQ2SEQ,
            {"d_model": 768, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "encoder_attention_heads": 12,
             "decoder_attention_heads": 12, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50265, **NO_CACHE},
            {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "vocab_size": 256}, batch=8, tokens=512)
_WIDE: Sizes = {**BART.full, "d_model": 1024, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
                "encoder_attention_heads": 16, "decoder_attention_heads": 16}
UNTUNED_TRANSLATORS: Mapping[str, Text] = {
    "pegasus": Text("PegasusConfig", SEQ2SEQ, _WIDE, BART.tiny, tokens=512),
    "m2m100": Text("M2M100Config", SEQ2SEQ, {**_WIDE, "vocab_size": 128112}, BART.tiny, tokens=512),
    "blenderbot": Text("BlenderbotConfig", SEQ2SEQ, {**_WIDE, "vocab_size": 8008, "max_position_embeddings": 512}, BART.tiny,
                       batch=8, tokens=512),
    "mt5": Text("MT5Config", SEQ2SEQ, {**T5.full, "vocab_size": 250112, "feed_forward_proj": "gated-gelu"}, T5.tiny,
                tokens=512, attention="eager"),
    # In many graphs, as they ask tensors for numbers, and with the cache that they return if nobody says otherwise.
    "switch": Text("SwitchTransformersConfig", SEQ2SEQ,
                   {"d_model": 768, "d_ff": 2048, "num_heads": 12, "num_layers": 2, "num_decoder_layers": 2,
                    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 8,
                    "router_jitter_noise": 0.0, "decoder_start_token_id": 0, "vocab_size": 32128},
                   {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_experts": 4, "vocab_size": 256},
                   batch=8, tokens=256, attention="eager"),
    "nllb_moe": Text("NllbMoeConfig", SEQ2SEQ,
                     {**BART.full, "vocab_size": 32000, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
                      "router_jitter_noise": 0.0}, BART.tiny, tokens=256, attention="eager"),
    "longt5": Text("LongT5Config", SEQ2SEQ,
                   {"d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 4, "num_decoder_layers": 4,
                    "decoder_start_token_id": 0, "vocab_size": 32128},
                   {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "local_radius": 7, "vocab_size": 256},
                   attention="eager"),
}

WHISPER = Text("WhisperConfig", SPEECH,
               {"d_model": 768, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "encoder_attention_heads": 12,
                "decoder_attention_heads": 12, "encoder_layers": 2, "decoder_layers": 2, **NO_CACHE},
               {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_attention_heads": 4,
                "decoder_attention_heads": 4, "max_source_positions": 32, "vocab_size": 256, "pad_token_id": 0,
                "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, batch=4, tokens=256)

LANGUAGE = (
    *(Architecture(name, partial(make_language, text)) for name, text in (
        *DECODERS.items(), *ENCODERS.items(), *UNTUNED_ENCODERS.items())),
    *(Architecture(name, partial(make_translation, text)) for name, text in UNTUNED_TRANSLATORS.items()),
    Architecture("t5", partial(make_translation, T5)), Architecture("bart", partial(make_translation, BART)),
    Architecture("whisper", partial(make_speech, WHISPER)),
    Architecture("llama_decode", partial(make_decode, LLAMA), modes=("infer",)))


def mixed(*kinds: Sequence[Architecture]) -> dict[str, Architecture]:
    """Return all kinds by name, spread evenly: a run that ends early has seen something of each."""
    placed = sorted((place / len(kind), order, row) for order, kind in enumerate(kinds) for place, row in enumerate(kind))
    return {row.name: row for _, _, row in placed}


CASES: dict[str, Architecture] = mixed(
    LANGUAGE, tuple(Architecture(name, make) for name, make in zoo_vision.MAKERS.items()))
