"""What dynafuse does with a region, step by step: what it predicted, and what the profiler measured of that.

Worked example: of two fused steps with a sort between, ``by_step(steps, kernels)`` has a line each: the fused ones with the
kernels that they launched, the sort with all kernels between those.
"""
from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from bench.measure import Metrics
from dynafuse.cache.kernels import STORE
from dynafuse.lowering.registry import executor
from dynafuse.report.data import ReportedGraph, ReportedStep
from dynafuse.report.reading import report_of
from dynafuse.runtime.observers import Compiled, listening

Kernels = Sequence[tuple[str, float]]
"""Names of kernels with their microseconds, in the order in which they ran."""

GENERATED = "dynafuse_"
"""How the names of kernels begin that dynafuse generates."""


class Watched:
    """The graphs that dynafuse compiles in a block, as they run."""

    def __init__(self) -> None:
        self._compiled: list[Compiled] = []
        self._listening = listening(self._compiled.append, plan_only=False)

    def __enter__(self) -> None:
        self._listening.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._listening.__exit__(*error)

    @property
    def is_interim(self) -> bool:
        """Whether the latest graph is one that runs until the kernels of another are compiled."""
        return bool(self._compiled) and self._compiled[-1].meanwhile is not None

    def predicted(self) -> Metrics:
        """Return the predicted device time and the number of steps of one call; no time where a step has none.

        A graph that is called several times counts as often: pieces that repeat themselves are compiled once.
        """
        times = [step.predicted_us for graph in self._graphs() for step in graph.steps * graph.called]
        return {"steps": len(times), **({} if None in times else {"predicted_us": sum(filter(None, times))})}

    def by_step(self, kernels: Kernels) -> list[Metrics]:
        """Return measured and predicted microseconds of each step, given the kernels of one call."""
        return by_step([(step, _launches(step)) for graph in self._graphs() for step in graph.steps], kernels)

    def _graphs(self) -> Sequence[ReportedGraph]:
        """Return all graphs that stay."""
        return report_of([graph for graph in self._compiled if graph.meanwhile is None], None, False).graphs


def _launches(step: ReportedStep) -> int | None:
    """Return how many kernels of dynafuse's a step launches; None for one that other libraries run."""
    kernel = STORE.asked(step.key) if step.key is not None and step.executor == "triton" else None
    return None if kernel is None else executor(step.executor).launches(kernel.result())


def by_step(steps: Sequence[tuple[ReportedStep, int | None]], kernels: Kernels) -> list[Metrics]:
    """Return what was measured of each step beside what was predicted.

    Args:
        steps: in the order in which they run, each with the number of generated kernels that it launches; None for one that
            a library runs, in who knows how many. Neighbours of that sort share a line.
        kernels: those of one call. Copies and fills before a fused step's kernels count as the step's.
    """
    left = deque(kernels)
    return [_line(group, _taken(left, launches)) for group, launches in _groups(steps)]


def _groups(steps: Sequence[tuple[ReportedStep, int | None]]) -> Iterator[tuple[list[ReportedStep], int | None]]:
    """Iterate over fused steps one by one, and over runs of steps that libraries run."""
    for is_library, group in itertools.groupby(steps, lambda pair: pair[1] is None):
        if is_library:
            yield [step for step, _ in group], None
        else:
            yield from (([step], launches) for step, launches in group)


def _taken(left: deque[tuple[str, float]], launches: int | None) -> Kernels:
    """Remove the next kernels: up to the last of ``launches`` generated ones, or up to the next generated one if None."""
    taken: list[tuple[str, float]] = []
    generated = 0
    while left and (not _is_generated(left[0]) if launches is None else generated < launches):
        generated += _is_generated(left[0])
        taken.append(left.popleft())
    return taken


def _is_generated(kernel: tuple[str, float]) -> bool:
    return kernel[0].startswith(GENERATED)


def _line(steps: Sequence[ReportedStep], kernels: Kernels) -> Metrics:
    times = [step.predicted_us for step in steps]
    return {
        "steps": " ".join(step.name for step in steps), "executor": steps[0].executor, "kernel_class": steps[0].kernel_class,
        "kernels": len(kernels), "measured_us": sum(us for _, us in kernels),
        "predicted_us": None if None in times else sum(filter(None, times)),
    }
