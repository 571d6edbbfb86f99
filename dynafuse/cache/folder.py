"""The cache of this user on disk, as options and torch want it; and its part in torch's bundles of caches.

Worked example: ``disk(config)`` is the ``Disk`` in ``DYNAFUSE_CACHE_DIR``, or None with ``options={"cache": False}``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from functools import cache
from pathlib import Path

import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from dynafuse import config as options
from dynafuse.cache.disk import KERNELS, Disk
from dynafuse.cache.entry import Damaged, unpack
from dynafuse.config import Config
from dynafuse.cost import calibration

log = logging.getLogger(__name__)

ARTIFACT = "dynafuse"


@cache
def _disk(folder: str, limit_mb: int) -> Disk:
    return Disk(Path(folder), limit_mb << 20, _record)


def disk(config: Config) -> Disk | None:
    """Return the cache on disk; None where an option, or torch, says that there is to be none."""
    if not config.cache or not config.cache_size_mb or torch.compiler.config.force_disable_caches:
        return None
    return _disk(str(folder()), config.cache_size_mb)


def folder() -> Path:
    """Return where entries are kept."""
    return calibration.cache_folder() / KERNELS


def digest_of(*parts: str) -> str:
    """Return the key of an entry that depends on some texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


def _record(key: str, packed: bytes) -> None:
    """Take an entry along in ``torch.compiler.save_cache_artifacts``."""
    CacheArtifactManager.record_artifact(ARTIFACT, key, packed)


class KernelArtifact(CacheArtifact):
    """An entry in torch's bundle of caches."""

    def populate_cache(self) -> None:
        """Keep it, if it is sound."""
        target = disk(options.resolve())
        try:
            unpack(self.content, self.key)
            if target is not None:
                target.put(self.key, self.content)
        except (Damaged, ValueError) as error:
            log.warning("ignored %s of torch's cache artifacts: %s", self.key, error)

    @staticmethod
    def type() -> str:
        """Return its name among torch's kinds of artifacts."""
        return ARTIFACT


with contextlib.suppress(AssertionError):  # registered before: this module was loaded anew
    CacheArtifactFactory.register(KernelArtifact)
