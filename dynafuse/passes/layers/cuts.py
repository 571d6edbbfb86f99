"""Cuts of a graph and their cost: values that a fused kernel would have held in registers are written and read.

Worked example: a decoder layer is best cut between its last product and the residual add. The product is a library's and
writes its result anyway, the residual stream is in memory already, and the add still fuses with the norm of the next layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynafuse.fallback import attempted
from dynafuse.ops import is_library
from dynafuse.passes.layers.repeats import Run

GRAD_MODE = torch._C._set_grad_enabled


def value_of(node: Node) -> Any:
    """Return a node's fake value, as Dynamo has it."""
    return node.meta.get("example_value")


def bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors among some values."""
    return sum(t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor))


def described(value: Any) -> Hashable:
    """Return all of a value that code compiled for it may rely on."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    is_parameter = isinstance(value, torch.nn.Parameter)
    return (value.dtype, value.device, tuple(value.shape), value.stride() if value.layout is torch.strided else None,
            value.requires_grad, is_parameter, value.is_conj(), value.is_neg())


def letter(node: Node, label: Hashable) -> Hashable:
    """Return a key of a node without its operands' names: the same call in another layer has an equal one."""
    operands, tree = pytree.tree_flatten((node.args, node.kwargs))
    parts = tuple(_operand(operand) for operand in operands)
    return (node.op, node.target, tree, parts, described(value_of(node)), label)


def _operand(operand: Any) -> Hashable:
    if not isinstance(operand, Node):
        return (type(operand).__name__, repr(operand))
    value = value_of(operand)
    # a submodule, such as the body of a checkpoint, equals only itself
    return ("node", operand.name if value is None else described(value))


def crosses(node: Node) -> bool:
    """Return whether a value can be passed between pieces: a plain tensor of static sizes that no call writes to."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, FakeTensor)
    return plain and is_static(node) and (not node.op.startswith("call") or value._version == 0)


def is_static(node: Node) -> bool:
    """Return whether a node's value has no symbols: neither among the sizes of tensors nor as a number."""
    return all(map(_is_static, pytree.tree_leaves(value_of(node))))


def _is_static(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return all(isinstance(size, int) for size in (*value.shape, *strides))
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


class LibraryCall(NamedTuple):
    """An op of a library with the fake tensors that it takes and returns."""

    target: Any
    args: Any
    kwargs: Any
    result: Any


@dataclass(frozen=True)
class Program:
    """The calls of a graph in order. Placeholders and constants are no calls.

    ``labels`` say of nodes what else has to be equal in equal layers.
    """

    calls: Sequence[Node]
    labels: Mapping[Node, Hashable]
    _library: dict[Hashable, tuple[LibraryCall, ...]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def index(self) -> Mapping[Node, int]:
        """Return the position of each call."""
        return {node: i for i, node in enumerate(self.calls)}

    def last_use(self, node: Node) -> int:
        """Return the position of the last call that uses a node; the number of calls if the graph returns it."""
        return max((self.index.get(user, len(self.calls)) for user in node.users), default=-1)

    @cached_property
    def letters(self) -> list[Hashable]:
        """Return a key per call, see :func:`letter`."""
        return [letter(node, self.labels.get(node)) for node in self.calls]

    def library(self, node: Node) -> tuple[LibraryCall, ...]:
        """Return the library calls that a call makes, determined once for all calls of the same letter."""
        letter = self.letters[self.index[node]]
        if letter not in self._library:
            self._library[letter] = _library_calls(node)
        return self._library[letter]

    @cached_property
    def grad_mode_is_outer(self) -> list[bool]:
        """Return, before each call and at the end, whether gradients are enabled just as where the graph is compiled."""
        outer = current = torch.is_grad_enabled()
        matches = []
        for node in self.calls:
            matches.append(current == outer)
            if node.target is GRAD_MODE:
                current = bool(node.args[0])
        return [*matches, current == outer]

    def may_cut(self, position: int, alive: Sequence[Node]) -> bool:
        """Return whether the graph may be cut before the call at a position, which ``alive`` values cross."""
        return self.grad_mode_is_outer[position] and all(map(crosses, alive))


@dataclass(frozen=True)
class Cut:
    """A cut of a run, once per period, at an offset from its start.

    ``lost_bytes`` are written and read only because of the cut; ``bytes`` are those of all values that cross it.
    """

    offset: int
    lost_bytes: int
    bytes: int


def cuts(program: Program, run: Run) -> list[Cut]:
    """Return the possible cuts of a run, those that lose least first, then those that the fewest bytes cross."""
    possible = []
    levels = _levels(program, run)
    for position, alive in _alive(program, run):
        if program.may_cut(position, alive):
            lost = (value_of(node) for node in alive if _lost(program, node, position, levels))
            possible.append(Cut(position - run.start - run.period, bytes_of(lost), bytes_of(map(value_of, alive))))
    return sorted(possible, key=lambda cut: (cut.lost_bytes, cut.bytes, cut.offset))


def _alive(program: Program, run: Run) -> Iterator[tuple[int, list[Node]]]:
    """Yield per position of the second period the values computed before it, within the run, and used from it on."""
    alive: dict[Node, int] = {}
    for position in range(run.start, run.start + 2 * run.period):
        alive = {node: last for node, last in alive.items() if last >= position}
        if position >= run.start + run.period:
            yield position, list(alive)
        node = program.calls[position]
        alive[node] = program.last_use(node)


def _levels(program: Program, run: Run) -> dict[Node, tuple[int, bool]]:
    """Return per call of two periods the library calls on the longest path up to it, and whether it is one itself."""
    window = program.calls[run.start:run.start + 2 * run.period]
    levels: dict[Node, tuple[int, bool]] = {}
    for node in window:
        is_library = bool(program.library(node))
        level = max((levels[operand][0] for operand in node.all_input_nodes if operand in levels), default=0)
        levels[node] = (level + is_library, is_library)
    return levels


def _lost(program: Program, node: Node, position: int, levels: Mapping[Node, tuple[int, bool]]) -> bool:
    """Return whether a cut forces a value or its gradient into memory, which would stay in a kernel otherwise.

    A value stays in one if a later call on the same level reads it; a gradient, if it is the sum of what several such calls
    or library calls that read the value give back.
    """
    level, is_library = levels[node]
    later = [levels[user] for user in node.users if program.index.get(user, -1) >= position and user in levels]
    same_level = [user_is_library for user_level, user_is_library in later if user_level - user_is_library == level]
    return not is_library and (len(same_level) > 1 or not all(same_level))


class _LibraryCalls(TorchDispatchMode):
    """Records the library ops that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[LibraryCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_library(func):
            self.calls.append(LibraryCall(func, args, kwargs or {}, result))
        return result


def _library_calls(node: Node) -> tuple[LibraryCall, ...]:
    """Return the library calls of a call, by running it on Dynamo's fake tensors; none for one that writes to them."""
    values = [value for value in pytree.tree_leaves(value_of(node)) if isinstance(value, FakeTensor)]
    if not values or any(value._version for value in values) or node.op == "call_module":
        return ()
    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    call: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    with torch.no_grad(), values[0].fake_mode, _LibraryCalls() as recorded:
        ran = attempted(lambda: (call(*args, **kwargs), True)[1], lambda error: False)
    return tuple(recorded.calls) if ran else ()  # a call that cannot be run by itself counts as no library call
