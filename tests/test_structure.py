"""The shape of the source: who imports whom, how long functions and files are, that modules explain themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "dynafuse"
SOURCES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

ORDER = (
    "errors", "config", "forks", "fallback", "fx", "ops", "ir", "cost", "partition", "passes", "cache", "lowering", "select",
    "runtime", "build", "backend", "report", "entry", "force", "tools", "__init__")
"""The parts of the package: each may import those before it."""

YET = {"cache/persist.py": {"lowering", "select"}, "runtime/interim.py": {"build"}, "select/choose.py": {"build"},
       "select/runners.py": {"runtime"}}
"""What still looks the other way."""

GPU_COMPILERS = frozenset({"triton", "nvfuser", "nvfuser_direct"})
MAY_IMPORT_COMPILERS = frozenset({"lowering", "runtime"})
MOST_LINES_OF_FUNCTION = 80
MOST_LINES_OF_FILE = 600

every_source = pytest.mark.parametrize("source", SOURCES, ids=str)


def part_of(source: Path) -> str:
    """The part a file belongs to: its first folder, or its own name."""
    return source.parts[0] if len(source.parts) > 1 else source.stem


def tree_of(source: Path) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"), filename=str(source))


def imported_modules(tree: ast.Module, source: Path) -> Iterator[str]:
    """Dotted absolute names of all that is imported anywhere in a file, the names after `from x import` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, source)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def absolute(node: ast.ImportFrom, source: Path) -> str:
    """The module that `from ... import` names, relative ones resolved."""
    package = ["dynafuse", *source.parent.parts]
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def imported_parts(source: Path) -> set[str]:
    """Parts of the package that a file imports; `from dynafuse import __version__` and the like are none."""
    names = [name.split(".") for name in imported_modules(tree_of(source), source)]
    return {name[1] for name in names if name[0] == "dynafuse" and len(name) > 1 and name[1] in ORDER}


@every_source
def test_file_belongs_to_a_declared_part(source: Path) -> None:
    assert part_of(source) in ORDER, "say in ORDER which parts this new one may import"


@every_source
def test_imports_keep_their_direction(source: Path) -> None:
    before = ORDER[:ORDER.index(part_of(source)) + 1]
    assert imported_parts(source) <= {*before} | YET.get(str(source), set())


@every_source
def test_gpu_compilers_are_imported_where_they_belong(source: Path) -> None:
    compilers = {name.split(".")[0] for name in imported_modules(tree_of(source), source)} & GPU_COMPILERS
    assert not compilers or part_of(source) in MAY_IMPORT_COMPILERS


def test_what_is_imported_is_declared() -> None:
    """Triton's interpreter needs numpy, which nothing else brings along: an environment from scratch has what is listed."""
    imported = {name.split(".")[0] for source in SOURCES for name in imported_modules(tree_of(source), source)}
    foreign = imported - set(sys.stdlib_module_names) - {"dynafuse", "nvfuser", "nvfuser_direct"}
    project = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    declared = project.split("\ndependencies = [")[1].split("\n]")[0]
    assert {name for name in foreign if f'"{name}' not in declared} == set()


@every_source
def test_functions_are_short(source: Path) -> None:
    functions = (
        node for node in ast.walk(tree_of(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    lengths = {f"{node.name}:{node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES_OF_FUNCTION} == {}


@every_source
def test_files_are_short(source: Path) -> None:
    assert len((ROOT / source).read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_FILE


@every_source
def test_public_modules_have_a_docstring(source: Path) -> None:
    if source.name == "__init__.py" or not source.name.startswith("_"):
        assert ast.get_docstring(tree_of(source))


@pytest.mark.parametrize("module", ["dynafuse", "dynafuse.config", "dynafuse.errors", "dynafuse.tools.cli"])
def test_importing_loads_neither_torch_nor_triton(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'triton'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
