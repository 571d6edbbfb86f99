"""The README and the pages of docs: their code runs, kernel, report and figures are made, links lead somewhere.

``REWRITE_GOLDENS=1`` writes kernel, report and figures anew.
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks are run from the checkout and not installed

from bench import table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
MOST_LINES = 150


def text() -> str:
    """The page."""
    return PAGE.read_text(encoding="utf-8")


def code(page: Path) -> list[str]:
    """A page's Python, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def run(code: str, page: Path) -> str:
    """Run a page's code; return what it prints."""
    if "dynafuse" not in torch._dynamo.list_backends():  # the package runs without being installed
        torch._dynamo.register_backend(name="dynafuse")(backend.dynafuse)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(page), "exec", dont_inherit=True), {"__name__": "page"})
    return printed.getvalue()


def between(page: str, marker: str) -> str:
    """What stands between a pair of markers."""
    return page.split(f"<!-- {marker} -->\n")[1].split(f"<!-- /{marker} -->")[0]


def without_keys(plan: str) -> str:
    """A plan without the keys of its kernels, which change with every version of torch."""
    return re.sub(r"\b[0-9a-f]{8}\b", "········", plan)


def test_its_code_runs() -> None:
    assert "→ 2 kernels (2 distinct), 1 eager call" in run(code(PAGE)[0], PAGE)


def test_the_example_of_options_runs() -> None:
    page = ROOT / "docs" / "options.md"
    run(code(page)[0], page)


def test_example_prints_its_report() -> None:
    page = ROOT / "docs" / "report.md"
    text = page.read_text(encoding="utf-8")
    example = next(block for block in code(page) if "print(report)" in block and "import" in block)
    kept, made = between(text, "report"), f"```\n{run(example, page)}```\n"
    if os.environ.get("REWRITE_GOLDENS") == "1":
        page.write_text(text.replace(kept, made), encoding="utf-8")
        return
    assert without_keys(kept) == without_keys(made), "REWRITE_GOLDENS=1 writes it anew"


def test_its_kernel_is_that_of_the_walk() -> None:
    """That page is what the pipeline prints (tests/bench/test_walk.py)."""
    (kernel,) = re.findall(r"@triton.jit\n.*?(?=\n… )", (ROOT / "docs" / "walk.md").read_text(encoding="utf-8"), re.DOTALL)
    kept, made = between(text(), "kernel"), f"```python\n{kernel}\n```\n"
    if os.environ.get("REWRITE_GOLDENS") == "1":
        PAGE.write_text(text().replace(kept, made), encoding="utf-8")
        return
    assert kept == made, "REWRITE_GOLDENS=1 writes it anew, after that of the walk"


def test_its_figures_are_those_that_were_measured() -> None:
    results = [ROOT / name for name in re.findall(r"`(bench/results/[^`]+\.json)`", text())]
    kept, made = between(text(), "bench"), table.summary(results)
    if os.environ.get("REWRITE_GOLDENS") == "1":
        PAGE.write_text(text().replace(f"<!-- bench -->\n{kept}", f"<!-- bench -->\n{made}"), encoding="utf-8")
        return
    assert kept == made, "REWRITE_GOLDENS=1 writes it anew"
    assert len(made.splitlines()) == 2 + 4


def test_it_is_short() -> None:
    assert len(code(PAGE)[0].splitlines()) <= 7 and 'backend="dynafuse"' in code(PAGE)[0]
    assert len(text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", [PAGE, ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", [PAGE, *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench" / "README.md"], ids=lambda p: p.name)
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


def test_variables_that_pages_set_are_valid() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (PAGE, *sorted((ROOT / "docs").glob("*.md"))))
    settings = re.findall(r'(DYNAFUSE_[A-Z_]+)=("[^"]*"|[^\s`,)]+)', pages)
    assert len(settings) >= 4
    for name, value in settings:
        config.resolve(environ={name: value.strip('"')})


def test_what_it_tells_to_make_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = text() + (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", pages, flags=re.MULTILINE)) <= set(targets)
