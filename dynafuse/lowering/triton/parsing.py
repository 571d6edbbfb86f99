"""One thread at a time has Python parse, where two of them may not.

Before 3.12, CPython counts the depth of a syntax tree that it makes in one place for all threads, and may collect garbage
meanwhile, whose finalizers let other threads run. If one of those parses, too, the first fails: ``SystemError: AST
constructor recursion depth mismatch``. Triton parses every kernel, Dynamo its guards. From 3.12 on, garbage is collected
between instructions alone.

Worked example: ``take_turns()`` once, before the first thread that compiles; from then on ``ast.parse`` takes a lock.
"""

from __future__ import annotations

import ast
import sys
from functools import cache, wraps
from typing import Any

from dynafuse.forks import Lock


@cache
def take_turns() -> None:
    """Have threads parse one after another from now on, if this Python needs that."""
    if sys.version_info >= (3, 12):
        return
    parse, turn = ast.parse, Lock()

    @wraps(parse)
    def parse_in_turn(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return parse(*args, **kwargs)

    ast.parse = parse_in_turn
