"""The memory of a recording: where it reads its inputs, and how what leaves it is kept from the next replay.

A replay reads and writes the addresses that it was recorded with. So each input is either read in place, as long as it is at
the recorded address, or copied into a buffer before the replay. And each output is either copied into memory of its own
after the replay, or handed over: then there is no other replay until nothing holds its memory any more.

Outputs that share memory share it also after that: they are copied as one group. An output that is an input, or a view of
one, is made of what the caller gave.

Worked example, a linear layer: ``x`` is copied in, ``weight`` is read in place, ``y`` is copied out, and ``relu``'s mask,
which only the backward sees, is handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dynafuse.fx import extent
from dynafuse.runtime.alike import Sharing
from dynafuse.runtime.capture.decide import Layout
from dynafuse.runtime.capture.lending import cdata_of, use_count

guards: Any = torch._C._dynamo.guards
reinterpret = guards._reinterpret_tensor
Empty: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]
"""Allocates a tensor of some sizes, strides and dtype."""

Maker: TypeAlias = Callable[[Sequence[Any], Sequence[Tensor]], Any]
"""Makes one result of a call's arguments and of the tensors that were allocated for its outputs."""


class Unrecordable(Exception):
    """A graph turned out, at its recording, to be one that cannot be replayed exactly."""


# Inputs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Which inputs are read in place, at which addresses, and what the others are copied into.

    Where parameters are is part of what a recording is looked up by, so that they need no check.
    """

    positions: tuple[int, ...]  # of inputs that are read in place, other than parameters
    addresses: list[int]  # of those
    storages: frozenset[StorageWeakRef]  # of all inputs that are read in place: none of a later tensor has their numbers
    batches: tuple[Load | Sending, ...]  # of inputs that are copied

    def fit(self, args: Sequence[Any]) -> bool:
        """Return whether arguments are where the recording reads them."""
        return [args[i].data_ptr() for i in self.positions] == self.addresses

    def moved(self, args: Sequence[Any]) -> frozenset[int]:
        """Return which inputs are elsewhere."""
        pairs = zip(self.positions, self.addresses, strict=True)
        return frozenset(i for i, address in pairs if args[i].data_ptr() != address)

    @property
    def copied(self) -> frozenset[int]:
        """Return which inputs are copied as they are."""
        return frozenset(i for batch in self.batches if isinstance(batch, Load) for i in batch.positions)

    @property
    def bytes(self) -> int:
        """Count the bytes that are copied in."""
        return sum(target.nbytes for batch in self.batches for target in batch.targets)


@dataclass(frozen=True)
class Load:
    """Inputs of one dtype that are copied into buffers by one call."""

    positions: tuple[int, ...]
    targets: list[Tensor]
    extents: tuple[int | None, ...]  # of inputs that are not dense: of the memory that is copied instead

    def __call__(self, args: Sequence[Any]) -> None:
        if len(self.targets) == 1:
            self.targets[0].copy_(_source(args[self.positions[0]], self.extents[0]))
        else:
            sources = [_source(args[i], extent) for i, extent in zip(self.positions, self.extents, strict=True)]
            torch._foreach_copy_(self.targets, sources)


@dataclass(frozen=True)
class Sending:
    """Numbers of one dtype on the host, which are sent to a buffer on the device together."""

    positions: tuple[int, ...]
    targets: list[Tensor]  # the buffer

    def __call__(self, args: Sequence[Any]) -> None:
        self.targets[0].copy_(torch.stack([args[i] for i in self.positions]))


def _source(tensor: Tensor, extent: int | None) -> Tensor:
    return tensor if extent is None else tensor.as_strided((extent,), (1,))


def inputs_of(args: Sequence[Any], layout: Layout, in_place: frozenset[int], device: torch.device,
              empty: Empty) -> tuple[Inputs, list[Any]]:
    """Return how the inputs of a recording are read, and the arguments to record with.

    Args:
        args: The arguments of the call that is recorded.
        layout: How the recording treats them.
        in_place: Positions of those that are read where they are. What the graph writes to has to be among them: a copy
            would be written instead.
        device: Where the recording runs; numbers that lie on the host are sent there.
        empty: Allocates the buffers that the others are copied into, on that device.
    """
    assert layout.written <= in_place
    recorded, copied = list(args), dict[torch.dtype, list[tuple[int, Tensor, int | None]]]()
    on_host: dict[torch.dtype, list[int]] = {}
    for i, arg in enumerate(args):
        if not isinstance(arg, Tensor) or i in in_place:
            continue
        if arg.device != device:
            on_host.setdefault(arg.dtype, []).append(i)
            continue
        recorded[i], target, extent = _buffer(arg, empty)
        copied.setdefault(arg.dtype, []).append((i, target, extent))
    sendings = []
    for dtype, numbers in on_host.items():
        together = empty((len(numbers),), (1,), dtype)
        sendings.append(Sending(tuple(numbers), [together]))
        for i, number in zip(numbers, together.unbind(), strict=True):
            recorded[i] = number
    stays = [i for i in sorted(in_place) if isinstance(args[i], Tensor)]
    positions = tuple(i for i in stays if i not in layout.stationary)
    batches = (tuple(zip(*rows, strict=True)) for rows in copied.values())
    loads = tuple(Load(numbers, list(targets), extents) for numbers, targets, extents in batches)
    storages = frozenset(StorageWeakRef(args[i].untyped_storage()) for i in stays)
    return Inputs(positions, [args[i].data_ptr() for i in positions], storages, (*loads, *sendings)), recorded


def _buffer(arg: Tensor, empty: Empty) -> tuple[Tensor, Tensor, int | None]:
    """Return a buffer like an input, what is copied into, and the extent of an input that is not dense."""
    if _is_dense(arg):
        buffer = empty(tuple(arg.size()), arg.stride(), arg.dtype)
        return buffer, buffer, None
    elements = extent_of(arg)
    memory = empty((elements,), (1,), arg.dtype)
    return memory.as_strided(arg.size(), arg.stride()), memory, elements


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are all of the memory that it spans, each once."""
    return bool(torch._debug_has_internal_overlap(tensor) == 0)


