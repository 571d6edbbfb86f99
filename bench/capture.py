"""Writes the fusible regions of models to a file that `bench.regions` reads.

Example:
    python -m bench.capture llama --scale full --modes train,infer -o llama.jsonl.xz
    python -m bench.capture bert,swin -o zoo.jsonl.xz                        # models of bench.zoo
    python -m bench.capture my_package.models:build -o mine.jsonl --fake     # build() returns (model, arguments)

The model runs once under `torch.compile` with a backend that compiles nothing: it runs the graphs that AOTAutograd makes,
normalized by dynafuse, node by node, forward and backward, and notes which integers go into regions. A node is fusible if
dynafuse says so (`partition.annotate`); one that is not, or that draws random numbers, is a call. A region is a connected
set of fusible nodes between the same calls (`stages`). Regions that differ only in names and in the range of integers are
written once, with `count`, how often they occur.

With `--fake` no graph is run: results are memory that nobody has written, so that models of any size take seconds on a CPU.
Regions that read integers which a graph would have computed are left out then.
"""
from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import itertools
import json
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from bench import zoo_models
from bench.models import CASES, Build
from bench.region_file import Region, TensorSpec, write
from bench.run import default_device, split
from dynafuse.fx import hint
from dynafuse.ir import Annotated, Role
from dynafuse.ops import Kind
from dynafuse.partition.annotate import annotate
from dynafuse.passes.decompositions import decompositions
from dynafuse.passes.normalize import normalize

KNOWN = {**zoo_models.CASES, **CASES}
"""The models that go by a name: those of bench.models, and the others of bench.zoo."""

INSIDE = frozenset({Role.FUSED, Role.VIEW})
NAMED_REDUCTIONS = 3
"""How many reductions a region's name has at most."""

DIGITS = 12
"""Hexadecimal digits of a region's digest that its name ends in."""

ALIGNED_BYTES = 16
"""What tensors are aligned to in the memory that torch hands out: only the offset beyond that is kept."""

MOST_MARKS = 4
"""How many different negative integers are taken for marks; more are taken for a range."""

HIGHEST = 2**63 - 1


