"""The pages of docs: the tables of options are what the code declares, the architecture is that of the tree.

``REWRITE_GOLDENS=1`` writes the tables anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from dynafuse import config, force_backend
from dynafuse.cost import device as devices
from dynafuse.errors import OptionError

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


ROOT = PAGE.parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def named_paths() -> set[str]:
    """What the page on architecture names as a path of the repository, in code or in commands."""
    words = re.findall(r"[\w./-]+", ARCHITECTURE.read_text(encoding="utf-8"))
    return {word.rstrip("./") for word in words if word.split("/")[0] in ("dynafuse", "tests", "bench", "docs") and "/" in word}


def test_files_that_the_architecture_names_exist() -> None:
    found = named_paths()
    assert len(found) > 60
    assert sorted(path for path in found if not (ROOT / path).exists()) == []


def test_no_part_of_the_package_is_left_out_of_the_architecture() -> None:
    found = named_paths()
    parts = {path.name for path in (ROOT / "dynafuse").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    missing = sorted(name for name in parts - {"__init__.py"} if not any(path.split("/")[1] == name for path in found))
    assert missing == [], "say in docs/architecture.md what they are for"


def test_steps_of_the_pipeline_are_in_the_architecture() -> None:
    """Every module of ours that the pipeline imports is named."""
    modules = re.findall(r"^from (dynafuse(?:\.\w+)+) import", (ROOT / "dynafuse" / "backend.py").read_text(encoding="utf-8"),
                         flags=re.MULTILINE)
    paths = {module.replace(".", "/") for module in modules}
    named = {path.removesuffix(".py") for path in named_paths()}
    missing = sorted(path for path in paths if path not in named and not any(n.startswith(f"{path}/") for n in named))
    assert missing == [], "say in docs/architecture.md which step they are"
