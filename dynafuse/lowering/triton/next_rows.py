"""Loads the next rows of a loop into registers, while those of the moment are computed and stored.

Where a program fills a processor's registers no other one runs beside it that could use the memory while it computes. Tiles
that are copied ahead to shared memory come back from there before a row's sums are known, and are held twice as wide if they
are floats of 16 bits. What is loaded behind the sums waits as it came.

Worked example: of the loop ``v1 = tl.load(in0 + (r + 4096*x)); …; v7 = tl.sum(v6, 1); …`` over rows ``x`` the load becomes
``v1 = next0``. ``next0`` is loaded before the loop, and anew behind the sum, each time with ``x_next`` in place of ``x``.
"""

from __future__ import annotations

import re
from dataclasses import replace

from dynafuse.lowering.triton.early_loads import defined_names, is_free_load
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.scopes import Line, Scope

LOAD = re.compile(r"(?P<name>\w+) = (?P<load>tl\.load\(((?!\)\.to\().)*\))(?P<casts>(\.to\([\w.]+\))*)$")
"""A load: what it is called, and how it is widened."""


def load_next_rows(emitter: Emitter, start: str, following: str, end: int | None = None) -> None:
    """Let the loop that is open begin each step with rows that are there already.

    What is loaded at a place, or under conditions, that only the step itself knows is loaded there as before. Loads of the
    next rows follow the last point at which the program's threads wait for each other to combine what their lanes hold.

    Args:
        emitter: The kernel's emitter, whose open loop is complete. Its loads are masked along ``x``.
        start: The text of the first row of a program's first tile.
        following: The text of that of the next tile, in a step of the loop.
        end: The number of the loop's lines that load what is to be there already; None for all.
    """
    loop = emitter.open_loop_scope
    assert loop is not None
    defined = defined_names(loop)
    before = Scope(header=Line(f"x_next_base = {start}"), next_of="x")
    ahead = Scope(header=Line(f"x_next_base = {following}"), next_of="x")
    late: list[Line] = []  # what is there behind the loads of the next rows has to be taken before these
    for place, line in enumerate(loop.lines[:end]):
        if not (isinstance(line, Line) and "x" in line.tiles and is_free_load(line, defined)):
            continue
        match = LOAD.match(line.text)
        assert match is not None, line.text
        load = replace(line, text=f"{emitter.new_name('next')} = {match['load']}")
        before.lines.append(load)
        ahead.lines.append(replace(load))
        taken = replace(line, text=f"{match['name']} = {load.text.split()[0]}{match['casts']}", exprs=())
        loop.lines[place] = taken
        if place >= emitter.last_wait:
            late.append(taken)
    if ahead.lines:
        emitter.top.lines.append(before)
        behind = [line for line in loop.lines[emitter.last_wait:] if not any(line is taken for taken in late)]
        loop.lines[emitter.last_wait:] = [*late, ahead, *behind]
