"""Compiles kernels for a GPU on a machine that need not have one, and reads from the binaries what they use. A program of its own.

``python -m tests.support.native goldens llama`` prints one JSON object: group → kernel → registers, bytes of spills, bytes of shared memory, whether it calls libdevice.
It runs without ``TRITON_INTERPRET``: Triton decides between compiler and interpreter when it is imported.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.fx import Node

from dynafuse import backend
from dynafuse.cache.canonical import CanonicalRegion, canonical, family
from dynafuse.lowering.triton.compiler import compile_launch
from dynafuse.lowering.triton.launch import located
from dynafuse.lowering.triton.lower import lower
from dynafuse.lowering.triton.packed_sums import PACKED_SUM
from dynafuse.lowering.triton.room import registers
from dynafuse.ops import Row, rows
from tests.support import graphs, numbered, quick_dynamo, representative
from tests.support.cases_of_integers import ARITHMETIC, CALLS, CHAINS, COMPUTED, INDEXING, PIECES, X
from tests.support.row_calls import eager, tensors, write
from tests.support.samples import Sample, samples

CAPABILITY = 90
USED = re.compile(r"REG:(\d+) STACK:(\d+)")
SPILLED = re.compile(r"(\d+) bytes spill")
TOUCHED = re.compile(r"\b(ld|st|atom|red|cp\.async|prefetch)\.[\w:.]*global")
WIDE = re.compile(r"\b(?:ld|st)\.global\.\S*v4\.b32")
HALF_AS_WIDE = re.compile(r"\b(?:ld|st)\.global\.\S*(?:v2\.b32|v4\.b16|b64)")
NARROWED = re.compile(r"cvt\.rn\.bf16\.s\d+")


def goldens() -> Iterator[CanonicalRegion]:
    for name in representative.CASES:
        yield from representative.bounds(name)


def classes() -> Iterator[CanonicalRegion]:
    """The same as kernels for classes of sizes, where they are."""
    for name in representative.CASES:
        yield from (bound for bound in representative.bounds(name, classes=True) if bound.sizes)


def folds() -> Iterator[CanonicalRegion]:
    """A fold of every width that a region's tensors allow, in 16-bit floats."""
    for terms in (4, 8, 16, 32, 39):
        plan = graphs.planned(graphs.built(total, *(torch.empty(4096, 512, dtype=torch.bfloat16) for _ in range(terms))))
        (region,) = plan.regions
        found = family(canonical(plan.annotated, region, (), "sm90"), 3)
        assert found is not None
        yield found


def indices() -> Iterator[CanonicalRegion]:
    """What indexes by loaded values, in the classes of kernels that there are; each checks them."""
    table, short = (torch.empty(4096, size, dtype=torch.bfloat16) for size in (131072, 512))
    long = torch.empty(4096, dtype=torch.int64)
    calls: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
        (lambda w, i: F.embedding(i, w) * 2, (short, long)),
        (lambda w, i: torch.cat([F.embedding(i, w), w[:77]]), (short, long)),
        (lambda w, i: w[i].softmax(-1), (table, long)),
        (lambda w, i: w[i].softmax(-1), (short, long)),
        (lambda w, i: w[i].sum(0), (short, long)),
        (lambda w, i: w.gather(1, i[:, None]) * 2, (short, long)),
        (lambda w, i: w.t()[i, 3:80], (short, long)),
        (lambda w, i: w.scatter(1, i[:, None], 1.0) * 2, (short, long)),
        (lambda w, i: F.cross_entropy(w.float(), i), (table, long)),
        (lambda w, i: F.layer_norm(w[i], [512]), (short, long)),
        (lambda w, i: F.pad(w[i, :1], [-1, 3], value=-2.5), (short, long)),
        (lambda w, i: (added(w, i[:, None].expand(4096, 512), w), w.float().sum(1)), (short, long)),
        (lambda w, i: (added(w, i[None, :512].expand(4096, 512), w), w.float().sum(1)), (short, long)),
        (lambda w, i: added(w, i[0].expand(4096), w[:, 3]), (short, long)),
    ]
    for function, inputs in calls:
        plan = graphs.planned(graphs.traced(function, *inputs))
        found = [canonical(plan.annotated, region, (), "sm90") for region in plan.regions]
        yield from (bound for bound in found if any(launch.asserts for launch in lower(bound.code).launches))


