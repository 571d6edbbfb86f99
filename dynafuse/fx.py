"""Questions to FX graphs: what a node is, what it looks into, how large it is, where the user wrote it; calls put into them.

Worked example: of ``y = x.t()[0]``, ``is_view(y)`` is True, ``base(y)`` is ``x``, and ``user_line(y)`` is
``model.py:12, in forward: y = x.t()[0]``.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, overload

import sympy
import torch
from torch._guards import detect_fake_mode
from torch._subclasses.meta_utils import is_sparse_any
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.functions import FloorDiv, Max

Size: TypeAlias = int | sympy.Expr
"""A size or stride: an int when static, a sympy expression over the graph's size symbols when dynamic."""

UNKNOWN_SIZE = 8192
"""What a size that is only known at run time counts as, in prices and schedules."""

OWNS_BASE = "owns_base"
"""The metadata of a scatter whose base nothing else reads."""

IN_PLACE = "in_place"
"""The metadata of a scatter that runs in the memory of an input, whose new value it is."""

PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
OWN_STEPS = re.compile(r"\.forward\._dynafuse_module")  # how Dynamo gets at the module of a forced instance
PARTS = re.compile(r"\[['\"](.*?)['\"]\]|\[(\d+)\]|\.([^.\[]+)|^([^.\[]+)")


# Calls ----------------------------------------------------------------------------------------------------------------


def arguments(node: Node) -> dict[str, Any]:
    """Return a call's arguments by schema name, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return arguments_of(node.target, node.args, node.kwargs)


def arguments_of(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an overload is called with by schema name, defaults filled in.

    Args:
        target: The overload.
        args, kwargs: What it is called with.
    """
    defaults = _defaults(target)
    given = dict(zip(defaults, args, strict=False)) | dict(kwargs)
    return {name: given.get(name, default) for name, default in defaults.items()}


@cache
def _defaults(target: torch._ops.OpOverload) -> dict[str, Any]:
    """Return an overload's parameters with their defaults; None where there is none."""
    return {a.name: a.default_value if a.has_default_value() else None for a in target._schema.arguments}


FILLS = {torch.ops.aten.full.default: "fill_value", torch.ops.aten.full_like.default: "fill_value",
         torch.ops.aten.scalar_tensor.default: "s"}
"""Ops that make a tensor of one number, and the names of the arguments with the number."""


def is_zeros(node: object) -> bool:
    """Return whether a value is a tensor full of zeros that are literal."""
    while isinstance(node, Node) and is_view(node):
        node = node.args[0]
    fill = arguments(node)[FILLS[node.target]] if isinstance(node, Node) and node.target in FILLS else None
    return isinstance(fill, (int, float)) and fill == 0


def is_count(node: Node) -> bool:
    """Return whether a call returns 0, 1, 2 …"""
    given = arguments(node) if node.target is torch.ops.prims.iota.default else {}
    return bool(given and given["start"] == 0 and given["step"] == 1)


# Memory ---------------------------------------------------------------------------------------------------------------


def is_view(node: Node) -> bool:
    """Return whether an op returns a view, by its schema. Of a number, as in ``_conj(2j)``, there is none."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and bool(node.all_input_nodes)


def shares_memory(node: Node) -> bool:
    """Return whether a call returns a view of its first operand, or a piece of what may be views."""
    return is_view(node) or node.target is operator.getitem


def is_returned(node: Node) -> bool:
    """Return whether a graph returns a tensor, or a view of it."""
    return any(user.op == "output" or (shares_memory(user) and is_returned(user)) for user in node.users)


def base(node: Node) -> Node:
    """Return what a value is a view of, by the schemas of its ops: for graphs that nobody has annotated.

    In a plan, ``Annotated.base`` and ``Annotated.memory`` say it.
    """
    return looked_at(node, is_view)


def looked_at(node: Node, looks_through: Callable[[Node], bool]) -> Node:
    """Return the first node that does not look through to its first operand, from ``node`` on.

    Args:
        node: Where to begin.
        looks_through: Whether a node stands for its first operand; one that does has an operand.
    """
    while looks_through(node):
        node = node.all_input_nodes[0]
    return node


def makes_memory(node: Node) -> bool:
    """Return whether an op returns memory of its own, by its schema."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target.is_view and not target._schema.is_mutable


