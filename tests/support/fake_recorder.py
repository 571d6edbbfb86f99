"""A recorder for CPU tensors with the hazards of CUDA graphs: what it replays reads and writes the recorded addresses.

Recording leaves no trace but garbage in the outputs, as nothing has run; a replay overwrites the outputs of the replay
before, and what other recordings of its pool have left there, also what it reads of that.

Worked example::

    with recording_on_cpu() as recorder:
        compiled(fn, capture="always")(x)       # three times
    assert recorder.replays == 1
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from dynafuse.runtime.capture.buffers import extent_of
from dynafuse.runtime.capture.lending import use_count
from dynafuse.runtime.capture.pools import Pool
from dynafuse.runtime.capture.recorder import RECORDERS, Recorded
from dynafuse.runtime.capture.traffic import Event


@dataclass(frozen=True)
class Place:
    """A tensor by its address: it keeps nothing alive."""

    address: int
    start: int  # of the storage
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    extent: int
    reach: int  # elements to the end of the storage: tensors at one address have one storage, as the interpreter takes for granted

    @staticmethod
    def of(tensor: Tensor) -> Place:
        reach = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
        return Place(tensor.data_ptr(), start_of(tensor), tensor.size(), tensor.stride(), tensor.dtype, extent_of(tensor), reach)

    def memory(self, elements: int | None = None) -> Tensor:
        """All memory that it spans, or so many elements from where it begins, as they are now."""
        elements = self.extent if elements is None else elements
        with torch.inference_mode(mode=False):
            if not elements:
                return torch.empty(0, dtype=self.dtype)
            memory = (ctypes.c_byte * (elements * self.dtype.itemsize)).from_address(self.address)
            return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype)

    def tensor(self, memory: Tensor | None = None) -> Tensor:
        """What is at the address now, or in other memory."""
        return (self.memory(self.reach) if memory is None else memory).as_strided(self.size, self.stride)


def _uses(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return use_count(storage._cdata), sys.getrefcount(storage)


ALONE = _uses(torch.empty(1))
"""How often the storage of a tensor is held that is in one variable, by tensors and in Python."""


def kept(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those tensors whose memory somebody else keeps from being given to others."""
    def held(some: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor in some if any(count > alone for count, alone in zip(_uses(tensor), ALONE, strict=True))]

    doubtful = held(tensors)
    if doubtful:
        gc.collect()  # Triton's interpreter leaves storages in circles
    return held(doubtful)


def start_of(tensor: Tensor) -> int:
    """The address at which a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def spoil(tensor: Tensor) -> None:
    """Overwrite all memory that a tensor spans."""
    memory = Place.of(tensor).memory()
    memory.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 93)


class FakeRecorder:
    """Records calls on CPU tensors."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.memory = 1 << 40
        self.recordings = 0
        self.pieces: list[Sequence[int]] = []  # bytes that recordings began with
        self.traffic: list[Sequence[Event]] = []  # of calls that are watched
        self.replays = 0
        self.capturing = False  # whether somebody else captures the current stream
        self.failing: Exception | None = None
        self.shared = Pool(list[list[Tensor]]())

    def stream(self) -> int | None:
        return None if self.capturing else 0

    def pool(self, stream: int, shared: bool) -> Pool:
        return self.shared if shared else Pool(list[list[Tensor]]())

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype).zero_()  # valid indices: recording runs the call here

    def wait(self) -> None:
        pass

    def watch(self) -> Callable[[], Sequence[Event]]:
        return lambda: self.traffic.pop(0) if self.traffic else ()

    def lent(self, storage: UntypedStorage, recorded: Recorded) -> UntypedStorage:
        memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        memory.owner = recorded.replay  # which keeps the pool
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def record(self, call: Callable[[list[Any]], Any], args: list[Any], pool: Pool, pieces: Sequence[int] = ()) -> Recorded:
        if self.failing is not None:
            raise self.failing
        self.recordings += 1
        self.pieces.append(pieces)
        passed = {start_of(arg) for arg in args if isinstance(arg, Tensor)}
        spared = set(map(start_of, kept([tensor for other in pool.handle for tensor in other]))) - passed
        given = [Place.of(arg) if isinstance(arg, Tensor) else arg for arg in args]
        inputs = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
        with unchanged([arg for arg in args if isinstance(arg, Tensor)]):
            outputs, again = call(list(args)), call(list(args))
        args.clear()
        constants = {a.untyped_storage()._cdata for a, b in zip(outputs, again, strict=True)
                     if isinstance(a, Tensor) and a.untyped_storage()._cdata == b.untyped_storage()._cdata}
        places = [i for i, output in enumerate(outputs) if isinstance(output, Tensor)
                  and output.untyped_storage()._cdata not in inputs | constants]
        written = [outputs[i] for i in places]
        for tensor in written:
            spoil(tensor)
        pool.handle.append(written)

        returned = {start_of(output) for output in outputs if isinstance(output, Tensor)} - set(map(start_of, written))

        def replay() -> None:
            self.replays += 1
            pooled = [tensor for other in pool.handle for tensor in other]
            starts = set(map(start_of, pooled))
            read = [arg.tensor(arg.memory().clone()) if isinstance(arg, Place) and arg.start in starts else arg for arg in given]
            for tensor in pooled:
                if start_of(tensor) not in returned | spared:
                    spoil(tensor)
            results = call([arg.tensor() if isinstance(arg, Place) else arg for arg in read])
            for i, tensor in zip(places, written, strict=True):
                Place.of(tensor).memory().copy_(Place.of(results[i]).memory())

        return Recorded(outputs, replay)


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put tensors and the generator back as they were."""
    memories = [Place.of(tensor).memory() for tensor in tensors]
    before, state = [memory.clone() for memory in memories], torch.get_rng_state()
    try:
        yield
    finally:
        for memory, old in zip(memories, before, strict=True):
            memory.copy_(old)
        torch.set_rng_state(state)


@contextmanager
def recording_on_cpu() -> Iterator[FakeRecorder]:
    """Have graphs of CPU tensors recorded in the block."""
    recorder = FakeRecorder()
    RECORDERS["cpu"] = lambda index: recorder
    try:
        yield recorder
    finally:
        del RECORDERS["cpu"]


def together(*work: Callable[[], None]) -> None:
    """Run functions in threads that begin together; what one raises is raised."""
    barrier, errors = threading.Barrier(len(work)), list[BaseException]()

    def run(one: Callable[[], None]) -> None:
        try:
            barrier.wait()
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
