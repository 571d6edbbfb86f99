"""The runner of PyTorch's tests: the list of expected failures, and a suite of its own that passes, fails, hangs and crashes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from .__main__ import main
from .expected import judge, parse, read, table
from .fetch import NoSuite, _extract, fetched
from .run import Queue, Result, Task, results_in
from .worker import _expecttest

LIST = """
# a comment
base,dynamic/*   test_names   inductor: looks at the names of kernels
*/triton         test_slow    time: 300 s in the interpreter
"""

SUITE = '''
import os, time, unittest
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.inductor_utils import HAS_CUDA
import dynafuse
import torch

class Tests(unittest.TestCase):
    def test_compiled(self):
        result, (code,) = run_and_get_code(torch.compile(lambda x: x + 1), torch.zeros(3))
        self.assertEqual(code.count("tl.load"), 1)
        self.assertEqual(result.tolist(), [1, 1, 1])

    def test_counted(self):
        torch._inductor.metrics.generated_kernel_count = 0
        torch.compile(lambda x: x + 1)(torch.zeros(3))
        self.assertEqual(torch._inductor.metrics.generated_kernel_count, 4)

    def test_crashes(self):
        os._exit(11)

    def test_eager(self):
        before = dynafuse.stats()["launch_sites"]
        for backend in ("eager", torch._dynamo.testing.CompileCounter()):
            torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.zeros(3))
        self.assertEqual(dynafuse.stats()["launch_sites"], before + 2)
        self.assertEqual(backend.op_count, 2)

    def test_hangs(self):
        time.sleep(1000)

    def test_skipped(self):
        self.skipTest("not here")

    def test_wrong(self):
        self.assertEqual(1, 2)

    def test_works(self):
        print("what a test prints is no answer")
'''


def result(test: str, status: str = "failed", mode: str = "base", executor: str = "triton") -> Result:
    return Result(Task(mode, executor, test), status, 1.0, "")


@pytest.mark.parametrize(("ended", "outcome"), [
    (result("test_names"), "expected"),
    (result("test_names", "passed"), "unexpected"),
    (result("test_names", "skipped"), "skipped"),
    (result("test_names", mode="deep"), "unexpected"),
    (result("test_slow", "hung"), "expected"),
    (result("test_slow", "passed"), "passed"),
    (result("test_slow", "hung", executor="default"), "unexpected"),
    (result("test_other", "crashed"), "unexpected"),
    (result("test_other", "passed"), "passed"),
], ids=str)
def test_results_are_judged_by_the_list(ended: Result, outcome: str) -> None:
    assert judge(ended, parse(LIST)) == outcome


@pytest.mark.parametrize("line", ["base/* test_a", "base test_a time: slow", "base/* test_a slow", "base/* test_a magic: slow",
                                  "base/* test_a time: "])
def test_a_line_without_a_reason_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse(line)


def test_the_list_has_each_test_once() -> None:
    entries = read(Path(__file__).with_name("expected.txt"))
    places = [(mode, executor, entry.test) for entry in entries for mode in entry.modes for executor in entry.executors]
    assert len(places) == len(set(places))


def test_the_table_counts() -> None:
    rows = table([result("test_names"), result("a"), result("b", "passed"), result("c", "skipped")], parse(LIST)).splitlines()
    assert rows[1].split() == ["base", "triton", "3", "1", "1", "1", "1"]


def test_a_worker_keeps_its_executor_while_there_is_work() -> None:
    queue = Queue([Task("base", executor, name) for executor in ("default", "triton") for name in "abc"])
    first = queue.next(None)
    second = queue.next(None)
    assert first is not None and second is not None
    assert {first.executor, second.executor} == {"default", "triton"}
    taken = [task for _ in range(4) if (task := queue.next(first.executor)) is not None]
    assert [task.executor for task in taken] == [first.executor] * 2 + [second.executor] * 2
    assert queue.next(first.executor) is None


def test_older_torch_is_told_to_skip_only_ops_that_it_has() -> None:
    pytest.importorskip("expecttest")  # which torch.testing imports
    from .shims import _told_of_known_ops

    lacking, known = ("op_of_another_torch", "", "xpu", None, True), ("std", "unbiased", "cpu", None, True)
    skip_ops = Mock()
    _told_of_known_ops(skip_ops)("Tests", "test_op", {lacking, known})
    skip_ops.assert_called_once_with("Tests", "test_op", [known])


def test_the_stand_in_for_expecttest_reads_what_is_raised() -> None:
    case = _expecttest().TestCase()
    case.assertExpectedRaisesInline(ValueError, int, "invalid literal for int() with base 10: 'a'", "a")
    for number, said in (("a", "another literal"), ("1", "")):
        with pytest.raises(AssertionError):
            case.assertExpectedRaisesInline(ValueError, int, said, number)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, str], Path]:
    """The suite above, run: the exit status, the status of each test, the folder. What hangs runs first, with a short limit."""
    folder = tmp_path_factory.mktemp("peer")
    for name in ("inductor", "functorch"):
        (folder / name).mkdir()
    (folder / "inductor" / "suite_of_the_runner.py").write_text(SUITE)
    assert run(folder, "*hangs", "--limit", "2") == 0
    status = run(folder, "*")
    return status, {found.task.test: found.status for found in results_in(folder / "results.jsonl")}, folder


def run(folder: Path, tests: str, *more: str) -> int:
    (folder / "expected.txt").write_text("*/* Tests.test_hangs time: it sleeps\n*/* Tests.test_crashes torch: it ends the process\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEER_SUITE", str(folder))
        return main(["--modes", "inductor/suite_of_the_runner.py", "--executors", "triton", "--jobs", "1", "--limit", "60",
                     "--tests", tests, "--out", str(folder / "results.jsonl"), "--expected", str(folder / "expected.txt"), *more])


def test_every_test_of_a_suite_ends(ended: tuple[int, dict[str, str], Path]) -> None:
    status, outcomes, _ = ended
    assert status == 1
    assert outcomes == {"Tests.test_compiled": "passed", "Tests.test_counted": "passed", "Tests.test_crashes": "crashed", "Tests.test_eager": "passed",
                        "Tests.test_hangs": "hung",
                        "Tests.test_skipped": "skipped", "Tests.test_wrong": "failed", "Tests.test_works": "passed"}


def test_a_run_goes_on_where_it_ended(ended: tuple[int, dict[str, str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, outcomes, folder = ended
    assert run(folder, "*[!g]") == 0
    assert len(results_in(folder / "results.jsonl")) == len(outcomes)
    assert "test_wrong" not in capsys.readouterr().out


def test_a_file_of_names_says_what_is_run(ended: tuple[int, dict[str, str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, _, folder = ended
    (folder / "names.txt").write_text("Tests.test_works\nTests.test_skipped\ntest_of_another_file\n")
    assert run(folder, "*", "--names", str(folder / "names.txt")) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2:] == ["1", "1", "0", "0", "1"]


def test_a_file_that_cannot_be_loaded_is_named(ended: tuple[int, dict[str, str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, _, folder = ended
    (folder / "inductor" / "suite_of_another_torch.py").write_text("from torch import what_came_later\n")
    assert run(folder, "*works", "--modes", "inductor/suite_of_another_torch.py,inductor/suite_of_the_runner.py") == 1
    printed = capsys.readouterr()
    assert "suite_of_another_torch.py was not loaded: ImportError: cannot import name 'what_came_later'" in printed.err
    assert "suite_of_the_runner" in printed.out


def test_a_folder_without_the_suite_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEER_SUITE", str(tmp_path))
    with pytest.raises(NoSuite, match=r"has no folders inductor and functorch"):
        fetched()


def test_only_the_folders_of_tests_are_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "pytorch_2.orig.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for name in ("test/inductor/test_a.py", "test/functorch/b/c.py", "test/jit/test_d.py", "test/test_f.py", "torch/inductor/e.py"):
            member = tarfile.TarInfo(f"pytorch-2.6.0/{name}")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"\n"))
    _extract(archive, tmp_path / "test")
    found = sorted(str(path.relative_to(tmp_path / "test")) for path in (tmp_path / "test").rglob("*.py"))
    assert found == ["functorch/b/c.py", "inductor/test_a.py", "test_f.py"]
