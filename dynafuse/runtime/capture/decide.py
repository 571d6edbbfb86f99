"""Whether a graph is captured: what stands against it, what it would copy, what that saves.

Worked example: the ``Verdict`` on a forward of 200 small launches is to capture it, and tells what that saves; that on one
with a collective is ``not captured: _c10d_functional.all_reduce.default (all_reduce) may do more than launch kernels``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dynafuse.cost.device import Device
from dynafuse.cost.model import Prediction
from dynafuse.cost.replay import Copies, Saving, saving
from dynafuse.fx import numbers_of
from dynafuse.ir import Annotated, Plan, Role
from dynafuse.ops.overloads import moves_generator, overloads, written_to
from dynafuse.passes.given_numbers import is_sent
from dynafuse.runtime.alignment import draws_by_address
from dynafuse.runtime.capture.tail import Tail
from dynafuse.runtime.capture.traffic import Traffic

SAFE_NAMESPACES = frozenset({"aten", "prims", "prim", "dynafuse"})
"""Namespaces whose ops do nothing but launch kernels. What a custom op does on the host would be left out by a replay."""

ABSOLUTE = frozenset(overloads(
    "aten.as_strided.default aten.as_strided_.default aten.as_strided_copy.default aten.as_strided_scatter.default"))
"""Ops that look at memory by its distance from the beginning of a tensor's storage, which a copy does not have."""

TANGENT = "tangents"  # begins the names that AOTAutograd gives to a backward's incoming gradients
SAVED = "SavedForBackwards"  # AOTAutograd's descriptions of what it saves begin so
LEAST_TAKEN = 4  # bytes that a backward takes of its forward's for each that it copies, if that alone is worth a recording
MOST_TWICE = 64 << 20  # bytes of what a launched forward has saved that a recording of its backward may keep copies of


@dataclass
class Shared:
    """What the graphs of one model tell each other, in the order in which their functions are made.

    AOTAutograd tells a backward the strides of what its forward saves as they turned out, but not where in memory it begins.
    """

    marked: frozenset[int] = frozenset()  # positions of the Dynamo graph's parameters and buffers
    may_spread: bool = False  # whether rows of results may be further apart than eager's, as only the user gets them
    by_trees: dict[str, bool] = field(default_factory=dict)  # kinds of graph, and whether torch's trees record them
    parameters: frozenset[str] = frozenset()  # names of the forward's inputs that stay where they are, and of their views
    moving: frozenset[str] = frozenset()  # names of the forward's other inputs, and of their views
    hands_over: bool = False  # whether the forward is recorded, and leaves what it saves where it is
    copied: frozenset[str] = frozenset()  # names of what it saves in memory that the user gets as well, in a copy
    offered: frozenset[int] = frozenset()  # inputs of the backward that nothing but autograd holds
    described: frozenset[Any] = frozenset()  # AOTAutograd's descriptions of the forward's inputs that stay where they are
    begins: Mapping[str, int] = field(default_factory=dict)  # elements at which the forward's results begin, by name
    traffic: Traffic = field(default_factory=Traffic)  # what memory their calls take and give back

    def note_forward(self, annotated: Annotated, layout: Layout, captured: bool) -> None:
        """Note what the backward has to know of its forward.

        Args:
            annotated: The forward with its facts.
            layout: How a recording treats its inputs and outputs.
            captured: Whether it is recorded.
        """
        inputs = list(annotated.graph.find_nodes(op="placeholder"))
        given = {node: annotated.memory(node) for node in (*inputs, *annotated.graph.output_node().all_input_nodes)}
        stationary = {inputs[i] for i in layout.stationary}
        self.parameters = frozenset(node.name for node, base in given.items() if base in stationary)
        self.described = frozenset(node.meta["desc"] for node in stationary if "desc" in node.meta)
        elsewhere = set(inputs) - stationary
        self.moving = frozenset(node.name for node, base in given.items() if base in elsewhere)
        self.hands_over = captured
        listed = annotated.graph.output_node().args[0]
        assert isinstance(listed, (list, tuple))
        results = [(i, node) for i, node in enumerate(listed) if isinstance(node, Node)]
        leaving = {annotated.memory(node) for i, node in results if i not in layout.saved}
        self.copied = frozenset(node.name for _, node in results if annotated.memory(node) in leaving)

    def handed(self, module: GraphModule) -> frozenset[int]:
        """Return the positions of a backward's inputs that stay where its recorded forward has made them."""
        inputs = list(module.graph.find_nodes(op="placeholder"))
        return frozenset(i for i in self.produced(module) if self.hands_over and inputs[i].name not in self.copied)

    def produced(self, module: GraphModule) -> frozenset[int]:
        """Return the positions of a backward's inputs that its forward has made."""
        inputs = enumerate(module.graph.find_nodes(op="placeholder"))
        return frozenset(i for i, node in inputs if isinstance(node.meta.get("val"), torch.Tensor)
                         and TANGENT not in node.name and node.name not in self.parameters | self.moving)


