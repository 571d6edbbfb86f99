"""Triton's interpreter as tests use it: kernels touch nothing but their arguments (``bounds.py``), and it takes a fifth less time.

By itself it prepares a check of every sum and product of integers for overflow, and then leaves the check out unless kernels are debugged.
It also replaces the language's functions by interpreted ones for each call of a function inside a kernel, though they stay replaced.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any

from tests.support import bounds


def install() -> None:
    """Prepare the interpreter of this process, which may have no Triton, or compile."""
    bounds.install()
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.language import core
    from triton.runtime import interpreter

    replace_functions = interpreter._patch_lang
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function inside a kernel."""
        modules = [value for value in self.fn.__globals__.values() if isinstance(value, ModuleType)]
        if any(core.is_builtin(getattr(module, "load", None)) for module in modules):
            replace_functions(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
