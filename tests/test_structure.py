"""The shape of the source: who imports whom, how long functions and files are, that modules explain themselves."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dynafuse

ROOT = Path(__file__).parents[1] / "dynafuse"
SOURCES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

ORDER = (
    "errors", "executors", "config", "forks", "futures", "fallback", "fx", "ops", "ir", "cost", "partition", "passes", "cache",
    "lowering", "select", "runtime", "pipeline", "backend", "report", "force", "tools", "entry", "__init__",
    "__main__")
"""The parts of the package: each may import those before it."""

LEAVES = {"lowering/base.py": "executors", "lowering/registry.py": "executors"}
"""Files that are a part of their own: by them every stage sees executors."""

GPU_COMPILERS = frozenset({"triton", "nvfuser", "nvfuser_direct"})
MAY_IMPORT_COMPILERS = frozenset({"lowering", "runtime"})
MOST_LINES_OF_FUNCTION = 80
MOST_LINES_OF_FILE = 600

TESTS = ROOT.parent / "tests"
OF_THE_WHOLE = frozenset({"architectures", "backend", "bench", "fuzz", "peer", "support", "training"})
"""Folders of tests that are not those of a room: of the whole pipeline, of the benchmarks, and what tests share."""

VERBS = frozenset(re.findall(r"\w+", """
    Add Adopt Allocate Apply Ask Be Begin Bind Build Calibrate Capture Check Clamp Close Collect Combine Compile
    Compute Convert Copy Count Create Cut Declare Decorate Define Demote Describe Differentiate Digest Divide Draw
    Evaluate Forget Format Generate Give Group Hand Have Hide Hold Import Insert Join Keep Launch Leave Let Load Log
    Look Lower Make Mark Match Measure Merge Move Multiply Name Note Number Open Order Parse Pass Place Plan Pop
    Predict Price Print Put Raise Read Recompute Record Reduce Refuse Register Release Remove Replace Report Reset Restore
    Return Rewrite Round Run Say Set Share Sort Split Stand Start Stop Store Take Tell Time Train Unify Wait Work Wrap
    Write Yield
"""))
"""What docstrings of functions begin with; a new verb is welcome, a noun phrase ("The …", "Whether …") is not."""

SAYS_NOTHING = frozenset({"found", "made", "one", "there", "kept", "among"})
"""Names that say how a value came about, not what it holds."""

every_source = pytest.mark.parametrize("source", SOURCES, ids=str)


def part_of(source: Path) -> str:
    """The part a file belongs to: its first folder, or its own name."""
    return LEAVES.get(source.as_posix()) or (source.parts[0] if len(source.parts) > 1 else source.stem)


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


def at_run_time(tree: ast.Module) -> ast.Module:
    """A file without what is only for the type checker."""
    class Dropped(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    dropped: ast.Module = Dropped().visit(tree)
    return dropped


def file_of(name: str) -> Path | None:
    """The file of the package that a dotted name is, or is in; None for other packages."""
    parts = name.split(".")
    if parts[0] != "dynafuse":
        return None
    for end in range(len(parts), 0, -1):
        inside = "/".join(parts[1:end])
        for path in (f"{inside}.py", f"{inside}/__init__.py".lstrip("/")):
            if Path(path) in KNOWN:
                return Path(path)
    return None


KNOWN = frozenset(SOURCES)


def imported_files(source: Path) -> set[Path]:
    """Files of the package that a file imports when it runs; `from dynafuse import __version__` and the like are none."""
    files = {file_of(name) for name in imported_modules(at_run_time(tree_of(source)), source)}
    return {file for file in files if file is not None and file != Path("__init__.py")}


@every_source
def test_file_belongs_to_a_declared_part(source: Path) -> None:
    assert part_of(source) in ORDER, "say in ORDER which parts this new one may import"


@every_source
def test_imports_keep_their_direction(source: Path) -> None:
    before = ORDER[:ORDER.index(part_of(source)) + 1]
    assert {str(file) for file in imported_files(source) if part_of(file) not in before} == set()


def test_no_cycles() -> None:
    """Not even through imports inside of functions."""
    TopologicalSorter({source: imported_files(source) - {source} for source in SOURCES}).prepare()


@every_source
def test_gpu_compilers_are_imported_where_they_belong(source: Path) -> None:
    compilers = {name.split(".")[0] for name in imported_modules(tree_of(source), source)} & GPU_COMPILERS
    assert not compilers or part_of(source) in MAY_IMPORT_COMPILERS


def test_what_is_imported_is_declared() -> None:
    """Triton's interpreter needs numpy, which nothing else brings along: an environment from scratch has what is listed."""
    imported = {name.split(".")[0] for source in SOURCES for name in imported_modules(tree_of(source), source)}
    foreign = imported - set(sys.stdlib_module_names) - {"dynafuse", "nvfuser", "nvfuser_direct"}
    foreign -= {"cuda"}  # torch's builds for CUDA bring it along, and nothing else needs it
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


def functions_of(source: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree_of(source)) if isinstance(node, ast.FunctionDef)]


@every_source
def test_docstrings_start_with_a_verb(source: Path) -> None:
    documented = {f"{function.name}:{function.lineno}": text for function in functions_of(source) if (text := ast.get_docstring(function))}
    assert {name: text for name, text in documented.items() if text.split()[0].rstrip(",:;.") not in VERBS} == {}