@dataclass(frozen=True)
class Layout:
    """Inputs and outputs of a graph by position, as a recording treats them."""

    stationary: frozenset[int]  # inputs that are read in place: parameters, buffers, what the graph writes to
    handed: frozenset[int]  # inputs that a recorded forward makes, and that stay where it has made them
    written: frozenset[int]  # inputs that the graph writes to
    saved: frozenset[int]  # outputs that only the backward sees
    given: frozenset[int]  # outputs that are handed to whoever holds gradients
    sized: tuple[int, ...]  # inputs whose sizes, strides or offset are dynamic
    numbers: tuple[int, ...]  # inputs that are no tensors
    copies: Copies  # inputs that are elsewhere each time, and outputs that leave, inputs not among them
    bytes: int  # of the memory that a recording keeps: of those, and of outputs that only the backward sees
    taken: int = 0  # bytes that a recorded forward makes, whose memory a recorded backward takes
    twice: int = 0  # bytes that a forward makes elsewhere each time, which a recorded backward has copies of

    @property
    def is_static(self) -> bool:
        """Return whether all sizes of the graph are known."""
        return not self.sized and not self.numbers

    def of_part(self, inputs: Sequence[int], saved: frozenset[int], tail: Tail, staying: int) -> Layout:
        """Return how a recording treats a part of a graph that has only known sizes.

        Args:
            inputs: The part's inputs, as positions of the graph's.
            saved: The part's results of which nothing leaves the graph, by position among them.
            tail: The rest of the graph.
            staying: The bytes of these results.
        """
        stationary, written = (frozenset(place for place, i in enumerate(inputs) if i in positions)
                               for positions in (self.stationary, self.written))
        copies = tail.copies
        return Layout(stationary, frozenset(), written, saved, frozenset(), (), (), copies, copies.bytes + staying)


@dataclass(frozen=True)
class Verdict:
    """Whether a graph is captured, and why or why not.

    One that is not is captured all the same if its calls turn out to take the host ``least_host_us``, unless that is None.
    One that is asked for is captured whatever it costs: there it is None as well.
    """

    captured: bool
    why: str
    least_host_us: float | None = None

    @property
    def may_be_recorded(self) -> bool:
        """Return whether calls may be recorded, now or later."""
        return self.captured or self.least_host_us is not None

    def __str__(self) -> str:
        if self.captured:
            return self.why
        if self.least_host_us is None:
            return f"not captured: {self.why}"
        return f"captured as a CUDA graph once its calls take the host {self.least_host_us:.0f} µs: {self.why}"


def marked_inputs(gm: GraphModule) -> frozenset[int]:
    """Return the positions of a Dynamo graph's parameters and buffers, also of a part of a graph, where torch finds none."""
    described = (node.meta.get("tensor_dict") or {} for node in gm.graph.find_nodes(op="placeholder"))
    return frozenset(i for i, values in enumerate(described) if values.get("_dynamo_static_input_type"))