def extent_of(tensor: Tensor) -> int:
    """Return how many elements of memory a tensor spans."""
    return extent(tensor.size(), tensor.stride())


# Outputs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Outputs of a recording in one storage, which may be handed over: saved for the backward, or gradients."""

    source: Tensor  # what is copied out of: the output itself, or all the memory up to the end of the last one
    cdata: int  # of the storage
    handed: bool
    own: bool


@dataclass(frozen=True)
class Emission:
    """How a call's results are made after a replay."""

    shapes: tuple[tuple[Sequence[int], Sequence[int], torch.dtype], ...]  # of what is allocated
    batches: tuple[Store, ...]
    given: tuple[tuple[Tensor, Sequence[int], Sequence[int]], ...]  # what is handed over in memory of its own
    makers: tuple[Maker, ...]

    def __call__(self, args: Sequence[Any], empty: Empty) -> tuple[Any, ...]:
        fresh = [empty(*shape) for shape in self.shapes]
        for batch in self.batches:
            batch(fresh)
        fresh += [reinterpret(source, size, stride, 0) for source, size, stride in self.given]
        return tuple([make(args, fresh) for make in self.makers])

    @property
    def bytes(self) -> int:
        """Count the bytes that are copied out."""
        return sum(source.nbytes for batch in self.batches for source in batch.sources)


@dataclass(frozen=True)
class Store:
    """Outputs of one dtype that are copied out by one call."""

    positions: tuple[int, ...]  # among what is allocated
    sources: list[Tensor]

    def __call__(self, fresh: Sequence[Tensor]) -> None:
        if len(self.sources) == 1:
            fresh[self.positions[0]].copy_(self.sources[0])
        else:
            torch._foreach_copy_([fresh[i] for i in self.positions], self.sources)


