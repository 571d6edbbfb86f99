"""Measurements on disk: what one process has measured, the next ones need not.

Worked example: ``measurements(config).get(key)`` are the times of a region by executor, of this process or of one before it.
"""

from __future__ import annotations

from dynafuse.cache import sources
from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Entry
from dynafuse.cache.folder import digest_of, disk
from dynafuse.cache.once import read
from dynafuse.config import Config
from dynafuse.select import MEASUREMENTS, Measurement, MeasurementStore, Timing


class Measurements(MeasurementStore):
    """The process's measurements, with those on disk behind them."""

    def __init__(self, kept: Disk | None, held: MeasurementStore = MEASUREMENTS) -> None:
        super().__init__()
        self.kept, self.held = kept, held

    def __len__(self) -> int:
        return len(self.held)

    def get(self, key: str) -> dict[str, Timing]:
        """What was measured under a key, by this process or by one before it."""
        found = self.held.get(key)
        if found or self.kept is None:
            return found
        measurement = _measurement(self.kept, key)
        if measurement is not None:
            self.held.add(measurement)
        return self.held.get(key)

    def put(self, key: str, executor: str, measured: Timing) -> None:
        """Keep a measurement, on disk if it is one for others too."""
        self.held.put(key, executor, measured)
        measurement = self.held.durable(key)
        if self.kept is not None and measurement is not None:
            self.kept.write(Entry("measurement", _measurement_key(key), measurement.to_dict()))


def measurements(config: Config) -> MeasurementStore:
    """Where the tuner looks for measurements and leaves them."""
    return Measurements(disk(config))


def _measurement_key(key: str) -> str:
    return digest_of("measurement", key, sources.digest())


def _measurement(kept: Disk, key: str) -> Measurement | None:
    def decode(entry: Entry) -> Measurement:
        found = Measurement.from_dict(entry.data)
        if entry.kind != "measurement" or found.key != key:
            raise ValueError(f"it is a {entry.kind} entry of {found.key}")
        return found

    return read(kept, _measurement_key(key), decode)
