"""Which torch an nvFuser wheel is for, and how one that does not match is loaded."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynafuse.lowering.nvfuser import availability
from dynafuse.lowering.nvfuser.availability import Availability, judge

WHEEL = {"nvfuser-cu128-torch210": "0.2.36"}


def test_a_matching_wheel_is_available() -> None:
    found = judge(WHEEL, True, "2.10.0+cu128", "12.8", override=False)
    assert found == Availability(True, "nvfuser-cu128-torch210 0.2.36", "nvfuser-cu128-torch210", "0.2.36")


@pytest.mark.parametrize(("torch_version", "cuda", "words"), [
    ("2.11.0+cu128", "12.8", "built for torch 2.10, this is torch 2.11.0+cu128"),
    ("2.1.0", "12.8", "built for torch 2.10, this is torch 2.1.0"),
    ("2.10.0+cu130", "13.0", "built for CUDA 12.8, this torch for CUDA 13.0"),
    ("2.10.0+cpu", None, "built for CUDA, this torch has none"),
])
@pytest.mark.parametrize("name", ["nvfuser-cu128-torch210", "nvfuser_cu128_torch210"])
def test_a_wheel_for_another_torch_is_not(name: str, torch_version: str, cuda: str | None, words: str) -> None:
    found = judge({name: "0.2.36"}, True, torch_version, cuda, override=False)
    assert not found.available and words in found.reason and "DYNAFUSE_NVFUSER_UNMATCHED=1" in found.reason
    allowed = judge({name: "0.2.36"}, True, torch_version, cuda, override=True)
    assert allowed.available and not allowed.matched and words in allowed.reason


def test_one_of_several_wheels_is_enough() -> None:
    found = judge({"nvfuser-cu126-torch210": "1", **WHEEL}, True, "2.10.0", "12.8", override=False)
    assert found.available and found.distribution == "nvfuser-cu128-torch210"


def test_a_folder_without_a_distribution_needs_the_override() -> None:
    found = judge({}, True, "2.11.0", "13.0", override=False)
    assert not found.available and "has no distribution that says which torch it is for" in found.reason
    assert judge({}, True, "2.11.0", "13.0", override=True).available


def test_no_module_is_not_available_whatever_is_allowed() -> None:
    found = judge(WHEEL, False, "2.10.0", "12.8", override=True)
    assert not found.available and str(found).startswith("nvFuser is not available: no module nvfuser_direct")


def test_distributions_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [SimpleNamespace(metadata={"Name": name}, version="0.2.36")
            for name in ("nvfuser-cu130-torch210", "torch", "nvfuser-common", None)]
    monkeypatch.setattr(availability, "distributions", lambda: held)
    assert availability.installed() == {"nvfuser-cu130-torch210": "0.2.36"}


def test_finding_imports_nothing() -> None:
    before = set(sys.modules)
    availability.find.cache_clear()
    found = availability.find()
    assert availability.MODULE not in set(sys.modules) - before
    assert found.reason and found.available is (found.available and importlib.util.find_spec(availability.MODULE) is not None)


def test_loading_what_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find", lambda: Availability(False, "no wheel"))
    availability.load.cache_clear()
    with pytest.raises(ImportError, match="nvFuser is not available: no wheel"):
        availability.load()


def test_an_unmatched_library_is_bound_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load(name: str) -> str:
        seen.update(name=name, flags=sys.getdlopenflags(), port=os.environ.get(availability.PORT))
        return "module"

    monkeypatch.setenv(availability.PORT, "0")
    monkeypatch.delenv(availability.PORT)
    monkeypatch.setattr(availability, "import_module", load)
    monkeypatch.setattr(availability, "find", lambda: Availability(True, "allowed", matched=False))
    availability.load.cache_clear()
    before = sys.getdlopenflags()
    assert availability.load() == "module"
    assert seen["name"] == "nvfuser_direct" and seen["port"] == availability.DEFAULT_PORT
    assert seen["flags"] & os.RTLD_LAZY and not seen["flags"] & os.RTLD_NOW
    assert sys.getdlopenflags() == before
    availability.load.cache_clear()


@pytest.mark.nvfuser
def test_the_installed_wheel_matches() -> None:
    availability.find.cache_clear()
    found = availability.find()
    assert found.available and found.matched, found
    assert found.version == importlib.metadata.version(found.distribution)
    assert torch.__version__.split("+")[0].startswith("2.10")
