"""What the partitioner needs to know of every node: role, sizes, strides, dtype, row of the op table.

Sizes are ints or sympy expressions; hints exist only for costs, never for correctness.

Worked example: in a graph of ``relu(x) @ w`` the ``relu`` gets role ``fused`` and the ``mm`` role ``eager`` with the
reason ``no row in the op table``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.fx import Graph, GraphModule, Node

from dynafuse import ops
from dynafuse.fx import arguments, environment_of, expression, hint, is_dense, owns_base, shares_memory, size_of
from dynafuse.ir import ALIGNED, Annotated, Facts, Role, Size, Tensor
from dynafuse.ops import Call, Kind, Row
from dynafuse.ops.overloads import COPIES_INTO, is_done
from dynafuse.ops.reductions import reduced_dims
from dynafuse.partition.accuracy import accuracies
from dynafuse.partition.forcing import EMPTY, NOTHING, ONE_ELEMENT, Forcing

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

DTYPES = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
})
EIGHT_BITS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""Floats of which eager computes nothing: kernels cast and move them."""

LEAST_CAPABILITY = 89
"""From which on Triton has them."""

NOT_ANY: Mapping[Node, str] = {}


def tensor_of(value: torch.Tensor) -> Tensor:
    """Return the facts of a fake tensor."""
    count = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        count *= 1 if isinstance(stride, int) and stride == 0 else hint(size)
    return Tensor(tuple(map(size_of, value.shape)), tuple(map(size_of, value.stride())), value.dtype, value.device, count)


def alignment_of(value: torch.Tensor) -> int:
    """Return the bytes that the address of a strided tensor is a multiple of, at most as many as that of its memory is.

    Args:
        value: The tensor; of one whose offset is dynamic nothing is known to speak against it.
    """
    offset = value.storage_offset()
    return math.gcd(ALIGNED, offset * value.dtype.itemsize) if isinstance(offset, int) else ALIGNED


def annotate(module: GraphModule, device_type: str | None, eager: Mapping[Node, str] = NOT_ANY,
             forcing: Forcing = NOTHING) -> Annotated:
    """Return facts for every node.

    Args:
        module: A normalized graph.
        device_type: The type of device whose tensors are fused; None: nothing is.
        eager: Nodes that run eager whatever they are, each with the reason.
        forcing: What the user forces onto which executor.

    Raises:
        ForceError: A node is forced, strictly, to an executor that cannot run it or that is not enabled.
    """
    facts: dict[Node, Facts] = {}
    for node in module.graph.nodes:
        fact = _facts(node, module, device_type, facts)
        facts[node] = replace(fact, role=Role.EAGER, reason=eager[node]) if node in eager else fact
    for node, accuracy in accuracies(module.graph, facts).items():
        facts[node] = replace(facts[node], accuracy=accuracy)
    return Annotated(module.graph, forcing.applied(module.graph, facts), _environment(module.graph))


def _environment(graph: Graph) -> ShapeEnv | None:
    """Return where torch keeps what it knows of a graph's sizes; None if all are numbers."""
    values = (node.meta.get("val") for node in graph.nodes)
    sizes = (size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else (value,)))
    return environment_of(sizes)


def _facts(node: Node, module: GraphModule, device_type: str | None, before: Mapping[Node, Facts]) -> Facts:
    value = node.meta.get("val")
    tensor = tensor_of(value) if _is_strided(value) else None
    if node.op == "output":
        return Facts(Role.OUTPUT, None)
    if node.op == "placeholder":
        if not isinstance(value, torch.Tensor):
            return Facts(Role.HOST, tensor)
        return Facts(Role.INPUT, tensor, alignment=ALIGNED if tensor is None else alignment_of(value))
    if node.op == "get_attr":
        return _constant(node, module)
    if not isinstance(value, torch.Tensor):
        scalar = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
        row = ops.lookup(node.target)
        reason = row.reason if row and row.reason else "returns no single tensor"
        return Facts(Role.HOST if scalar and not _touches_tensor(node) else Role.EAGER, None, reason=reason)
    if is_done(node):
        return Facts(Role.VIEW, tensor)
    if not isinstance(node.target, torch._ops.OpOverload):
        return Facts(Role.EAGER, tensor, reason=f"{node.target} is no ATen op")
    return _computed(node, tensor, device_type, before)


def _constant(node: Node, module: GraphModule) -> Facts:
    holder: Any = module
    for part in str(node.target).split("."):
        holder = getattr(holder, part)
    if not isinstance(holder, torch.Tensor):
        return Facts(Role.HOST, None)
    return Facts(Role.INPUT, tensor_of(holder), alignment=alignment_of(holder))


def _touches_tensor(node: Node) -> bool:
    return any(isinstance(a.meta.get("val"), torch.Tensor) for a in node.all_input_nodes)


