"""The memory that recordings share, when they may be replayed there, and when another one may be made.

They share what they compute on the way: they are replayed on one stream, one after the other, under the pool's lock. A
replay writes to memory that was free when it was recorded. What a forward hands over is not, from its recording on: those
that are made behind it leave that alone, those before it are not replayed as long as somebody holds it.

So the forwards of a model that breaks have split share a pool with their backwards: one that is recorded while what others
have handed over is held. That ends where a backward was recorded that frees, on its way, what its forward has handed over:
what is recorded from then on may write there, and gets another pool while that is held.

Worked example: forwards A and B, and backwards of B and A, are recorded in one step, and replayed in the next. If B comes
first one day, A is launched, as long as B's backward has not been.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynafuse.runtime.capture.lending import Loan


class Handed(Protocol):
    """What a recording hands over."""

    @property
    def busy(self) -> bool:
        """Return whether somebody holds it still."""

    gives_away: bool
    """Whether it is the user who holds it, and not autograd: gradients."""

    outlives: bool
    """Whether it was found to be held when the next forward runs."""


@dataclass(frozen=True)
class Pool:
    """Memory that recordings share.

    ``handle`` is the recorder's own, ``turns`` counts the recordings, and ``lent`` is what they have handed over, by number.
    Whoever asks for it has the lock.
    """

    handle: Any
    lock: threading.Lock = field(default_factory=threading.Lock)
    turns: Iterator[int] = field(default_factory=itertools.count)
    lent: dict[int, tuple[Handed, Loan]] = field(default_factory=dict)

    def spared(self, lender: Loan | None = None) -> frozenset[int]:
        """Return the numbers of the recordings whose memory, of which something is held, a new one leaves alone.

        Args:
            lender: What the new one frees itself, as only it asks for that.
        """
        held = [number for number in [*self.lent] if self._is_held(number)]
        loans = {number: self.lent[number][1] for number in held}
        return frozenset(number for number, loan in loans.items() if loan is lender or not loan.taken)

    def takes(self, lender: Loan | None = None) -> bool:
        """Return whether a new recording leaves alone all that is held.

        Args:
            lender: What it frees itself, as only it asks for that.
        """
        return self.spared(lender) == self.lent.keys()

    def holders(self, number: int, spared: frozenset[int]) -> list[Handed]:
        """Return what is held that a replay would overwrite, other than what it hands over itself.

        Args:
            number: The number of the recording.
            spared: The numbers of those whose memory it leaves alone.
        """
        others = (other for other in [*self.lent] if other not in spared and other != number)
        return [self.lent[other][0] for other in others if self._is_held(other)]

    def _is_held(self, number: int) -> bool:
        """Return whether something is held that a recording has handed over; if not, forget it until there is again."""
        is_held = self.lent[number][0].busy
        if not is_held:
            del self.lent[number]
        return is_held


def chain(key: Hashable, new: Callable[[], Pool]) -> Pool:
    """Return the pool for a forward that hands over: that of the forwards before it whose backwards are still to come.

    Args:
        key: The device and the stream.
        new: Makes another one.
    """
    last = _CHAINS.get(key)
    if last is not None:
        with last.lock:
            goes_on = last.takes() and bool(last.lent)
        if goes_on:
            return last
    pool = _CHAINS[key] = new()
    return pool


def reset() -> None:
    """Forget which pool goes on; recordings that are still in use keep theirs."""
    _CHAINS.clear()


_CHAINS: weakref.WeakValueDictionary[Hashable, Pool] = weakref.WeakValueDictionary()
"""The last pool for forwards that hand over, by device and stream, as long as a recording uses it."""
