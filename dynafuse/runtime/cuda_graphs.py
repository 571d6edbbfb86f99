"""CUDA graphs, through torch's cudagraph trees: ``mode="reduce-overhead"``.

The first calls of a graph warm up and record, later ones replay. A graph that cannot be recorded runs as it is, and one
line of log says why (``TORCH_LOGS=cudagraphs``).

Worked example: a training step of 300 launches becomes two replays, one for the forward and one for the backward graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

Call = Callable[[list[Any]], Any]


def capture(call: Call, module: GraphModule, kind: str, static: Sequence[int], captured: dict[str, bool]) -> Call:
    """Return a function, recorded and replayed as CUDA graphs if its graph allows that.

    Args:
        call: The function of a graph.
        module: The graph.
        kind: forward, backward or inference.
        static: Positions of the inputs whose addresses do not change from call to call; of a backward they are not asked
            for.
        captured: Whether graphs of this model are recorded, by kind, to which this one is added: tensors saved for a
            backward keep their addresses only if the forward was recorded.
    """
    reason = _obstacle(module)
    captured[kind] = reason is None
    if reason is not None:
        _log_skip(reason)
        return _after_forward(call, module) if kind == "backward" and captured.get("forward") else call
    if kind == "backward":
        static = _saved(module) if captured.get("forward") else ()
    return _recorded(call, module, kind, static)


def reset() -> None:
    """Forget every recording."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


def _obstacle(module: GraphModule) -> str | None:
    """Return why a graph cannot be recorded, in torch's words; None if it can."""
    from torch._dynamo.backends.cudagraphs import get_device_node_mapping
    from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    reason = check_multiple_devices_or_any_cpu_nodes(get_device_node_mapping(module))
    if reason is None and (node := get_first_incompatible_cudagraph_node(module)):
        reason = f"incompatible op ({node.name})"
    return reason


def _log_skip(reason: str) -> None:
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to {reason}")


def _saved(module: GraphModule) -> Sequence[int]:
    """Return the positions of a backward graph's inputs that the forward saved."""
    from torch._inductor.utils import count_tangents

    return range(count_tangents(module))


def _device(module: GraphModule) -> int:
    values = (node.meta.get("val") for node in module.graph.nodes)
    return next(v.device.index or 0 for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda")


def _recorded(call: Call, module: GraphModule, kind: str, static: Sequence[int]) -> Call:
    """Return a function that sets up the recording at its first call, when the sizes are known."""
    from torch._dynamo.backends.cudagraphs import find_input_mutations
    from torch._inductor.cudagraph_trees import cudagraphify_impl
    from torch._inductor.cudagraph_utils import get_placeholder_info

    device, placeholders = _device(module), get_placeholder_info(module.graph)
    mutated, traces = find_input_mutations(module.graph), _stack_traces(module)
    recorded: list[Call] = []

    def run(inputs: list[Any]) -> Any:
        if not recorded:
            recorded.append(cudagraphify_impl(
                call, inputs, static, device_index=device, is_backward=kind == "backward",
                is_inference=kind == "inference", stack_traces=traces, placeholders=placeholders,
                mutated_input_idxs=mutated,
            ))
        return recorded[0](inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _stack_traces(module: GraphModule) -> list[str | None]:
    """Return the stack trace of each output in the user's code, for torch's errors about overwritten outputs."""
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    return [o.stack_trace if isinstance(o, torch.fx.Node) else None for o in outputs]


def _after_forward(call: Call, module: GraphModule) -> Call:
    """Wrap a backward that is not recorded, so that it tells the trees that the forward's generation is over."""
    from torch._inductor.cudagraph_trees import get_manager

    device = _device(module)

    def run(inputs: list[Any]) -> Any:
        manager = get_manager(device, create_if_none_exists=False)
        if manager is not None:
            manager.set_to_running_backward()
        return call(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