def owns_base(node: Node) -> bool:
    """Return whether a scatter may write into its base, as nothing else reads that (``passes/scatters.py`` has noted it)."""
    return bool(node.meta.get(OWNS_BASE))


def in_place(node: Node) -> bool:
    """Return whether a scatter runs in its base's memory, an input's (``passes/in_place.py`` has noted it)."""
    return bool(node.meta.get(IN_PLACE))


def moved_by(node: Node) -> dict[Node, None]:
    """Return the nodes whose bytes a call moves: its result and its operands, of a scatter in place the values alone."""
    return dict.fromkeys(node.all_input_nodes[1:] if in_place(node) else (node, *node.all_input_nodes))


@overload
def extent(shape: Sequence[int], strides: Sequence[int]) -> int: ...
@overload
def extent(shape: Sequence[Size], strides: Sequence[Size]) -> Size: ...
def extent(shape: Sequence[Size], strides: Sequence[Size]) -> Size:
    """Return how many elements of memory a tensor spans, from its first one to its last; of no elements, none.

    Args:
        shape: The sizes of a tensor.
        strides: Its strides, in elements, none of them negative.
    """
    if any(size == 0 for size in shape):
        return 0
    return functools.reduce(operator.add, ((size - 1) * stride for size, stride in zip(shape, strides, strict=True)), 1)


