"""Fusible regions as data: what one fused kernel computes, or a few. A file has a JSON object a line, and may be an .xz.

Worked example, a softmax's numerator over rows of 1024::

    {"name": "amax_a1b2", "models": ["llama/train"], "params": ["x"], "inputs": [[[64, 1024], "bf16"]], "alias_bytes": null,
     "ops": [["amax", "aten.amax.default", [{"ref": "x"}, [-1], true], {}],
             ["sub", "aten.sub.Tensor", [{"ref": "x"}, {"ref": "amax"}], {}],
             ["exp", "aten.exp.default", [{"ref": "sub"}], {}]],
     "outputs": [{"ref": "exp"}]}

``params`` and ``inputs`` go together. An input is ``[shape, dtype]`` or ``[shape, dtype, options]`` for a tensor,
``["S", shape]`` for sizes that an op takes, ``["sc", number]`` or ``["sym", number]`` for a number. A tensor's options:

- ``st``: its strides, in elements.
- ``off``: where in its memory it begins, in elements.
- ``gen``: its values: ``["index", low, high]`` (without ``high``), ``["index", low, high, [-100]]`` (those and -100),
  ``["perm"]``, ``["const", number]`` or ``["offsets", high]`` (sorted, from 0 on); random ones without it.
- ``alias``: the number of the buffer that it shares with others, which is as long as ``alias_bytes`` says.
- ``dev``: ``"cpu"`` where it is not on the device.

Operands are JSON's values, or one of ``{"ref": name}``, ``{"item": [value, index]}``, ``{"torch": name}`` (a dtype, layout
or memory format), ``{"device": name}`` (``"cuda"`` stands for the device that the region runs on), ``{"float": text}``
(``"inf"``), ``{"str": text}``.
"""
from __future__ import annotations

import json
import lzma
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
import torch._inductor.inductor_prims  # registers ops that regions of Inductor have
from torch import Tensor
from torch.fx import Graph, GraphModule

DTYPE_NAMES: Mapping[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b8": torch.bool,
}
RANDOM_OPS = ("inductor_random", "inductor_randint", "inductor_seed", "inductor_lookup_seed")
"""Inductor's own random numbers, which eager cannot repeat."""

HIGHEST_INTEGER = 100
"""Above the integers that an input has for which no range is given."""


@dataclass(frozen=True)
class TensorSpec:
    """An input tensor: sizes, strides and offset in elements, and how its values are made up.

    Attributes:
        stride: None for a contiguous tensor.
        values: as in the file's ``gen``; empty for random ones.
        alias: the number of the buffer that it lies in; None where it has memory of its own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    offset: int = 0
    values: tuple[Any, ...] = ()
    alias: int | None = None
    on_host: bool = False

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> TensorSpec:
        """Return the spec that a line of a file has."""
        options = data[2] if len(data) > 2 else {}
        stride = options.get("st")
        return cls(tuple(data[0]), _dtype(data[1]), None if stride is None else tuple(stride), int(options.get("off", 0)),
                   tuple(options.get("gen") or ()), options.get("alias"), options.get("dev") == "cpu")

    def to_json(self) -> list[Any]:
        """Return the spec as a line of a file has it."""
        options: dict[str, Any] = {}
        if self.stride is not None:
            options["st"] = list(self.stride)
        if self.offset:
            options["off"] = self.offset
        if self.values:
            options["gen"] = list(self.values)
        if self.alias is not None:
            options["alias"] = self.alias
        if self.on_host:
            options["dev"] = "cpu"
        return [list(self.shape), dtype_name(self.dtype), *([options] if options else [])]

    @property
    def extent(self) -> int:
        """The elements from the first to the last, with the gaps between them."""
        if self.stride is None or not all(self.shape):
            return math.prod(self.shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    def tensor(self, device: str, buffers: Mapping[int, Tensor], filled: bool = True) -> Tensor:
        """Return a tensor of this spec; one of a shared buffer is a view of that. Without ``filled`` it holds anything."""
        if self.alias is not None:
            buffer = buffers[self.alias]
            whole = len(buffer) // self.dtype.itemsize * self.dtype.itemsize
            return self._laid_out(buffer[:whole].view(self.dtype))
        count, place = self.offset + self.extent, "cpu" if self.on_host else device
        return self._laid_out(
            self._elements(count, place) if filled else torch.empty(count, dtype=self.dtype, device=place))

    def _laid_out(self, elements: Tensor) -> Tensor:
        stride = self.stride if self.stride is not None else torch.empty(self.shape, device="meta").stride()
        return elements.as_strided(self.shape, stride, self.offset)

    def _elements(self, count: int, device: str) -> Tensor:
        match self.values:
            case ("index" | "randint", low, high):
                return torch.randint(low, max(high, low + 1), (count,), device=device).to(self.dtype)
            case ("index", low, high, others):
                elements = torch.randint(low - len(others), high, (count,), device=device)
                for below, other in enumerate(others, 1):
                    elements[elements == low - below] = other
                return elements.to(self.dtype)
            case ("perm",):
                return torch.randperm(count, device=device).to(self.dtype)
            case ("const", number):
                return torch.full((count,), number, dtype=self.dtype, device=device)
            case ("offsets", high):
                elements = torch.randint(max(high, 1), (count,), device=device).sort().values.to(self.dtype)
                elements[:1] = 0
                return elements
        if self.dtype is torch.bool:
            return torch.randint(2, (count,), device=device).bool()
        if not self.dtype.is_floating_point:
            return torch.randint(HIGHEST_INTEGER, (count,), device=device).to(self.dtype)
        return torch.randn(count, device=device).to(self.dtype)


@dataclass(frozen=True)
class Region:
    """One region of a file, as it stands there; :meth:`module` and :meth:`inputs` make something to run of it."""

    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name: unique in its file."""
        name: str = self.data["name"]
        return name

    @property
    def models(self) -> str:
        """The models that have the region."""
        return ", ".join(self.data.get("models", ()))

    @property
    def random_op(self) -> str | None:
        """The first op that draws random numbers, so that nothing can be compared with eager; None without one."""
        names = (op for _, op, *_ in self.data["ops"])
        return next((name for name in names if name != "getitem" and _draws_random(name)), None)

    def module(self, device: str) -> GraphModule:
        """Return the region as a graph that takes its tensors and returns a tuple; sizes and numbers are constants in it."""
        graph = Graph()
        values: dict[str, Any] = {}
        for name, spec in zip(self.data["params"], self.data["inputs"], strict=True):
            values[name] = spec[1] if _is_number(spec) else graph.placeholder(name.lstrip("_"))
        for name, op, args, kwargs in self.data["ops"]:
            positional = tuple(_operand(arg, values, device, graph) for arg in args)
            named = {key: _operand(arg, values, device, graph) for key, arg in kwargs.items()}
            values[name] = graph.call_function(op_named(op), positional, named)
        graph.output(tuple(_operand(output, values, device, graph) for output in self.data["outputs"]))
        return GraphModule(torch.nn.Module(), graph)

    def inputs(self, device: str, filled: bool = True) -> list[Tensor]:
        """Return the tensors that :meth:`module` takes, made up by their specs; the same at every call.

        Without ``filled`` they hold anything, and take no memory on a CPU: for planning, which looks at no value.
        """
        torch.manual_seed(0)
        specs = [TensorSpec.from_json(spec) for spec in self.data["inputs"] if not _is_number(spec)]
        shared = {spec.alias: spec.dtype for spec in specs if spec.alias is not None}
        buffer = _buffer if filled else _empty_buffer
        buffers = {alias: buffer(self.data["alias_bytes"][alias], dtype, device) for alias, dtype in sorted(shared.items())}
        return [spec.tensor(device, buffers, filled) for spec in specs]


