"""The README: its code runs, its report is what the code prints, its links lead somewhere, its variables are valid.

``REWRITE_GOLDENS=1`` writes the report anew.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynafuse import __all__ as PUBLIC
from dynafuse import backend, config
from dynafuse.cost import device  # noqa: F401  (declares the cost constants that the page may set)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
MOST_LINES = 275


def text() -> str:
    """The page."""
    return PAGE.read_text(encoding="utf-8")


def code() -> list[str]:
    """Its Python, in order."""
    return re.findall(r"```python\n(.*?)```", text(), flags=re.DOTALL)


def report() -> str:
    """What stands between the report's markers."""
    return text().split("<!-- report -->\n```\n")[1].split("```\n<!-- /report -->")[0]


def without_keys(plan: str) -> str:
    """A plan without the keys of its kernels, which change with every version of torch."""
    return re.sub(r"\b[0-9a-f]{8}\b", "········", plan)


def test_its_code_runs_and_prints_its_report() -> None:
    if "dynafuse" not in torch._dynamo.list_backends():  # the package runs without being installed
        torch._dynamo.register_backend(name="dynafuse")(backend.dynafuse)
    printed, names = io.StringIO(), {"__name__": "readme"}
    with contextlib.redirect_stdout(printed):
        for block in code():
            exec(compile(block, str(PAGE), "exec"), names)
    made = printed.getvalue()
    if os.environ.get("REWRITE_GOLDENS") == "1":
        PAGE.write_text(text().replace(f"```\n{report()}```", f"```\n{made}```"), encoding="utf-8")
    assert without_keys(report()) == without_keys(made), "REWRITE_GOLDENS=1 writes it anew"


def test_the_first_example_is_short() -> None:
    assert len(code()[0].splitlines()) <= 11 and 'backend="dynafuse"' in code()[0]
    assert len(text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", [PAGE, ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", [PAGE, ROOT / "docs" / "kernels.md", ROOT / "bench" / "README.md"], ids=lambda p: p.parent.name)
def test_results_that_it_names_are_there(path: Path) -> None:
    kept = [result.name for result in (ROOT / "bench" / "results").glob("*.json")]
    named = re.findall(r"`(?:bench/results/)?([^`/ ]+\.json)`", path.read_text(encoding="utf-8"))
    assert named or path != PAGE
    for pattern in named:
        assert fnmatch.filter(kept, pattern), pattern


def test_public_names_that_pages_use_are_there_after_a_plain_import() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (PAGE, *sorted((ROOT / "docs").glob("*.md"))))
    names = set(re.findall(r"\bdynafuse\.([A-Za-z_]+)", pages))
    code = f"import dynafuse; [getattr(dynafuse, name) for name in {sorted(names & set(PUBLIC))!r}]"
    subprocess.run([sys.executable, "-c", code], check=True)
    called = set(re.findall(r"`dynafuse\.([A-Za-z_.]+)\(", pages))
    assert called <= set(PUBLIC), "what a page calls is public"


def test_variables_that_it_sets_are_valid() -> None:
    settings = re.findall(r'(DYNAFUSE_[A-Z_]+)=("[^"]*"|[^\s`]+)', text())
    assert len(settings) >= 4
    for name, value in settings:
        config.resolve(environ={name: value.strip('"')})


def test_what_it_tells_to_make_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text(), flags=re.MULTILINE)) <= set(targets)