class Recorder:
    """A backend of `torch.compile` that keeps the regions of what it is given; with ``fake`` it runs nothing of that."""

    def __init__(self, model: str, device: str, fake: bool = False) -> None:
        self.model, self.device = model, device
        self._unwritten: Unwritten | None = Unwritten() if fake else None
        self._graphs: list[Graph] = []

    def backend(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a function that runs a Dynamo graph by torch's own ops; what `torch.compile(backend=…)` takes."""
        def compiler(kind: str) -> Callable[..., Any]:
            return functools.partial(self._record, kind)

        through_aot = aot_autograd(
            fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference"),
            partition_fn=min_cut_rematerialization_partition, decompositions=decompositions(fallback_random=True))
        compiled: Callable[..., Any] = through_aot(module, example_inputs)
        return compiled

    def _record(self, kind: str, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = Graph(normalize(module, merge_equal=kind == "inference"), self.device, self._unwritten)
        self._graphs.append(graph)
        boxed: Callable[..., Any] = make_boxed_func(graph.run)
        return boxed

    def regions(self) -> list[Region]:
        """Return the regions of all graphs so far, equal ones once, in the order in which they first occur."""
        by_structure: dict[str, dict[str, Any]] = {}
        for kind, data in (region for graph in self._graphs for region in graph.regions()):
            text = json.dumps({**data, "inputs": [_without_values(spec) for spec in data["inputs"]]}, sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
            described = {"name": f"{kind}_{digest}", "models": [self.model], "count": 0}
            by_structure.setdefault(digest, {**described, **data})["count"] += 1
        return [Region(data) for data in by_structure.values()]


class Unwritten:
    """Memory that nobody has written, for results that nobody has computed."""

    def __init__(self) -> None:
        self._integers: dict[int, Tensor] = {}  # by their address, which is theirs as long as they are here

    def result(self, node: Node) -> Any:
        """Return a result as large as that of a node."""
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            return value
        size, stride = [hint(length) for length in value.shape], [hint(step) for step in value.stride()]
        result = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        if _is_integer(node):
            self._integers[result.untyped_storage().data_ptr()] = result
        return result

    def has(self, tensor: Tensor) -> bool:
        """Return whether integers are of this memory."""
        return tensor.untyped_storage().data_ptr() in self._integers


class Graph:
    """An ATen graph, its regions, and the integers that have gone into them; what is ``unwritten`` is its results."""

    def __init__(self, module: GraphModule, device: str, unwritten: Unwritten | None = None) -> None:
        self.module, self.device, self.unwritten = module, device, unwritten
        self.annotated = annotate(module, device)
        self.parts = [part for part in connected(self.annotated) if self._computes(part)]
        self._constants = constants(self.annotated)
        self.integers: dict[Node, Integers] = {}
        self.unknown: set[Node] = set()
        self._watched = {node for part in self.parts for node in _inputs(part) if _is_integer(node)}

    def run(self, *args: Any) -> Any:
        """Run the graph node by node, and note the integers; without running it, those of its inputs."""
        return _Noting(self).run(*args) if self.unwritten is None else self._pretend(self.unwritten, args)

    def _pretend(self, unwritten: Unwritten, args: Sequence[Any]) -> list[Any]:
        values = dict(zip(self.module.graph.find_nodes(op="placeholder"), args, strict=True))
        for node in self._watched:
            if node in values and not unwritten.has(values[node]):
                self.note(node, values[node])
            else:
                self.unknown.add(node)
        (output,) = self.module.graph.find_nodes(op="output")
        return [values[result] if result in values else unwritten.result(result) if isinstance(result, Node) else result
                for result in output.args[0]]

    def note(self, node: Node, value: Any) -> None:
        """Take in a value of a node."""
        if node in self._watched and isinstance(value, Tensor) and value.numel():
            self.integers.setdefault(node, Integers()).add(value)

    def regions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Iterate over the regions: what each is called after, its first reductions, and the rest of it as a file has it."""
        for part in self.parts:
            if not self.unknown.isdisjoint(_inputs(part)):
                continue
            reductions = [_stem(node) for node in part if self._is_reduction(node)]
            yield "_".join(reductions[:NAMED_REDUCTIONS]) or "pointwise", self._region(part)

    def _is_reduction(self, node: Node) -> bool:
        row = self.annotated.facts[node].row
        return row is not None and row.kind is Kind.REDUCTION

    def _computes(self, part: Sequence[Node]) -> bool:
        return any(self.annotated.facts[node].role is Role.FUSED for node in part)

    def _region(self, part: Sequence[Node]) -> dict[str, Any]:
        inputs = _inputs(part)
        names = dict(zip(inputs, (f"in{index}" for index in range(len(inputs))), strict=True))
        encode = functools.partial(_encoded, names=names, device=self.device)
        seen: Counter[str] = Counter()
        ops = []
        for node in part:
            names[node] = f"{_stem(node)}_{seen[_stem(node)]}"
            seen[_stem(node)] += 1
            ops.append([names[node], _op_name(node), [encode(arg) for arg in node.args],
                        {key: encode(arg) for key, arg in node.kwargs.items()}])
        inside = set(part)
        computed = (node for node in part if node not in self._constants)  # who else reads a constant has it by itself
        outputs = [{"ref": names[node]} for node in computed if not set(node.users) <= inside]
        return {"params": [names[node] for node in inputs], "inputs": [self._spec(node).to_json() for node in inputs],
                "alias_bytes": None, "ops": ops, "outputs": outputs}

    def _spec(self, node: Node) -> TensorSpec:
        tensor = node.meta["val"]
        shape, stride = tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride()))
        contiguous = torch.empty(shape, device="meta").stride()
        return TensorSpec(
            shape, tensor.dtype, None if stride == contiguous else stride,
            hint(tensor.storage_offset()) % max(1, ALIGNED_BYTES // tensor.dtype.itemsize),
            self.integers[node].values if node in self.integers else (),
            on_host=tensor.device.type != self.device)


class Integers:
    """The integers that a tensor had."""

    def __init__(self) -> None:
        self._negative: set[int] = set()
        self._low, self._high = HIGHEST, -HIGHEST  # of those that are not negative

    def add(self, tensor: Tensor) -> None:
        """Take in those of a tensor."""
        self._negative.update(tensor[tensor < 0].unique().tolist())
        others = tensor[tensor >= 0]
        if others.numel():
            self._low, self._high = min(self._low, int(others.min())), max(self._high, int(others.max()))

    @property
    def values(self) -> tuple[Any, ...]:
        """Return a range that has them all; a few negative ones stand for something else than an index, such as no label."""
        if self._low > self._high:
            return "index", min(self._negative), max(self._negative) + 1
        end = min(self._high + 1, HIGHEST)
        if len(self._negative) <= MOST_MARKS:
            return "index", self._low, end, *([sorted(self._negative)] if self._negative else [])
        return "index", min(self._negative), end


class _Noting(Interpreter):
    """Runs a graph node by node and shows each value to it."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.module)
        self._graph = graph

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self._graph.note(n, value)
        return value


# ------ what a region is
def connected(annotated: Annotated) -> list[list[Node]]:
    """Return the connected sets of fusible nodes of one stage, in the order of the graph.

    Constants connect nothing: they are in every set that reads them.
    """
    stage, constant = stages(annotated), constants(annotated)
    sets: dict[Node, list[Node]] = {}
    for node in annotated.graph.nodes:
        if not _is_fusible(node, annotated) or node in constant:
            continue
        sets[node] = [node]
        for operand in node.all_input_nodes:
            if operand in sets and stage[operand] == stage[node] and sets[operand] is not sets[node]:
                joined = sets[operand] + sets[node]
                sets.update(dict.fromkeys(joined, joined))
    position = {node: index for index, node in enumerate(annotated.graph.nodes)}
    distinct = {id(nodes): _with_operands(nodes, constant) for nodes in sets.values()}.values()
    return sorted((sorted(nodes, key=position.__getitem__) for nodes in distinct), key=lambda nodes: position[nodes[-1]])


def stages(annotated: Annotated) -> dict[Node, int]:
    """Return how many calls come before each node: on the longest way to it, or to the first node that reads it.

    A fusible node waits for who reads it, as a compiler would have it. No way leads from a stage through a call back into
    it: what a call reads is of its stage or an earlier one, and what reads the call is of a later one.
    """
    stage: dict[Node, int] = {}
    for node in annotated.graph.nodes:
        stage[node] = max((stage[operand] + _is_call(operand, annotated) for operand in node.all_input_nodes), default=0)
    for node in reversed(annotated.graph.nodes):
        if _is_fusible(node, annotated):
            stage[node] = min((stage[user] for user in node.users if user.op != "output"), default=stage[node])
    return stage


def constants(annotated: Annotated) -> set[Node]:
    """Return the fusible nodes that are made of nothing, such as ranges, and of such nodes alone."""
    found: set[Node] = set()
    for node in annotated.graph.nodes:
        if _is_fusible(node, annotated) and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _with_operands(nodes: Iterable[Node], among: Container[Node]) -> set[Node]:
    """Return nodes with what they are made of, as far as that is among some nodes."""
    known = set(nodes)
    waiting = list(known)
    while waiting:
        new = [operand for operand in waiting.pop().all_input_nodes if operand in among and operand not in known]
        known.update(new)
        waiting.extend(new)
    return known


def _is_fusible(node: Node, annotated: Annotated) -> bool:
    facts = annotated.facts[node]
    return facts.role in INSIDE and (facts.row is None or facts.row.kind is not Kind.RANDOM)


def _is_call(node: Node, annotated: Annotated) -> bool:
    """Return whether a node is computed and cannot be in a region."""
    return annotated.facts[node].role in (*INSIDE, Role.EAGER) and not _is_fusible(node, annotated)


def _inputs(part: Sequence[Node]) -> list[Node]:
    """Return the tensors that a region reads and does not compute, in the order in which it reads them."""
    inside = set(part)
    operands = dict.fromkeys(operand for node in part for operand in node.all_input_nodes if operand not in inside)
    return [operand for operand in operands if isinstance(operand.meta.get("val"), Tensor)]


def _is_integer(node: Node) -> bool:
    dtype = node.meta["val"].dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


# ------ as data
def _op_name(node: Node) -> str:
    return "getitem" if node.target is operator.getitem else str(node.target)


def _stem(node: Node) -> str:
    """Return an op's name without its namespace and overload."""
    return "getitem" if node.target is operator.getitem else str(node.target).split(".")[1]


def _encoded(value: Any, names: Mapping[Node, str], device: str) -> Any:
    """Return an operand as a file has it."""
    encode = functools.partial(_encoded, names=names, device=device)
    if isinstance(value, Node):
        return {"ref": names[value]} if value in names else hint(value.meta["val"])  # a size that Python computes
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "cuda" if value.type == device else value.type}
    if isinstance(value, str):
        return {"str": value}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    assert value is None or isinstance(value, (bool, int, float)), value
    return value


def _without_values(spec: list[Any]) -> list[Any]:
    """Return an input without the range of its integers."""
    return [item if not isinstance(item, dict) else {key: item[key] for key in item if key != "gen"} for item in spec]


# ------ command line
def capture(model: Callable[..., Any], arguments: Sequence[Any], name: str, device: str, fake: bool = False) -> list[Region]:
    """Run a model, and a backward from its outputs if they require grad, and return its regions on a type of device.

    Args:
        model: The model.
        arguments: What it is called with.
        name: What its regions are said to be of.
        device: The type of device.
        fake: Whether to run none of its graphs; regions are left out then that read integers which these compute.
    """
    recorder = Recorder(name, device, fake)
    torch.compiler.reset()
    results = pytree.tree_leaves(torch.compile(model, backend=recorder.backend, dynamic=False)(*arguments))
    outputs = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return recorder.regions()


def models(options: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Any], Sequence[Any]]]:
    """Iterate over what is asked for: its name, the model, and its arguments."""
    module, colon, function = options.model.partition(":")
    if colon:
        yield options.model, *getattr(importlib.import_module(module), function)()
        return
    names = split(options.model)
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        raise SystemExit(f"bench: unknown model {unknown[0]!r}; known: {', '.join(KNOWN)}, or module:function")
    for name, mode in itertools.product(names, split(options.modes)):
        how = Build(device=options.device, scale=options.scale, layers=options.layers, train=mode == "train")
        work = KNOWN[name].build(how)
        yield f"{name}/{mode}", work.module.requires_grad_(how.train), work.inputs


