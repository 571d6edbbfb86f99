"""Decoding by transformers' `generate` with a static cache: time per token, tokens, graphs and cold start of each system.

Example:
    python -m bench.generate --systems eager,inductor,dynafuse --out generate.json
    python -m bench.generate --cases llama --systems "dynafuse,dynafuse@DYNAFUSE_CAPTURE=auto" --out capture.json
    python -m bench.generate --scale tiny --device cpu --systems eager,dynafuse --tokens 8 --out tiny.json

A case is MODEL/BATCH. Every system has a process of its own for each case, with empty caches; it runs eager's `generate`
first, with the same weights. `ms_per_token` is what each token after the first takes, with the time of `generate` itself.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import systems
from bench.apart import parsed, run
from bench.measure import Metrics, timed_once
from bench.run import split, unknown_cases

PASSED = ("scale", "dtype", "device", "tokens", "rounds")
"""Options that a process for one case and system is given."""

SUITE = "generate"
PROMPT = 16
"""Tokens of the prompt."""

SIZES: Mapping[str, dict[str, int]] = {
    "full": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 1024},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 128},
}
MODELS: Mapping[str, tuple[str, dict[str, int]]] = {
    "llama": ("Llama", {}), "qwen3": ("Qwen3", {"head_dim": 64}),
}
CASES = tuple(f"{model}/{batch}" for model in MODELS for batch in (1, 8))


def build(case: str, scale: str, dtype: str, device: str) -> tuple[Any, dict[str, Any]]:
    """Return a model with random weights, and its prompt as arguments."""
    import torch
    import transformers

    name, batch = case.split("/")
    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES[scale], **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(device, getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.randint(0, config.vocab_size, (int(batch), PROMPT), device=device)
    return model, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0,
                   "cache_implementation": "static"}


def compiling(system: systems.System) -> dict[str, Any]:
    """Return the arguments by which `generate` compiles the decoding step with a system."""
    if system.backend is None:
        return {"disable_compile": True}
    from transformers import CompileConfig

    config = CompileConfig(backend=system.backend, mode=system.mode, fullgraph=False)
    config._compile_all_devices = True  # the CPU's, too
    return {"compile_config": config}


def measured(system: systems.System, options: argparse.Namespace) -> Metrics:
    """Measure a case under a system, in this process."""
    from torch._dynamo.utils import counters

    model, given = build(options.cases, options.scale, options.dtype, options.device)

    def generate(tokens: int, **more: Any) -> Any:  # always in a cache of the same length
        return model.generate(**given, max_length=PROMPT + tokens, min_length=PROMPT + tokens, **more)

    expected = generate(options.tokens, disable_compile=True)
    how = compiling(system)
    counters.clear()
    start = time.perf_counter()
    tokens = generate(options.tokens, **how)
    cold_s = time.perf_counter() - start
    graphs = counters["stats"]["unique_graphs"]
    whole = seconds(lambda: generate(options.tokens, **how), options)
    first = seconds(lambda: generate(1, **how), options)
    agree = (tokens == expected).all(0).long().cumprod(0).sum().item() - PROMPT
    return {"ms_per_token": 1e3 * (whole - first) / (options.tokens - 1), "tokens_equal": int(agree == options.tokens),
            "equal_until": int(agree), "graphs": graphs, "graphs_later": counters["stats"]["unique_graphs"] - graphs,
            "cold_s": cold_s, "first_ms": 1e3 * first}


def seconds(step: Callable[[], Any], options: argparse.Namespace) -> float:
    """Return the median time of some calls after one that is not timed."""
    step()
    return statistics.median(timed_once(step, options.device) for _ in range(options.rounds))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.generate", description="Time per token of generate.")
    parser.add_argument("--cases", default=",".join(CASES), help="names of MODEL/BATCH, or of models, comma-separated")
    parser.add_argument("--scale", choices=tuple(SIZES), default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of generate")
    return parsed(parser, arguments, SUITE, limit=600)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 unless a system failed, or compiled again once it had generated."""
    options = parse(arguments)
    wanted = split(options.cases)
    if unknown := [name for name in wanted if name not in CASES and name not in MODELS]:
        raise unknown_cases(unknown, CASES)
    cases = [case for case in CASES if case in wanted or case.split("/")[0] in wanted]
    rows = run(SUITE, cases, options, PASSED, measured)
    return int(any("error" in row or row["graphs_later"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
