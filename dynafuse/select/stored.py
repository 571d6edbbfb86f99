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

    def __init__(self, disk: Disk | None, held: MeasurementStore = MEASUREMENTS) -> None:
        super().__init__()
        self.disk, self.held = disk, held

    def __len__(self) -> int:
        return len(self.held)

    def get(self, key: str) -> dict[str, Timing]:
        """Return what was measured under a key, by this process or by one before it."""
        timings = self.held.get(key)
        if timings or self.disk is None:
            return timings
        measurement = _measurement(self.disk, key)
        if measurement is not None:
            self.held.add(measurement)
        return self.held.get(key)

    def put(self, key: str, executor: str, measured: Timing) -> None:
        """Keep a measurement, on disk if it is one for others too.

        Args:
            key: The region's key for measurements.
            executor: The executor's name.
            measured: Its times, or why it has none.
        """
        self.held.put(key, executor, measured)
        measurement = self.held.durable(key)
        if self.disk is not None and measurement is not None:
            self.disk.write(Entry("measurement", _measurement_key(key), measurement.to_dict()))


def measurements(config: Config) -> MeasurementStore:
    """Return where the tuner looks for measurements and leaves them."""
    return Measurements(disk(config))


def _measurement_key(key: str) -> str:
    return digest_of("measurement", key, sources.digest())


def _measurement(disk: Disk, key: str) -> Measurement | None:
    def decode(entry: Entry) -> Measurement:
        measurement = Measurement.from_dict(entry.data)
        if entry.kind != "measurement" or measurement.key != key:
            raise ValueError(f"it is a {entry.kind} entry of {measurement.key}")
        return measurement

    return read(disk, _measurement_key(key), decode)