def read(path: Path) -> list[Region]:
    """Return the regions of a file, in its order. Raises OSError if it cannot be read, ValueError if it is no such file."""
    with _opened(path, "rt") as lines:
        return [Region(json.loads(line)) for line in lines if line.strip()]


def write(path: Path, regions: Iterable[Region]) -> None:
    """Write regions to a file; one whose name ends in ``.xz`` is compressed."""
    with _opened(path, "wt") as file:
        file.writelines(json.dumps(region.data, separators=(",", ":")) + "\n" for region in regions)


def dtype_name(dtype: torch.dtype) -> str:
    """Return what a dtype is called in a file."""
    names = {value: name for name, value in DTYPE_NAMES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = DTYPE_NAMES.get(name) or getattr(torch, name)
    return dtype


def _opened(path: Path, mode: str) -> IO[str]:
    opened: Callable[..., IO[str]] = lzma.open if path.suffix == ".xz" else open
    return opened(path, mode)


def _buffer(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return the bytes of random numbers of one of the dtypes that the buffer is read as."""
    numbers = torch.randn(size // dtype.itemsize + 1, device=device) * (1 if dtype.is_floating_point else HIGHEST_INTEGER)
    return numbers.to(dtype).view(torch.uint8)[:size]


def _empty_buffer(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return bytes that hold anything."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def _is_number(spec: Sequence[Any]) -> bool:
    """Return whether an input is sizes or a number, not a tensor."""
    return isinstance(spec[0], str)


@cache
def op_named(op: str) -> Any:
    """Return the op of a name in a file: an overload, or ``operator.getitem``. Raises AttributeError for an unknown one."""
    if op == "getitem":
        return operator.getitem
    target: Any = torch.ops
    for part in op.split("."):
        target = getattr(target, part)
    return target


def _draws_random(op: str) -> bool:
    if any(name in op for name in RANDOM_OPS):
        return True
    try:
        return torch.Tag.nondeterministic_seeded in op_named(op).tags
    except AttributeError:  # an op that this torch does not have: the region will say so
        return False


def _operand(value: Any, values: Mapping[str, Any], device: str, graph: Graph) -> Any:
    """Return an operand of a file as an operand of a graph."""
    if isinstance(value, list):
        return [_operand(item, values, device, graph) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "item":
        return graph.call_function(operator.getitem, tuple(_operand(part, values, device, graph) for part in content))
    if kind == "ref":
        return values[content]
    if kind == "torch":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(device if content == "cuda" else content)
    return float(content) if kind == "float" else content


def iter_tensors(result: Any) -> Iterator[Tensor]:
    """Iterate over the tensors that a region's module returns."""
    yield from (item for item in result if isinstance(item, Tensor))
