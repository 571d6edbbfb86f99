"""Triton's interpreter as tests use it: kernels touch nothing but their arguments (``bounds.py``), and it takes a third less time.

By itself it prepares a check of every sum and product of integers for overflow, and then leaves the check out unless kernels are debugged.
It replaces the functions of the language by interpreted ones at every launch, and puts them back, and looks for the lines of a kernel in its
file with a tokenizer. It works out the sizes and the name of a block's type for every value, and how two blocks of the same sizes would
become so. What it says of a kernel is the same without.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import os
import textwrap
from types import SimpleNamespace
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
    """Replace the language's functions for good, by ones that are called directly: no kernel of this process is compiled."""
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    def replace(where: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that a kernel calls it

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(where, name, interpreted)

    interpreter._patch_attr = replace
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()


def _read_sources_once() -> None:
    """Rewrite a kernel from the lines of its definition alone, which nothing has to look for, parsed where they are in their file."""
    from triton.runtime.interpreter import FunctionRewriter

    rewrite = FunctionRewriter.rewrite_ast

    def rewritten(self: Any) -> Any:
        code = self.fn.__code__
        linecache.checkcache(code.co_filename)
        try:
            tree = ast.parse(_definition(linecache.getlines(code.co_filename), code.co_firstlineno))
        except SyntaxError:  # a text of several lines in it, for example
            return rewrite(self)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                self.ast_transformer.visit_Assign(node)
                _place(node.value, node)
        self.filename = code.co_filename
        return self._compile_and_exec(tree)

    FunctionRewriter.rewrite_ast = rewritten


def _definition(lines: list[str], first: int) -> str:
    """Return the function that begins, with its decorators, at a line of a file, alone and at its line.

    Raises:
        SyntaxError: There is none.
    """
    start = next((k for k in range(first - 1, len(lines)) if lines[k].lstrip().startswith("def ")), None)
    if start is None:
        raise SyntaxError(f"no function is defined at line {first}")
    indent = len(lines[start]) - len(lines[start].lstrip())
    ends = (k for k in range(start + 1, len(lines)) if lines[k][:indent + 1].strip() and lines[k].lstrip()[0] not in ")#")
    block = lines[start:next(ends, len(lines))]
    return "\n" * start + textwrap.dedent("".join(block))


def _place(value: ast.expr, where: ast.stmt) -> None:
    """Say where the call is that the interpreter put around a value: where it is assigned."""
    assert isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    for node in (value, value.func, value.func.value, *value.args[1:]):
        ast.copy_location(node, where)
