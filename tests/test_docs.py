"""The page of options: its tables are what the code declares. ``REWRITE_GOLDENS=1`` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynafuse import config, force_backend
from dynafuse.errors import OptionError
from dynafuse.partition import device as devices

PAGE = Path(__file__).parents[1] / "docs" / "options.md"


def costs() -> str:
    """The cost constants, with their values on the shipped devices."""
    shipped = [devices.describe(name) for name in devices.known()]
    lines = ["| constant | meaning | " + " | ".join(d.name for d in shipped) + " |", "|---|---|" + "---|" * len(shipped)]
    for name, doc in devices.COST_CONSTANTS.items():
        values = " | ".join(f"{d.constants[name]:g}" for d in shipped)
        lines.append(f"| `DYNAFUSE_COST_{name.upper()}` | {doc} | {values} |")
    return "\n".join(lines)


def between(text: str, marker: str) -> tuple[str, str, str]:
    """What stands before, between and behind a pair of markers."""
    before, rest = text.split(f"<!-- {marker} -->\n")
    inside, after = rest.split(f"<!-- /{marker} -->")
    return before + f"<!-- {marker} -->\n", inside, f"<!-- /{marker} -->" + after


@pytest.mark.parametrize("marker", ["options", "costs"])
def test_tables_are_fresh(marker: str) -> None:
    made = {"options": config.describe, "costs": costs}[marker]() + "\n"
    before, inside, after = between(PAGE.read_text(encoding="utf-8"), marker)
    if os.environ.get("REWRITE_GOLDENS") == "1":
        PAGE.write_text(before + made + after, encoding="utf-8")
        return
    assert inside == made, "write the tables anew with REWRITE_GOLDENS=1"


def test_variables_that_the_page_sets_are_valid() -> None:
    """Every ``DYNAFUSE_NAME=value`` outside the tables resolves."""
    words = [word.strip("`,()") for word in PAGE.read_text(encoding="utf-8").replace('="', "=").replace('"', "").split()]
    settings = [word.split("=", 1) for word in words if word.startswith("DYNAFUSE_") and "=" in word and "<" not in word]
    assert len(settings) >= 8
    for name, value in settings:
        config.resolve(environ={name: value})


def test_every_executor_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in config.FORCIBLE:
        assert f'`"{name}"`' in text and force_backend(name)
    with pytest.raises(OptionError, match="valid: eager, inductor, nvfuser, triton"):
        force_backend("cuda")
