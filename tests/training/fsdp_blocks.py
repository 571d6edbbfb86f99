"""One rank of FSDP2 with every block of a small Llama compiled by itself; run by ``test_fsdp.py``.

    python fsdp_blocks.py RANK RANKS FILE EXECUTORS

Prints the losses of a few steps through eager, then through dynafuse, one list per line.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 3


def losses(backend: str, executors: str) -> list[float]:
    """Those of a few steps, from the same weights every time."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="sdpa"))
    options = {"strict": True, **({"executors": executors} if executors else {})}
    for layer in model.model.layers:
        if backend == "dynafuse":
            layer.compile(backend=backend, options=options)
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    """Join the others, train twice, print."""
    rank, ranks, file, executors = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    try:
        for backend in ("eager", "dynafuse"):
            print(json.dumps(losses(backend, executors)), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
