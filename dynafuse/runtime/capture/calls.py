"""The function of a captured graph: warms up, records, replays, and launches kernel by kernel wherever that is not safe.

Calls with other sizes, on another stream, or with other parameters have a recording of their own, up to a number; what is
beyond it runs uncaptured. So does a call

- that turns out to take the host less time than a replay would save, three times, with more and more calls between them;
- of one of several layers in training, if only the host's clock speaks for recordings: each would keep memory for itself;
- that would be recorded, but is the first of its thread;
- that finds its recording in use by another thread, or its handed outputs still held: several forwards before a backward, or
  gradients that are accumulated;
- whose arguments are not where the recording reads them: a backward of a forward that ran uncaptured;
- that would leave nothing of saved tensors that are needed once more: a backward under ``retain_graph``;
- during another capture, under a dispatch mode (fake tensors), or with gradients enabled.

Worked example: of a training step's forward, call 1 and 2 warm up, call 3 records and replays, call 4 replays. Where a model
only runs, an image that was in the same memory in calls 1 to 3 is read there; once it is elsewhere the call is launched, two
more warm up, and the next one records a copy of the image.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dynafuse.fallback import Guard
from dynafuse.runtime.alike import sharing_of
from dynafuse.runtime.capture.buffers import Inputs, Outputs, Unrecordable, inputs_of
from dynafuse.runtime.capture.decide import Layout
from dynafuse.runtime.capture.lending import Consumed, Loan, cdata_of
from dynafuse.runtime.capture.pools import Pool, chain
from dynafuse.runtime.capture.recorder import RECORDING, Recorder, at_once
from dynafuse.runtime.capture.traffic import Event, Traffic
from dynafuse.runtime.observers import Replays
from dynafuse.runtime.written import Call, Written

WARM_UPS = 2
"""Calls before one is recorded: kernels are loaded, libraries have chosen theirs. The thread that records made one of them:
libraries keep handles for each thread, which cannot be made during a capture."""

TIMED = 5
"""Calls before one is recorded if the host's clock decides: the shortest of them counts, and the first ones are slow."""

ASKED_AGAIN = (40, 400)
"""Calls that are launched before the host's clock is asked once more, as it may have been asked in a quiet moment."""

MOST_WARM_UPS = 10
"""Calls of a backward in which its forward may be recorded, so that what that hands over is read in place."""

MOST_SIZES = 8
MOST_PLACES = 64
"""Tuples of sizes, and of sizes and addresses of parameters, that are recorded; further ones run uncaptured."""

MOST_MISSES = 3
"""Calls in a row whose arguments are elsewhere, or still needed, before they are recorded anew."""

MOST_REFUSED = 64
"""Calls in a row that find gradients of an earlier one still held, before they are recorded anew with no such memory."""

MOST_RECORDINGS = 4
"""Recordings of one slot, before it runs uncaptured for good."""

MOST_KEPT = 0.1
"""The share of a device's memory that recordings may keep, before there are no further ones."""

Key: TypeAlias = tuple[Any, ...]

log = logging.getLogger(__name__)
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


