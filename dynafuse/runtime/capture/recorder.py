"""How a call is recorded and replayed: by CUDA graphs, or by whatever tests put in their place.

Worked example::

    recorder = recorder_for(torch.device("cuda", 0))
    recording = recorder.record(call, [x], recorder.pool(shared=True))
    recording.replay()              # writes where recording.outputs are
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from dynafuse.runtime.capture import pools
from dynafuse.runtime.capture.pools import Pool
from dynafuse.runtime.capture.traffic import Event

MOST_EVENTS = 100_000
"""Times at which memory may be taken or given back while that is watched: torch keeps the last ones."""


@dataclass(frozen=True)
class Recorded:
    """A recorded call: the outputs that every replay writes anew."""

    outputs: Sequence[Any]
    replay: Callable[[], object]


class Recorder(Protocol):
    """What records calls on one device, which has so many bytes of ``memory``."""

    device: torch.device
    memory: int

    def stream(self) -> int | None:
        """Return what tells the current stream from others; None where nothing may be recorded or replayed now."""

    def pool(self, stream: int, shared: bool) -> Pool:
        """Return a pool for a stream: the one that all recordings there share, or a new one."""

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor on the device, outside of any pool.

        Args:
            size: Its sizes.
            stride: Its strides, in elements.
            dtype: Its dtype.
        """

    def record(self, call: Callable[[list[Any]], Any], args: list[Any], pool: Pool, pieces: Sequence[int] = ()) -> Recorded:
        """Record a call without running it. Whatever stands against that is raised.

        Args:
            call: The function, which takes its arguments as one list.
            args: Its arguments; the list is emptied.
            pool: Where what it allocates lies.
            pieces: How many bytes the pool takes before, each in one piece.
        """

    def watch(self) -> Callable[[], Sequence[Event]]:
        """Return what tells what memory of the current stream is taken and given back from now on, and ends that."""

    def lent(self, storage: UntypedStorage, recorded: Recorded) -> UntypedStorage:
        """Return a storage in the memory of one that was recorded, which the allocator may still give to recordings.

        Args:
            storage: The storage, which need not live as long.
            recorded: The call that has made it: its pool lives at least as long.
        """

    def wait(self) -> None:
        """Wait until the device is done with every replay."""


class Side:
    """What is captured in the place of a stream, with the workspace of cuBLAS for all that is replayed there.

    Torch keeps one for each stream that products run on, 32 MB on an H100, and allocates it where it is missing: in each
    pool, if nothing is done about it. Replays on one stream wait for each other, so that one is enough for them.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.stream = torch.cuda.Stream(index)
        self._pool = torch.cuda.graph_pool_handle()  # of nothing else: the workspace is found where it was before
        self._nothing = Nothing(index)
        self._holder: torch.cuda.CUDAGraph | None = None  # a graph as long as which the pool lives

    @contextmanager
    def current(self) -> Iterator[None]:
        """Have the stream be the current one, and its workspace the only one that torch knows; forget it in the end."""
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.stream(self.stream):
                if self._holder is None:
                    self._holder = self._nothing.captured(self._pool)
                torch._C._cuda_beginAllocateCurrentThreadToPool(self.index, self._pool)
                try:
                    torch.cuda.current_blas_handle()
                finally:
                    torch._C._cuda_endAllocateToPool(self.index, self._pool)
                    torch._C._cuda_releasePool(self.index, self._pool)
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()


class Nothing:
    """A graph that does nothing of use, in memory of the stream that is the current one when this is made.

    So is what torch keeps of the device's generator while there are graphs. On another stream either takes a segment.
    """

    def __init__(self, index: int) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(torch.cuda.default_generators[index])
        self._tensor = torch.zeros(1, device=torch.device("cuda", index))

    def captured(self, handle: Any) -> torch.cuda.CUDAGraph:
        """Return the graph, captured on the current stream with a pool of its own.

        Args:
            handle: The pool's.
        """
        self._graph.capture_begin(handle, capture_error_mode="thread_local")
        self._tensor.zero_()
        self._graph.capture_end()
        return self._graph


class CudaRecorder:
    """Records CUDA graphs."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index)
        self.memory: int = torch.cuda.get_device_properties(index).total_memory

    def stream(self) -> int | None:
        """Return the current stream's handle; None while it is being captured, or if another device is current."""
        if torch._C._cuda_isCurrentStreamCapturing() or torch._C._cuda_getDevice() != self.index:
            return None
        return torch._C._cuda_getCurrentRawStream(self.index)

    def pool(self, stream: int, shared: bool) -> Pool:
        """Return the pool of a stream, or a new one."""
        key = (self.index, stream)
        with _POOLS_LOCK:
            pool = _POOLS.get(key) if shared else None
            if pool is None:
                side = _SIDES.get(key)
                if side is None:
                    side = _SIDES[key] = Side(self.index)
                pool = Pool((torch.cuda.graph_pool_handle(), side))
                if shared:
                    _POOLS[key] = pool
            return pool

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor on the device, which is the current one.

        Args:
            size: Its sizes.
            stride: Its strides, in elements.
            dtype: Its dtype.
        """
        allocated: Tensor = torch._C._dynamo.guards._empty_strided_cuda(size, stride, dtype)  # type: ignore[attr-defined]
        return allocated

    def record(self, call: Callable[[list[Any]], Any], args: list[Any], pool: Pool, pieces: Sequence[int] = ()) -> Recorded:
        """Record a call as a CUDA graph.

        Args:
            call: The function, which takes its arguments as one list.
            args: Its arguments; the list is emptied.
            pool: Where what it allocates lies, and on which stream it is recorded.
            pieces: How many bytes the pool takes before, each in one piece.
        """
        def divided(args: list[Any]) -> Any:
            taken = [self.empty((piece,), (1,), torch.uint8) for piece in pieces]
            taken.clear()  # they go back to the pool at once
            return call(args)

        graph, (handle, side) = torch.cuda.CUDAGraph(), pool.handle
        collects = gc.isenabled()
        torch.cuda.synchronize(self.index)
        gc.disable()  # what it frees may be a graph, which must not happen during a capture
        try:
            with side.current():
                outputs = _capture(graph, divided, args, handle)
        except BaseException:
            _recover(self.index, handle, side.stream)
            raise
        finally:
            if collects:
                gc.enable()
        return Recorded(outputs, graph.replay)

    def watch(self) -> Callable[[], Sequence[Event]]:
        """Return what tells what memory is taken and given back from now on.

        There is nothing to be told where the user looks at it, or has chosen another allocator than torch's own.
        """
        if torch._C._cuda_isHistoryEnabled() or torch.cuda.get_allocator_backend() != "native":
            return list[Event]
        history, stream = torch.cuda.memory._record_memory_history, torch._C._cuda_getCurrentRawStream(self.index)
        history(context=None, max_entries=MOST_EVENTS)

        def told() -> Sequence[Event]:
            try:
                seen = torch.cuda.memory._snapshot(self.index)["device_traces"][self.index]
            finally:
                history(None)
            return [] if len(seen) >= MOST_EVENTS else [
                Event(entry["addr"], entry["size"], entry["action"] == "alloc") for entry in seen
                if entry["action"] in ("alloc", "free_completed") and entry["stream"] == stream]

        return told

    def lent(self, storage: UntypedStorage, recorded: Recorded) -> UntypedStorage:
        """Return a storage in the memory of one that was recorded; as long as it lives, the graph keeps the pool.

        Args:
            storage: The storage, which need not live as long.
            recorded: The call that has made it.
        """
        tensor = torch.as_tensor(_Memory(storage, recorded.replay), device=self.device)
        assert tensor.data_ptr() == storage.data_ptr()
        return tensor.untyped_storage()

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.index)


class _Memory:
    """Memory of the device for whoever knows NumPy's protocol for such: what is made of it keeps ``owner`` alive."""

    def __init__(self, storage: UntypedStorage, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),), "typestr": "|u1", "data": (storage.data_ptr(), False), "version": 3}


