"""Kernels of several loop nests, which have nothing in common but their launch: each nest has programs of its own.

Every nest becomes a function, as the kernel that it would be alone, and the kernel calls the one whose programs a program is
among. Nests whose functions are the same but for how many points they walk are one call in one place, which takes the
tensors of whichever nest it is: of a hundred parameters that an optimizer changes, the code is there once.

Worked example: ``relu`` of tensors of 1,000 and 2,000 elements and ``exp`` of one of 5,000, in programs of 1,024 points::

    program = tl.program_id(0)
    if program < 3:
        nest0 = tl.where(program < 1, 0, 1)
        begin0 = tl.where(nest0 == 1, 1, 0)
        place0 = program - begin0
        in0_0 = tl.where(nest0 == 1, in1, in0)
        out0_0 = tl.where(nest0 == 1, out1, out0)
        x_size0 = tl.where(nest0 == 1, 2000, 1000)
        dynafuse_nest_relu_0(in0_0, out0_0, place0, place0 * 0, x_size0, 1024)
    else:
        place1 = program - 3
        dynafuse_nest_exp_1(in2, out2, place1, place1 * 0, 5000, 1024)
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from dynafuse.errors import LoweringError
from dynafuse.ir import Apart, Launch, Spec, nests_apart
from dynafuse.lowering.triton.builder import PROGRAM, X_SIZE, KernelBuilder
from dynafuse.lowering.triton.dependent import WAITS, prologue
from dynafuse.lowering.triton.room import with_warps
from dynafuse.lowering.triton.schedule import candidates
from dynafuse.lowering.triton.tiles import Schedule, point_count

SIDE_BY_SIDE = "side_by_side"
"""The class of such kernels."""

ALIGNED = 16  # points: what a size has in common with it tells the compiler how many of a tile end together

Write: TypeAlias = Callable[[Spec, Schedule], KernelBuilder]
"""Returns what a nest becomes as a function, given its spec and its schedule."""


@dataclass(frozen=True)
class Nested:
    """A nest with its function: how that would be launched alone, and what its arguments are in the whole."""

    source: str
    launch: Launch
    spec: Spec
    names: Mapping[str, str]
    points: int  # along ``x``

    @property
    def programs(self) -> int:
        """Return how many programs it has."""
        return math.prod(map(int, self.launch.grid))

    @property
    def points_of_program(self) -> int:
        """Return how many points a program computes."""
        return point_count(self.spec, range(len(self.spec.axes))) // self.programs + 1

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what is the same for all nests that one call serves."""
        launch = self.launch
        return self.source, launch.signature, launch.constants, launch.grid[1] == 1, math.gcd(self.points, ALIGNED)


def side_by_side(spec: Spec, name: str, write: Write) -> tuple[list[str], Launch]:
    """Return the texts of functions and kernel of a spec of several nests, and the launch.

    Args:
        spec: The region.
        name: The kernel's name.
        write: Returns what a nest becomes as a function.

    Raises:
        LoweringError: A nest takes more than one launch.
    """
    kinds: dict[tuple[object, ...], list[Nested]] = {}
    for nest in _nested(nests_apart(spec), write):
        kinds.setdefault(nest.kind, []).append(nest)
    calls = list(kinds.values())
    launch = _launch(spec, name, [nest for same in calls for nest in same])
    functions = [same[0].source.replace(f"def {same[0].launch.entry}(", f"def {_function(same[0], number)}(", 1)
                 for number, same in enumerate(calls)]
    return [*functions, _kernel(launch, calls)], launch


def _nested(aparts: Sequence[Apart], write: Write) -> list[Nested]:
    """Return nests with their functions, all with as many warps as the best schedule of any has."""
    choices = _alike({apart.spec: candidates(apart.spec) for apart in aparts})
    warps = max(schedules[0].warps for schedules in choices.values())
    built = {spec: write(spec, _of_warps(schedules, warps)) for spec, schedules in choices.items()}
    for spec, builder in built.items():
        if len(builder.launches) != 1 or builder.workspaces:
            raise LoweringError(spec.ops[-1].target, "it takes several launches beside others that share one")
    return [Nested(builder.sources[0], builder.launches[0], apart.spec, apart.names(), int(builder.numel("x")))
            for apart in aparts for builder in (built[apart.spec],)]


def _alike(choices: Mapping[Spec, Sequence[Schedule]]) -> dict[Spec, list[Schedule]]:
    """Return the schedules of nests as they may share a launch: without cuts, and with register tiles in all nests or none.

    Nests that end elsewhere may be the same function. All programs of a launch have as many registers as those of the
    hungriest nest: a batch norm takes 1.4 of its time beside windows whose lanes compute several points.
    """
    has_tiles = all(schedules[0].register_tile for schedules in choices.values())
    return {spec: [replace(schedule, cuts=()) for schedule in schedules if has_tiles or not schedule.register_tile]
            for spec, schedules in choices.items()}