def obstacle(module: GraphModule, annotated: Annotated, device_type: str) -> str | None:
    """Return why a graph cannot be replayed exactly; None if it can.

    Args:
        module: The graph.
        annotated: The same with its facts.
        device_type: The type of the one device that all its tensors have to be on.
    """
    from torch._inductor.utils import get_first_incompatible_cudagraph_node  # private to torch

    for check in (_foreign_device(module, device_type), *map(_unsafe_input, module.graph.find_nodes(op="placeholder")),
                  *(_unsafe_call(node, annotated) for node in module.graph.nodes)):
        if check is not None:
            return check
    node = get_first_incompatible_cudagraph_node(module)
    return None if node is None else f"{node.target} ({node.name}) cannot be recorded"


def layout_of(module: GraphModule, plan: Plan, static: frozenset[int], names: frozenset[str] = frozenset(),
              produced: frozenset[int] = frozenset(), handed: frozenset[int] = frozenset(),
              given: frozenset[int] = frozenset()) -> Layout:
    """Return how a recording treats a graph's inputs and outputs.

    Args:
        module: The graph.
        plan: Its plan.
        static: Positions of its parameters and buffers, as far as torch knows them.
        names: Names of further inputs that are parameters.
        produced: Positions of inputs that a forward has made.
        handed: Those of them that stay where it has made them, because it is recorded.
        given: Positions of outputs that are handed over to the user.
    """
    inputs = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    written = frozenset(inputs[node] for node in _written(plan) if node in inputs)
    named = frozenset(i for node, i in inputs.items() if node.name in names)
    sized = tuple(i for node, i in inputs.items() if _is_sized(node.meta.get("val")))
    numbers = tuple(i for node, i in inputs.items() if not isinstance(node.meta.get("val"), torch.Tensor))
    stationary, saved = static | named | written, _saved(module)
    copied, handed_over = _leaving(plan, stationary | handed, saved | given)
    copies = Copies(len(copied), sum(copied))
    taken, twice = (sum(_sizes(plan, [node for node, i in inputs.items() if i in positions]))
                    for positions in (handed, produced - handed))
    staying = copies.bytes + sum(handed_over)
    return Layout(stationary, handed, written, saved, given, sized, numbers, copies, staying, taken, twice)


def verdict(price: Prediction, layout: Layout, device: Device, always: bool, tail: Tail | None = None) -> Verdict:
    """Return whether a graph that can be captured should be.

    Args:
        price: What the graph's plan costs.
        layout: How a recording treats its inputs and outputs.
        device: The device that is priced.
        always: Whether it should be, whatever that saves.
        tail: The last steps, if they are launched behind a replay.
    """
    if layout.twice > MOST_TWICE and not always:
        return Verdict(False, f"what its forward has saved, {layout.twice / 1e6:.0f} MB, would be in memory twice")
    result = saving_of(price, price, layout, device, tail)
    how = "captured as a CUDA graph" if tail is None else f"captured as a CUDA graph, {tail}"
    if result.pays:
        least_host_us = None if always else 0.0
        return Verdict(True, f"{how}, saves about {result.us:.0f} µs a call ({result})", least_host_us)
    if always:
        return Verdict(True, f"{how}, as asked for: it does not pay ({result})")
    if layout.taken >= LEAST_TAKEN * max(layout.copies.bytes, 1):
        return Verdict(True, f"captured as a CUDA graph if its forward is, whose memory it then takes ({result})", 0.0)
    return Verdict(False, f"it does not pay ({result})", result.least_host_us if result.is_open else None)


def saving_of(launched: Prediction, recorded: Prediction, layout: Layout, device: Device, tail: Tail | None) -> Saving:
    """Return what a replay saves.

    Args:
        launched: What the plan costs by which the graph runs if it is not captured.
        recorded: What the plan costs by which it is captured.
        layout: How a recording treats its inputs and outputs.
        device: The device that is priced.
        tail: The last steps of the recorded plan, if they are launched behind a replay.
    """
    if tail is None:
        return saving(launched, layout.copies, device, recorded)
    return saving(launched, tail.copies, device, recorded, tail.launched)


