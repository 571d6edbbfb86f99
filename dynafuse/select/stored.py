"""Measurements on disk: what one process has measured, the next ones need not.

Worked example: ``verdicts(config).get(key)`` are the times of a region by executor, of this process or of one before it.
"""

from __future__ import annotations

from dynafuse.cache import sources
from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Entry
from dynafuse.cache.folder import digest_of, disk
from dynafuse.cache.once import read
from dynafuse.config import Config
from dynafuse.select import VERDICTS, Measured, Verdict, VerdictStore


class Verdicts(VerdictStore):
    """The process's measurements, with those on disk behind them."""

    def __init__(self, kept: Disk | None, held: VerdictStore = VERDICTS) -> None:
        super().__init__()
        self.kept, self.held = kept, held

    def __len__(self) -> int:
        return len(self.held)

    def get(self, key: str) -> dict[str, Measured]:
        """What was measured under a key, by this process or by one before it."""
        found = self.held.get(key)
        if found or self.kept is None:
            return found
        verdict = _verdict(self.kept, key)
        if verdict is not None:
            self.held.add(verdict)
        return self.held.get(key)

    def put(self, key: str, executor: str, measured: Measured) -> None:
        """Keep a measurement, on disk if it is one for others too."""
        self.held.put(key, executor, measured)
        verdict = self.held.lasting(key)
        if self.kept is not None and verdict is not None:
            self.kept.write(Entry("verdict", _verdict_key(key), verdict.to_dict()))


def verdicts(config: Config) -> VerdictStore:
    """Where the tuner looks for measurements and leaves them."""
    return Verdicts(disk(config))


def _verdict_key(key: str) -> str:
    return digest_of("verdict", key, sources.digest())


def _verdict(kept: Disk, key: str) -> Verdict | None:
    def decode(entry: Entry) -> Verdict:
        found = Verdict.from_dict(entry.data)
        if entry.kind != "verdict" or found.key != key:
            raise ValueError(f"it is a {entry.kind} entry of {found.key}")
        return found

    return read(kept, _verdict_key(key), decode)