def is_dense(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Return whether elements lie in memory without gaps, for all sizes. Symbols are asked nothing, which would bind them.

    Args:
        shape: The sizes of a tensor.
        strides: Its strides, in elements.
    """
    dims = [pair for pair in zip(shape, strides, strict=True) if pair[0] != 1]
    return _is_contiguous(dims) or _is_permuted(dims)


def _is_contiguous(dims: Sequence[tuple[Size, Size]]) -> bool:
    """Return whether the elements lie in memory row by row, without gaps."""
    expected: Size = 1
    for size, stride in reversed(dims):
        if stride != expected:
            return False
        expected = expected * size
    return True


def _is_permuted(dims: Sequence[tuple[Size, Size]]) -> bool:
    left = [(_stride(stride), expression(size)) for size, stride in dims]
    expected: sympy.Expr = sympy.S.One
    while left:
        inner = next((pair for pair in left if pair[0] == expected), None)
        if inner is None:
            return False
        left.remove(inner)
        expected = expected * inner[1]
    return True


def _stride(stride: Size) -> sympy.Expr:
    """Return a stride of a tensor that is not empty: torch writes ``Max(1, size)`` for sizes that may be 0."""
    return expression(stride).replace(Max, _unless_empty)


def _unless_empty(*sizes: sympy.Expr) -> sympy.Expr:
    others = [size for size in sizes if size != 1]
    return others[0] if len(others) == 1 < len(sizes) else Max(*sizes)


# Sizes ----------------------------------------------------------------------------------------------------------------


def takes_checks(environment: ShapeEnv) -> bool:
    """Return whether torch checks what it is asked of sizes from now on, instead of forgetting it."""
    return not (environment.frozen or environment._suppress_guards_tls())


def can_be_checked(expr: sympy.Expr, environment: ShapeEnv) -> bool:
    """Return whether torch can check what is asked of an expression before each call: it finds each size in an input.

    It knows others: a graph may be given what an input is a view of in its place.
    """
    if environment not in _TRACKED:
        _TRACKED[environment] = _symbols(environment)
    known = _TRACKED[environment]
    return all(symbol in known for symbol in environment.replace(expr).free_symbols)


_TRACKED: weakref.WeakKeyDictionary[ShapeEnv, Collection[sympy.Expr]] = weakref.WeakKeyDictionary()
"""The sizes that torch can check, of each graph that is being compiled."""


def _symbols(environment: ShapeEnv) -> Collection[sympy.Expr]:
    """Return what the sizes, strides and offsets of inputs are, and the numbers among them."""
    if environment.tracked_fakes is None:  # traced by something else than Dynamo
        return environment.var_to_sources
    numbers = itertools.chain.from_iterable(numbers_of(tracked.fake) for tracked in environment.tracked_fakes)
    return {number.node.expr for number in numbers if isinstance(number, torch.SymInt)}


def numbers_of(value: object) -> Iterable[object]:
    """Return the sizes, strides and offset of a tensor, of a subclass those of what it wraps; what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return [value]
    if is_traceable_wrapper_subclass(value):
        return itertools.chain.from_iterable(numbers_of(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.shape if is_sparse_any(value) else [*value.shape, *value.stride(), value.storage_offset()]


def is_one(size: int | torch.SymInt) -> bool:
    """Return whether a size is the number 1. A symbol is not asked: that would guard, or fail where it depends on data."""
    return isinstance(size, int) and size == 1


def size_of(size: int | torch.SymInt) -> Size:
    """Return a size as an int or a sympy expression; a number for what tracing guarded to be 0, or to be 1, as to broadcast.

    What torch writes as ``(s**2)//s``, the last size of a ``view(-1)``, is ``s``.
    """
    if isinstance(size, int):
        return size
    expr = _divided(size.node.shape_env.replace(size.node.expr) if size.node.shape_env else size.node.expr)
    if expr.is_Integer:
        return int(expr)
    known = hint(size)
    return known if known in (0, 1) and not expr.is_Symbol and statically_known_true(size == known) else expr


@cache
def _divided(expr: sympy.Expr) -> sympy.Expr:
    """Return an expression without divisions that leave no rest whatever the symbols are."""
    return expr.replace(FloorDiv, _quotient)


def _quotient(whole: sympy.Expr, part: sympy.Expr) -> sympy.Expr:
    quotient = sympy.cancel(whole / part)
    return quotient if is_whole(quotient) else FloorDiv(whole, part)


def is_whole(expr: sympy.Expr) -> bool:
    """Return whether ``expr`` is free of fractions, so that it is an integer wherever its symbols are."""
    numerator, denominator = expr.as_numer_denom()
    return denominator == 1 and numerator.is_integer is not False


@cache
def expression(size: Size) -> sympy.Expr:
    """Return a size as a sympy expression."""
    return sympy.sympify(size)


def hint(size: int | torch.SymInt) -> int:
    """Return the value of a size in the example inputs, for costs."""
    if isinstance(size, int):
        return size
    if size.node._hint is not None:
        return int(size.node._hint)
    environment = size.node.shape_env
    values = "backed_var_to_val" if hasattr(environment, "backed_var_to_val") else "var_to_val"  # its name until torch 2.10
    known = environment.replace(size.node.expr).xreplace(getattr(environment, values))
    return int(known) if known.is_number and known.is_finite else UNKNOWN_SIZE


def environment_of(sizes: Iterable[Any]) -> ShapeEnv | None:
    """Return where torch keeps what it knows of symbolic sizes among some values; None if there are none."""
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def hint_of(size: Size, environment: ShapeEnv) -> int:
    """Return the value in the example inputs of a size that is an expression, for costs.

    Args:
        size: The size.
        environment: What torch knows of its symbols.
    """
    return size if isinstance(size, int) else hint(environment.create_symintnode(size, hint=None))


def needed_by(readers: Iterable[Node], nodes: Set[Node]) -> set[Node]:
    """Return which of some nodes others read, and which of them these are computed of.

    Args:
        readers: What reads them.
        nodes: The nodes.
    """
    needed, waiting = set[Node](), list(readers)
    while waiting:
        operands = nodes & set(waiting.pop().all_input_nodes) - needed
        needed |= operands
        waiting += operands
    return needed


# New calls ------------------------------------------------------------------------------------------------------------


def fake_mode_of(nodes: Iterable[Node]) -> AbstractContextManager[Any]:
    """Return the mode that nodes' values were made in, to be entered where new ones are; of tensors that are real, none.

    It may only be asked where another mode is not active, so ask where values will be made.
    """
    return detect_fake_mode([node.meta.get("val") for node in nodes]) or nullcontext()


def insert(before: Node, target: Any, args: tuple[Any, ...], like: Node | None = None, /, **kwargs: Any) -> Node:
    """Insert a call before a node, with metadata of another and a value of its own.

    Args:
        before: The node that it stands before.
        target: What is called.
        args: Its arguments; nodes among them need a value (``val``).
        like: The node that it has its metadata from, but for notes on memory; ``before`` unless given.
        **kwargs: Its arguments by name.
    """
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, args, kwargs)
    values, named = map_arg((args, kwargs), lambda operand: operand.meta["val"])
    own = {"val", "tensor_meta", OWNS_BASE, IN_PLACE}
    meta = {key: entry for key, entry in (like or before).meta.items() if key not in own}
    new.meta = meta | {"val": target(*values, **named)}
    return new


def size_node(before: Node, node: Node, dim: int) -> int | Node:
    """Return a size of a tensor: a number, or a node that computes it.

    Args:
        before: A node before which the size has to be known. What computes it there is taken, else inserted.
        node: The tensor.
        dim: The dimension.
    """
    size = size_of(node.meta["val"].shape[dim])
    if isinstance(size, int):
        return size
    known: Iterator[Node] = itertools.takewhile(lambda other: other is not before, before.graph.nodes)
    sizes = (other for other in known if isinstance(other.meta.get("val"), torch.SymInt))
    same = next((other for other in sizes if size_of(other.meta["val"]) == size), None)
    return same or insert(before, torch.ops.aten.sym_size.int, (node, dim))


# Parts ----------------------------------------------------------------------------------------------------------------


def extract(root: torch.nn.Module, nodes: Sequence[Node], inputs: Iterable[Node],
            outputs: Iterable[Node]) -> tuple[GraphModule, dict[Node, Node]]:
    """Copy nodes of a graph into a graph of their own, which takes ``inputs`` and returns a tuple of ``outputs``.

    What else the nodes read comes along: constants and submodules, which are looked up in ``root``.

    Args:
        root: The module that the graph belongs to.
        nodes: What is copied, operands first.
        inputs: The nodes that become placeholders, in order, under their own names.
        outputs: Nodes among ``nodes`` or ``inputs`` that are returned, in order.

    Returns:
        The module, and its nodes by those that they are copies of.
    """
    graph, copies = Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    inside = set(nodes)
    for operand in dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes):
        if operand not in inside and operand not in copies:
            copies[operand] = graph.node_copy(operand)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(root, graph), copies


# The user's code ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of code: where it stands, as ``model.py:12``, the function that it is in, and its text."""

    place: str
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}, in {self.function}: {self.text}"


