"""One Python function per graph: allocates, launches, calls eager ops, frees.

The function is generated once, so that a call does nothing that could be done before: no look-ups by name, no objects
built that can be built once, every buffer dropped at its last use.

Worked example, for ``relu(x) @ w``::

    def call(args):
        x, w = args
        args.clear()
        stream = stream_of(0)
        relu = empty((8, 4), (4, 1), c0)
        k0(stream, 1, 1, 1, x.data_ptr(), relu.data_ptr())
        del x
        mm = c1(relu, w)
        return (mm,)

The first steps may be a function of their own, ``head``, which something else may then stand for: a replay of them.
"""

from __future__ import annotations

import keyword
import math
import operator
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from dynafuse.cost.products import PRODUCTS
from dynafuse.fx import in_place
from dynafuse.ir import ARRIVED, COUNT, Facts, Plan, Region, Role, Size
from dynafuse.lowering import base
from dynafuse.lowering.triton.counters import counters_on
from dynafuse.lowering.triton.launch import Kernel, stream_of
from dynafuse.ops import is_library
from dynafuse.ops.indexing_math import as_expr
from dynafuse.ops.overloads import COPIES_INTO, in_place_variant, written_to
from dynafuse.ops.symbols import is_name, place_of
from dynafuse.runtime import random
from dynafuse.runtime.alignment import aligned, allocates, draws_by_address, has_known_place
from dynafuse.runtime.alike import Sharing
from dynafuse.runtime.buffers import has_more_elements, is_given_up
from dynafuse.runtime.devices import cuda_devices, launch_on
from dynafuse.runtime.lifetimes import Lifetimes
from dynafuse.runtime.promised import as_planned
from dynafuse.runtime.sizes import MATH, size_text, solution
from dynafuse.runtime.step import Step
from dynafuse.runtime.views import place_in

MOST_COLUMNS, MOST_ORIGINS = 120, 4  # of a comment about a region, and how many of the user's lines it names
guards: Any = torch._C._dynamo.guards


@dataclass(frozen=True)
class Part:
    """The first steps of a graph as a function of their own, which returns what the others need of them."""

    source: str
    name: str  # of the function, a global of the graph's
    inputs: tuple[int, ...]  # of the graph, by position
    results: tuple[Node, ...]
    staying: frozenset[int]  # positions of results of which nothing leaves the graph's function