def device_of(model: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """Return the type of device that a model runs on: the CPU only if all arguments, parameters and buffers are there."""
    state = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    tensors = [leaf for leaf in (*pytree.tree_leaves(list(arguments)), *state) if isinstance(leaf, Tensor)]
    return next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")


def merged(regions: Iterable[Region]) -> list[Region]:
    """Return regions with equal ones as one, that has all their models."""
    by_name: dict[str, dict[str, Any]] = {}
    for region in regions:
        known = by_name.setdefault(region.name, {**region.data, "models": [], "count": 0})
        known["models"] = list(dict.fromkeys((*known["models"], *region.data["models"])))
        known["count"] += region.data["count"]
    return [Region(data) for data in by_name.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the regions of models to a file; 0 if they have any."""
    parser = argparse.ArgumentParser(prog="python -m bench.capture", description="Write the fusible regions of models.")
    parser.add_argument("model", help=f"comma-separated: {', '.join(KNOWN)}; or module:function, "
                                      "which returns a model and its arguments")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file; compressed if it ends in .xz")
    parser.add_argument("--modes", default="train", help="train,infer (of the models that are named)")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--layers", type=int, help="number of layers of language models")
    parser.add_argument("--fake", action="store_true", help="run no graph; leaves out regions that read computed integers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device())
    options = parser.parse_args(arguments)
    found = [region for name, model, inputs in models(options)
             for region in capture(model, inputs, name, device_of(model, inputs), options.fake)]
    regions = merged(found)
    write(options.out, regions)
    print(f"{sum(region.data['count'] for region in regions)} regions, {len(regions)} distinct, in {options.out}")
    return 0 if regions else 1


if __name__ == "__main__":
    sys.exit(main())
