"""Triton's interpreter as tests use it: kernels touch nothing but their arguments (``bounds.py``), and it takes a third less time.

By itself it prepares a check of every sum and product of integers for overflow, and then leaves the check out unless kernels are debugged.
It also replaces the language's functions by interpreted ones for each launch, found anew, and for each call of a function inside a kernel,
though they stay replaced. It works out the sizes and the name of a block's type for every value, and how two blocks of the same sizes would
become so. What it says of a kernel is the same without.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import linecache
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.support import bounds


def install() -> None:
    """Prepare the interpreter of this process, which may have no Triton, or compile."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        from triton.runtime import interpreter

        object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
        _remember_types()
        _compare_sizes_first()
        _replace_functions_once()
        _read_sources_once()
    bounds.install()


def _remember_types() -> None:
    """Work out what follows from a block's element type and sizes once for all blocks that have them, and NumPy's types once for each of Triton's."""
    from triton.language import core
    from triton.runtime import interpreter

    create_type, create_tensor, equal, np_dtype = (
        core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__, interpreter._get_np_dtype)
    types: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    sizes: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    np_dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types:
            create_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape.values,) if type.is_block() else ()
        if key not in sizes:
            create_tensor(self, handle, type)
            sizes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes[key]

    def np_dtype_of(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    interpreter._get_np_dtype = np_dtype_of


def _compare_sizes_first() -> None:
    """Leave blocks of the same sizes as they are before they are compared size by size."""
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def of_the_same_sizes(self: Any, lhs: Any, rhs: Any) -> Any:
        types = lhs.type, rhs.type
        if all(type.is_block() for type in types) and types[0].shape.values == types[1].shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = of_the_same_sizes


def _replace_functions_once() -> None:
    """Find the functions that are replaced once, and replace none where they are, inside a kernel."""
    from triton.language import core
    from triton.runtime import interpreter

    find = interpreter._patch_lang
    found: dict[tuple[int, ...], list[tuple[object, str, object]]] = {}

    def languages(fn: Callable[..., Any]) -> list[ModuleType]:
        return [value for value in fn.__globals__.values() if value is interpreter.tl or value is core]

    def replace(fn: Callable[..., Any]) -> Any:
        key = tuple(map(id, languages(fn)))
        if not core.is_builtin(core.load):  # replaced already, by a launch of another thread
            return find(fn)
        if key not in found:
            scope = find(fn)
            found[key] = [(where, name, inspect.getattr_static(where, name)) for where, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for where, name, value in found[key]:
            scope.set_attr(where, name, value)
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function inside a kernel."""
        if any(core.is_builtin(module.load) for module in languages(self.fn)):
            find(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang, interpreter.InterpretedFunction.__call__ = replace, call


def _read_sources_once() -> None:
    """Look up the line at which a kernel is defined without reading it as one that is compiled."""
    from triton.runtime.interpreter import FunctionRewriter

    def place(self: Any) -> tuple[str, int]:
        code = self.fn.__code__
        lines = linecache.getlines(code.co_filename)
        return code.co_filename, next(k for k in itertools.count(code.co_firstlineno) if lines[k - 1].strip().startswith("def "))

    FunctionRewriter._get_jit_fn_file_line = place
