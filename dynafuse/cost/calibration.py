"""What ``dynafuse calibrate`` measured, as it is stored: one JSON file per device name and versions.

Worked example: on an H200, ``load("NVIDIA H200", known_names)`` reads
``calibration/nvidia-h200-1f0c9a7e.json`` in the cache folder; the last part of the name stands for the versions of
dynafuse, torch, Triton, nvFuser and the driver. A file that is damaged, of other versions or with values that cannot be
is logged and ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import platformdirs

from dynafuse import __version__

log = logging.getLogger(__name__)

FORMAT = 1
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Calibration:
    """Constants measured on a device, which torch calls ``device``; ``date`` is ISO 8601 in UTC."""

    device: str
    versions: Mapping[str, str]
    date: str
    constants: Mapping[str, float]
    format: int = FORMAT


def cache_folder() -> Path:
    """Return the user's cache folder of dynafuse; it need not exist."""
    return Path(os.environ.get("DYNAFUSE_CACHE_DIR") or platformdirs.user_cache_dir("dynafuse")).expanduser()


def folder() -> Path:
    """Return where calibrations are."""
    return cache_folder() / "calibration"


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    distributions = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in ("torch", "triton", "pytorch-triton") or name.startswith("nvfuser"):
            distributions[name] = f"{name} {distribution.version}" if name.startswith("nvfuser") else distribution.version
    fusers = sorted(version for name, version in distributions.items() if name.startswith("nvfuser"))
    return (
        ("dynafuse", __version__),
        ("torch", distributions.get("torch", "none")),
        ("triton", distributions.get("triton", distributions.get("pytorch-triton", "none"))),
        ("nvfuser", ", ".join(fusers) or "none"),
        ("driver", driver()),
    )


def versions() -> dict[str, str]:
    """Return the versions of everything that measured times depend on; of what is missing, ``none``."""
    return dict(_versions())


def driver() -> str:
    """Return the version of NVIDIA's kernel driver."""
    try:
        version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return "none"
    return version[0] if version else "none"


def path_of(device: str, of_versions: Mapping[str, str]) -> Path:
    """Return the file for a device name and versions."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    digest = hashlib.sha256(json.dumps([device, sorted(of_versions.items())]).encode()).hexdigest()[:8]
    return folder() / f"{slug}-{digest}.json"


def save(calibration: Calibration) -> Path:
    """Write a calibration, in folders that only the user can enter; a reader never sees half a file."""
    path = path_of(calibration.device, calibration.versions)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False, encoding="utf-8") as file:
        json.dump(asdict(calibration), file, indent=1)
    os.replace(file.name, path)
    return path


def load(device: str, names: Iterable[str], of_versions: Mapping[str, str] | None = None) -> Calibration | None:
    """Return the calibration of a device with these versions, or None; what cannot be used is told of in the log.

    Args:
        device: The device's name as CUDA has it.
        names: The constants there are; a file with others is none of ours.
        of_versions: Versions by what they are of; None: those at hand.
    """
    if not os.path.isdir(folder()):  # unlike Path.is_dir never an error
        return None
    wanted = versions() if of_versions is None else dict(of_versions)
    calibration = read(path_of(device, wanted), frozenset(names))
    if calibration is not None and (calibration.device != device or dict(calibration.versions) != wanted):
        log.warning("ignored %s: it is for %s with %s", path_of(device, wanted), calibration.device,
                    dict(calibration.versions))
        return None
    return calibration


def stored(names: Iterable[str]) -> list[Calibration]:
    """Return all readable calibrations, whatever the device and the versions, newest last."""
    if not os.path.isdir(folder()):
        return []
    known = frozenset(names)
    calibrations = [read(path, known) for path in sorted(folder().glob("*.json"))]
    return sorted(filter(None, calibrations), key=attrgetter("date"))


def read(path: Path, names: frozenset[str]) -> Calibration | None:
    """Return the calibration in a file, None (and a line of log, if there is something) when it cannot be used.

    Args:
        path: The file.
        names: The constants there are; a file with others cannot be used.
    """
    try:
        if path.stat().st_uid != os.getuid():
            raise ValueError("another user owns it")
        return _checked(json.loads(path.read_text(encoding="utf-8")), names)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("ignored %s: %s", path, error)
        return None


def _checked(data: object, names: frozenset[str]) -> Calibration:
    """Return the calibration that parsed JSON stands for; ValueError or TypeError if it stands for none."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("not a calibration of this format")
    if not all(isinstance(data.get(name), dict) for name in ("versions", "constants")):
        raise ValueError("versions and constants have to be objects")
    calibration = Calibration(**data)
    texts = [calibration.device, calibration.date, *calibration.versions.values()]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("device, date and versions have to be texts")
    if unknown := calibration.constants.keys() - names:
        raise ValueError(f"unknown constants {', '.join(sorted(unknown))}")
    for name, value in calibration.constants.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}")
    return calibration
