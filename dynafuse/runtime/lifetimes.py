"""Which variables of a graph's function are needed up to which step.

Values that are written into another one's memory have that one's variable. What the function returns is needed to its end.

Worked example, for ``(x * 2).relu_() @ w`` of four steps: ``relu_`` has the variable of ``mul``, which step 2 frees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from dynafuse.fx import in_place
from dynafuse.ir import Plan, Region, Role


class Lifetimes:
    """The variables of a graph's function, by the nodes whose values they hold first."""

    def __init__(self, plan: Plan, arguments: Mapping[str, Sequence[Node]], returned: Sequence[Node]) -> None:
        """Take a plan.

        Args:
            plan: The plan.
            arguments: The inputs and outputs of each region's kernel, by the region's name.
            returned: What the function returns, and what that is made of.
        """
        self.plan = plan
        self.arguments = arguments
        into = {node: node.all_input_nodes[0] for node in plan.annotated.facts if in_place(node)}
        self.into = into | {node: base for region in plan.regions for node, base in region.copies.items()}
        self.returned = dict.fromkeys(map(self.owner, returned))

    def owner(self, node: Node) -> Node:
        """Return the node whose variable a value is in."""
        while node in self.into:
            node = self.into[node]
        return node

    def freed(self) -> dict[int, list[Node]]:
        """Return the nodes whose variables are not needed after a step, by the step's number."""
        last = {node: number for number, step in enumerate(self.plan.steps) for node in self._used(step)}
        freed: dict[int, list[Node]] = {}
        for node, number in last.items():
            is_kept = node in self.returned or node.op == "get_attr"
            if not is_kept and self.plan.annotated.facts[node].role is not Role.HOST:
                freed.setdefault(number, []).append(node)
        return freed

    def needed(self, begin: int, end: int | None = None) -> list[Node]:
        """Return the nodes whose variables steps need, constants aside, and if they are the last ones what is returned, too.

        Args:
            begin: The first of the steps.
            end: The first one after them; None for all.
        """
        used = [node for step in self.plan.steps[begin:end] for node in self._used(step)]
        return [node for node in dict.fromkeys([*used, *(self.returned if end is None else ())]) if node.op != "get_attr"]

    def _used(self, step: Region | Node) -> list[Node]:
        if isinstance(step, Region):
            used: Sequence[Node] = self.arguments[step.name]
        elif self.plan.annotated.facts[step].role is Role.VIEW:
            used = [self.plan.annotated.base(step), step]
        else:
            used = [*step.all_input_nodes, step]
        return list(map(self.owner, used))
