"""Sizes, launches and workspaces as JSON can hold them. Sizes are read back by name and arguments: no text is evaluated.

Worked example: a grid of ``((s0 + 1023)//1024, 1, 1)`` becomes
``[["FloorDiv", ["Add", 1023, "s0"], 1024], 1, 1]``, and that the same expression again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, TypeAlias

import sympy
import torch

from dynafuse.ir import Launch, Size, Workspace
from dynafuse.ops.symbols import symbol_of

Symbols: TypeAlias = Callable[[str], sympy.Symbol]
"""The symbol of a name: by default one of a spec, whose name says its sign."""


class NoEntry(ValueError):
    """What an entry cannot describe: it is not kept."""


@cache
def _functions() -> Mapping[str, Callable[..., sympy.Expr]]:
    """What sizes are made of."""
    from torch.utils._sympy import functions

    known: tuple[Any, ...] = (sympy.Add, sympy.Mul, sympy.Pow, functions.FloorDiv, functions.CleanDiv, functions.Mod,
                              functions.PythonMod, functions.ModularIndexing, functions.Max, functions.Min)
    return {function.__name__: function for function in known}


def size_to_json(size: Size, symbols: Symbols = symbol_of) -> Any:
    """A size over ``symbols``. Raises NoEntry for one that would not be read back as the same."""
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
    if isinstance(size, sympy.Expr) and _functions().get(name) is type(size):
        return [name, *map(_plain, size.args)]
    raise NoEntry(f"the size {size} is made of {name}")


def size_from_json(plain: Any, symbols: Symbols = symbol_of) -> Size:
    """The size that :func:`size_to_json` wrote."""
    return plain if isinstance(plain, int) else _expr(plain, symbols)


def _expr(plain: Any, symbols: Symbols) -> sympy.Expr:
    if isinstance(plain, int):
        return sympy.Integer(plain)
    if isinstance(plain, str):
        return symbols(plain)
    name, *arguments = plain
    return _functions()[name](*(_expr(one, symbols) for one in arguments))


def launch_to_json(launch: Launch) -> dict[str, Any]:
    """A launch. Raises NoEntry."""
    return {**asdict(launch), "grid": [size_to_json(size) for size in launch.grid], "unaligned": sorted(launch.unaligned)}


def launch_from_json(plain: Mapping[str, Any]) -> Launch:
    """The launch that :func:`launch_to_json` wrote."""
    x, y, z = map(size_from_json, plain["grid"])
    fields = {**plain, "grid": (x, y, z), "signature": _pairs(plain["signature"]),
              "constants": _pairs(plain["constants"]), "unaligned": frozenset(plain["unaligned"])}
    return Launch(**fields)


def _pairs(plain: Sequence[Sequence[Any]]) -> tuple[tuple[Any, Any], ...]:
    return tuple((first, second) for first, second in plain)


def workspace_to_json(space: Workspace) -> list[Any]:
    """A workspace. Raises NoEntry."""
    return [space.name, str(space.dtype)[6:], size_to_json(space.size)]


def workspace_from_json(plain: Sequence[Any]) -> Workspace:
    """The workspace that :func:`workspace_to_json` wrote."""
    name, dtype, size = plain
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    return Workspace(name, found, size_from_json(size))
