"""Threads that parse at once while garbage with finalizers is collected."""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Iterator

import pytest

from dynafuse.lowering.triton.parsing import take_turns

THREADS, TIMES = 4, 100
SOURCE = inspect.getsource(ast.NodeVisitor) + inspect.getsource(ast.NodeTransformer)


class Garbage:
    """Is collected by the garbage collector alone, and lets other threads run when it is."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(200):
            pass


@pytest.fixture(autouse=True)
def _often_switched() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_threads_that_parse_at_once_do_not_fail() -> None:
    """Without turns some of these fail in Python 3.11."""
    take_turns()
    errors: list[BaseException] = []

    def work(depth: int) -> None:
        if depth:  # threads of the same depth would not notice each other
            return work(depth - 1)
        for _ in range(TIMES):
            Garbage()
            try:
                ast.parse(SOURCE)
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(9 * number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, (len(errors), errors[0])


def test_turns_change_nothing_else() -> None:
    take_turns()
    assert ast.dump(ast.parse("x", mode="eval")) == "Expression(body=Name(id='x', ctx=Load()))"
    with pytest.raises(SyntaxError):
        ast.parse("x(")
    assert ast.parse("y").body, "an error gives the turn back"
