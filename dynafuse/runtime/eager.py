"""A graph that runs node by node, by torch's own ops: what is left where nothing of it could be compiled.

Worked example: ``eager(module)([x, y])`` returns what the function that dynafuse would have made of ``module`` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Interpreter

from dynafuse.runtime import random


class _Eager(Interpreter):
    """Draws random numbers of a seed as kernels do."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A node's result."""
        return super().call_function(random.EAGER.get(target, target), args, kwargs)


def eager(module: GraphModule) -> Callable[[list[Any]], Any]:
    """The function of a graph of ATen ops. Boxed: it takes its arguments in a list, which it empties."""
    def run(args: list[Any]) -> Any:
        return _Eager(module).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
