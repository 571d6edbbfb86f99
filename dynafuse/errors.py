"""What can go wrong, one class per kind of mistake: what happened, where, and what to do.

    >>> str(OptionError.unknown("option", "stritc", ["strict", "workers"]))
    "unknown option 'stritc' (did you mean 'strict'?); valid: strict, workers"
    >>> print(CompileError(["aten.add.Tensor", "aten.relu.default"], "out of shared memory", "/tmp/repro.py"))
    a region of 2 ops failed to compile: out of shared memory
      ops: aten.add.Tensor, aten.relu.default
      repro: /tmp/repro.py
      without DYNAFUSE_STRICT=1 the region runs eager instead

Every class survives pickling: compile workers raise them across process borders.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_OPS_SHOWN = 12
_LINES_SHOWN, _COLUMNS_SHOWN = 6, 160  # of what a compiler says at last
_DEMOTION = "without DYNAFUSE_STRICT=1 the region runs eager instead"


class DynafuseError(Exception):
    """Base of every error that dynafuse raises on purpose."""


class DynafuseWarning(UserWarning):
    """The result is right, but something did not go as asked: a region was demoted, a setting had no effect."""


class OptionError(DynafuseError):
    """An option, mode or environment variable is unknown, or its value is not one that it takes."""

    @classmethod
    def unknown(cls, what: str, name: object, valid: Iterable[str]) -> OptionError:
        """Make the error of a name that does not exist; it suggests the closest one that does.

        Args:
            what: Which namespace was searched: "option", "mode", …
            name: What was given, of any type.
            valid: All names in that namespace, in any order.
        """
        names = sorted(valid)
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        return cls(f"unknown {what} {name!r}{hint}; valid: {', '.join(names) or 'none'}")

    @classmethod
    def ill_typed(cls, where: str, value: object, expected: str) -> OptionError:
        """Make the error of a value of a wrong type or range.

        Args:
            where: The setting as the user wrote it, such as "option 'workers'".
            value: What was given.
            expected: Which values are valid, in words.
        """
        return cls(f"{where} is {value!r} ({type(value).__name__}): expected {expected}")


class ExecutorError(DynafuseError):
    """An executor that is asked for, or that tensors of a device run on by default, cannot be used on this machine."""


class CacheError(DynafuseError):
    """A command on the kernel cache cannot be carried out: a file is no exported cache, or cannot be read or written."""


class CompileError(DynafuseError):
    """A region lowered but did not compile.

    Args:
        ops: The region's ops in order, as their overloads' names.
        reason: The compiler's words.
        repro: A file that shows the failure by itself; None if none was written.
        where: The user's lines.
    """

    def __init__(self, ops: Sequence[str], reason: str, repro: str | Path | None = None, where: Sequence[str] = ()) -> None:
        super().__init__(ops, reason, repro, where)
        self.ops = tuple(ops)
        self.reason = reason
        self.repro = repro
        self.where = tuple(where)

    def __str__(self) -> str:
        return "\n  ".join(
            [
                f"a region of {_count(self.ops)} failed to compile: {self.reason}",
                f"ops: {_shorten(self.ops)}",
                *(f"at {line}" for line in self.where),
                f"repro: {self.repro}" if self.repro else "repro: none written",
                _DEMOTION,
            ]
        )


class LoweringError(DynafuseError):
    """An op inside a region has no lowering for these operands: its row of the op table promises too much.

    Args:
        op: The op, as its overload's name.
        reason: Which operand, shape or dtype is in the way.
        where: The user's file and line; None if they are not known.
    """

    def __init__(self, op: str, reason: str, where: str | None = None) -> None:
        super().__init__(op, reason, where)
        self.op = op
        self.reason = reason
        self.where = where

    def __str__(self) -> str:
        place = f" (from {self.where})" if self.where else ""
        return f"cannot lower {self.op}{place}: {self.reason}\n  {_DEMOTION}"


class IndexOutOfRange(DynafuseError, IndexError):
    """A loaded index is not within what it indexes: eager's IndexError, from a kernel that runs in Triton's interpreter.

    Args:
        what: The op and the range.
        where: The user's line; on a GPU a device assert prints both.
    """

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what, where)
        self.what = what
        self.where = where

    def __str__(self) -> str:
        return self.what + (f", at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Violation:
    """One op that the executor it is forced to cannot run. ``tensor`` is its output, ``where`` the user's line."""

    executor: str
    op: str
    tensor: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        place = f"\n    {self.where}" if self.where else ""
        return f"{self.executor} cannot run {self.op} ({self.tensor}): {self.reason}{place}"


class ForceError(DynafuseError):
    """Ops are forced to an executor that cannot run them, or that is not enabled.

    Args:
        violations: All of a graph's, in order.
        enabled: The names of the enabled executors.
        remedies: How to enable those that are not.
    """

    def __init__(self, violations: Sequence[Violation], enabled: Sequence[str], remedies: Sequence[str] = ()) -> None:
        super().__init__(violations, enabled, remedies)
        self.violations = tuple(violations)
        self.enabled = tuple(enabled)
        self.remedies = tuple(remedies)

    def __str__(self) -> str:
        rest = len(self.violations) - _OPS_SHOWN
        return "\n  ".join(
            [
                f"force_backend cannot be kept for {_count(self.violations)}:",
                *map(str, self.violations[:_OPS_SHOWN]),
                *([f"… {rest} more"] if rest > 0 else []),
                *self.remedies,
                f"move them out, force another executor (enabled: {', '.join(self.enabled)}), or let them fall back: "
                "force_backend(..., strict=False), or `?` behind the executor of a `force` pattern",
            ]
        )


def told(error: BaseException) -> str:
    """Return an error's class and its words: the first line, and the last ones where there are more, as of a compiler's."""
    lines = [line.strip()[:_COLUMNS_SHOWN] for line in str(error).splitlines() if line.strip()]
    head = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    rest = lines[1:]
    cut = ["…"] if len(rest) > _LINES_SHOWN else []
    return "\n    ".join([head, *cut, *rest[-_LINES_SHOWN:]])


def _count(ops: Sequence[object]) -> str:
    return "1 op" if len(ops) == 1 else f"{len(ops)} ops"


def _shorten(ops: Sequence[str]) -> str:
    """Return the first ops of a long region; the repro file has them all."""
    rest = len(ops) - _OPS_SHOWN
    return ", ".join(ops[:_OPS_SHOWN]) + (f", … {rest} more" if rest > 0 else "")
