"""What an executor is: the one protocol by which the pipeline knows Triton, nvFuser, Inductor, eager and those of others.

An executor answers, without trying anything out: can it be used here, does it refuse this node, this group of nodes, this
spec. It makes kernels from specs, and says how they are kept in the cache. ``docs/executors.md`` builds one from nothing.

Worked example::

    class Calls(Executor):
        \"\"\"Run regions by plain calls of torch.\"\"\"

        name = "calls"

        def compile(self, region, compilation):
            return finished(lambda: CallKernel(region.spec))

    dynafuse.register_executor(Calls())
    torch.compile(model, backend="dynafuse", options={"executors": "calls"})

This module imports nothing: every stage may see executors through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # those that see executors through this module
    import torch
    from torch.fx import Node

    from dynafuse.cache.canonical import CanonicalRegion
    from dynafuse.cache.entry import Entry
    from dynafuse.config import Config
    from dynafuse.fallback import Guard
    from dynafuse.ir import Facts, Spec


@dataclass(frozen=True)
class Use:
    """Where a graph would run: the type of device of its tensors, the options, and whether it is only planned."""

    device_type: str  # cuda | cpu
    config: Config
    planning: bool = False  # for a described device: nothing will run

    @property
    def on_gpu(self) -> bool:
        """Return whether kernels are for a GPU."""
        return self.device_type == "cuda" or self.planning


@dataclass(frozen=True)
class Availability:
    """Whether an executor can be used, and why not. ``ruled_out``: the options themselves say so, not the machine."""

    available: bool
    reason: str = ""
    ruled_out: bool = False

    def __str__(self) -> str:
        return self.reason


AVAILABLE = Availability(True)

VARIANT = "variant"
"""The option of a spec that says in which of several ways its kernel is made, if not in the usual one."""


@dataclass(frozen=True)
class Compilation:
    """What a kernel is compiled for: the device's compute capability (90 for sm_90; None: not natively), the options."""

    capability: int | None
    config: Config
    guard: Guard  # for what fails later than the compilation


class Kernel(Protocol):
    """A compiled region, as the function of a graph calls it."""

    @property
    def source(self) -> str:
        """Return what was generated, as text."""

    @property
    def scalars(self) -> tuple[int, ...]:
        """Return which of the spec's symbols follow the tensors as arguments, by position."""

    def run(self, inputs: list[Any], device: int | None) -> Sequence[torch.Tensor]:
        """Return the stored tensors in the order of the spec's stores; one that overwrites an input is that input.

        Args:
            inputs: The tensors of the spec's inputs, then the integers of :attr:`scalars`.
            device: The index of the CUDA device; None for the CPU.
        """


