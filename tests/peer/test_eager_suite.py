"""The plugin by which PyTorch's tests of eager are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITE = '''
import torch
from torch.testing._internal.common_utils import TestCase

class Tests(TestCase):
    def test_compiled(self):
        self.assertTrue(torch.compiler.is_dynamo_compiling())
        self.assertEqual((torch.ones(3) + 1).tolist(), [2, 2, 2])

    def test_wrong(self):
        self.assertEqual((torch.ones(3) + 1).tolist(), [2, 2, 3])
'''


def tried(folder: Path, limit: int) -> str:
    """What pytest says of the suite, with a limit."""
    (folder / "test_small.py").write_text(SUITE)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PEER_LIMIT": str(limit)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.peer.eager_suite", "--noconftest", "-q", "-p", "no:cacheprovider", "test_small.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300).stdout


def test_tests_are_compiled_and_fail_where_they_are_wrong(tmp_path: Path) -> None:
    assert "1 failed, 1 passed" in tried(tmp_path, 0)


def test_a_part_of_each_file(tmp_path: Path) -> None:
    said = tried(tmp_path, 1)
    assert ("1 passed" in said) != ("1 failed" in said)
