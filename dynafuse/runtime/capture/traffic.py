"""What memory the functions of a graph take and give back, as calls of theirs that warm up show it.

A plan tells which tensors it makes, but not what libraries take on the way: workspaces of convolutions, operands in another
layout. So the allocator is watched in the last call that warms up, and in that of the backward behind it, which gives back
what was saved. How large the pool of their recordings grows follows from that (``pool_size.py``).

Worked example: a forward takes 4 MB at A and 8 at B, and gives A back; its backward takes 8 MB at C, a gradient, and gives B
back. So 16 MB are in use at once, or 12 where the gradient is in memory that is no pool's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dynafuse.runtime.capture.pool_size import Life, best_pieces


class Event(NamedTuple):
    """Memory at an address is taken, so many bytes, or given back."""

    address: int
    bytes: int
    is_taken: bool


class Traffic:
    """The memory that a graph's function takes and gives back in a call, and the backward's behind it."""

    def __init__(self) -> None:
        self._first: Sequence[Event] = ()
        self._second: Sequence[Event] | None = ()  # None between the two
        self._apart: Counter[int] = Counter()  # sizes of what the second has given away that a recording has in no pool

    def is_awaited(self, kind: str, is_last: bool) -> bool:
        """Return whether a call is to be watched.

        Args:
            kind: Whose call: forward, backward or inference.
            is_last: Whether it is the last one that warms up.
        """
        return self._second is None if kind == "backward" and self._first else is_last

    def note(self, kind: str, events: Sequence[Event], apart: Sequence[int] = ()) -> None:
        """Note what a call has taken and given back.

        Args:
            kind: Whose call: forward, backward or inference.
            events: That, in its order.
            apart: The bytes of each result that a recording makes in memory that is no pool's.
        """
        if kind != "backward":
            self._first, self._second = events, None
        elif self._second is None or not self._first:
            self._second, self._apart = events, Counter(apart)

    def lives(self) -> list[Life]:
        """Return the tensors that were seen, each with the times from which and up to which it was in use."""
        events = (*self._first, *(self._second or ()))
        taken: dict[int, tuple[int, int]] = {}
        lives = []
        for time, event in enumerate(events):
            if event.address in taken:  # if it is taken again, others have given it back
                bytes_, begin = taken.pop(event.address)
                lives.append(Life(bytes_, begin, time))
            if event.is_taken:
                taken[event.address] = event.bytes, time
        apart = self._apart.copy()
        for bytes_, begin in taken.values():
            is_apart = begin >= len(self._first) and apart[bytes_] > 0
            if is_apart:
                apart[bytes_] -= 1
            else:
                lives.append(Life(bytes_, begin, len(events)))
        return lives

    def pieces(self) -> tuple[int, ...]:
        """Return the bytes of the first pieces with which a pool for these tensors grows least."""
        return best_pieces(self.lives())
