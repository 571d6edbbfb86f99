"""Fetches PyTorch's tests, which come with Debian's source package of it, into a folder that git ignores.

``PEER_SUITE`` names a folder that has them already (its ``inductor``, ``functorch`` and, for Dynamo's, ``dynamo``), as a machine
without a network needs.
The system's own configuration of apt is not touched.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main\n"
NEEDED = ("inductor", "functorch")
"""Folders that the modes take their tests from."""

FOLDERS = (*NEEDED, "dynamo")
"""Folders that are fetched, beside the files that lie in none."""


class NoSuite(Exception):
    """The suite is not there, and cannot be fetched."""


def fetched() -> Path:
    """The folder of the suite, which is fetched where it is missing."""
    folder = Path(os.environ.get("PEER_SUITE") or ROOT / ".peer" / "test")
    own = "PEER_SUITE" not in os.environ
    if all((folder / name).is_dir() for name in (FOLDERS if own else NEEDED)):
        return folder
    if not own:
        raise NoSuite(f"PEER_SUITE={folder} has no folders {' and '.join(NEEDED)}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        _extract(_download(Path(temporary)), folder)
    return folder


def _download(folder: Path) -> Path:
    """The archive of the package's upstream source."""
    sources = folder / "sources.list"
    sources.write_text(os.environ.get("PEER_APT_SOURCE", SOURCES))
    (folder / "lists" / "partial").mkdir(parents=True)
    settings = [f"Dir::Etc::sourcelist={sources}", "Dir::Etc::sourceparts=/dev/null", f"Dir::State::Lists={folder / 'lists'}",
                f"Dir::Cache={folder}", "APT::Sandbox::User="]
    apt = ["apt-get", "-qq", *(word for setting in settings for word in ("-o", setting))]
    try:
        subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "source", "--download-only", "pytorch"], cwd=folder, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoSuite(f"{error}\nSet PEER_SUITE to the folder test of a checkout of PyTorch 2.6.") from error
    return next(folder.glob("pytorch_*.orig.tar.*"))


def _extract(archive: Path, folder: Path) -> None:
    """Unpack the folders of tests that are run."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, _wanted(tar), filter="data")


def _wanted(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        parts = PurePosixPath(member.name).parts  # pytorch-2.6.0/test/inductor/…
        wanted = len(parts) == 3 or (len(parts) > 3 and parts[2] in FOLDERS)
        if wanted and parts[1] == "test" and member.isfile():
            member.name = str(PurePosixPath(*parts[2:]))
            yield member


if __name__ == "__main__":
    print(fetched())