def added(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values added to zeros, some of a tile to one address."""
    return torch.ops.aten.index_put(x.new_zeros(9, dtype=torch.float32), [index], values.float(), True)


def total(build: graphs.Builder, x: Node, *rest: Node) -> Node:
    for other in rest:
        x = build.op("aten.add.Tensor", x, other)
    return build.op("aten.tanh.default", x)


def doubles() -> Iterator[CanonicalRegion]:
    """What rows make at an index, in float64: the interpreter does not mind a literal that Triton takes for float32."""
    calls = [(row, sample) for row in rows() if row.fusible and row.lower for sample in samples(row)]
    for row, sample in calls:
        inputs = tensors(sample)
        if not sample.dynamic and any(t.dtype is torch.float64 for t in inputs) and eager(row, sample) is not None:
            plan = graphs.planned(graphs.built(partial(called, row, sample), *inputs))
            yield from (canonical(plan.annotated, region, (), "sm90") for region in plan.regions)


def called(row: Row, sample: Sample, build: graphs.Builder, *nodes: Node) -> Node:
    return write(build, row, sample, nodes)


def llama() -> Iterator[CanonicalRegion]:
    """Forward and backward of a small Llama, planned for an H200."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8,
                         num_key_value_heads=4, vocab_size=1000, use_cache=False)
    model, ids = LlamaForCausalLM(config).to(torch.bfloat16), torch.randint(1000, (2, 64))
    found: list[backend.Compiled] = []
    with backend.listening(found.append, plan_only=True):
        torch.compile(model, backend=backend.dynafuse, options={"device": "h200"})(ids, labels=ids).loss.backward()
    assert {graph.kind for graph in found} == {"forward", "backward"}
    for graph in found:
        yield from graph.bounds.values()


def integers() -> Iterator[CanonicalRegion]:
    """What computes with integers of any sign and with sizes, planned for an H200."""
    functions = [(function, (X, n)) for function in (ARITHMETIC | INDEXING).values() for n in (4, -3)]
    functions += [(function, CALLS[0]) for function in PIECES.values()]
    functions += [(function, (X,)) for function in (COMPUTED | CHAINS).values()]
    found: list[backend.Compiled] = []
    with backend.listening(found.append, plan_only=True):
        for function, inputs in functions:
            torch._dynamo.reset()
            torch.compile(function, backend=backend.dynafuse, dynamic=True, options={"device": "h200", "executors": "triton"})(*inputs)
    for graph in found:
        yield from graph.bounds.values()


def positions() -> Iterator[CanonicalRegion]:
    """Where the extremes of rows are, of lengths that fill a tile and others, planned for an H200."""
    found: list[backend.Compiled] = []
    with backend.listening(found.append, plan_only=True):
        for length, dynamic in itertools.product((2, 3, 16, 100, 5000), (False, True)):
            torch._dynamo.reset()
            extremes = torch.compile(lambda x, n: ((x + n).argmin(1), x[:, -2:].argmax(1), (max(n, 0) - x).sum((0, 1))),
                                     backend=backend.dynafuse, dynamic=dynamic, options={"device": "h200", "executors": "triton"})
            extremes(torch.randn(4096, length), 4)
    for graph in found:
        yield from graph.bounds.values()


def signs() -> Iterator[CanonicalRegion]:
    """What is -1, 0 or 1 by comparisons of 16-bit floats, in each float, planned for an H200."""
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.sign, torch.sgn, lambda x: torch.where(x < 0, -1, 0).to(x.dtype), lambda x: (-(x < 0).int()).to(x.dtype),
        lambda x: ((x > 1).long() - 1).float().to(x.dtype), lambda x: (-(x < 0).to(torch.int8)).to(x.dtype)]
    found: list[backend.Compiled] = []
    with backend.listening(found.append, plan_only=True):
        for function, dtype in itertools.product(functions, (torch.bfloat16, torch.float16, torch.float32)):
            torch._dynamo.reset()
            torch.compile(function, backend=backend.dynafuse, options={"device": "h200", "executors": "triton"})(
                torch.randn(4096, 512, dtype=dtype))
    for graph in found:
        yield from graph.bounds.values()