# What docstrings tell --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Documented:
    """A public function or method, or a class by its constructor, with its docstring."""

    name: str
    function: ast.FunctionDef
    text: str
    is_method: bool

    @property
    def parameters(self) -> list[str]:
        """Every parameter but ``self`` or ``cls``."""
        bound = self.is_method and not any(ast.unparse(d) == "staticmethod" for d in self.function.decorator_list)
        given = self.function.args
        plain = [*given.posonlyargs, *given.args][bound:]
        return [arg.arg for arg in (*plain, given.vararg, *given.kwonlyargs, given.kwarg) if arg is not None]

    def section(self, title: str) -> set[str]:
        """The names that a section explains, several at once before one colon included."""
        lines = self.text.partition(f"\n\n{title}:\n")[2].partition("\n\n")[0]
        named = re.findall(r"^ {4}([*\w]+(?:, [*\w]+)*):(?: |$)", lines, re.MULTILINE)
        return {name.lstrip("*") for names in named for name in names.split(", ")}


@cache
def documented(source: Path) -> tuple[Documented, ...]:
    """The public functions of a file and those of its public classes; none of a file or folder that is not public."""
    parts = (part for part in source.with_suffix("").parts if part not in ("__init__", "__main__"))
    return () if any(part.startswith("_") for part in parts) else tuple(public(tree_of(source).body))


def public(body: Iterable[ast.stmt], of: str = "") -> Iterator[Documented]:
    """The public functions among some statements, and those of public classes, with the names of these in front."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield Documented(f"{of}{node.name}", node, ast.get_docstring(node) or "", is_method=bool(of))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            constructors = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
            texts = [ast.get_docstring(item) or ast.get_docstring(node) or "" for item in constructors]
            yield from (Documented(of + node.name, *pair, True) for pair in zip(constructors, texts, strict=True))
            yield from public(node.body, f"{of}{node.name}.")


def raised(function: ast.FunctionDef) -> set[str]:
    """The errors that leave a function by a ``raise`` of its own."""
    return set(_raised(function.body, frozenset())) - {"NotImplementedError", "AssertionError"}


def _raised(nodes: Iterable[ast.AST], caught: frozenset[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Try):
            kinds = (kind for handler in node.handlers if handler.type is not None for kind in ast.walk(handler.type))
            yield from _raised(node.body, caught | {kind.id for kind in kinds if isinstance(kind, ast.Name)})
            yield from _raised([*node.handlers, *node.orelse, *node.finalbody], caught)
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            classes = [part for part in ast.unparse(error).split(".") if part[0].isupper()]  # none: it is raised again
            yield from (name for name in classes[:1] if name not in caught)
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield from _raised(ast.iter_child_nodes(node), caught)


MOST_UNTOLD = 2
"""So many parameters of a function can go without a section of their own, except where users meet it."""


EXPORTED = frozenset((file_of(value.__module__), value.__name__) for name in dynafuse.__all__
                     if not isinstance(value := getattr(dynafuse, name), str))
"""The functions and classes of the package's interface, with the files that they are from."""


def most_untold(source: Path, name: str) -> int:
    """How many parameters can go without a section: of users' own functions none, of their classes' methods one."""
    if (source, name) in EXPORTED:
        return 0
    return 1 if (source, name.split(".")[0]) in EXPORTED else MOST_UNTOLD


@every_source
def test_docstrings_tell_what_arguments_are(source: Path) -> None:
    """What takes many is called by name: a section tells of each what its name and its type do not."""
    functions = [item for item in documented(source) if (source, item.name) in EXPORTED or item.function.name != "__init__"]
    untold = {item.name: set(item.parameters) - item.section("Args") for item in functions
              if len(item.parameters) > most_untold(source, item.name)}
    assert {name: parameters for name, parameters in untold.items() if parameters} == {}


@every_source
def test_docstrings_tell_of_no_other_arguments(source: Path) -> None:
    strangers = {item.name: item.section("Args") - set(item.parameters) for item in documented(source)}
    assert {name: parameters for name, parameters in strangers.items() if parameters} == {}


@every_source
def test_docstrings_tell_what_is_raised(source: Path) -> None:
    untold = {item.name: raised(item.function) - item.section("Raises") for item in documented(source)}
    assert {name: errors for name, errors in untold.items() if errors} == {}


@every_source
def test_locals_are_named_for_what_they_hold(source: Path) -> None:
    """Attributes are not asked: they are read with what they belong to, as in ``graph.kept``."""
    names = {node.arg if isinstance(node, ast.arg) else node.id
             for function in functions_of(source) for node in ast.walk(function)
             if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))}
    assert names & SAYS_NOTHING == set()


@pytest.mark.parametrize("module", ["dynafuse", "dynafuse.config", "dynafuse.errors", "dynafuse.tools.cli"])
def test_importing_loads_neither_torch_nor_triton(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'triton'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


FOLDERS_OF_TESTS = sorted({path.parent.relative_to(TESTS) for path in TESTS.rglob("*.py")} - {Path("fuzz/found")})


@pytest.mark.parametrize("folder", FOLDERS_OF_TESTS, ids=str)
def test_tests_lie_where_what_they_test_does(folder: Path) -> None:
    """In packages, so that equal names of files do not meet and none stands for a module of Python's or of Triton's."""
    assert all((TESTS / parent / "__init__.py").exists() for parent in (folder, *folder.parents))
    assert (ROOT / folder).is_dir() or folder.parts[0] in OF_THE_WHOLE
