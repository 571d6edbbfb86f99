"""What a graph saves if it is replayed as a CUDA graph, instead of launched kernel by kernel.

A replay is one call of the host. Inputs that are not read in place are copied in before it, and outputs that leave are
copied out after it, which takes the host a little per tensor and the device a read and a write. The last steps may be
launched behind it, as without a replay::

    replayed = max(device + copies / bandwidth, a replay of the host + tensors × a copy of the host + last launches)
    saved    = plain - replayed, where plain is what the user waits for without (``cost/model.py``)

It pays if that saves a share of the call that is more than the predictions are wrong by. The host's time is what they are
most wrong about: processors differ, and their caches are colder in a model than in a measurement. So a call that would pay
if the host took a few times as long as predicted, also for a replay, is decided by the host's clock when it runs.

Worked example, a decoder layer of 24 launches on an H200: 45 µs of the device and 150 µs of the host a call; replayed, with
0.5 MB copied out, 46 µs of the device and 19 of the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynafuse.cost.device import Device
from dynafuse.cost.model import LEAST, NOTHING, Prediction, objective

REPLAY_HOST_US = 12.0
"""The host's time for a replay: checks, the launch of the graph, the calls that copy."""

NODE_HOST_US = 0.05
"""The host's time per microsecond of launches that are in the graph: its launch takes longer with each node."""

TENSOR_HOST_US = 1.5
"""The host's time per tensor that is copied: it is allocated, and an argument of the call that copies."""

LEAST_SAVED_US = 20.0
LEAST_SHARE = 0.2
"""What has to be saved at least of a call: recording takes time and memory."""

MOST_SLOWER = 4.0
"""How many times the predicted time the host may take: 1.1 to 2.4 times were measured in training steps of the zoo."""


@dataclass(frozen=True)
class Copies:
    """Tensors that are copied at a replay, in or out, and their bytes."""

    tensors: int = 0
    bytes: int = 0

    def __add__(self, other: Copies) -> Copies:
        return Copies(self.tensors + other.tensors, self.bytes + other.bytes)

    def less(self, other: Copies) -> Copies:
        """Return what is left of copies without some of them."""
        return Copies(self.tensors - other.tensors, self.bytes - other.bytes)


@dataclass(frozen=True)
class Replay:
    """Microseconds that a call takes of the device and of the host, of which all or the first steps are replayed."""

    device_us: float
    host_us: float

    @property
    def us(self) -> float:
        """Return the longer of both."""
        return max(self.device_us, self.host_us)


@dataclass(frozen=True)
class Saving:
    """What a call takes launched kernel by kernel, ``plain_us`` in all and ``host_us`` of the host, and as a replay."""

    plain_us: float
    host_us: float
    replayed: Replay

    @property
    def us(self) -> float:
        """Return the microseconds that a replay saves."""
        return self.plain_us - self.replayed.us

    @property
    def pays(self) -> bool:
        """Return whether that is worth a recording."""
        return self.us >= max(LEAST_SAVED_US, LEAST_SHARE * self.plain_us)

    @property
    def least_host_us(self) -> float:
        """Return how long a call by launches has to take the host so that a replay pays, on a host as slow as that.

        It is infinite if a replay takes the host nearly as long, which then is true of any host.
        """
        device_us, host_us, most_share = self.replayed.device_us, self.replayed.host_us, 1 - LEAST_SHARE
        if host_us >= most_share * self.host_us:
            return math.inf
        return max(device_us + LEAST_SAVED_US, device_us / most_share, LEAST_SAVED_US / (1 - host_us / self.host_us))

    @property
    def is_open(self) -> bool:
        """Return whether that may be, though it is not what is predicted."""
        return self.least_host_us <= MOST_SLOWER * self.host_us

    def __str__(self) -> str:
        return f"{self.plain_us:.0f} µs a call by launches, {self.replayed.us:.0f} µs by replay"


def saving(prediction: Prediction, copies: Copies, device: Device, recorded: Prediction | None = None,
           launched: Prediction = NOTHING) -> Saving:
    """Return what a call of a graph saves by replay.

    Args:
        prediction: What a call costs, by launches and as nodes of a CUDA graph.
        copies: What is copied at each replay, in and out together.
        device: The device that is priced.
        recorded: What is recorded costs, where that is another plan's.
        launched: The part of that which is launched behind the replay.
    """
    plain = Prediction(prediction.device_us, prediction.host_us)
    return Saving(objective(plain, device), prediction.host_us, replay_of(recorded or prediction, copies, device, launched))


def replay_of(recorded: Prediction, copies: Copies, device: Device, launched: Prediction = NOTHING) -> Replay:
    """Return what a call takes of which all is replayed, but for what is launched behind the replay.

    Args:
        recorded: What all of it costs.
        copies: What is copied, in and out together.
        device: The device that is priced.
        launched: The part that is launched.
    """
    nodes = recorded.less(launched)
    copied_us = 2 * copies.bytes / max(device.bandwidth_tbs * 1e6, LEAST)
    host_us = REPLAY_HOST_US + NODE_HOST_US * nodes.host_us + TENSOR_HOST_US * copies.tensors + launched.host_us
    return Replay(nodes.captured_us + copied_us + launched.device_us, host_us)