def _foreign_device(module: GraphModule, device_type: str) -> str | None:
    values = (node.meta.get("val") for node in module.graph.nodes if not is_sent(node))
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    devices |= {value.device for value in _constants(module)}
    names = ", ".join(sorted(map(str, devices)))
    if len(devices) == 1 and next(iter(devices)).type == device_type:
        return None
    return f"its tensors are on {names}" if devices else "it has no tensors"


def _constants(module: GraphModule) -> Iterator[torch.Tensor]:
    for node in module.graph.find_nodes(op="get_attr"):
        holder: Any = module
        for part in str(node.target).split("."):
            holder = getattr(holder, part)
        if isinstance(holder, torch.Tensor):
            yield holder


def _unsafe_input(node: Node) -> str | None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return None if value.layout is torch.strided else f"{node.name} is {value.layout}"
    if value is None or isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    return f"{node.name} is neither tensor nor number"


def _unsafe_call(node: Node, annotated: Annotated) -> str | None:
    if node.op in ("placeholder", "output", "get_attr"):
        return None
    target = node.target
    if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
        return f"{target} ({node.name}) is a graph of its own"
    if not isinstance(target, torch._ops.OpOverload):
        return None  # arithmetic on sizes, a piece of a result
    if target.namespace not in SAFE_NAMESPACES:
        return f"{target} ({node.name}) may do more than launch kernels"
    if _asks_for_size(node, target):
        return f"{target} ({node.name}) asks the device how large its result is"
    if target in ABSOLUTE and annotated.memory(node.all_input_nodes[0]).op == "placeholder":
        return f"{target} ({node.name}) looks around in an input's memory"
    if draws_by_address(node) and any(annotated.memory(argument).op == "placeholder" for argument in node.all_input_nodes):
        return f"{target} ({node.name}) draws random numbers by where an input begins"
    if moves_generator(node) and "dropout_p" in {argument.name for argument in target._schema.arguments}:
        return f"{target} ({node.name}) draws random numbers of its own"
    return None


def _asks_for_size(node: Node, target: torch._ops.OpOverload) -> bool:
    """Return whether a call waits for the device to tell its result's size: an index does by a mask, not by positions."""
    if torch.Tag.dynamic_output_shape not in target.tags or node.kwargs.get("output_size") is not None:
        return False
    if target is not torch.ops.aten.index.Tensor:
        return True
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    return any(isinstance(index, Node) and index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices)


def _written(plan: Plan) -> Iterator[Node]:
    """Return the values that calls and kernels of a plan write to, as the nodes that have the memory."""
    for node in plan.annotated.graph.nodes:
        yield from map(plan.annotated.memory, written_to(node))
    for region in plan.regions:
        yield from map(plan.annotated.memory, region.copies.values())


def _saved(module: GraphModule) -> frozenset[int]:
    """Return the outputs of a forward that only its backward sees; none where torch does not describe them."""
    descriptions: Sequence[Any] = module.graph.output_node().meta.get("desc") or ()
    return frozenset(i for i, value in enumerate(descriptions) if type(value).__name__.startswith(SAVED))


def _is_sized(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in numbers_of(value))


def _leaving(plan: Plan, in_place: frozenset[int], handed: frozenset[int]) -> tuple[list[int], list[int]]:
    """Return the bytes of each tensor that a replay copies, in or out, and of each that it leaves where it is."""
    facts, graph = plan.annotated.facts, plan.annotated.graph
    inputs = [node for i, node in enumerate(graph.find_nodes(op="placeholder")) if i not in in_place]
    listed = graph.output_node().args[0]
    assert isinstance(listed, (list, tuple))
    bases = {node: plan.annotated.memory(node) for node in listed if isinstance(node, Node)}
    results = {base for base in bases.values() if facts[base].role is not Role.INPUT}
    leaving = {bases[node] for i, node in enumerate(listed) if isinstance(node, Node) and i not in handed} & results
    return _sizes(plan, [*inputs, *leaving]), _sizes(plan, results - leaving)


def _sizes(plan: Plan, nodes: Iterable[Node]) -> list[int]:
    """Return the bytes of those nodes that are tensors."""
    facts = plan.annotated.facts
    return [tensor.bytes for node in nodes if (tensor := facts[node].tensor) is not None]