class Writer:
    """Writes the function of one graph."""

    def __init__(self, plan: Plan, module: GraphModule, steps: Mapping[str, Step], static: frozenset[int],
                 over: Mapping[Node, Node], sharing: Sharing, apart: int = 0, placed: Collection[Node] = ()) -> None:
        """Take a plan with its kernels; the arguments are those of :func:`dynafuse.runtime.written.write`."""
        self.plan = plan
        self.placed = placed
        self.makers: dict[str, Node] = {}  # results that may be given memory, by the globals that make them
        self.over = over
        self.sharing = sharing
        self.facts: Mapping[Node, Facts] = plan.annotated.facts
        self.module = module
        self.steps = steps
        self.static = static
        self.names: dict[Node, str] = {}
        self.given: dict[Node, str] = {}  # inputs that eager ops have to have, where kernels may have an aligned copy
        self.ahead: dict[Node, None] = {}  # those among them whose copies kernels have overwritten since
        self.symbols: dict[sympy.Expr, str] = {}  # sizes that variables hold: symbols, and what the graph computes of them
        self.apart = apart
        self.head: Part | None = None
        self.lines: list[str] = []
        self.aligning: dict[Node, str] = {}  # the lines that copy misaligned inputs
        self.globals: dict[str, Any] = {MATH: math}
        self._constants: dict[int, str] = {}
        self.locals = frozenset(_identifier(node.name) for node in self.facts)
        self.placeholders = tuple(node for node in self.facts if node.op == "placeholder")
        self.output = plan.annotated.graph.output_node()
        self.returned_views = self._returned_views()
        self.shared = self._shared()
        arguments = {name: (*step.inputs, *step.outputs) for name, step in steps.items()}
        self.lifetimes = Lifetimes(plan, arguments, [*self.output.all_input_nodes, *self.returned_views.values()])
        self.last = self.lifetimes.freed()
        self.devices = cuda_devices(plan)
        self.read = {memory for step in steps.values() for i in step.inputs for memory in (i, self.lifetimes.owner(i))}

    # ------------------------------------------------------------------ the whole function

    def write(self) -> tuple[str, dict[str, Any]]:
        """Return the source of ``call`` and the globals that it needs."""
        self._inputs()
        bound = len(self.lines)
        self._align()
        self.lines += self.aligning.values()
        self._prologue()
        for number, step in enumerate(self.plan.steps):
            if number and number == self.apart:
                self._put_apart(number, bound)
            if isinstance(step, Region):
                self._region(self.steps[step.name])
            else:
                self._node(step)
            self._free(number)
        for node in list(self.ahead):
            self._give_back(node)
        self.lines.append(f"return ({self._returned()})")
        head = "" if self.head is None else self.head.source
        return head + _function("call", self.lines), self.globals

    def _put_apart(self, number: int, bound: int) -> None:
        """Make the steps so far a function of their own, if all that it takes and returns is tensors of known sizes.

        Args:
            number: The step that is next.
            bound: How many lines bind the inputs.
        """
        later = self.lifetimes.needed(number)
        results = [node for node in later if node in self.names and node.op != "placeholder" and self._has_variable(node)]
        if not results or self.symbols or self.given or any(self.facts[node].tensor is None for node in results):
            return
        inputs = [node for node in self.lifetimes.needed(0, number) if node.op == "placeholder"]
        memory = self.plan.annotated.memory
        elsewhere = {*map(memory, self.output.all_input_nodes), *self.placeholders}
        staying = frozenset(i for i, node in enumerate(results) if memory(node) not in elsewhere)
        body, self.lines = self.lines[bound + len(self.aligning):], self.lines[:bound]
        listed, name = _listed(self.names[node] for node in results), self.constant(Part, "head")
        lines = [*self._unpacked(inputs), *self._aligned(inputs), *body, f"return ({listed})"]
        self.lines.append(f"{listed}= {name}([{_listed(self.names[node] for node in inputs)}])")
        if unused := [self.names[node] for node in inputs if node not in later]:
            self.lines.append(f"del {', '.join(unused)}")
        self.lines += self._aligned(later)
        self._prologue()
        self.head = Part(_function(name, lines), name, tuple(map(self.placeholders.index, inputs)), tuple(results), staying)

    def _inputs(self) -> None:
        for node in self.placeholders:
            self.names[node] = _identifier(node.name)
        self.lines += self._unpacked(self.placeholders)
        for node in self.placeholders:
            self._bind_symbols(node)
        for node in self.placeholders:
            self._solve_symbols(node)
        for node in self.facts:
            if node.op == "get_attr":
                self.names[node] = self.constant(_attribute(self.module, str(node.target)))

    def _unpacked(self, inputs: Sequence[Node]) -> list[str]:
        return [f"{_listed(self.names[node] for node in inputs)}= args", "args.clear()"] if inputs else []

    def _align(self) -> None:
        """Write copies of inputs that are less aligned than kernels assume. The caller's is kept for what needs that."""
        needed = set(self.returned_views.values()).union(*(self._as_given(node).values() for node in self.facts))
        for number, node in enumerate(self.placeholders):
            if node not in self.read or (number in self.static and has_known_place(node)):
                continue
            if self.facts[node].alignment <= node.meta["val"].dtype.itemsize:
                continue
            if node in needed:
                self.given[node] = f"given{number}"
                self.lines.append(f"{self.given[node]} = {self.names[node]}")
            self.aligning[node] = self._aligned_one(node)

    def _aligned(self, nodes: Sequence[Node]) -> list[str]:
        return [self.aligning[node] for node in nodes if node in self.aligning]

    def _as_given(self, node: Node) -> dict[Node, Node]:
        """Return the arguments of a call that are in memory that it has to have as it is, with that memory.

        It writes to it, or what it draws depends on where it begins.
        """
        if draws_by_address(node):
            return {argument: self.lifetimes.owner(self.plan.annotated.base(argument)) for argument in node.all_input_nodes}
        return {argument: self.lifetimes.owner(argument) for argument in written_to(node)}

    def _give_back(self, node: Node) -> None:
        """Write the copy of an input that kernels have overwritten back to where the caller looks."""
        if node in self.ahead:
            name, given = self.names[node], self.given[node]
            self.lines.append(f"if {given} is not {name}: {name} = {given}.copy_({name})")
            del self.ahead[node]

    def _aligned_one(self, node: Node) -> str:
        name = self.names[node]
        return f"if {name}.data_ptr() & {self.facts[node].alignment - 1}: {name} = {self.constant(aligned)}({name})"

    def _prologue(self) -> None:
        if self.steps:
            for index in self.devices:
                self.lines.append(f"stream{index} = {self.constant(stream_of, 'stream_of')}({index})")

    def _returned(self) -> str:
        outputs = self.output.args[0]
        assert isinstance(outputs, (list, tuple))
        return "".join(f"{self._result(output)}, " for output in outputs)

    def _result(self, output: Any) -> str:
        return self._returned_view(output) if output in self.returned_views else self._argument(output)

    def _returned_views(self) -> dict[Node, Node]:
        """Return the outputs that are views of inputs, each with its input."""
        outputs = (node for node in self.output.all_input_nodes if self.facts[node].role is Role.VIEW)
        return {node: base for node in outputs if (base := self.plan.annotated.base(node)).op == "placeholder"}

    def _has_variable(self, node: Node) -> bool:
        """Return whether a variable holds a value: a view of an input that is returned, and nothing else, is made there."""
        return node not in self.returned_views or len(node.users) > 1

    def _shared(self) -> set[Node]:
        """Return the outputs that are views of memory that other outputs are in, too."""
        bases = {node: self.plan.annotated.base(node) for node in self.output.all_input_nodes}
        count = Counter(bases.values())
        return {node for node, source in bases.items() if count[source] > 1 and node is not source}

    def _returned_view(self, node: Node) -> str:
        """Write a view of what the caller gave, also where kernels have an aligned copy of it.

        Autograd has to know that it is a view: writing to one of several views is then an error, not silently wrong.
        """
        base = self.returned_views[node]
        return self._view_of(self.given.get(base, self.names[base]), node)

    def _given(self, argument: Node, memory: Node) -> str:
        """Write an argument of a call in what the caller gave."""
        is_view = self.facts[argument].role is Role.VIEW
        return self._view_of(self.given[memory], argument) if is_view else self.given[memory]

    def _view_of(self, name: str, node: Node) -> str:
        sizes, strides, offset = self._place(node)
        return f"{name}.as_strided({sizes}, {strides}, {name}.storage_offset() + {offset})"

    # ------------------------------------------------------------------ lifetimes

    def _free(self, number: int) -> None:
        last = (n for n in self.last.get(number, ()) if n not in self.ahead)
        names = [self.names[n] for n in last if n in self.names]
        if names:
            self.lines.append(f"del {', '.join(names)}")

    # ------------------------------------------------------------------ sizes

    def _bind_symbols(self, node: Node) -> None:
        """Bind variables to the size symbols among the sizes and strides of ``node``."""
        value, name = node.meta.get("val"), self.names[node]
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            self._bind(value, name)
            if self.facts[node].role is Role.HOST and not value.node.expr.is_number:
                self.symbols.setdefault(value.node.expr, name)
        elif isinstance(value, torch.Tensor):
            for d, size in enumerate(value.shape):
                self._bind(size, f"{name}.size({d})")
            if value.layout is torch.strided:
                for d, stride in enumerate(value.stride()):
                    self._bind(stride, f"{name}.stride({d})")
                self._bind(value.storage_offset(), f"{name}.storage_offset()")

    def _bind(self, size: int | torch.SymInt | torch.SymFloat, text: str) -> None:
        if isinstance(size, (torch.SymInt, torch.SymFloat)) and isinstance(size.node.expr, sympy.Symbol):
            symbol = size.node.expr
            if symbol not in self.symbols:
                self.symbols[symbol] = _identifier(str(symbol))
                self.lines.append(f"{self.symbols[symbol]} = {text}")

    def _solve_symbols(self, node: Node) -> None:
        """Bind variables to the symbols that only sums among the sizes of an input tell."""
        value = node.meta.get("val")
        for d, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            solved = solution(as_expr(size), f"{self.names[node]}.size({d})", self.symbols)
            if solved is not None:
                symbol, text = solved
                self.symbols[symbol] = _identifier(str(symbol))
                self.lines.append(f"{self.symbols[symbol]} = {text}")

    def size(self, size: Size) -> str:
        """Return a size as Python source over the bound symbols."""
        if isinstance(size, int):
            return str(size)
        return size_text(sympy.sympify(size), self.symbols)

    def _sizes(self, sizes: Sequence[Size]) -> str:
        return f"({''.join(self.size(s) + ', ' for s in sizes)})"

    # ------------------------------------------------------------------ steps

    def _device(self, step: Step) -> int | None:
        tensor = self.facts[step.outputs[0]].tensor
        assert tensor is not None
        return tensor.device.index or 0 if tensor.device.type == "cuda" else None

    def _region(self, step: Step) -> None:
        self.lines += [f"# {line}" for line in _described(step.region)]
        if isinstance(step.kernel, Kernel):  # its launches are written out, one by one
            self._launches(step, step.kernel)
        else:
            self._delegated(step, step.kernel)
        for node, into in step.region.copies.items():
            self.names[node] = self.names[into]
            if (memory := self.lifetimes.owner(into)) in self.given:
                self.ahead[memory] = None

    def _delegated(self, step: Step, kernel: base.Kernel) -> None:
        """Write one call, which allocates its outputs itself."""
        sizes = [self.size(step.symbols[symbol]) for symbol in kernel.scalars]
        inputs = ", ".join([self.names[n] for n in step.inputs] + sizes)
        for node in step.outputs:
            self.names[node] = _identifier(node.name)
        targets = ", ".join("_" if node in step.region.copies else self.names[node] for node in step.outputs)
        self.lines.append(f"{targets}, = {self.constant(kernel.run, 'fused')}([{inputs}], {self._device(step)})")

    def _launches(self, step: Step, kernel: Kernel) -> None:
        """Write the allocation of outputs and workspaces, then one launch after the other."""
        for node in step.outputs:
            if node in self.over:
                self._reuse(node, self.over[node])
            elif node not in step.region.copies:
                self._allocate(node)
        device = self._device(step)
        arguments = self._arguments(step, kernel, device)
        stream = "None" if device is None else f"stream{device}"
        for launcher, launch in zip(kernel.bound(device, step.places), kernel.launches, strict=True):
            name = self.constant(launcher, f"k_{launch.entry}")
            grid = [self._grid(g, step) for g in launch.grid]
            if ARRIVED in dict(launch.signature):
                arguments[ARRIVED] = f"{self.constant(counters_on(device), 'counters')}({stream}, {grid[0]})"
            passed = [_passed(arguments[a], kind, device) for a, kind in launch.signature]
            call = f"{name}({', '.join([stream, *grid, *passed])})"
            self.lines.append(self._guarded(call, device, grid))
        if kernel.workspaces:
            self.lines.append(f"del {', '.join(arguments[w.name] for w in kernel.workspaces)}")

    def _guarded(self, call: str, device: int | None, grid: Sequence[str]) -> str:
        """Write a launch on its device, left out when an axis of a dynamic size is empty."""
        dynamic = [g for g in grid if not g.isdigit()]
        if len(self.devices) > 1:
            call = f"{self.constant(launch_on)}({device}, lambda: {call})"
        return f"if {' and '.join(f'({g}) > 0' for g in dynamic)}: {call}" if dynamic else call

    def _allocate(self, node: Node) -> None:
        tensor = self.facts[node].tensor
        assert tensor is not None
        self.names[node] = _identifier(node.name)
        sizes = f"{self._sizes(tensor.shape)}, {self._sizes(tensor.stride)}"
        self.lines.append(f"{self.names[node]} = {self._empty(sizes, tensor.dtype, tensor.device, node)}")

    def _reuse(self, node: Node, operand: Node) -> None:
        """Write the tensor of a result over the memory of an operand."""
        tensor, operand_tensor = self.facts[node].tensor, self.facts[operand].tensor
        assert tensor is not None and operand_tensor is not None
        self.names[node] = _identifier(node.name)
        reused = self.names[operand]
        if (tensor.shape, tensor.stride) != (operand_tensor.shape, operand_tensor.stride):
            sizes = f"{self._sizes(tensor.shape)}, {self._sizes(tensor.stride)}"
            reused = f"{self.constant(guards._reinterpret_tensor, 'reinterpret')}({reused}, {sizes}, 0)"
        if operand.op == "placeholder":  # saved by a forward: whether it is kept is not known before
            sizes = f"{self._sizes(tensor.shape)}, {self._sizes(tensor.stride)}"
            fresh = self._empty(sizes, tensor.dtype, tensor.device)
            name, count = self.names[operand], self.constant(sys.getrefcount, "getrefcount")
            asked = f"{name}, {count}({name})"
            if has_more_elements(self.facts[node], self.facts[operand]):
                asked += f", {' * '.join(map(self.size, tensor.shape))}"
            reused = f"{reused} if {self.constant(is_given_up, 'is_given_up')}({asked}) else {fresh}"
        self.lines.append(f"{self.names[node]} = {reused}  # written over")

    def _empty(self, sizes: str, dtype: torch.dtype, device: torch.device, node: Node | None = None) -> str:
        if device.type == "cuda" and len(self.devices) == 1:
            return f"{self._maker(guards._empty_strided_cuda, 'empty', node)}({sizes}, {self.constant(dtype)})"
        empty = self._maker(torch.empty_strided, "empty", node)
        return f"{empty}({sizes}, dtype={self.constant(dtype)}, device={self.constant(device)})"

    def _maker(self, function: Any, name: str, node: Node | None) -> str:
        """Return the name of a global that makes a result: one of its own if the result may be given memory."""
        if node not in self.placed:
            return self.constant(function, name)
        assert node is not None
        own = self._unique(f"{name}_placed{len(self.makers)}")
        self.makers[own], self.globals[own] = node, function
        return own

    def _arguments(self, step: Step, kernel: Kernel, device: int | None) -> dict[str, str]:
        """Return the source of each argument that the kernel can take, by name, and write the allocation of workspaces."""
        sources = {f"in{i}": self.names[node] for i, node in enumerate(step.inputs)}
        for i, node in enumerate(step.outputs):
            into = step.region.copies.get(node)
            sources[f"out{i}"] = self.names[node if into is None else into]
        symbols = {name for launch in kernel.launches for name, _ in launch.signature if is_name(name)}
        sources |= {name: self.size(step.symbols[place_of(name)]) for name in symbols}
        sources |= {f"k{i}": repr(value) for i, value in enumerate(step.hoisted)} | {COUNT: str(step.count)}
        where = torch.device("cpu") if device is None else torch.device("cuda", device)
        for number, space in enumerate(kernel.workspaces):
            name = f"ws{number}"
            size = self.size(self._renamed(space.size, step))
            self.lines.append(f"{name} = {self._empty(f'({size},), (1,)', space.dtype, where)}")
            sources[space.name] = name
        return sources

    def _grid(self, size: Size, step: Step) -> str:
        return self.size(self._renamed(size, step))

    def _renamed(self, size: Size, step: Step) -> Size:
        """Return a size over a spec's symbols as one over the graph's."""
        if isinstance(size, int):
            return size
        real = {s: sympy.sympify(step.symbols[place_of(s)]) for s in size.free_symbols}
        return size.xreplace(real)

    def _node(self, node: Node) -> None:
        if node.op == "get_attr":
            return  # a global
        role = self.facts[node].role
        self.names[node] = _identifier(node.name)
        if role is Role.VIEW:
            if self._has_variable(node):
                self.lines.append(f"{self.names[node]} = {self._view(node)}")
            return
        as_given = {argument: memory for argument, memory in self._as_given(node).items() if memory in self.given}
        for memory in as_given.values():
            self._give_back(memory)
        call = self._call(node, {argument: self._given(argument, memory) for argument, memory in as_given.items()})
        if in_place(node):
            self.names[node] = self.names[node.all_input_nodes[0]]
            self.lines.append(call)
        else:
            self.lines.append(f"{self.names[node]} = {call}")
        for memory in as_given.values():
            if node.target is not COPIES_INTO:  # after which nothing reads the input
                self.lines.append(f"{self.names[memory]} = {self.given[memory]}")
                self.lines.append(self._aligned_one(memory))
        self._bind_symbols(node)
        if role is Role.EAGER:
            self._check_layout(node)
            if node in self.read and not in_place(node) and not allocates(node):
                self.lines.append(self._aligned_one(node))

    def _call(self, node: Node, others: Mapping[Node, str]) -> str:
        """Write the call of an op, with other names for some of its arguments."""
        called = in_place_variant(node.target) if in_place(node) else node.target
        name = _identifier(getattr(called, "__name__", "op"))
        target = self._maker(_called(called), name, None if in_place(node) else node)
        own = {argument: self.names[argument] for argument in others}
        self.names.update(others)
        arguments = [*map(self._argument, node.args), *(f"{k}={self._argument(v)}" for k, v in node.kwargs.items())]
        self.names.update(own)
        return f"{target}({', '.join(arguments)})"

    def _check_layout(self, node: Node) -> None:
        """Write a check of an eager op's result, which copies it if its strides are not those that its readers count on."""
        tensor = self.facts[node].tensor
        if tensor is None or in_place(node) or not _may_differ(node) or not self._is_relied_on(node):
            return
        dynamic = [sympy.sympify(size) for size in (*tensor.shape, *tensor.stride)]
        if any(symbol not in self.symbols for size in dynamic for symbol in size.free_symbols):
            return  # sizes that no variable holds: nothing that relies on them could be written either
        name, sizes, strides = self.names[node], self._sizes(tensor.shape), self._sizes(tensor.stride)
        copy = f"{self.constant(as_planned)}({name}, {sizes}, {strides}, {str(_source(node).target)!r})"
        differs = f"{name}.size() != {sizes} or {name}.stride() != {strides}"
        if node.target is operator.getitem:  # of several results an op may leave one out that it describes as empty
            differs = f"{name} is not None and ({differs})"
        self.lines.append(f"if {differs}: {name} = {copy}")

    def _is_relied_on(self, node: Node) -> bool:
        """Return whether kernels, views or the readers of this graph's results look at the memory of a node."""
        return node in self.read or any(user is self.output or self.facts[user].role is Role.VIEW for user in node.users)

    def _view(self, node: Node) -> str:
        """Write a chain of views as one new tensor over the base's memory.

        Outputs that share memory share a version, too: autograd has to know if one is written to and it has saved another.
        """
        name, (sizes, strides, offset) = self.names[self.plan.annotated.base(node)], self._place(node)
        if node in self.shared:
            return f"{self.constant(self.sharing, 'sharing')}({name}, {sizes}, {strides}, {offset})"
        return f"{self.constant(guards._reinterpret_tensor, 'reinterpret')}({name}, {sizes}, {strides}, {offset})"

    def _place(self, node: Node) -> tuple[str, str, str]:
        """Return the sizes and strides of a view, and its offset from its base."""
        place = place_in(node, self.plan.annotated.base(node), self.facts)
        return self._sizes(place.sizes), self._sizes(place.strides), self.size(place.offset)

    # ------------------------------------------------------------------ arguments

    def _argument(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._argument(v) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, slice):
            return f"slice({self._argument(value.start)}, {self._argument(value.stop)}, {self._argument(value.step)})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size_text(value.node.expr, self.symbols)
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self.constant(value)

    def constant(self, value: Any, name: str = "c") -> str:
        """Return the name of a global that holds ``value``."""
        if id(value) not in self._constants:
            self._constants[id(value)] = unique = self._unique(f"{name}_{len(self._constants)}")
            self.globals[unique] = value
        return self._constants[id(value)]

    def _unique(self, name: str) -> str:
        """Return a name for a global that no variable shadows."""
        while name in self.locals:
            name += "_"
        return name


