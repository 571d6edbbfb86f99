"""What a recorded forward saves for its backward, and gradients, in memory that both recordings use.

A forward's recording hands out tensors on memory that is only lent: as long as one of them is held, the recording is not
replayed. Who owns the memory waits until the backward is recorded, in the same pool. That frees it tensor by tensor as it
goes on, so that its own values and gradients take the place, as they do where nothing is recorded. Gradients are lent as
well: the forward is not replayed as long as somebody holds one. From then on a replay of the backward leaves nothing of
what was saved: it runs only where nobody else holds that, and nobody will ask for it again.

Worked example: of ``tanh`` the forward saves the result, 4 kB, and the backward returns a gradient of 4 kB. The pool has
4 kB for both; after ``backward(retain_graph=True)`` the result is still needed, so that this call runs uncaptured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage

_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # True outside of a backward
use_count: Callable[[int], int] = torch._C._storage_Use_Count
Lender: TypeAlias = Callable[[UntypedStorage], UntypedStorage]
"""Returns a storage in another's memory that does not own it, but keeps it from being given to others than recordings."""


def cdata_of(tensor: Tensor) -> int:
    """Return the number of a tensor's storage."""
    number: int = tensor.untyped_storage()._cdata
    return number


@dataclass
class Loan:
    """The storages that a forward's recording lends, by number, with their owners until a backward takes them.

    The first backward that is recorded takes them. In the memory that it frees nothing else may be recorded.
    """

    stream: int  # on which the forward is replayed
    owners: dict[int, UntypedStorage] = field(default_factory=dict)
    taken: bool = False

    def lend(self, outputs: Sequence[Any], others: Sequence[Any], saved: Collection[int], lender: Lender) -> list[Any]:
        """Return a recording's outputs in lent memory, but for views that leave: what they are of has to be known.

        Who owns the memory waits for the backward if only that sees what is there. The rest is copied out just behind each
        replay, so that the pool has the memory for other recordings.

        Args:
            outputs: What the recorded call returned.
            others: Its arguments, and what else is in no memory of the pool.
            saved: Positions of outputs that are handed over: what only the backward sees, gradients.
            lender: Makes storages.
        """
        tensors = {i: output for i, output in enumerate(outputs) if isinstance(output, Tensor)}
        leaving = {cdata_of(output) for i, output in tensors.items() if i not in saved}
        views = {cdata_of(output) for output in tensors.values() if output._base is not None}
        stay = (leaving & views).union(cdata_of(tensor) for tensor in others if isinstance(tensor, Tensor))
        lent: dict[int, UntypedStorage] = {}
        changed = list(outputs)
        for i, output in tensors.items():
            owner = output.untyped_storage()
            number = owner._cdata
            if number in stay or not owner.nbytes():
                continue
            if number not in lent:
                lent[number] = lender(owner)
                if number not in leaving:
                    self.owners[lent[number]._cdata] = owner
            changed[i] = _in(lent[number], output)
        return changed

    def lends(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in memory that a backward may take."""
        return not self.taken and cdata_of(tensor) in self.owners

    def take(self, args: Sequence[Any], positions: Collection[int]) -> dict[int, Tensor]:
        """Return the arguments at some positions that are in lent memory, as its owners, which are given up, by position."""
        numbers = {i: cdata_of(args[i]) for i in positions if self.lends(args[i])}
        owned = {i: _in(self.owners[number], args[i]) for i, number in numbers.items()}
        for number in numbers.values():
            self.owners.pop(number, None)
        self.taken = True
        return owned


def _in(storage: UntypedStorage, tensor: Tensor) -> Tensor:
    """Return a tensor like another one in a storage like its own."""
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


@dataclass(frozen=True)
class Consumed:
    """Inputs of a backward that a replay leaves nothing of, and how often their storages are held if by them alone."""

    positions: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @staticmethod
    def of(args: Sequence[Any], positions: Collection[int], unused: Mapping[int, int]) -> Consumed:
        """Return how some arguments are held if by nobody else.

        Args:
            args: The arguments of a call.
            positions: Which of them.
            unused: How often each of their storages is held where no call has them, by number.
        """
        numbers = [cdata_of(args[i]) for i in positions]
        storages = tuple(dict.fromkeys(numbers))
        return Consumed(tuple(positions), storages, tuple(unused[number] + numbers.count(number) for number in storages))

    def given_up(self, args: Sequence[Any]) -> bool:
        """Return whether the arguments of a call are held by their list alone, and not kept for another backward."""
        if not self.positions:
            return True
        return (not _keeps_graph() and tuple(map(use_count, self.storages)) == self.counts
                and all(count == IN_LIST for count in _references(args, self.positions)))


def _references(args: Sequence[Any], positions: Sequence[int]) -> list[int]:
    return [sys.getrefcount(args[i]) for i in positions]


IN_LIST, = _references([torch.empty(1)], (0,))
"""The references to a tensor that is in one list, with those that counting takes."""
