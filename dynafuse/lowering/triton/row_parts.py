"""Rows in several tiles beside one another: what is computed along a row is written once for each of its parts.

Tiles have a power of two of elements. One that holds a long row may reach far beyond its end, and the compiler computes a
value for the whole of it before the next one, so that more is held at a time than there are registers for. Parts are
computed one behind the other, as far as no reduction is waited for; a reduction combines them before it combines lanes.

Worked example: of rows of 12,288 elements in three parts ``v1 = tl.load(in0 + (r))``, ``v2 = v1 * v1``,
``v3 = tl.sum(v2, 1)`` become ``v1_p0 = tl.load(in0 + (r_p0))``, ``v2_p0 = v1_p0 * v1_p0``, the same with ``p1`` and ``p2``,
and ``v3 = tl.sum(v2_p0 + v2_p1 + v2_p2, 1)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from dynafuse.errors import LoweringError
from dynafuse.lowering.triton.early_loads import DEFINITION, NAMES, defined_names
from dynafuse.lowering.triton.scopes import Line, Scope

COMBINED = {"tl.sum": "{0} + {1}", "lm.amax": "lm.maximum({0}, {1})", "lm.amin": "lm.minimum({0}, {1})"}
"""Reductions of a tile, and what combines the elements of two tiles before."""

REDUCTION = re.compile(r"(?P<name>\w+) = (?P<function>[\w.]+)\((?P<element>\w+)(?P<rest>, [01]\).*)$")


def in_parts(scope: Scope, count: int) -> None:
    """Write what a kernel computes along rows once for each part of a row; of a single one all stays as it is.

    Args:
        scope: The kernel's top level, complete. Nothing that it stores may be loaded by it.
        count: How many parts there are.

    Raises:
        LoweringError: Something is computed of whole rows but the reductions that ``COMBINED`` has.
    """
    if count == 1:
        return
    along = {name for line in scope.all_lines() if "r" in line.tiles for name in defined_names(Scope([line]))}
    _write(scope, frozenset(along), count)


def part_name(name: str, part: int) -> str:
    """Return what a variable is called in a part of a row."""
    return f"{name}_p{part}"


def _write(scope: Scope, along: frozenset[str], count: int) -> None:
    """Write the lines of a scope, of its loops too, for each part; ``along`` are the names of what varies along rows."""
    writer = _Parts(along, count)
    for item in scope.lines:
        if isinstance(item, Scope):
            _write(item, along, count)
            writer.flush()
            writer.written.append(item)
        else:
            writer.add(item)
    writer.flush()
    scope.lines = writer.written


@dataclass
class _Parts:
    """The lines of a scope while they are put in another order."""

    along: frozenset[str]
    count: int
    written: list[Line | Scope] = field(default_factory=list)
    of_parts: list[Line] = field(default_factory=list)  # of which each part has its own, not written yet
    after: list[Line] = field(default_factory=list)  # what is made of these, for whole rows
    made: set[str] = field(default_factory=set)  # its names

    def add(self, line: Line) -> None:
        """Take the next line."""
        definition = DEFINITION.match(line.text)
        names = set(NAMES.findall(line.text)).union(str(symbol) for expr in line.exprs for symbol in expr.free_symbols)
        defined = set(definition[1].split(", ")) if definition else set[str]()
        if defined & self.along or (not defined and (names & self.along or "r" in line.tiles)):
            if names & self.made:
                self.flush()
            self.of_parts.append(line)
        elif names & self.along:
            self.after.append(self._of_all(line))
            self.made |= defined
        elif names & self.made:
            self.after.append(line)
            self.made |= defined
        else:
            self.written.append(line)

    def flush(self) -> None:
        """Write what waits."""
        for part in range(self.count if self.of_parts else 0):
            self.written.append(Scope([replace(line) for line in self.of_parts], part=part, along=self.along))
        self.written += self.after
        self.of_parts, self.after, self.made = [], [], set()

    def _of_all(self, line: Line) -> Line:
        """Return a reduction of all parts of a row in place of one of a tile."""
        match = REDUCTION.match(line.text)
        combine = COMBINED.get(match["function"]) if match else None
        if match is None or combine is None:
            raise LoweringError(line.text, "it needs rows that are in one part")
        combined = part_name(match["element"], 0)
        for part in range(1, self.count):
            combined = combine.format(combined, part_name(match["element"], part))
        return replace(line, text=f"{match['name']} = {match['function']}({combined}{match['rest']}")