def _passed(name: str, kind: str, device: int | None) -> str:
    """Return an argument of a launch: of a CUDA tensor its address, which takes a launcher longer to ask for."""
    return f"{name}.data_ptr()" if kind[0] == "*" and device is not None else name


def _called(target: Any) -> Any:
    """Return the fastest function that calls an op: the innermost one, without Python around it.

    The dispatcher's function parses its arguments by the op's schema. For a library call, torch's own function of the op's
    name is faster, because its parser is generated.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return target
    if target in random.EAGER:
        return random.EAGER[target]
    known = getattr(torch._C._VariableFunctions, target.overloadpacket.__name__, None)
    return known if known and is_library(target) and target._overloadname == "default" else target._op


def _described(region: Region) -> Sequence[str]:
    """Return what a region computes and where the user wrote it, for readers of the function."""
    ops = " ".join(dict.fromkeys(str(n.target).split(".")[1] for n in region.nodes if "." in str(n.target)))
    lines = [f"{region.name} on {region.executor}: {ops}"[:MOST_COLUMNS]]
    lines += [f"    {' '.join(origin.split())}"[:MOST_COLUMNS] for origin in region.origins[:MOST_ORIGINS]]
    more = len(region.origins) - MOST_ORIGINS
    return [*lines, f"    and {more} lines more"] if more > 0 else lines


def _source(node: Node) -> Node:
    """Return the call that returned a node's value, alone or among others."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _may_differ(node: Node) -> bool:
    """Return whether a call may return other strides than torch predicts.

    Products of matrices do not: the same code predicts and returns. A result that shares memory with an argument has that
    argument's layout, and could not be copied.
    """
    target = _source(node).target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return target not in PRODUCTS and all(returned.alias_info is None for returned in target._schema.returns)


def _function(name: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"def {name}(args):\n{body}\n"


def _listed(names: Iterable[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _identifier(name: str) -> str:
    clean = re.sub(r"\W", "_", name)
    return f"v_{clean}" if not clean.isidentifier() or keyword.iskeyword(clean) or clean in ("args", "call", MATH) else clean


def _attribute(module: GraphModule, target: str) -> Any:
    holder: Any = module
    for part in target.split("."):
        holder = getattr(holder, part)
    return holder
