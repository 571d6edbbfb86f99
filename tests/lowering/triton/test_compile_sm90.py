"""Generated kernels compile to cubins for compute capability 9.0, on any machine, without spilling registers."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.processes import environment, python

MOST_SPILLS = 0
"""Bytes of spill stores and loads in one kernel. A row that no longer fits in registers belongs in a loop."""

MOST_SHARED = 228 * 1024 - 1024
"""Bytes of shared memory that a program may have on an H100 or H200."""

FEWEST = {"goldens": 20, "classes": 10, "llama": 10, "numbers": 40, "folds": 5, "doubles": 40, "indices": 10, "integers": 60, "positions": 20,
          "signs": 9, "windows": 30, "scans": 20, "aligned": 10, "slices": 2}
"""Kernels that there are at least in a group: fewer means that the sources went missing."""

PROCESSES = ["goldens classes llama numbers folds doubles indices", "integers positions signs", "windows scans aligned slices"]
"""Groups that one process compiles: to start one takes longer than to compile some of them."""

NEEDS_LIBDEVICE = re.compile("_sin|_cos|_log|_iota_c ")
"""Kernels of a Llama that have to wait until libdevice is read: with a sine or a logarithm. Names end where they are long."""


def natively(*groups: str) -> dict[str, dict[str, dict[str, int]]]:
    """What ``tests.support.native`` reports of groups of kernels."""
    printed = python("-m", "tests.support.native", *groups, env=environment(interpreted=False))
    found: dict[str, dict[str, dict[str, int]]] = json.loads(printed.splitlines()[-1])
    return found


def test_every_group_is_compiled() -> None:
    assert sorted(" ".join(PROCESSES).split()) == sorted(FEWEST)


@pytest.mark.parametrize("groups", PROCESSES)
def test_kernels_compile_without_spills(groups: str) -> None:
    for group, kernels in natively(*groups.split()).items():
        assert len(kernels) >= FEWEST[group], (group, sorted(kernels))
        assert not {name: used for name, used in kernels.items() if used["spills"] > MOST_SPILLS}, group
        assert not {name: used for name, used in kernels.items() if used["shared"] > MOST_SHARED}, group
        # LLVM does so with what is -1 or 0 by one bit, and makes 1 of it.
        assert not {name: used for name, used in kernels.items() if used["narrowed"]}, group
        if group == "aligned":
            assert all(used["wide"] for name, used in kernels.items() if "_combine" not in name), kernels
        if group == "slices":
            assert all(used["half_as_wide"] and not used["wide"] for used in kernels.values()), kernels
        if group == "llama":  # norms, activations, softmax, and the backward of each
            linked = {name for name, used in kernels.items() if used["libdevice"]}
            assert linked == {name for name in kernels if NEEDS_LIBDEVICE.search(name)}
