"""Chooses how a spec becomes kernels: the class, which tile dimension walks which axes, tile sizes, warps.

A dry run of the emitter shows what is read and written where. The order of axes follows the memory layout of the largest
access, so that neighbouring lanes touch neighbouring elements.

Worked example: a row softmax over ``bfloat16[8192, 4096]`` is scheduled ``persistent``: ``x`` walks the rows, ``r`` the
4096 elements, one row a program, 4 warps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dynafuse.ir import Spec
from dynafuse.lowering.base import VARIANT
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.column_schedule import columns, split_columns
from dynafuse.lowering.triton.pointwise_schedule import pointwise_schedules
from dynafuse.lowering.triton.probe import Probe
from dynafuse.lowering.triton.reduced_rows import Rows, rows_of, splittable, with_running_states
from dynafuse.lowering.triton.row_schedule import split_rows, whole_rows
from dynafuse.lowering.triton.rowcol_schedule import rowcol
from dynafuse.lowering.triton.ties import Ties
from dynafuse.lowering.triton.tiles import Schedule, probe, reduced_axes, traffic
from dynafuse.partition.kernel_class import goes_by_rows, reduction_class

MOST_CANDIDATES = 8


def choose_schedule(spec: Spec) -> Schedule:
    """Return the schedule that a spec's options name, else the best; of sizes that are not known that of typical ones."""
    named = dict(spec.options).get(VARIANT)
    if named is None:
        return next(_schedules(spec))
    return next(schedule for schedule in candidates(spec) if str(schedule) == named)


def candidates(spec: Spec) -> tuple[Schedule, ...]:
    """Return schedules of a spec that differ in speed by what no formula knows, the one to choose without timings first."""
    return tuple(itertools.islice(_distinct(_schedules(spec)), MOST_CANDIDATES))


def _schedules(spec: Spec) -> Iterator[Schedule]:
    """Yield schedules of a spec by its typical sizes, the best first, some more than once."""
    typical = spec.typical
    probed = probe(typical)
    ties = Ties(typical, probed)
    for schedule in _by_class(typical, probed):
        yield replace(schedule, lanes_first=True) if ties.lanes_first(schedule) else schedule


def _by_class(spec: Spec, probed: Probe) -> Iterable[Schedule]:
    """Return schedules of a spec, by whether and what it reduces."""
    reduced_sets = list(dict.fromkeys(reduced_axes(spec, op) for op, _ in spec.of_rows))
    if not reduced_sets:
        return pointwise_schedules(spec, probed)
    accesses = sorted(probed.accesses, key=lambda access: -traffic(spec, probed, access))
    if len(reduced_sets) == 1:
        return _rows(spec, probed, accesses, reduced_sets[0])
    return rowcol(spec, probed, accesses, reduced_sets)


def _distinct(schedules: Iterable[Schedule]) -> Iterator[Schedule]:
    """Yield schedules, each once."""
    seen: list[Schedule] = []
    for schedule in schedules:
        if schedule not in seen:
            seen.append(schedule)
            yield schedule


def _rows(spec: Spec, probed: Probe, accesses: Sequence[Access], reduced: frozenset[int]) -> Iterable[Schedule]:
    """Return schedules of a spec that reduces rows alone."""
    facts = rows_of(spec, probed, accesses, reduced)
    return (with_running_states(facts, schedule) for schedule in _row_schedules(facts, reduced))


def _row_schedules(facts: Rows, reduced: frozenset[int]) -> Iterable[Schedule]:
    """Return schedules of a spec that reduces rows alone, which keep a state per element of a tile."""
    kernel_class = reduction_class(facts.rows, facts.length, along=facts.along, across=facts.across,
                                   splittable=splittable(facts.spec, reduced), is_static=facts.is_static, flops=facts.flops)
    if kernel_class == "split":
        return split_rows(facts) if goes_by_rows(facts.along, facts.across) else split_columns(facts)
    return whole_rows(facts) if kernel_class == "row" else columns(facts)
