"""Results of measuring a region: a timing per executor, and which executor is the fastest by them.

A measurement is keyed by what the region computes, not by its graph or its executor: equal regions share it.

Worked example: ``Measurement("5f0c…", {"triton": Timing(12.1, 6.4), "nvfuser": Timing(10.3, 11.9)}).winner`` is
``"nvfuser"``; its 11.9 µs of the host count where the host is what a plan waits for, see :meth:`Measurement.predictions`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dynafuse.cache.hoisted import hoist_scalars
from dynafuse.cost import calibration
from dynafuse.cost.model import Prediction
from dynafuse.forks import Lock
from dynafuse.ir import Spec

DIFFER = 0.03
"""Share of a kernel's time by which its timings differ: what is faster by less is not known to be faster."""


@dataclass(frozen=True)
class Timing:
    """Times of one executor in microseconds a call, on the device and on the host; None with a ``reason`` if it failed.

    ``captured`` says that the device time was taken by replays of a CUDA graph. A ``transient`` failure, such as one for
    want of memory, may not happen again: it is not stored beyond this process.
    """

    device_us: float | None = None
    host_us: float | None = None
    captured: bool = True
    reason: str = ""
    transient: bool = False

    def longer(self, factor: float) -> Timing:
        """Return the timing with times that are some times as long; of one that failed there are none."""
        device_us, host_us = (us and factor * us for us in (self.device_us, self.host_us))
        return replace(self, device_us=device_us, host_us=host_us)

    def __str__(self) -> str:
        return self.reason if self.device_us is None else f"{self.device_us:.1f} µs"


@dataclass(frozen=True)
class Measurement:
    """The timings of a region by executor. ``executors`` are those that were to be compared, the best prediction first.

    ``reason`` says why executors are missing from ``timings``: what kept the region from being measured at all, or that
    the budget ran out; ``exhausted`` is True for the latter.
    """

    key: str
    timings: Mapping[str, Timing]
    executors: tuple[str, ...] = ()
    reason: str = ""
    exhausted: bool = False

    @property
    def decided(self) -> bool:
        """Return whether every executor was measured or has failed, and at least one has not failed."""
        return bool(self._times) and all(name in self.timings for name in self._names)

    @property
    def winner(self) -> str:
        """Return the fastest executor on the device; unless ``decided``, the best prediction that did not fail."""
        times = self._times
        if self.decided:
            return min(times, key=lambda name: times[name])
        return next((name for name in self._names if not self._failed(name)), self._names[0])

    def handicapped(self, usual: str) -> Measurement:
        """Return the measurement with longer times of all but the usual one, which these have to beat by ``DIFFER``."""
        longer = {name: timing.longer(1 / (1 - DIFFER)) for name, timing in self.timings.items() if name != usual}
        return replace(self, timings={**self.timings, **longer})

    @property
    def failures(self) -> dict[str, str]:
        """Return the executors that failed, with the reason."""
        return {name: timing.reason for name, timing in self.timings.items() if timing.device_us is None}

    @property
    def _names(self) -> tuple[str, ...]:
        return self.executors or tuple(self.timings)

    @property
    def _times(self) -> dict[str, float]:
        times = {name: self.timings[name].device_us for name in self._names if name in self.timings}
        return {name: us for name, us in times.items() if us is not None}

    def _failed(self, name: str) -> bool:
        return name in self.timings and self.timings[name].device_us is None

    def predictions(self, predicted: Mapping[str, Prediction]) -> dict[str, Prediction]:
        """Return the predictions with measured times in place of predicted ones, for ``cost.model.choose``.

        Executors that failed are left out, and compile time counts as none: a kernel that was measured is compiled. If the
        measurement did not decide, times stay as predicted, because measured times do not compare with predicted ones. If
        every executor failed, the predictions are returned as they are.
        """
        usable = {name: prediction for name, prediction in predicted.items() if not self._failed(name)}
        if not self.decided:
            return usable or dict(predicted)
        return {name: self._measured_prediction(name, prediction) for name, prediction in usable.items()}

    def _measured_prediction(self, name: str, predicted: Prediction) -> Prediction:
        timing = self.timings.get(name)
        if timing is None or timing.device_us is None:
            return predicted
        host_us = predicted.host_us if timing.host_us is None else timing.host_us
        return Prediction(timing.device_us, host_us, 0.0, timing.device_us)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as JSON can hold it."""
        timings = {name: asdict(timing) for name, timing in self.timings.items()}
        return {**asdict(replace(self, timings={})), "executors": list(self.executors), "timings": timings}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError: It is anything else.
        """
        try:
            timings = {str(name): _timing(fields) for name, fields in data["timings"].items()}
            return cls(str(data["key"]), timings, tuple(map(str, data["executors"])), str(data["reason"]),
                       bool(data["exhausted"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a measurement: {error}") from None

    def __str__(self) -> str:
        times = ", ".join(f"{name} {self.timings[name]}" for name in self._names if name in self.timings)
        why = f" ({self.reason})" if self.reason else ""
        return f"{times or 'not measured'} → {self.winner}{why}"


def _timing(fields: Mapping[str, Any]) -> Timing:
    """Check a timing that was read. Raises ValueError and TypeError."""
    timing = Timing(**fields)
    for us in (timing.device_us, timing.host_us):
        if us is not None and not (isinstance(us, (int, float)) and math.isfinite(us) and us >= 0):
            raise ValueError(f"{us!r} is no time")
    if timing.device_us is None and not timing.reason:
        raise ValueError("neither a time nor a reason")
    return timing


def measurement_key(spec: Spec, hints: Mapping[str, int], device: torch.device) -> str:
    """Return the key of a region's measurement: a digest of the spec, the device, and the versions that times depend on.

    An ``executor`` among the spec's options does not enter, nor do floats that do not change code.

    Args:
        spec: The region.
        hints: The values of its size symbols, by name, which enter as powers of two.
        device: Where it is measured.
    """
    spec, _ = hoist_scalars(spec)
    spec = replace(spec, options=tuple(option for option in spec.options if option[0] != "executor"))
    sizes = sorted((name, max(hint, 1).bit_length()) for name, hint in hints.items())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else str(device)
    text = "\n".join(map(repr, (spec, sizes, name, sorted(calibration.versions().items()))))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass
class MeasurementStore:
    """The timings that this process has taken, by the region's key and the executor. Threads may share a store."""

    _timings: dict[str, dict[str, Timing]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def __len__(self) -> int:
        return len(self._timings)

    def get(self, key: str) -> dict[str, Timing]:
        """Return the timings of a region by executor; a copy."""
        with self._lock:
            return dict(self._timings.get(key, {}))

    def put(self, key: str, executor: str, timing: Timing) -> None:
        """Store the timing of one executor, in the place of an earlier one.

        Args:
            key: The region's key for measurements.
            executor: The executor's name.
            timing: Its times, or why it has none.
        """
        with self._lock:
            self._timings.setdefault(key, {})[executor] = timing

    def add(self, measurement: Measurement) -> None:
        """Store all timings of a measurement, such as one that was read from a file."""
        for executor, timing in measurement.timings.items():
            self.put(measurement.key, executor, timing)

    def durable(self, key: str) -> Measurement | None:
        """Return the timings of a region that other processes may rely on; None if there are none."""
        timings = {name: timing for name, timing in self.get(key).items() if not timing.transient}
        return Measurement(key, timings, tuple(timings)) if timings else None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._timings.clear()