def _capture(graph: torch.cuda.CUDAGraph, call: Callable[[list[Any]], Any], args: list[Any], handle: Any) -> Sequence[Any]:
    graph.capture_begin(handle, capture_error_mode="thread_local")
    try:
        outputs: Sequence[Any] = call(args)
    except BaseException:
        with suppress(RuntimeError):  # the first error says what is wrong
            graph.capture_end()
        raise
    graph.capture_end()
    return outputs


def _recover(index: int, handle: Any, side: torch.cuda.Stream) -> None:
    """Restore what a capture that the device has ended keeps: the allocator on that stream, and the generators.

    Torch gives them back at the end of a capture, but raises before it does where the device has ended the capture by itself
    (something waited for it, say): random numbers would be refused from then on, and memory of the stream never used again.

    Args:
        index: The device.
        handle: The pool that was recorded to.
        side: The stream.
    """
    with suppress(RuntimeError):  # torch has done so
        torch._C._cuda_endAllocateToPool(index, handle)
    with suppress(RuntimeError):
        nothing = Nothing(index)
        with torch.cuda.stream(side):
            nothing.captured(torch.cuda.graph_pool_handle())  # whose end takes the generators out of every capture


RECORDING = threading.Lock()
"""Held while something is recorded: libraries' workspaces are dropped before and after."""


@contextmanager
def at_once(*locks: threading.Lock) -> Iterator[bool]:
    """Take all of some locks if they are free, and tell whether they were."""
    with ExitStack() as taken:
        for lock in locks:
            if not lock.acquire(blocking=False):
                yield False
                return
            taken.callback(lock.release)
        yield True


_POOLS: weakref.WeakValueDictionary[tuple[int, int], Pool] = weakref.WeakValueDictionary()
"""Shared pools by device and stream, as long as a recording uses one: after that, torch takes its handle no more."""

_SIDES: weakref.WeakValueDictionary[tuple[int, int], Side] = weakref.WeakValueDictionary()
"""What is captured in the place of streams, by device and stream, as long as a pool uses it."""

_POOLS_LOCK = threading.Lock()

RECORDERS: dict[str, Callable[[int], Recorder]] = {"cuda": CudaRecorder}
"""What records, by type of device."""


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what records on a device; None where nothing does."""
    make = RECORDERS.get(device.type)
    return None if make is None else make(device.index or 0)


def reset() -> None:
    """Forget the pools that recordings share; recordings that are still in use keep theirs."""
    with _POOLS_LOCK:
        _POOLS.clear()
    pools.reset()
