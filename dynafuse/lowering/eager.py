"""Eager as an executor: torch's own ops, one by one. It takes every node and compiles none."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dynafuse.lowering.base import Compilation, Executor

if TYPE_CHECKING:
    from torch.fx import Node

    from dynafuse.cache.canonical import CanonicalRegion
    from dynafuse.ir import Facts


class Eager(Executor):
    """Torch's own ops. What runs eager is a step of a plan by itself, never a region."""

    name = "eager"
    device_types = frozenset({"cuda", "cpu"})
    fuses = False

    def refuses_node(self, node: Node, facts: Mapping[Node, Facts]) -> str:
        """Return "": torch runs every op."""
        return ""

    def compile(self, region: CanonicalRegion, compilation: Compilation) -> Future[Any]:
        """Raise AssertionError: no region is given to eager."""
        raise AssertionError(f"{region.region} was given to eager as a whole")


EAGER = Eager()