class Recording:
    """A recorded call with its memory."""

    def __init__(self, inputs: Inputs, outputs: Outputs, replay: Callable[[], object], pool: Pool, number: int,
                 spared: frozenset[int], recorder: Recorder, consumed: Consumed, loan: Loan) -> None:
        """Take what was recorded.

        Args:
            inputs: What it reads.
            outputs: What it writes.
            replay: Runs it again.
            pool: The memory that it uses.
            number: How many recordings were made there before.
            spared: The numbers of those whose memory it leaves alone.
            recorder: What has recorded it.
            consumed: The inputs that a replay leaves nothing of.
            loan: The outputs' memory, as far as it is lent.
        """
        self.inputs = inputs
        self.outputs = outputs
        self.replay = replay
        self.pool = pool
        self.number = number
        self.spared = spared
        self.consumed = consumed
        self.loan = loan
        self.empty = recorder.empty
        self.hands_over = bool(outputs.handed)
        self.lends = bool(loan.owners)  # whether what it hands over is in the pool
        self.outlived = False  # whether gradients were held when it was to be replayed
        self.refused = 0  # calls in a row that found an output of an earlier one still held
        self.shared = 0  # calls in a row that were not alone in holding what a replay leaves nothing of
        self.bytes = inputs.bytes + outputs.bytes
        self.device = recorder.device
        _LIVE.add(self)
        for cdata in (*outputs.handed, *[storage.cdata for storage in inputs.storages]):
            _STAYING[cdata] = self

    def run(self, args: list[Any]) -> tuple[Any, ...] | None:
        """Return the results of a call at whose arguments the recording fits; None where it cannot be replayed now."""
        lock = self.pool.lock
        if not lock.acquire(blocking=False):
            return None
        try:
            if self._held() or self._shares_saved(args) or self._is_held_up():
                return None
            for load in self.inputs.batches:
                load(args)
            self.replay()
            hands_over = self._hands_over_now()
            results = (self.outputs.handing if hands_over else self.outputs.copying)(args, self.empty)
            if hands_over and self.lends:
                self.pool.lent[self.number] = self.outputs, self.loan
        finally:
            lock.release()
        args.clear()
        return results

    def _held(self) -> bool:
        """Return whether handed outputs are still held; where they are again and again, outputs are copied from then on.

        Once is enough for gradients: they are accumulated, or looked at later.
        """
        if not self.outputs.busy:
            self.refused = 0
            return False
        self.refused += 1
        if self.refused >= MOST_MISSES or self.outputs.gives_away:
            self.hands_over = False
        return True

    def _is_held_up(self) -> bool:
        """Return whether somebody holds what a replay would overwrite, and note it of gradients: they outlive their step."""
        holders = self.pool.holders(self.number, self.spared)
        for handed in holders:
            if handed.gives_away:
                handed.outlives = self.outlived = True
        return bool(holders)

    def _shares_saved(self, args: Sequence[Any]) -> bool:
        """Return whether what a replay would leave nothing of is needed once more, and note how often that was in a row."""
        self.shared = 0 if self.consumed.given_up(args) else self.shared + 1
        return self.shared > 0

    def _hands_over_now(self) -> bool:
        """Return whether saved tensors may be handed over; whom hooks on saved tensors show them to is not known."""
        return self.hands_over and saved_tensor_hooks(False) is None


_STAYING: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()
"""Recordings by the storages that they hand over or read in place."""


_LIVE: weakref.WeakSet[Recording] = weakref.WeakSet()
"""All recordings."""


def kept_bytes(device: torch.device) -> int:
    """Return how much memory of a device all recordings keep for their inputs and outputs."""
    return sum(recording.bytes for recording in list(_LIVE) if recording.device == device)


def stays(tensor: Tensor) -> bool:
    """Return whether a tensor is in memory that a recording hands over, or reads in place, at each replay."""
    return cdata_of(tensor) in _STAYING


@dataclass
class Slot:
    """Calls of one tuple of sizes and places: how far they are on the way to a recording."""

    calls: int = 0
    recording: Recording | None = None
    recordings: int = 0
    misses: int = 0
    takes: bool = True  # whether a backward may take the memory of what was saved
    gives: bool = True  # whether gradients may be handed over
    apart: bool = False  # whether they are in no pool, as they are held when the next forward runs
    host_us: float = math.inf  # the shortest time that one of those calls took the host
    asked: int = 0  # how often that was too short
    pause: int = 0  # calls that are launched before any count
    moving: frozenset[int] = field(default_factory=frozenset)  # inputs that have turned out not to stay in place
    places: dict[int, int] | None = None  # the addresses that inputs have had in all of those calls
    presumed: frozenset[int] = field(default_factory=frozenset)  # inputs that are read in place for no other reason
    threads: set[int] = field(default_factory=set)  # those that have run such a call uncaptured

    def note(self, places: dict[int, int]) -> None:
        """Keep those inputs that are where they have been in every call, given by their addresses."""
        self.places = places if self.places is None else dict(self.places.items() & places.items())

    def restart(self) -> None:
        """Count calls anew, and where their inputs are."""
        self.calls = self.misses = 0
        self.places = None