def user_line(node: Node) -> str:
    """Return the user's last line on a node's stack trace, as ``model.py:12, in f: y = x.sort()``; else its module."""
    return _told(node, _line_of(node.meta.get("stack_trace") or ""))


def user_place(node: Node) -> str:
    """Return the place of :func:`user_line`, as ``model.py:12``; else the node's module."""
    line = _line_of(node.meta.get("stack_trace") or "")
    return _told(node, line and line.place)


def _told(node: Node, line: Line | str | None) -> str:
    """Return a line of a node's, or its module where there is none; with a word of it if the node is of the backward."""
    backward = "backward of " if node.meta.get("partitioner_tag") == "is_backward" else ""
    if line:
        return f"{backward}{line}"
    modules = [".".join(module_path(str(entry[0]))) for entry in module_stack(node).values()]
    return f"{backward}module {modules[-1]}" if modules else ""


@cache
def _line_of(trace: str) -> Line | None:
    """Return the last line of the user's code on a stack trace; equal layers share theirs."""
    frames = re.findall(r'File "(.*?)", line (\d+), in (.*?)\n\s*(.*)', trace)
    own = [frame for frame in frames if not frame[0].startswith(PACKAGES)] or frames
    if not own:
        return None
    file, line, function, text = own[-1]
    return Line(f"{file}:{line}", function, text.strip())


def module_stack(node: Node) -> Mapping[str, Any]:
    """Return the modules that a node was called in, or that the op was whose backward it belongs to."""
    modules: Mapping[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return modules


def module_path(source: str) -> list[str]:
    """Return ``L['self'].layers[0].mlp`` as ``self layers 0 mlp``: first the variable's name, then the path."""
    text = OWN_STEPS.sub("", source.split("@")[0])
    parts = ["".join(groups) for groups in PARTS.findall(text)]
    return [part for part in (parts[1:] if parts[0] in ("L", "G") else parts) if part != "_modules"]