def windows() -> Iterator[CanonicalRegion]:
    """Gradients of upsampling, of elements that few outputs read and many, planned for an H200."""
    ways: list[dict[str, Any]] = [
        {"scale_factor": 2}, {"size": (50, 90)}, {"scale_factor": 2, "mode": "bilinear"}, {"scale_factor": 4, "mode": "bilinear"},
        {"scale_factor": 2, "mode": "bilinear", "align_corners": True}, {"scale_factor": 8, "mode": "bilinear"},
        {"scale_factor": 2, "mode": "bicubic"}, {"size": (50, 90), "mode": "bicubic"}]
    found: list[backend.Compiled] = []
    with backend.listening(found.append, plan_only=True):
        for way, layout in itertools.product(ways, (torch.contiguous_format, torch.channels_last)):
            torch._dynamo.reset()
            x = torch.randn(2, 32, 28, 28, dtype=torch.bfloat16).to(memory_format=layout).requires_grad_()
            torch.compile(lambda x, way=way: F.interpolate(x.relu(), **way), backend=backend.dynafuse,
                          options={"device": "h200", "executors": "triton"})(x).sum().backward()
    for graph in found:
        yield from graph.bounds.values()


def scans() -> Iterator[CanonicalRegion]:
    """Scans of short and long rows and of columns, in each dtype that is accumulated, of sizes known and not."""
    cases: list[tuple[Callable[[torch.Tensor, int], Any], torch.dtype]] = [
        (lambda x, dim: (x.cumsum(dim), x.cumsum(dim).amax(dim)), torch.bfloat16), (torch.cumsum, torch.float64),
        (lambda x, dim: x.softmax(dim).cumprod(dim), torch.float32), (torch.logcumsumexp, torch.float32)]
    found: list[backend.Compiled] = []
    with backend.listening(found.append, plan_only=True):
        for (function, dtype), (shape, dim) in itertools.product(cases, (((4096, 70), 1), ((512, 8192), 1), ((300, 20000), 1), ((2048, 1024), 0))):
            torch._dynamo.reset()
            torch.compile(function, backend=backend.dynafuse, dynamic=shape == (4096, 70), options={"device": "h200"})(
                torch.randn(shape, dtype=dtype), dim)
        for shape, dim in itertools.product(((4096, 70), (300, 20000)), (0, 1)):
            torch._dynamo.reset()
            torch.compile(lambda x, dim: ((x > 0).cumsum(dim), x.int().cumsum(dim, dtype=torch.int8)), backend=backend.dynafuse,
                          options={"device": "h200"})(torch.randn(shape), dim)
    for graph in found:
        yield from graph.bounds.values()


def aligned() -> Iterator[CanonicalRegion]:
    """Dynamic sizes that leave rows aligned, in each class of kernels."""
    functions: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
        (lambda x: torch.relu(x) + 1, ((8192, 1024),)),
        (lambda x, w: torch.relu(x * w[:, None, None]), ((64, 64, 28, 28), (64,))),
        (lambda x, mask: (x.float() / 8 + mask).softmax(-1).to(x.dtype), ((8, 16, 1024, 1024), (1024, 1024))),
        (lambda x, w: F.layer_norm(x, x.shape[-1:], w), ((4096, 1024), (1024,))),
        (lambda x: x.float().mean((0, 2, 3)), ((16, 16, 28, 28),)),
        (lambda x: x.float().sum(0), ((4096, 512),)),
        (lambda x, y: torch.cat([x, y], -1) * 2, ((8192, 512), (8192, 1024))),
        (lambda x: F.pad(x, (0, 8)) * 2, ((8192, 1024),)),
        (lambda x: x.transpose(1, 2).contiguous() * 2, ((8, 1024, 512),)),
    ]
    for function, shapes in functions:
        arguments = tuple((shape, torch.bfloat16) for shape in shapes)
        yield from representative.bounds_of(representative.Case(function, arguments, dynamic=True))