class Executor(ABC):
    """Something that runs regions. All methods but :meth:`compile` have an answer that fits most executors.

    Instances keep no state that a plan depends on: a process has one of each, and caches are keyed by :meth:`target`.
    """

    name: str
    """By which options, reports and cost constants name it: lower case letters and digits."""

    device_types: frozenset[str] = frozenset({"cuda"})
    """Types of device it is made for: its absence is only told of there."""

    default_on: frozenset[str] = frozenset()
    """Types of device for which it is used without being named: the first such executor that is available."""

    remedy = "leave it out of `executors`"
    """What users can do where it is not available, as the end of a sentence."""

    fuses = True
    """Whether it computes several ops at once. Of what does not fuse there is one, ``eager``."""

    takes_arguments = False
    """Whether its kernels take hoisted scalars, size classes and the lengths of folds as arguments of their own."""

    draws_random = False
    """Whether its kernels draw random numbers from a seed: where none does, eager's own ops draw them."""

    scatters = False
    """Whether its kernels write at loaded indices, into memory that holds something already."""

    pools = False
    """Whether its kernels take the ops with which max pooling keeps places within windows instead of indices, the gradients
    of upsampling, and convolutions that keep channels apart."""

    allocates = True
    """Whether its kernels allocate their outputs inside of the call, whose price then includes it."""

    splits = False
    """Whether it takes several launches where a reduction is split over programs."""

    joins = False
    """Whether a kernel of its may run several loop nests side by side, each in programs of its own."""

    compiles_aside = False
    """Whether :meth:`compile` returns while other processes or threads still compile."""

    kept = False
    """Whether its kernels are kept in the cache on disk, by :meth:`encode` and :meth:`decode`."""

    validated = False
    """Whether a kernel's results are compared with torch's once, before it is used: for libraries of others."""

    @property
    def priced_as(self) -> str:
        """Return the executor by whose cost constants it is priced; Triton's, where no device is described for that one."""
        return self.name

    def __str__(self) -> str:
        return self.name

    # ------------------------------------------------------------------ what it can do

    def available(self, use: Use) -> Availability:
        """Return whether it can be used, and if not, why.

        Args:
            use: Where a graph would run, and with which options.
        """
        return AVAILABLE

    def notice(self, use: Use) -> str:
        """Return what a user should know who gets it without having named it, or "".

        Args:
            use: Where a graph would run, and with which options.
        """
        return ""

    def refuses_node(self, node: Node, facts: Mapping[Node, Facts]) -> str:
        """Return why it does not run a node that computes or is a view; or "".

        Args:
            node: The node, an op with a row or without.
            facts: The facts of all nodes of the graph.
        """
        return "" if facts[node].is_fused else facts[node].reason

    def refuses_group(self, nodes: Sequence[Node], facts: Mapping[Node, Facts]) -> str:
        """Return why it does not run nodes, each of which it takes, as one kernel; or "".

        Args:
            nodes: All that the kernel would compute, the views and cheap ops that it takes in included.
            facts: The facts of all nodes of the graph.
        """
        return ""

    def refuses_spec(self, spec: Spec) -> str:
        """Return why it does not run a region, known by its canonical form; or ""."""
        return ""

    def rejects(self, error: BaseException) -> str:
        """Return why its library does not want a region, if an error says that and no more; "" for failures.

        Args:
            error: What its :meth:`compile`, or the comparison with torch after it, has raised.
        """
        return ""

    # ------------------------------------------------------------------ kernels

    def target(self, device: torch.device, capability: int | None) -> str:
        """Return what a kernel runs on, as a part of its key: capability, library, versions.

        Args:
            device: The device of the region's tensors.
            capability: Its compute capability, as 90; None where nothing runs natively.
        """
        return f"{self.name} {device.type} sm{capability}"

    @abstractmethod
    def compile(self, region: CanonicalRegion, compilation: Compilation) -> Future[Any]:
        """Return the kernel of a region; the future holds what went wrong, if anything did.

        Args:
            region: The region. It may look at ``region.spec`` and, if it :attr:`takes_arguments`, at ``region.code``, which
                a kernel is made from; at ``region.hints``, example values of its symbols, and at its device. What the key
                does not describe may not matter.
            compilation: The device's capability, the options, and the guard of what fails later.

        Returns:
            A future of a :class:`Kernel`, done already unless it :attr:`compiles_aside`.
        """

    def variants(self, region: CanonicalRegion) -> tuple[str, ...]:
        """Return the ways to make a region's kernel that compute the same bits, the usual one first; () if there is one.

        A region that is to be made in another way than the usual one has it among its spec's options, as ``VARIANT``.
        """
        return ()

    def launches(self, kernel: Any) -> int:
        """Return how many launches a call of a kernel takes."""
        return 1

    # ------------------------------------------------------------------ the cache on disk

    def fingerprint(self, compilation: Compilation) -> str:
        """Return what an entry depends on beside the kernel's key, such as a compiler's settings."""
        return ""

    def encode(self, kernel: Any, region: CanonicalRegion, key: str, compilation: Compilation) -> Entry | None:
        """Return a kernel as an entry of the cache; None for one that no entry can describe.

        Args:
            kernel: What :meth:`compile` made.
            region: The region that it was made for.
            key: The key of the entry, which is not the region's own.
            compilation: What it was compiled for.
        """
        return None

    def decode(self, entry: Entry, region: CanonicalRegion, compilation: Compilation) -> Any:
        """Return the kernel that an entry describes. Whatever is raised, the kernel is compiled instead.

        Args:
            entry: What :meth:`encode` returned, here or in another process.
            region: A region with the key of the one that it was made for.
            compilation: What it has to be compiled for.

        Raises:
            ValueError: The entry describes another kernel, or the executor keeps none.
            KeyError: The entry lacks a part.
        """
        raise ValueError(f"{self.name} keeps no kernels")