def _is_strided(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def _computed(node: Node, tensor: Tensor | None, device_type: str | None, before: Mapping[Node, Facts]) -> Facts:
    row = ops.lookup(node.target)
    if row is None:
        return Facts(Role.EAGER, tensor, reason="no row in the op table")
    if tensor is None:
        return Facts(Role.EAGER, None, row, reason="not a strided tensor")
    shape = tuple(map(expression, tensor.shape))
    call = Call(node.target, arguments(node), shape, tensor.dtype)  # type: ignore[arg-type]
    row = ops.row_of(row, call)
    reason = ops.refusal(row, call)
    if row.kind is Kind.VIEW and node.meta.get("unbacked_bindings"):
        reason = reason or "its place is known only once it has run"
    if row.kind is Kind.VIEW and not reason:
        return Facts(Role.VIEW, tensor, row, call)
    reason = reason or obstacle(node, row, tensor, call, device_type, before)
    return Facts(Role.EAGER if reason else Role.FUSED, tensor, row, call, reason)


def unknown_to_device(module: GraphModule, capability: int | None) -> dict[Node, str]:
    """Return the nodes that a device's compiler does not know the dtypes of, each with that as the reason to run eager.

    Args:
        module: The graph.
        capability: The device's compute capability, as 90; None where nothing runs natively.
    """
    if capability is None or capability >= LEAST_CAPABILITY:
        return {}
    values = {node: node.meta.get("val") for node in module.graph.nodes}
    narrow = {node for node, value in values.items() if isinstance(value, torch.Tensor) and value.dtype in EIGHT_BITS}
    calls = (node for node in values if node.op == "call_function" and not shares_memory(node))
    return {node: "floats of 8 bits need compute capability 8.9" for node in calls
            if not narrow.isdisjoint((node, *node.all_input_nodes))}


def _moves(row: Row) -> bool:
    """Return whether an op casts or copies elements."""
    return row.casts or row.emit == "{0}" or row.kind in (Kind.INDEX, Kind.GATHER)


def obstacle(node: Node, row: Row, tensor: Tensor, call: Call, device_type: str | None,
             before: Mapping[Node, Facts]) -> str:
    """Return why this call of a fusible op cannot be fused; "" if it can.

    Args:
        node: The call.
        row: Its op's row.
        tensor: What it returns.
        call: Its arguments by name.
        device_type: The type of device whose tensors are fused; None: nothing is.
        before: The facts of its operands.
    """
    operands = [before[a].tensor for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    tensors = [t for t in (tensor, *operands) if t is not None]
    if len(tensors) <= len(operands):
        return "an operand is not a strided tensor"
    for t in tensors:
        if t.device.type != device_type or t.device != tensor.device:
            return f"on {t.device}, " + (f"fused kernels run on {device_type}" if device_type else "nothing is fused")
        if t.dtype not in DTYPES and not (t.dtype in EIGHT_BITS and _moves(row)):
            return f"dtype {t.dtype} is not fused"
        if any(isinstance(s, int) and s == 0 for s in t.shape):
            return EMPTY
    if not is_dense(tensor.shape, tensor.stride):
        return "its output is not dense"
    if any(isinstance(v, torch.Tensor) and v.is_neg() for v in _operand_values(node)):
        return "an operand is negated by whoever reads it, as torch marks parts of conjugated numbers"
    is_never_written_out = row.kind is Kind.SCAN or (row.kind is Kind.REDUCTION and row.states > 1)
    if is_never_written_out and _reduced_count(tensors[1].shape, call) == 1:
        return ONE_ELEMENT
    if row.kind is Kind.SCATTER and not owns_base(node):
        return "writes at loaded indices of a tensor that is read elsewhere, too"
    if node.target is COPIES_INTO and not _into_input(node):
        return "copies into something else than an input"
    if any(isinstance(v, (torch.SymFloat, torch.SymBool)) for v in _operand_values(node)):
        return "takes a number that is known only at run time"
    return ""


def _into_input(node: Node) -> bool:
    into, source = node.args[0], node.args[1]
    return isinstance(into, Node) and into.op == "placeholder" and isinstance(source, Node)


def _operand_values(node: Node) -> Sequence[Any]:
    return [a.meta.get("val") for a in node.all_input_nodes]


def _reduced_count(shape: tuple[Size, ...], call: Call) -> Size:
    count: Size = 1
    for dim in reduced_dims(call.args, len(shape)):
        count = count * shape[dim]
    return count


def signature(graph: Graph) -> str:
    """Return a graph as text, a node a line: ``y = aten.add.Tensor(x, 1) : float32[8, 4]``."""
    return "\n".join(map(_line, graph.nodes))


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op != "call_function":
        return f"{node.name} = {node.op} {node.target}{_described(node.meta.get('val'))}"
    target = node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", node.target)
    given = ", ".join((*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())))
    return f"{node.name} = {target}({given}){_described(node.meta.get('val'))}"


def _described(value: Any) -> str:
    """Return the dtype and sizes of a tensor, or a size, behind a colon; "" for anything else."""
    if isinstance(value, torch.Tensor):
        return f" : {str(value.dtype)[6:]}[{', '.join(map(str, value.shape))}]"
    return f" : {value}" if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ""
