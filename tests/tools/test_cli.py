"""The command line, in process and as installed users start it."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import dynafuse
from dynafuse import config
from dynafuse.errors import DynafuseError
from dynafuse.tools import cli

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int | None]], None]:
    """Replaces the demo by a given function."""

    def replace(main: Callable[..., int | None]) -> None:
        module = types.ModuleType("dynafuse.tools.demo")
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "dynafuse.tools.demo", module)

    return replace


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"dynafuse {dynafuse.__version__}\n"


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dynafuse", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"dynafuse {dynafuse.__version__}\n"


def test_options_prints_the_table(capsys: Capture) -> None:
    assert cli.main(["options"]) == 0
    assert capsys.readouterr().out == config.describe() + "\n"


@pytest.mark.parametrize("argv", [[], ["dmeo"], ["options", "more"]])
def test_wrong_arguments_exit_2(argv: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: dynafuse" in capsys.readouterr().err


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (1, 1)])
def test_demo_hands_its_status_on(
    returned: int | None, status: int, demo: Callable[[Callable[..., int | None]], None]
) -> None:
    demo(lambda page: returned)
    assert cli.main(["demo"]) == status


def test_errors_of_ours_are_one_line(demo: Callable[[Callable[..., int | None]], None], capsys: Capture) -> None:
    def fail(page: str | None) -> None:
        raise DynafuseError("it broke\n  in two lines")

    demo(fail)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "dynafuse: it broke in two lines\n"


def test_misspelt_variable_stops_the_demo_first(
    demo: Callable[[Callable[..., int | None]], None], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    demo(lambda page: pytest.fail("the demo ran"))
    monkeypatch.setenv("DYNAFUSE_STRIKT", "1")
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err.startswith("dynafuse: unknown environment variable 'DYNAFUSE_STRIKT'")


def test_demo_writes_its_page_where_it_is_told_to(
    demo: Callable[[Callable[..., int | None]], None], tmp_path: Path, capsys: Capture
) -> None:
    asked: list[str | None] = []
    demo(asked.append)
    assert cli.main(["demo"]) == 0 and cli.main(["demo", "--html", str(tmp_path / "plan.html")]) == 0
    assert asked == [None, str(tmp_path / "plan.html")]
    assert cli.main(["demo", "--html", str(tmp_path / "none" / "plan.html")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_command_line_starts_without_torch() -> None:
    code = "import sys; from dynafuse.tools.cli import main; main(['options']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
