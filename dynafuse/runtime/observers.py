"""Listeners and observers, which are told of the graphs that this process compiles: reports, tests, the history.

Worked example: ``with listening(graphs.append, plan_only=True): compiled(x)`` appends a :class:`Compiled` per graph, and
lowers none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from dynafuse.cache.canonical import CanonicalPlan, CanonicalRegion
from dynafuse.cost.device import Device
from dynafuse.cost.model import Meanwhile
from dynafuse.fallback import Guard
from dynafuse.ir import Plan


@dataclass
class Replays:
    """What has become of the calls of a graph that may be captured, so far."""

    recordings: int = 0
    replayed: int = 0
    launched: int = 0  # kernel by kernel: before a recording, or where a replay was not safe
    refused: str = ""  # why none is recorded, where that turned out

    def __str__(self) -> str:
        counts = (f"so far {self.replayed} calls replayed, {self.launched} launched kernel by kernel, "
                  f"{self.recordings} recorded")
        return f"{counts}: {self.refused}" if self.refused else counts


@dataclass(frozen=True)
class Compiled:
    """A graph that went through the pipeline."""

    kind: str  # forward | backward | inference
    regions: CanonicalPlan
    device: Device
    unusable: Mapping[str, str]  # executors that the options name and that cannot be used, with the reason
    captured: bool = False  # whether it is to be recorded as CUDA graphs
    calls: int = 1  # how often a training or inference step calls it: more than once for layers that are compiled once
    meanwhile: Meanwhile | None = None  # what an interim plan loses and saves; None for any other plan
    capture: str = ""  # whether it is captured, and why or why not; empty if nobody has asked for it
    replays: Replays | None = None  # of its calls, which go on; None if it cannot be captured
    sizes: tuple[int, ...] = ()  # for which alone it was compiled once more, of a graph with dynamic sizes

    @property
    def plan(self) -> Plan:
        """Return the plan, without canonical forms."""
        return self.regions.plan

    @property
    def bounds(self) -> dict[str, CanonicalRegion]:
        """Return the regions in canonical form, by name."""
        return self.regions.by_name


class Observer(Protocol):
    """Something that is told of every graph that this process runs."""

    def note(self, compiled: Compiled, origins: Mapping[str, str]) -> None:
        """Note a graph.

        Args:
            compiled: The graph.
            origins: Where each kernel came from when it was first requested, by key.
        """

    def clear(self) -> None:
        """Forget all graphs."""


OBSERVERS: list[Observer] = []
"""All observers. ``report.history`` adds itself when it is imported."""

Listener: TypeAlias = Callable[[Compiled], None]
_listeners: list[Listener] = []
# A thread that only plans has its own: other threads run what they compile.
_own_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("own_listeners", default=())
_plan_only: ContextVar[bool] = ContextVar("plan_only", default=False)
_sizes: ContextVar[tuple[int, ...]] = ContextVar("sizes", default=())


def plan_only() -> bool:
    """Return whether this thread only plans: nothing is lowered, and graphs run eager."""
    return _plan_only.get()


def sizes() -> tuple[int, ...]:
    """Return the sizes for which alone this thread compiles graphs; none where these serve whatever they are called with."""
    return _sizes.get()


@contextmanager
def compiling_for(sizes: tuple[int, ...]) -> Iterator[None]:
    """Have graphs that are compiled in the block say that they are for some sizes alone.

    Args:
        sizes: The dynamic sizes of a call.
    """
    before = _sizes.set(sizes)
    try:
        yield
    finally:
        _sizes.reset(before)


@contextmanager
def listening(listener: Listener, plan_only: bool) -> Iterator[None]:
    """Hand every graph that is compiled in the block to a listener.

    Args:
        listener: Is called with each graph. What it raises fails as a stage does.
        plan_only: Whether only graphs of this thread are handed over; they are not lowered then, and run eager.
    """
    before = _plan_only.set(plan_only)
    own = _own_listeners.set((*_own_listeners.get(), listener) if plan_only else _own_listeners.get())
    _listeners.extend(() if plan_only else (listener,))
    try:
        yield
    finally:
        if not plan_only:
            _listeners.remove(listener)
        _own_listeners.reset(own)
        _plan_only.reset(before)


def tell(compiled: Callable[[], Compiled], origins: Mapping[str, str], guard: Guard) -> None:
    """Tell the listeners of a graph and, unless its plan is an interim one or is not run, the observers.

    Args:
        compiled: Makes what they are told; it is asked once for each, so that no failure keeps it from the others.
        origins: Where each kernel came from when it was first requested, by key.
        guard: How far a failure of one reaches.
    """
    def note(graph: Compiled) -> None:
        if graph.meanwhile is None and not plan_only():
            for observer in OBSERVERS:
                observer.note(graph, origins)

    for listener in (*_listeners, *_own_listeners.get(), note):
        guard.stage("reports", lambda: listener(compiled()), lambda: None)  # noqa: B023


def clear() -> None:
    """Have all observers forget what has run."""
    for observer in OBSERVERS:
        observer.clear()