def _of_warps(schedules: Sequence[Schedule], warps: int) -> Schedule:
    """Return the best schedule that has a number of warps; the best of all with that many if none has."""
    return next((schedule for schedule in schedules if schedule.warps == warps), None) or with_warps(schedules[0], warps)


def _function(nest: Nested, number: int) -> str:
    """Return the name of the function of the kind of nests with a number."""
    return f"{nest.launch.entry}_{number}"


def _launch(spec: Spec, name: str, nests: Sequence[Nested]) -> Launch:
    """Return the launch of all nests."""
    types: dict[str, str] = {}
    over: list[tuple[str, str]] = []
    takers: Counter[str] = Counter()
    for nest in nests:
        for own, kind in nest.launch.signature:
            whole = nest.names[own]
            types[whole] = max(kind, types.get(whole, ""))  # of a size i64, if any nest takes it so
            takers[whole] += 1
        over += ((nest.names[output], nest.names[operand]) for output, operand in nest.launch.overwrites)
    order = [f"in{k}" for k in range(len(spec.inputs))] + [f"out{k}" for k in range(len(spec.stores))]
    order += [*spec.symbols, *spec.hoisted, *spec.counts]
    return Launch(name, tuple((argument, types[argument]) for argument in order if argument in types),
                  (sum(nest.programs for nest in nests), 1, 1), (), nests[0].launch.warps,
                  alignments=spec.alignments, asserts=any(nest.launch.asserts for nest in nests),
                  overwrites=tuple((output, operand) for output, operand in over if takers[operand] == 1))


def _kernel(launch: Launch, calls: Sequence[Sequence[Nested]]) -> str:
    """Return the text of the kernel, given the nests that each call serves."""
    nests = [nest for same in calls for nest in same]
    programs = sum(nest.programs for nest in nests)
    lines = [*prologue(programs, max(nest.points_of_program for nest in nests)), f"{PROGRAM} = tl.program_id(0)"]
    begin = 0
    for number, same in enumerate(calls):
        end = begin + sum(nest.programs for nest in same)
        condition = "else" if end == programs else f"{'elif' if begin else 'if'} {PROGRAM} < {end}"
        call = _Call(number, same, begin).text()
        lines += call if len(calls) == 1 else [f"{condition}:", *(f"    {line}" for line in call)]
        begin = end
    parameters = ", ".join([*(name for name, _ in launch.signature), f"{WAITS}: tl.constexpr = False"])
    text = "\n".join(f"    {line}" for line in lines)
    return f'@triton.jit\ndef {launch.entry}({parameters}):\n    """side by side: {len(nests)} loop nests"""\n{text}\n'


class _Call:
    """The call of a function by the programs of the nests that it serves, of which ``begin`` is the first."""

    def __init__(self, number: int, same: Sequence[Nested], begin: int) -> None:
        self.number = number
        self.same = same
        self.begin = begin
        self.lines: list[str] = []

    def text(self) -> list[str]:
        """Return its lines."""
        launch, place = self.same[0].launch, self._place()
        arguments = [self._chosen(f"{own}_", [nest.names[own] for nest in self.same]) for own, _ in launch.signature]
        grid = [place, f"{place} * 0"]
        if launch.grid[1] != 1:
            width = self._chosen("width", [nest.launch.grid[0] for nest in self.same])
            grid = [f"{place} % {width}", f"{place} // {width}"]
        size = self._chosen(X_SIZE, [nest.points for nest in self.same])
        constants = (str(constant) for _, constant in launch.constants)
        called = ", ".join([*arguments, *grid, size, *constants])
        return [*self.lines, f"{_function(self.same[0], self.number)}({called})"]

    def _place(self) -> str:
        """Return the text of a program's number among those of its nest; define that, and which nest it is."""
        nest, place = f"nest{self.number}", f"place{self.number}"
        programs = [each.programs for each in self.same]
        begins = list(itertools.accumulate(programs[:-1], initial=self.begin))
        if len(programs) == 1:
            self.lines.append(f"{place} = {PROGRAM} - {self.begin}")
        elif len(set(programs)) == 1:
            self.lines += [f"{nest} = ({PROGRAM} - {self.begin}) // {programs[0]}",
                           f"{place} = ({PROGRAM} - {self.begin}) % {programs[0]}"]
        else:
            self.lines += (f"{nest} = tl.where({PROGRAM} < {start}, {nest if number > 1 else 0}, {number})"
                           for number, start in enumerate(begins) if number)
            self.lines.append(f"{place} = {PROGRAM} - {self._chosen('begin', begins)}")
        return place

    def _chosen(self, name: str, values: Sequence[object]) -> str:
        """Return the text of what is one of several values, depending on the nest; define it where they differ."""
        variable, text = f"{name}{self.number}", str(values[0])
        for number, other in enumerate(values):
            if other != values[0]:
                self.lines.append(f"{variable} = tl.where(nest{self.number} == {number}, {other}, {text})")
                text = variable
        return text