def slices() -> Iterator[CanonicalRegion]:
    """What reads and writes slices of memory that begin at a multiple of 8 bytes."""
    found: list[backend.Compiled] = []
    with backend.listening(found.append, plan_only=True):
        for shape, function in (((1024, 1024), torch.relu_), ((512, 2048), lambda x: x.copy_(x.softmax(-1)))):
            torch._dynamo.reset()
            memory = torch.randn(4 + shape[0] * shape[1], dtype=torch.bfloat16)
            torch.compile(function, backend=backend.dynafuse, options={"device": "h200", "executors": "triton"})(
                memory[4:].view(shape))
    for graph in found:
        yield from graph.bounds.values()


def resources(kernel: Any) -> dict[str, int]:
    """What a compiled kernel's binary says that it uses, whether it came from libdevice in part, its integers made bfloat16, and its accesses of 16 bytes and of 8."""
    ((used, stack),) = USED.findall(said_of(kernel, "cubin", str(triton.knobs.nvidia.cuobjdump.path), "-res-usage"))
    return {"registers": int(used), "spills": spills(kernel) if int(stack) else 0, "shared": kernel.metadata.shared,
            "libdevice": "__nv_" in kernel.asm["ttgir"], "narrowed": len(NARROWED.findall(kernel.asm["ptx"])),
            "wide": len(WIDE.findall(kernel.asm["ptx"])), "half_as_wide": len(HALF_AS_WIDE.findall(kernel.asm["ptx"]))}


def spills(kernel: Any) -> int:
    """Bytes that ptxas spills to a kernel's stack; libdevice has arrays there."""
    said = said_of(kernel, "ptx", str(triton.knobs.nvidia.ptxas.path), "-v", f"--gpu-name=sm_{CAPABILITY}a", "-o", os.devnull)
    return sum(map(int, SPILLED.findall(said)))


def said_of(kernel: Any, form: str, *command: str) -> str:
    """What a program says of a kernel in one of its forms."""
    with tempfile.NamedTemporaryFile(suffix=f".{form}") as file:
        content = kernel.asm[form]
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        return subprocess.run([*command, file.name], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def waits_first(ptx: str) -> bool:
    """Whether a kernel that waits for the one before it does so before it touches memory."""
    wait, touched = ptx.find("griddepcontrol.wait"), TOUCHED.search(ptx)
    return wait < (touched.start() if touched else len(ptx))


def compiled(bounds: Iterator[CanonicalRegion]) -> dict[str, dict[str, int]]:
    """Every distinct kernel of some regions."""
    distinct = {bound.key: bound for bound in bounds}
    found: dict[str, dict[str, int]] = {}
    for key, bound in distinct.items():
        lowered = lower(bound.code)
        for launch in lowered.launches:
            kernel = compile_launch(lowered.source, launch, CAPABILITY)
            assert kernel.asm["cubin"][:4] == b"\x7fELF"
            places = {op.target: "model.py:12" for op in bound.code.ops}
            assert (b", at model.py:12\0" in located(kernel.asm["cubin"], places)) == launch.asserts, launch
            assert waits_first(kernel.asm["ptx"]), launch.entry
            assert not PACKED_SUM.search(kernel.asm["ptx"]), launch.entry
            used = resources(kernel)
            assert registers(kernel.asm["cubin"]) == used["registers"], launch.entry
            found[f"{launch.entry} {key[:8]}"] = used
    return found


if __name__ == "__main__":
    quick_dynamo.install()
    groups = {"goldens": goldens, "classes": classes, "llama": llama, "numbers": numbered.regions, "folds": folds,
              "doubles": doubles, "indices": indices, "integers": integers, "positions": positions, "signs": signs,
              "windows": windows, "scans": scans, "aligned": aligned,
              "slices": slices}
    print(json.dumps({name: compiled(groups[name]()) for name in sys.argv[1:]}))
