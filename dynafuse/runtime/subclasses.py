"""Plain subclasses of tensors as arguments: ``class T(torch.Tensor): pass``.

Such a class changes nothing of what ATen does. All the same torch's dispatch modes do not know it: AOTAutograd runs the
first call of a graph under one, in which every op on a ``T`` raises. So a compiled function gets the tensors without their
class; what it returns, Dynamo gives the class that eager's result has.

Worked example: ``without_subclasses(f, [T(...), torch.ones(2)])`` is ``f`` with its first argument as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

KNOWN = (torch.Tensor, torch.nn.Parameter)


def without_subclasses(function: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
    """Wrap a function so that it gets plain tensors where its examples have plain subclasses; itself if they have none.

    Args:
        function: The function.
        examples: An example of each of its arguments, in order.
    """
    places = frozenset(i for i, example in enumerate(examples) if is_plain(example))
    if not places:
        return function

    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            given = [arg.as_subclass(torch.Tensor) if i in places else arg for i, arg in enumerate(args)]
        return function(*given)

    return call


def returns_plain_tensors(module: GraphModule) -> bool:
    """Return whether no result of a Dynamo graph is made of several tensors."""
    results = (node.meta.get("example_value") for node in module.graph.output_node().all_input_nodes)
    return not any(isinstance(result, torch.Tensor) and is_traceable_wrapper_subclass(result) for result in results)


def is_called_with_fakes(module: GraphModule) -> bool:
    """Return whether the user calls a Dynamo graph with fake tensors: they have no memory that kernels could read.

    Dynamo guards on that, so the graph is called with no others.
    """
    given = (node.meta.get("grapharg") for node in module.graph.find_nodes(op="placeholder"))
    return any(isinstance(argument.example, FakeTensor) for argument in given if argument is not None)


def is_plain(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is of a subclass that has no dispatch of its own."""
    return (isinstance(value, torch.Tensor) and type(value) not in KNOWN and not is_traceable_wrapper_subclass(value)
            and type(value).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl)
