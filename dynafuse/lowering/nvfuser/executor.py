"""nvFuser as an executor: a spec becomes a recipe, which its library compiles in every process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch.fx import Node

from dynafuse.cache.entry import Entry
from dynafuse.futures import finished
from dynafuse.ir import Facts, Role, Spec, iter_instances
from dynafuse.lowering.base import AVAILABLE, Availability, Compilation, Executor, Use
from dynafuse.lowering.nvfuser import availability, recipe, replay
from dynafuse.lowering.nvfuser.kernel import FusionKernel
from dynafuse.lowering.nvfuser.lower import lower, refusal
from dynafuse.ops import Kind, nvfuser_rows

if TYPE_CHECKING:
    import torch

    from dynafuse.cache.canonical import CanonicalRegion

MAX_OPS = 60  # its segmenter's time grows faster than the region
MOVES = (Kind.INDEX, Kind.GATHER)
_BOILERPLATE = re.compile(r",? please report a bug.*")


class NvFuser(Executor):
    """nvFuser's library, where one is installed that fits torch. Its entries on disk hold recipes."""

    name = "nvfuser"
    remedy = "install it, or leave it out of `executors`"
    kept = True
    validated = True

    def available(self, use: Use) -> Availability:
        """Return whether a wheel for this torch is installed."""
        library = availability.find()
        if not library.available:
            return Availability(False, str(library))
        return AVAILABLE if use.on_gpu else Availability(False, "nvFuser runs on CUDA devices")

    def refuses_node(self, node: Node, facts: Mapping[Node, Facts]) -> str:
        """Return what its column of the op table says."""
        own = facts[node]
        if own.role not in (Role.FUSED, Role.VIEW) or own.row is None or own.call is None:
            return own.reason
        operands = (facts[operand].tensor for operand in iter_instances(tuple(own.call.args.values()), Node))
        return nvfuser_rows.refusal(own.row, own.call, [tensor for tensor in operands if tensor is not None])

    def refuses_group(self, nodes: Sequence[Node], facts: Mapping[Node, Facts]) -> str:
        """Return what nvFuser would cut into several kernels, each a launch that costs it more than any other executor."""
        if len(nodes) > MAX_OPS:
            return f"{len(nodes)} ops, nvFuser takes {MAX_OPS}"
        kinds = {row.kind for node in nodes if (row := facts[node].row) is not None}
        moves = any(kind in kinds for kind in MOVES) or any(_narrows(node, facts) for node in nodes)
        if moves and Kind.REDUCTION in kinds:
            return "nvFuser has no kernel that both moves and reduces"
        transposes = moves and any(_permutes(node, facts) for node in nodes)
        return "nvFuser has no kernel that both moves and transposes" if transposes else ""

    def refuses_spec(self, spec: Spec) -> str:
        """Return why a region cannot be recorded, its layouts included."""
        return refusal(spec)

    def rejects(self, error: BaseException) -> str:
        """Return what the library says in a plain RuntimeError, which is how its assertions and its compiler fail."""
        if type(error) is not RuntimeError:
            return ""
        first_line = next(iter(str(error).strip().splitlines()), "")
        return " ".join(_BOILERPLATE.sub("", first_line).split()) or "it does not say why"

    def target(self, device: torch.device, capability: int | None) -> str:
        """Return the library's version and the compute capability."""
        library = availability.find()
        return f"{self.name} {library.distribution} {library.version} sm{capability}"

    def compile(self, region: CanonicalRegion, compilation: Compilation) -> Future[FusionKernel]:
        """Record the region's recipe and define its fusion, here; the library compiles when it first runs."""
        return finished(lambda: _defined(region, lower(region.spec)))

    def encode(self, kernel: FusionKernel, region: CanonicalRegion, key: str, compilation: Compilation) -> Entry:
        """Return the recipe, which is all that an entry holds.

        Args:
            kernel: The fusion.
            region: The region that it was made for.
            key: The key of the entry.
            compilation: What it was compiled for, of which a recipe says nothing.
        """
        return Entry(self.name, key, {"region": region.key}, {"recipe": recipe.encode(kernel.recipe).encode()})

    def decode(self, entry: Entry, region: CanonicalRegion, compilation: Compilation) -> FusionKernel:
        """Return the fusion of a recipe, defined.

        Args:
            entry: What :meth:`encode` returned.
            region: A region with the key of the one that it was made for.
            compilation: What it has to be compiled for, of which a recipe says nothing.
        """
        entry.expect(self.name, region.key)
        return _defined(region, recipe.decode(entry.blobs["recipe"].decode()))


def _defined(region: CanonicalRegion, planned: recipe.Recipe) -> FusionKernel:
    return FusionKernel(region.key, planned, replay.define).prepare()


def _narrows(node: Node, facts: Mapping[Node, Facts]) -> bool:
    """Return whether a view takes a part of what it looks at."""
    own = facts[node]
    if own.role is not Role.VIEW or own.tensor is None:
        return False
    source = facts[node.all_input_nodes[0]].tensor
    return source is not None and own.tensor.hint < source.hint and 0 not in own.tensor.stride


def _permutes(node: Node, facts: Mapping[Node, Facts]) -> bool:
    """Return whether a view has the elements of what it looks at in another order of dimensions."""
    own = facts[node]
    if own.role is not Role.VIEW or own.tensor is None:
        return False
    source = facts[node.all_input_nodes[0]].tensor
    strides = [s for size, s in zip(own.tensor.shape, own.tensor.stride, strict=True) if size != 1]
    static = all(isinstance(stride, int) for stride in strides)
    return source is not None and len(strides) > 1 and static and strides != sorted(strides, key=int, reverse=True)


NVFUSER = NvFuser()
