"""Conversion of sizes, launches and workspaces to JSON and back. Reading sizes back evaluates no text.

Worked example: a grid of ``((s0 + 1023)//1024, 1, 1)`` becomes
``[["FloorDiv", ["Add", 1023, "s0"], 1024], 1, 1]``, which is read back as the same expression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy import functions

from dynafuse.ir import Launch, Size, Workspace
from dynafuse.ops.symbols import symbol_of

Symbols: TypeAlias = Callable[[str], sympy.Symbol]
"""Returns the symbol of a name: by default one of a spec, whose name says its sign."""


class NoEntry(ValueError):
    """Raised for what no entry can describe; it is not stored."""


_FUNCTIONS: Mapping[str, Callable[..., sympy.Expr]] = {function.__name__: function for function in (
    sympy.Add, sympy.Mul, sympy.Pow, functions.FloorDiv, functions.CleanDiv, functions.Mod, functions.PythonMod,
    functions.ModularIndexing, functions.Max, functions.Min)}
"""The functions that sizes are made of."""


def size_to_json(size: Size, symbols: Symbols = symbol_of) -> Any:
    """Convert a size to an int, a symbol's name, or a list of a function's name and its arguments.

    Args:
        size: The size.
        symbols: Returns the symbol of a name, as it will when the size is read back.

    Raises:
        NoEntry: It would not be read back as the same.
    """
    plain = _plain(size)
    if not isinstance(size, int) and _read_back(plain, symbols) != size:
        raise NoEntry(f"the size {size} is not the same when it is read back")
    return plain


def _read_back(plain: Any, symbols: Symbols) -> Size | None:
    try:
        return size_from_json(plain, symbols)
    except (KeyError, ValueError):  # a symbol of something else
        return None


def _plain(size: Any) -> Any:
    if isinstance(size, (int, sympy.Integer)) and not isinstance(size, bool):
        return int(size)
    if isinstance(size, sympy.Symbol):
        return str(size)
    name = type(size).__name__
    if isinstance(size, sympy.Expr) and _FUNCTIONS.get(name) is type(size):
        return [name, *map(_plain, size.args)]
    raise NoEntry(f"the size {size} is made of {name}")


def size_from_json(plain: Any, symbols: Symbols = symbol_of) -> Size:
    """Read the size that :func:`size_to_json` wrote.

    Args:
        plain: What was written.
        symbols: Returns the symbol of a name; what it raises for a name that it does not know is raised.

    Raises:
        KeyError: It names a function that sizes are not made of.
    """
    return plain if isinstance(plain, int) else _expr(plain, symbols)


def _expr(plain: Any, symbols: Symbols) -> sympy.Expr:
    if isinstance(plain, int):
        return sympy.Integer(plain)
    if isinstance(plain, str):
        return symbols(plain)
    name, *arguments = plain
    return _FUNCTIONS[name](*(_expr(argument, symbols) for argument in arguments))


def launch_to_json(launch: Launch) -> dict[str, Any]:
    """Convert a launch.

    Raises:
        NoEntry: A size of its grid would not be read back as the same.
    """
    return {**asdict(launch), "grid": [size_to_json(size) for size in launch.grid]}


def launch_from_json(plain: Mapping[str, Any]) -> Launch:
    """Read the launch that :func:`launch_to_json` wrote."""
    x, y, z = map(size_from_json, plain["grid"])
    fields = {**plain, "grid": (x, y, z), "signature": _pairs(plain["signature"]),
              "constants": _pairs(plain["constants"]), "alignments": _pairs(plain["alignments"]),
              "overwrites": _pairs(plain["overwrites"])}
    return Launch(**fields)


def _pairs(plain: Sequence[Sequence[Any]]) -> tuple[tuple[Any, Any], ...]:
    return tuple((first, second) for first, second in plain)


def workspace_to_json(space: Workspace) -> list[Any]:
    """Convert a workspace.

    Raises:
        NoEntry: Its size would not be read back as the same.
    """
    return [space.name, str(space.dtype)[6:], size_to_json(space.size)]


def workspace_from_json(plain: Sequence[Any]) -> Workspace:
    """Read the workspace that :func:`workspace_to_json` wrote.

    Raises:
        ValueError: What is written as its dtype is none.
    """
    name, dtype_name, size = plain
    dtype = getattr(torch, dtype_name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype_name!r} is no dtype")
    return Workspace(name, dtype, size_from_json(size))
