"""Where the project is, and the environment of a process of its own that a test starts.

Worked example: ``python("-m", "tests.support.native", "goldens", env=environment(interpreted=False))`` compiles natively and gives what it printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The root of the repository: ``dynafuse``, ``bench`` and ``tests`` are imported from there."""


def environment(*, interpreted: bool = True, **variables: str) -> dict[str, str]:
    """Return this process's environment for one that imports from the repository.

    Args:
        interpreted: False leaves out ``TRITON_INTERPRET``, at which Triton looks when it is imported.
        variables: What is set on top.
    """
    kept = {name: value for name, value in os.environ.items() if interpreted or name != "TRITON_INTERPRET"}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths)} | variables


def python(*arguments: str, env: Mapping[str, str], timeout: float | None = None) -> str:
    """Run Python with some arguments and return what it printed; AssertionError with its last words if it fails."""
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=timeout)
    assert not done.returncode, done.stderr[-4000:]
    return done.stdout
