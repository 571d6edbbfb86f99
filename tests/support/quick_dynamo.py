"""Dynamo without what it does for logs and for memory around each graph, which takes longer than to compile what is small."""

from __future__ import annotations

import sys


def install() -> None:
    """Leave it out in this process, as far as Dynamo is imported: to import it would cost what is light a second."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = _no_latency
    if convert := sys.modules.get("torch._dynamo.symbolic_convert"):
        convert.get_funcname = _no_name
    if config := sys.modules.get("torch._dynamo.config"):
        config.run_gc_after_compile = False


def _no_latency(*_: object) -> float:
    """Instead of what Dynamo measures of the guards of each graph, for its logs, and flushes the processor's caches for."""
    return 0.0


def _no_name(*_: object) -> None:
    """Instead of the name of the function around each line that is traced, for logs, for which whole files are tokenized."""
