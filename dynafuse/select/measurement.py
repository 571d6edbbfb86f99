"""What was measured of a region, and which executor that makes the fastest.

A verdict belongs to what the region computes, not to where it stands or who runs it: equal regions share it.

Worked example: ``Verdict("5f0c…", {"triton": Measured(12.1, 6.4), "nvfuser": Measured(10.3, 11.9)}).winner`` is
``"nvfuser"``; its 11.9 µs of the host count where the host is what a plan waits for, see :meth:`Verdict.predictions`.
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


@dataclass(frozen=True)
class Measured:
    """An executor's microseconds a call, of the device and of the host; None with the ``reason`` why there are none.

    ``captured`` says that the device time is that of CUDA-graph replays. A ``passing`` reason, such as memory that was
    short, holds for this process only.
    """

    device_us: float | None = None
    host_us: float | None = None
    captured: bool = True
    reason: str = ""
    passing: bool = False

    def __str__(self) -> str:
        return self.reason if self.device_us is None else f"{self.device_us:.1f} µs"


@dataclass(frozen=True)
class Verdict:
    """What is known of a region: per executor, best prediction first, what was measured.

    ``reason`` says why executors are missing from ``measured``: what kept the region from being measured at all, or that
    the budget ran out; ``exhausted`` is True for the latter. ``executors`` are those that were to be compared.
    """

    key: str
    measured: Mapping[str, Measured]
    executors: tuple[str, ...] = ()
    reason: str = ""
    exhausted: bool = False

    @property
    def decided(self) -> bool:
        """Whether every executor was measured or failed, and at least one did not fail."""
        return bool(self._times) and all(name in self.measured for name in self._names)

    @property
    def winner(self) -> str:
        """The fastest on the device; the best prediction that did not fail where measuring did not decide."""
        times = self._times
        if self.decided:
            return min(times, key=lambda name: times[name])
        return next((name for name in self._names if not self._failed(name)), self._names[0])

    @property
    def failures(self) -> dict[str, str]:
        """Executors that failed, with the reason."""
        return {name: one.reason for name, one in self.measured.items() if one.device_us is None}

    @property
    def _names(self) -> tuple[str, ...]:
        return self.executors or tuple(self.measured)

    @property
    def _times(self) -> dict[str, float]:
        known = {name: self.measured[name].device_us for name in self._names if name in self.measured}
        return {name: us for name, us in known.items() if us is not None}

    def _failed(self, name: str) -> bool:
        return name in self.measured and self.measured[name].device_us is None

    def predictions(self, predicted: Mapping[str, Prediction]) -> dict[str, Prediction]:
        """Predictions with what was measured in their place, for ``cost.choose``; without executors that failed.

        A kernel that was measured is compiled. Where measuring did not decide, times stay as predicted: what is
        measured is not to be compared with what is not. If all failed, predictions are returned as they are.
        """
        left = {name: one for name, one in predicted.items() if not self._failed(name)}
        if not self.decided:
            return left or dict(predicted)
        return {name: self._measured_prediction(name, one) for name, one in left.items()}

    def _measured_prediction(self, name: str, before: Prediction) -> Prediction:
        found = self.measured.get(name)
        if found is None or found.device_us is None:
            return before
        host_us = before.host_us if found.host_us is None else found.host_us
        return Prediction(found.device_us, host_us, 0.0, found.device_us)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        measured = {name: asdict(one) for name, one in self.measured.items()}
        return {**asdict(replace(self, measured={})), "executors": list(self.executors), "measured": measured}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """What :meth:`to_dict` made. Raises ValueError for anything else."""
        try:
            measured = {str(name): _measured(one) for name, one in data["measured"].items()}
            return cls(str(data["key"]), measured, tuple(map(str, data["executors"])), str(data["reason"]),
                       bool(data["exhausted"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a verdict: {error}") from None

    def __str__(self) -> str:
        times = ", ".join(f"{name} {self.measured[name]}" for name in self._names if name in self.measured)
        why = f" ({self.reason})" if self.reason else ""
        return f"{times or 'not measured'} → {self.winner}{why}"


def _measured(data: Mapping[str, Any]) -> Measured:
    found = Measured(**data)
    for us in (found.device_us, found.host_us):
        if us is not None and not (isinstance(us, (int, float)) and math.isfinite(us) and us >= 0):
            raise ValueError(f"{us!r} is no time")
    if found.device_us is None and not found.reason:
        raise ValueError("neither a time nor a reason")
    return found


def verdict_key(spec: Spec, hints: Mapping[str, int], device: torch.device) -> str:
    """The key of a region's verdict: what it computes, how large dynamic sizes are (as powers of two), on which device.

    Executors do not enter, nor an ``executor`` among the spec's options, nor floats that do not change code.
    """
    spec, _ = hoist_scalars(spec)
    spec = replace(spec, options=tuple(option for option in spec.options if option[0] != "executor"))
    sizes = sorted((name, max(hint, 1).bit_length()) for name, hint in hints.items())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else str(device)
    text = "\n".join(map(repr, (spec, sizes, name, sorted(calibration.versions().items()))))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass
class VerdictStore:
    """Measurements of this process, by the region's key and the executor."""

    _held: dict[str, dict[str, Measured]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str) -> dict[str, Measured]:
        """What was measured under a key, by executor."""
        with self._lock:
            return dict(self._held.get(key, {}))

    def put(self, key: str, executor: str, measured: Measured) -> None:
        """Keep a measurement."""
        with self._lock:
            self._held.setdefault(key, {})[executor] = measured

    def add(self, verdict: Verdict) -> None:
        """Keep all that a verdict knows, say one that was read from a file."""
        for executor, measured in verdict.measured.items():
            self.put(verdict.key, executor, measured)

    def lasting(self, key: str) -> Verdict | None:
        """What is worth keeping beyond this process under a key, or None."""
        measured = {name: one for name, one in self.get(key).items() if not one.passing}
        return Verdict(key, measured, tuple(measured)) if measured else None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
