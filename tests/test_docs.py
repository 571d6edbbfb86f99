"""The pages of docs: tables and lists are what the code declares, the architecture is that of the tree.

``REWRITE_GOLDENS=1`` writes the tables and lists anew.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch

from dynafuse import backend, config, force_backend
from dynafuse.cost import device as devices
from dynafuse.errors import OptionError
from dynafuse.lowering import registry
from tests.test_structure import ORDER, SOURCES

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


def order() -> str:
    """The rooms, each of which may import those before it."""
    return " → ".join(f"`{part}`" for part in ORDER)


def files() -> str:
    """Every file of the package with the first sentence of its docstring, by folder."""
    sections = []
    for folder in sorted({source.parent for source in SOURCES}):
        inside = [source for source in SOURCES if source.parent == folder]
        rows = [f"| `{source.name}` | {summary(source)} |" for source in inside if summary(source)]
        name = f"`dynafuse/{folder.as_posix()}/`".replace("/./", "/")
        sections.append("\n".join([f"### {name}", "", "| file | what |", "|---|---|", *rows]))
    return "\n\n".join(sections)


def summary(source: Path) -> str:
    """The first sentence of a file's docstring, as Markdown; "" for a file without one."""
    docstring = ast.get_docstring(ast.parse((ROOT / "dynafuse" / source).read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split()).removesuffix("::").removesuffix(":")
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence).replace("``", "`").replace("|", "\\|").rstrip(".")


ROOT = PAGE.parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MADE = {"options": (PAGE, config.describe), "costs": (PAGE, costs), "order": (ARCHITECTURE, order), "files": (ARCHITECTURE, files)}


@pytest.mark.parametrize("marker", MADE)
def test_tables_are_fresh(marker: str) -> None:
    page, describe = MADE[marker]
    made = describe() + "\n"
    before, inside, after = between(page.read_text(encoding="utf-8"), marker)
    if os.environ.get("REWRITE_GOLDENS") == "1":
        page.write_text(before + made + after, encoding="utf-8")
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
    for name in registry.names():
        assert f'`"{name}"`' in text and force_backend(name)
    with pytest.raises(OptionError, match="valid: eager, inductor, nvfuser, triton"):
        force_backend("cuda")


def named_paths() -> set[str]:
    """What the page on architecture names as a path of the repository, in code or in commands."""
    words = re.findall(r"[\w./-]+", ARCHITECTURE.read_text(encoding="utf-8"))
    return {word.rstrip("./") for word in words if word.split("/")[0] in ("dynafuse", "tests", "bench", "docs") and "/" in word}


def test_files_that_the_architecture_names_exist() -> None:
    found = named_paths()
    assert len(found) > 60
    assert sorted(path for path in found if not (ROOT / path).exists()) == []


def test_names_that_the_architecture_quotes_exist() -> None:
    """Functions, classes, fields and options, wherever they are in the package, the tests or the benchmarks."""
    sources = (path for folder in ("dynafuse", "tests", "bench") for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    text = ARCHITECTURE.read_text(encoding="utf-8").split("## Files")[0]
    quoted = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\)|=[^`]*)?`", text))
    assert len(quoted) > 60
    assert sorted(name for name in quoted if not name.startswith("torch.") and not words.issuperset(name.split("."))) == []


def test_stages_of_the_architecture_are_those_of_the_pipeline() -> None:
    """Every module that the pipeline or the backend imports is named, and the values of the trace are, in their order."""
    texts = {name: (ROOT / "dynafuse" / f"{name}.py").read_text(encoding="utf-8") for name in ("backend", "pipeline")}
    modules = {module for text in texts.values() for module in re.findall(r"^from dynafuse\.([\w.]+) import", text, re.MULTILINE)}
    named = {path.removesuffix(".py") for path in named_paths()}
    paths = {f"dynafuse/{module.replace('.', '/')}" for module in modules}
    assert sorted(path for path in paths if not any(f"{name}/".startswith(f"{path}/") for name in named)) == []
    stages = between(ARCHITECTURE.read_text(encoding="utf-8"), "stages")[1]
    noted = re.findall(r'trace\.note\("(\w+)"', texts["pipeline"])
    assert noted == re.findall(r"^\|[^|]*\|[^|]*\| `(\w+)`:", stages, re.MULTILINE)


def test_the_executor_of_the_page_runs() -> None:
    page = ROOT / "docs" / "executors.md"
    text, printed, names = page.read_text(encoding="utf-8"), io.StringIO(), {"__name__": "executors"}
    if "dynafuse" not in torch._dynamo.list_backends():  # the package runs without being installed
        torch._dynamo.register_backend(name="dynafuse")(backend.dynafuse)
    torch._dynamo.reset()
    try:
        with contextlib.redirect_stdout(printed):
            for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
                exec(compile(block, str(page), "exec", dont_inherit=True), names)
    finally:
        registry.unregister_executor("calls")
        backend.reset()
    before, inside, after = between(text, "printed")
    made = f"```\n{printed.getvalue()}```\n"
    if os.environ.get("REWRITE_GOLDENS") == "1":
        page.write_text(before + made + after, encoding="utf-8")
        return
    assert inside == made
