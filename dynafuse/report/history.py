"""The history of this process for :func:`process_report`: the graphs that it has compiled and called, the latest ones.

Worked example::

    for batch in batches:
        step(batch)
    print(dynafuse.process_report())     # plans, kernels, and whether these were compiled, on disk or in memory

A graph is noted at its first call, as plain numbers and texts: the history keeps none of its tensors or nodes alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from dynafuse.forks import Lock
from dynafuse.report.data import Report, ReportedGraph
from dynafuse.report.reading import graph_of
from dynafuse.runtime.observers import OBSERVERS, Compiled

MOST_GRAPHS = 128
MOST_STEPS = 8192


class History:
    """The latest graphs of a process; older ones are dropped and counted."""

    def __init__(self, most_graphs: int = MOST_GRAPHS, most_steps: int = MOST_STEPS) -> None:
        self._most_graphs, self._most_steps = most_graphs, most_steps
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all graphs."""
        with self._lock:
            self._graphs: deque[ReportedGraph] = deque()
            self._keys: set[str] = set()
            self._unusable: dict[str, str] = {}
            self._dropped = 0
            self._device: tuple[str, str] | None = None

    def note(self, compiled: Compiled, origins: Mapping[str, str]) -> None:
        """Add a graph. ``origins`` says where each kernel came from when it was first requested, by key."""
        graph = graph_of(compiled)
        with self._lock:
            self._add(graph, origins)
            self._unusable.update(compiled.unusable)
            self._device = self._device or (compiled.device.name, compiled.device.title)

    def _add(self, graph: ReportedGraph, origins: Mapping[str, str]) -> None:
        steps = []
        for step in graph.steps:
            if step.key is not None:
                reused = step.key in self._keys
                step = replace(step, reused=reused, origin="memory" if reused else origins.get(step.key, ""))
                self._keys.add(step.key)  # type: ignore[arg-type]
            steps.append(step)
        self._graphs.append(replace(graph, steps=tuple(steps), refusals=()))
        while len(self._graphs) > 1 and (
            len(self._graphs) > self._most_graphs or sum(len(graph.steps) for graph in self._graphs) > self._most_steps
        ):
            self._graphs.popleft()
            self._dropped += 1

    def report(self) -> Report:
        """Return a report of all graphs that are kept."""
        with self._lock:
            device, title = self._device or ("none", "no device")
            graphs = tuple(map(_as_of_now, self._graphs))
            return Report(device, f"{title}, as this process has compiled it", graphs, dict(self._unusable),
                          dropped=self._dropped, empty="no graph has been compiled and called yet")


def _as_of_now(graph: ReportedGraph) -> ReportedGraph:
    """Return a graph with the calls that were replayed until now; one that was is captured, whatever was predicted."""
    if graph.replays is None:
        return graph
    return replace(graph, replays=replace(graph.replays), captured=graph.captured or graph.replays.replayed > 0)


HISTORY = History()
"""The history of this process."""

OBSERVERS.append(HISTORY)


def process_report() -> Report:
    """Report the graphs that this process has compiled and called since it began, or since ``torch.compiler.reset``.

    Fused steps say where their kernel came from (``origin``): ``compiled``, ``disk``, or ``memory`` if an earlier graph has
    it. Eager steps have no price. At most 128 graphs and 8192 steps are kept, the latest ones.
    """
    return HISTORY.report()