class Captured:
    """The function of a captured graph."""

    def __init__(self, call: Call, layout: Layout, recorder: Recorder, kind: str, strict: bool,
                 least_host_us: float | None = None, replays: Replays | None = None, written: Written | None = None,
                 traffic: Traffic | None = None) -> None:
        """Take a graph's function.

        Args:
            call: The function as it launches kernels: it takes a list, and empties it.
            layout: How a recording treats its inputs and outputs.
            recorder: What records it.
            kind: forward, backward or inference.
            strict: Whether a failed recording raises.
            least_host_us: How long calls have to take the host to be recorded; None to record them whatever they cost.
            replays: Where calls are counted.
            written: Makes that function such that it hands results over in memory of their own, where there are such.
            traffic: What memory calls take and give back, which a backward has in common with its forward.
        """
        self._boxed_call = True  # torch copies what is in the instance's dictionary
        self.launched = call
        self.written = written
        self.traffic = traffic if layout.is_static else None  # one for all sizes would tell of the last ones
        self.layout = layout
        self.recorder = recorder
        self.kind = kind
        self.guard = Guard(strict)
        self.slots: dict[Key, Slot] = {}
        self.sizes: set[Key] = set()
        self.stationary = tuple(sorted(layout.stationary - set(layout.numbers)))
        self.least_host_us = least_host_us
        self.replays = replays or Replays()
        self.presumes = kind == "inference"  # whether inputs that were at one place in every call are read there
        self.closed = False  # whether nothing is recorded any more

    def __call__(self, args: list[Any]) -> Any:
        """Return the results of a call, and empty the list of its arguments."""
        slot = self._slot(args)
        if slot is None:
            return self._launched(args)
        recording = slot.recording
        if recording is None:
            return self._warm(slot, args)
        if not recording.inputs.fit(args):
            self._missed(slot, recording, args)
            return self._launched(args)
        slot.misses = 0
        results = self._replayed(recording, args)
        if results is not None:
            return results
        if recording.shared >= MOST_MISSES:
            slot.takes = False
            self._drop(slot)
        elif recording.refused >= MOST_REFUSED and recording.outputs.gives_away:
            slot.gives = False
            self._drop(slot)
        elif recording.outlived:
            self._drop(slot)  # to be made anew with the backward, whose gradients are in no pool from then on
        return self._launched(args)

    def _slot(self, args: Sequence[Any]) -> Slot | None:
        """Return the slot of a call; None for a call that runs uncaptured."""
        if self.closed or torch.is_grad_enabled() or dispatch_modes():
            return None
        stream = self.recorder.stream()
        if stream is None:
            return None
        sizes = self._sizes(args)
        key = (stream, sizes, *[args[i].data_ptr() for i in self.stationary])
        return self.slots.get(key) or self._new_slot(key, sizes)

    def _new_slot(self, key: Key, sizes: Key) -> Slot | None:
        """Return a new slot, in the place of one that nothing is recorded for if there are many; None if there is none."""
        if sizes not in self.sizes and len(self.sizes) >= MOST_SIZES:
            return None
        if len(self.slots) >= MOST_PLACES:
            unused = next((key for key, slot in list(self.slots.items()) if slot.recording is None), None)
            if unused is None:
                return None
            self.slots.pop(unused, None)
        self.sizes.add(sizes)
        slot = self.slots[key] = Slot()
        return slot

    def _sizes(self, args: Sequence[Any]) -> Key:
        """Return all numbers of a call that are not the same in every call."""
        layout = self.layout
        if layout.is_static:
            return ()
        tensors = (args[i] for i in layout.sized)
        return (*(args[i] for i in layout.numbers), *((t.size(), t.stride(), t.storage_offset()) for t in tensors))

    def _missed(self, slot: Slot, recording: Recording, args: Sequence[Any]) -> None:
        """Note a call whose arguments are elsewhere; after some of them the recording is dropped, to be made anew.

        One is enough if an input was only presumed to stay in place: from then on the graph's recordings copy such inputs.
        One is enough, too, if the forward is recorded anew because of gradients: it will hand over elsewhere what it saves.
        """
        moved = recording.inputs.moved(args)
        slot.misses += 1
        if recording.outputs.outlives:
            slot.apart = True
            self._drop(slot)
            return
        if not moved.isdisjoint(slot.presumed):
            self.presumes = False
        elif slot.misses < MOST_MISSES:
            return
        slot.moving |= moved
        self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        """Forget a recording, to make it anew."""
        slot.restart()
        self.recorder.wait()
        slot.recording = None

    def _warm(self, slot: Slot, args: list[Any]) -> Any:
        """Run a call uncaptured, or record it and replay that."""
        if slot.pause:
            slot.pause -= 1
            return self._launched(args)
        slot.calls += 1
        if self.presumes:
            slot.note({i: arg.data_ptr() for i, arg in enumerate(args) if isinstance(arg, Tensor)})
        warm_ups = TIMED if self.least_host_us and not slot.recordings else WARM_UPS
        is_cold = slot.calls <= warm_ups or threading.get_ident() not in slot.threads
        if is_cold or self._waits_for_forward(slot, args):
            is_watched = self.traffic is not None and self.traffic.is_awaited(self.kind, slot.calls == warm_ups)
            return self._timed(slot, partial(self._watched, slot) if is_watched else self._launched, args)
        if self._is_one_of_several(slot):
            self.replays.refused = "each of several layers would keep memory for itself"
            self._close()
        elif not self._is_worth_it(slot, args):
            self._ask_later(slot)
        if self.closed or slot.pause or slot.recordings >= MOST_RECORDINGS or not self._has_room():
            return self._launched(args)
        slot.recordings += 1
        slot.recording = self.guard.stage("CUDA graphs", lambda: self._recorded(slot, args), self._close)
        self.replays.recordings += slot.recording is not None
        results = None if slot.recording is None else self._replayed(slot.recording, args)
        return self._launched(args) if results is None else results

    def _timed(self, slot: Slot, call: Call, args: list[Any]) -> Any:
        """Run a call uncaptured, and note how long that takes the host, which does not wait for the device."""
        start = time.perf_counter()
        results = call(args)
        slot.host_us = min(slot.host_us, 1e6 * (time.perf_counter() - start))
        slot.threads.add(threading.get_ident())
        return results

    def _watched(self, slot: Slot, args: list[Any]) -> Any:
        """Run a call uncaptured, and note what memory it takes and gives back."""
        assert self.traffic is not None
        told = self.guard.stage("watching memory", self.recorder.watch, lambda: list[Event])
        try:
            return self._launched(args)
        finally:
            placed = () if self.written is None or self._lends_gradients(slot) else self.written.placed
            events = self.guard.stage("watching memory", told, list[Event])
            self.traffic.note(self.kind, events, [result.tensor.bytes for result in placed])

    def _is_worth_it(self, slot: Slot, args: Sequence[Any]) -> bool:
        """Return whether calls take the host as long as they have to, and a backward finds what its forward hands over."""
        if self.least_host_us is None or slot.recordings:
            return True
        return slot.host_us >= self.least_host_us and all(stays(args[i]) for i in self.layout.handed)

    def _ask_later(self, slot: Slot) -> None:
        """Launch some calls before others are counted, or all of them if that was often enough."""
        if slot.asked == len(ASKED_AGAIN):
            self._close()
            return
        slot.restart()
        slot.pause, slot.host_us = ASKED_AGAIN[slot.asked], math.inf
        slot.asked += 1

    def _is_one_of_several(self, slot: Slot) -> bool:
        """Return whether the clock alone speaks for recording a forward that was called with several sets of parameters.

        What a layer's recordings compute on the way is in a pool with what its forward hands over. Launched, all layers do
        so in the same memory, one after the other.
        """
        is_open = bool(self.least_host_us) and not slot.recordings
        return is_open and bool(self.layout.saved) and len({key[2:] for key in list(self.slots)}) > 1

    def _has_room(self) -> bool:
        """Return whether recordings would keep no more memory than they may with another one."""
        return kept_bytes(self.recorder.device) + self.layout.bytes <= MOST_KEPT * self.recorder.memory

    def _waits_for_forward(self, slot: Slot, args: Sequence[Any]) -> bool:
        """Return whether inputs are not yet where a recorded forward will leave them."""
        return slot.calls < MOST_WARM_UPS and not all(stays(args[i]) for i in self.layout.handed)

    def _replayed(self, recording: Recording, args: list[Any]) -> tuple[Any, ...] | None:
        """Return the results of a replay; None where it cannot be now."""
        results = recording.run(args)
        if results is not None:
            self.replays.replayed += 1
        return results

    def _launched(self, args: list[Any]) -> Any:
        """Run a call uncaptured."""
        self.replays.launched += 1
        return self.launched(args)

    def _close(self) -> None:
        """Record nothing any more."""
        self.closed = True

    def _recorded(self, slot: Slot, args: Sequence[Any]) -> Recording | None:
        """Record a call; None if that cannot be now, or if it turns out that it never can."""
        stream = self.recorder.stream()
        assert stream is not None
        lender = self._lender(args, stream) if slot.takes else None
        pool = self._pool(stream) if lender is None else lender.pool
        with at_once(RECORDING, pool.lock) as free:
            if not free:
                slot.recordings -= 1
                return None
            try:
                return self._record(slot, args, pool, stream, lender)
            except Unrecordable as error:
                log.info("%s graph not captured: %s", self.kind, error)
                self._close()
                return None

    def _lender(self, args: Sequence[Any], stream: int) -> Recording | None:
        """Return the forward's recording that lends arguments to a backward, which is then recorded in its pool."""
        if self.kind != "backward":
            return None
        lenders = (_STAYING.get(cdata_of(arg)) for arg in args if isinstance(arg, Tensor))
        lender = next((lender for lender in lenders if lender is not None and lender.loan.stream == stream
                       and any(lender.loan.lends(arg) for arg in args if isinstance(arg, Tensor))), None)
        if lender is None:
            return None
        with lender.pool.lock:
            return lender if lender.pool.takes(lender.loan) else None

    def _pool(self, stream: int) -> Pool:
        """Return where a recording without a lender is made."""
        if not self.layout.saved:
            return self.recorder.pool(stream, shared=True)
        return chain((self.recorder.device, stream), lambda: self.recorder.pool(stream, shared=False))

    def _record(self, slot: Slot, args: Sequence[Any], pool: Pool, stream: int, lender: Recording | None) -> Recording:
        staying = {i for i, arg in enumerate(args) if isinstance(arg, Tensor) and stays(arg)}
        lasting_place = (i for i in slot.places or () if self.presumes and args[i].device == self.recorder.device)
        slot.presumed = frozenset(lasting_place) - self.layout.stationary - staying - slot.moving
        in_place = (self.layout.stationary | staying | slot.presumed) - slot.moving
        with torch.inference_mode(mode=False):  # tensors that every mode may write to
            inputs, given = inputs_of(args, self.layout, in_place, self.recorder.device, self.recorder.empty)
        consumed = Consumed() if lender is None else _hand_back(lender, args, given, sorted(in_place & staying))
        lasting = [None if i in consumed.positions else value for i, value in enumerate(given)]
        number, spared = next(pool.turns), pool.spared(None if lender is None else lender.loan)
        pieces = self.traffic.pieces() if number == 0 and self.traffic is not None else ()  # later ones have the first one's
        lends = lender is not None and self._lends_gradients(slot)
        call, own = self._placed() if slot.gives and not lends else (self.launched, [])
        recorded = self.recorder.record(call, given, pool, pieces)
        saved, gradients = self.layout.saved, self.layout.given if lends else frozenset()
        loan = Loan(stream)
        results = loan.lend(
            recorded.outputs, [*lasting, *own], saved | gradients, lambda storage: self.recorder.lent(storage, recorded))
        own += [results[i] for i in gradients if cdata_of(results[i]) in loan.owners]
        outputs = Outputs(results, lasting, saved, sharing_of(self.kind), own, inputs.copied)
        outputs.settle()
        log.info("%s graph recorded: %d inputs in place, of which %d do not last, %d bytes copied in, %d out, "
                 "%d storages handed over", self.kind, len(inputs.positions), len(consumed.positions), inputs.bytes,
                 outputs.handing.bytes, len(outputs.handed))
        return Recording(inputs, outputs, recorded.replay, pool, number, spared, self.recorder, consumed, loan)

    def _lends_gradients(self, slot: Slot) -> bool:
        """Return whether gradients are handed over in the pool's memory, if a recorded forward lends that of its own."""
        return slot.gives and not slot.apart and bool(self.layout.given) and bool(self.layout.handed)

    def _placed(self) -> tuple[Call, list[Tensor]]:
        """Return the function to record, and the memory that it has for results which are handed over."""
        if self.written is None:
            return self.launched, []
        with torch.inference_mode(mode=False):
            tensors = (result.tensor for result in self.written.placed)
            own = [self.recorder.empty(tensor.shape, tensor.stride, tensor.dtype) for tensor in tensors]
        return self.written.with_memory(own), own


def _hand_back(lender: Recording, args: Sequence[Any], given: list[Any], positions: Sequence[int]) -> Consumed:
    """Replace lent tensors by the owners of their memory, which end with the list; return how they are held otherwise.

    Args:
        lender: What has lent them.
        args: The arguments of a call.
        given: The arguments to record with.
        positions: Which of them are read where they are.
    """
    owned = lender.loan.take(args, positions)
    for i, tensor in owned.items():
        given[i] = tensor
    return Consumed.of(args, tuple(owned), dict(zip(lender.outputs.handed, lender.outputs.unused, strict=True)))
