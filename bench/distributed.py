"""Training on several devices: ways of spreading a Llama × systems, each in processes of its own, into one JSON file.

Example:
    python -m bench.distributed --ways ddp,fsdp2,fsdp2_blocks,tensor --systems eager,inductor,dynafuse --out two.json
    python -m bench.distributed --device cpu --scale tiny --layers 2 --dtype float32 --steps 2 --systems eager,dynafuse

A row of suite `distributed`, case `<way>/<processes>`: the losses of the first steps with AdamW, `right` if they are
those of eager in the same run, `cold_s` (compile and first step), `step_ms` (median, wall, of the slowest rank), `peak_gb`.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from bench import systems
from bench.models import CASES, Build
from bench.report import Report, describe_machine, describe_versions

CHECKED = 4
"""Steps whose losses are compared."""

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}
"""How far a loss may be from eager's, relatively."""


# ------ ways
def ddp(model: nn.Module, system: systems.System, device: torch.device) -> Callable[..., Any]:
    """Every rank has all weights; gradients are averaged while the backward goes on."""
    ids = [device.index] if device.type == "cuda" else None
    return system.compile(nn.parallel.DistributedDataParallel(model, device_ids=ids))


def fsdp2(model: nn.Module, system: systems.System, device: torch.device) -> Callable[..., Any]:
    """Weights are sharded layer by layer; the whole model is compiled."""
    shard(model)
    return system.compile(model)


def fsdp2_blocks(model: nn.Module, system: systems.System, device: torch.device) -> Callable[..., Any]:
    """Weights are sharded layer by layer, and each layer is compiled by itself."""
    if system.backend is not None:
        for layer in layers(model):
            layer.compile(backend=system.backend, mode=system.mode)
    shard(model)
    return model


def tensor(model: nn.Module, system: systems.System, device: torch.device) -> Callable[..., Any]:
    """Products are split by heads and by hidden units, by DTensor; the whole model is compiled."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in layers(model):
        parallelize_module(layer, mesh, plan)
    return system.compile(model)


WAYS: dict[str, Callable[[nn.Module, systems.System, torch.device], Callable[..., Any]]] = {
    way.__name__: way for way in (ddp, fsdp2, fsdp2_blocks, tensor)}


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The decoder layers of a Llama under its loss."""
    yield from model.get_submodule("model.model.layers").children()


def shard(model: nn.Module) -> None:
    """Shard every layer, and the rest with the root."""
    from torch.distributed.fsdp import fully_shard

    for layer in layers(model):
        fully_shard(layer)
    fully_shard(model)


# ------ one rank
def train(options: argparse.Namespace) -> dict[str, Any]:
    """Metrics of one way under one system, as this rank sees them."""
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    dtype = getattr(torch, options.dtype)
    work = CASES["llama"].build(Build(device=str(device), scale=options.scale, layers=options.layers, dtype=dtype))
    torch.manual_seed(dist.get_rank() if options.ways != "tensor" else 0)
    inputs = [torch.randint_like(ids, int(ids.max())) for ids in work.inputs]
    start = time.perf_counter()
    model = WAYS[options.ways](work.module, systems.find(options.systems), device)
    optimizer = torch.optim.AdamW(by_kind(work.module.parameters()), lr=1e-4)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step().item()]
    metrics: dict[str, Any] = {"cold_s": time.perf_counter() - start}
    metrics["losses"] = losses + [step().item() for _ in range(CHECKED - 1)]
    metrics["step_ms"] = statistics.median(timed(step, device) for _ in range(options.steps))
    if device.type == "cuda":
        metrics["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return metrics


def by_kind(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters as groups of one type each: an optimizer's foreach kernels do not mix DTensors with plain tensors."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return [{"params": group} for group in kinds.values()]


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a step that all ranks begin together, by the slowest."""
    dist.barrier()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    slowest = torch.tensor([1e3 * (time.perf_counter() - start)], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def leave() -> NoReturn:
    """End a rank that has told its results, without the interpreter's teardown.

    What still holds the process group there (DDP does, in a cycle) takes its threads along running, and C++ aborts a
    process that is done: "terminate called without an active exception".
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def rank(options: argparse.Namespace) -> NoReturn:
    """What torchrun starts; rank 0 writes its metrics."""
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    metrics = train(options)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(metrics))
    leave()


# ------ all of them
def launch(options: argparse.Namespace, way: str, name: str) -> dict[str, Any]:
    """Metrics of one way under one system, in new processes with empty caches; its error where it fails."""
    out = options.out.with_suffix(f".{way}.{name.partition('@')[0]}.rank0")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}",
               "--module", "bench.distributed", "--rank", "--ways", way, "--systems", name, "--device", options.device,
               "--scale", options.scale, "--dtype", options.dtype, "--steps", str(options.steps), "--out", str(out)]
    command += [] if options.layers is None else ["--layers", str(options.layers)]
    system = systems.find(name)
    with systems.cold_process({"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", **system.env}):
        ranks = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            printed, errors = ranks.communicate(timeout=options.limit)
        except subprocess.TimeoutExpired:
            ranks.terminate()  # not killed: torchrun then ends its ranks, which would go on beside those that are timed next
            ranks.communicate()
            return {"error": f"not done after {options.limit} s"}
    if ranks.returncode or not out.exists():
        told = errors.partition("torch/distributed/elastic")[0] or printed  # behind it, torchrun's own trace
        return {"error": "\n".join(told.strip().splitlines()[-40:])}
    metrics: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return metrics


def judged(metrics: dict[str, Any], eager: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Metrics with how far the losses are from eager's."""
    if "error" in metrics or "error" in eager:
        return metrics
    pairs = zip(metrics["losses"], eager["losses"], strict=True)
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    return {**metrics, "loss_difference": difference, "right": difference <= tolerance}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.distributed", description="Ways × systems into one file.")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--systems", default="eager,inductor,dynafuse", help="eager first: it is compared with")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16")
    parser.add_argument("--steps", type=int, default=15, help="timed steps")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one way under one system")
    parser.add_argument("--out", type=Path, default=Path("bench/results/distributed.json"))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"unknown way {', '.join(sorted(unknown))}; known: {', '.join(WAYS)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 when every row has numbers and eager's losses."""
    options = parse(arguments)
    if options.rank:
        rank(options)
    report = Report(options.out, describe_machine(), describe_versions())
    wrong = 0
    for way in options.ways.split(","):
        eager: dict[str, Any] = {"error": "eager was not run"}
        for name in options.systems.split(","):
            metrics = launch(options, way, name)
            eager = metrics if name == "eager" else eager
            metrics = judged(metrics, eager, TOLERANCE[options.dtype])
            wrong += not metrics.get("right", False)
            report.put("distributed", f"{way}/{options.processes}", name, metrics)
            print(way, name, {k: v for k, v in metrics.items() if k != "losses"}, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
