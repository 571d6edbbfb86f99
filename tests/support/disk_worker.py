"""A process that asks the disk for kernels, with a compiler that sleeps and says so in a file. A program of its own.

``python -m tests.support.disk_worker FOLDER LOG SLEEP_S KEY...`` prints what it got, one JSON list. It imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path

from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Entry
from dynafuse.cache.once import Codec, Traffic, once

CODEC = Codec(lambda text: Entry("triton", text.split()[1], {}, {"source": text.encode() * 2000}),
              lambda entry: entry.blobs["source"][:len(entry.blobs["source"]) // 2000].decode())


def ask(folder: Path, made: Path, sleep_s: float, keys: list[str]) -> tuple[list[str], Traffic]:
    """The kernels of some keys, all asked for before the first is waited for."""
    disk, traffic = Disk(folder, 1 << 30), Traffic()

    def make(key: str) -> Future[str]:
        with made.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {key}\n")
        time.sleep(sleep_s)
        done: Future[str] = Future()
        done.set_result(f"kernel {key}")
        return done

    futures = [once(disk, key, CODEC, lambda key=key: make(key), traffic) for key in keys]
    return [future.result(60) for future in futures], traffic


if __name__ == "__main__":
    got, counted = ask(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    print(json.dumps([got, counted.hits, counted.misses]))