class Outputs:
    """The outputs of a recording, and the ways in which they leave it."""

    def __init__(self, outputs: Sequence[Any], args: Sequence[Any], saved: frozenset[int], sharing: Sharing,
                 own: Sequence[Tensor] = (), copied: frozenset[int] = frozenset()) -> None:
        """Take the outputs of a recorded call.

        Args:
            outputs: What the recorded call returned.
            args: The arguments that it was recorded with, without those that it has freed.
            saved: Positions of outputs that only the backward sees.
            sharing: Makes outputs that share memory with others.
            own: The memory of outputs that are handed to the user: of no pool, or lent by one.
            copied: Positions of arguments that are buffers, into which inputs are copied. What of one only the backward
                sees is handed over in the buffer, where a recorded backward finds it without a copy of its own.
        """
        self.sharing = sharing
        apart = {cdata_of(memory) for memory in own}
        members: dict[int, list[int]] = {}
        for i, output in enumerate(outputs):
            if isinstance(output, Tensor):
                members.setdefault(cdata_of(output), []).append(i)
        arguments = {cdata_of(arg): i for i, arg in enumerate(args) if isinstance(arg, Tensor)}
        buffers = {cdata: i for cdata, i in arguments.items()
                   if i in copied and cdata in members and saved.issuperset(members[cdata])}
        self.inputs = {cdata: i for cdata, i in arguments.items() if cdata not in buffers}
        members = {cdata: group for cdata, group in members.items() if cdata not in self.inputs}
        self.groups = tuple(_group([outputs[i] for i in group], saved.issuperset(group), cdata in apart)
                            for cdata, group in members.items())
        self.handed = tuple(group.cdata for group in self.groups if group.handed)
        self.gives_away = any(group.own for group in self.groups)
        self.outlives = False  # whether gradients in a pool's memory were held when the next forward ran
        self.copying = self._emission(outputs, args, hand_over=False)
        self.handing = self._emission(outputs, args, hand_over=True) if self.handed else self.copying
        held = [outputs[i] for group in members.values() for i in group]
        self.held = (*own, *held, *[args[i] for i in buffers.values()])  # keeps the memory
        storages = {cdata_of(output): output.untyped_storage() for output in self.held}
        self.bytes = sum(storage.nbytes() for cdata, storage in storages.items() if cdata not in buffers)
        self.unused: tuple[int, ...] = ()  # how often the storages of handed outputs are held by nobody else

    def settle(self) -> None:
        """Note how often the storages of handed outputs are held; call it when nobody else does."""
        self.unused = tuple(map(use_count, self.handed))

    @property
    def busy(self) -> bool:
        """Return whether something still holds an output that was handed over."""
        return tuple(map(use_count, self.handed)) != self.unused

    def _emission(self, outputs: Sequence[Any], args: Sequence[Any], hand_over: bool) -> Emission:
        copied = [group for group in self.groups if not (hand_over and group.handed)]
        given = [group for group in self.groups if hand_over and group.own]
        leaving = [*copied, *given]
        places = {group.cdata: place for place, group in enumerate(leaving)}
        batches: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for place, group in enumerate(copied):
            batches.setdefault(group.source.dtype, []).append((place, group.source))
        rows = (tuple(zip(*pairs, strict=True)) for pairs in batches.values())
        sources = {group.cdata: group.source for group in leaving}
        return Emission(
            tuple((tuple(group.source.size()), group.source.stride(), group.source.dtype) for group in copied),
            tuple(Store(positions, list(tensors)) for positions, tensors in rows),
            tuple((group.source, tuple(group.source.size()), group.source.stride()) for group in given),
            tuple(self._maker(output, args, places, sources) for output in outputs))

    def _maker(self, output: Any, args: Sequence[Any], places: dict[int, int], sources: dict[int, Tensor]) -> Maker:
        if not isinstance(output, Tensor):
            return lambda args, fresh: output
        cdata = cdata_of(output)
        if cdata in self.inputs:
            for i, arg in enumerate(args):
                if output is arg:
                    return itemgetter_of_arguments(i)
            return _view_of_input(output, self.inputs[cdata], args[self.inputs[cdata]])
        size, stride, offset = tuple(output.size()), output.stride(), output.storage_offset()
        if cdata not in places:
            return lambda args, fresh: reinterpret(output, size, stride, 0)
        place = places[cdata]
        if output is sources[cdata]:
            return lambda args, fresh: fresh[place]
        # With the version of what it shares memory with: autograd has to know if one is written to and it has saved another.
        return lambda args, fresh: self.sharing(fresh[place], size, stride, offset)


def itemgetter_of_arguments(position: int) -> Maker:
    """Return what makes an output that is an input."""
    get = itemgetter(position)
    return lambda args, fresh: get(args)


def _view_of_input(output: Tensor, position: int, arg: Tensor) -> Maker:
    if output.dtype != arg.dtype:
        raise Unrecordable(f"an output is input {position} in another dtype")
    size, stride, offset = output.size(), output.stride(), output.storage_offset() - arg.storage_offset()

    def view(args: Sequence[Any], fresh: Sequence[Tensor]) -> Tensor:
        given: Tensor = args[position]
        return given.as_strided(size, stride, given.storage_offset() + offset)

    return view


def _group(outputs: Sequence[Tensor], saved: bool, own: bool) -> Group:
    first = outputs[0]
    if any(output.dtype != first.dtype for output in outputs):
        raise Unrecordable("outputs of several dtypes share memory")
    cdata = cdata_of(first)
    end = max(output.storage_offset() + extent_of(output) if output.numel() else 0 for output in outputs)
    # Views are made of what they are of in eager: torch guards the sizes of that, too, where another graph is given them.
    bases = [output if output._base is None else output._base for output in outputs]
    for whole in (*bases, *outputs):
        if whole.dtype == first.dtype and whole.storage_offset() == 0 and extent_of(whole) == end and _is_dense(whole):
            return Group(whole, cdata, saved or own, own)
    return Group(first.as_strided((end,), (1,), 0), cdata, saved or own, own)
