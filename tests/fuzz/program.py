"""A program: arguments, statements, what it returns, and how it is called; as data, and as the text that runs.

Worked example of a text, which is all that is needed to run a program again::

    def arguments(s0, n):
        a = tensor((s0, 4), "float16", seed=3, layout="transposed", grad=True)
        return a, n

    def program(a, n):
        v0 = a[1:].flip(0)
        v1 = v0 * max(n, 1)
        return v1

    CALLS = [(3, 2), (5, 0)]
    DYNAMIC = None
    OPTIONS = {'executors': 'triton'}
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fuzz import inputs

NAME = re.compile(r"\b[a-z]+\d+\b")


@dataclass(frozen=True)
class Argument:
    """A tensor that is made before the call; sizes are expressions over the names that a call gives values to."""

    name: str
    shape: tuple[str, ...]
    dtype: str
    seed: int
    values: str = "normal"
    layout: str = "contiguous"
    grad: bool = False
    literal: str = ""  # the elements themselves, as text, instead of random ones

    def __str__(self) -> str:
        if self.literal:
            return f"{self.name} = literal({self.literal}, {self.dtype!r})"
        sizes = ", ".join(self.shape) + ("," if len(self.shape) == 1 else "")
        rest = f", values={self.values!r}" * (self.values != "normal") + f", layout={self.layout!r}" * (
            self.layout != "contiguous") + ", grad=True" * self.grad
        return f"{self.name} = tensor(({sizes}), {self.dtype!r}, seed={self.seed}{rest})"


@dataclass(frozen=True)
class Statement:
    """A line of the program (or a loop), and the names that it binds. What it writes to in place is in its text alone."""

    text: str
    binds: tuple[str, ...] = ()
    writes: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """The names in its text that it does not bind first."""
        _, equals, right = self.text.partition(" = ")
        return frozenset(NAME.findall(right if equals and self.binds and not self.text.startswith("for ") else self.text))


@dataclass(frozen=True)
class Program:
    """A program with its calls; ``parameters`` are the expressions passed, in the order of the names ``p0``, ``p1`` …"""

    sizes: tuple[str, ...]  # names that a call gives values to: sizes, then integers
    arguments: tuple[Argument, ...]
    parameters: tuple[tuple[str, str], ...]  # name inside, expression outside
    statements: tuple[Statement, ...]
    returns: tuple[str, ...]
    calls: tuple[tuple[int, ...], ...]
    dynamic: bool | None = False
    retain: bool = False  # whether the backward runs twice
    options: Mapping[str, Any] = field(default_factory=dict)
    check: str = "eager"  # or reproducible, or disk: what its results are compared with besides

    def __str__(self) -> str:
        made = [f"    {argument}" for argument in self.arguments]
        passed = ", ".join(outside for _, outside in self.parameters)
        body = ["    " + line for statement in self.statements for line in statement.text.split("\n")]
        lines = [f"def arguments({', '.join(self.sizes)}):", *made, f"    return ({passed},)", "", "",
                 f"def program({', '.join(inside for inside, _ in self.parameters)}):", *body,
                 f"    return ({', '.join(self.returns)},)", "", "",
                 f"CALLS = [{', '.join(map(str, self.calls))}]", f"DYNAMIC = {self.dynamic}",
                 f"OPTIONS = {dict(self.options)!r}"]
        if self.retain:
            lines.append("RETAIN = True")
        if self.check != "eager":
            lines.append(f"CHECK = {self.check!r}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Loaded:
    """What a text defines."""

    text: str
    arguments: Callable[..., tuple[Any, ...]]
    program: Callable[..., Any]
    calls: tuple[tuple[int, ...], ...]
    dynamic: bool | None
    retain: bool
    options: Mapping[str, Any]
    check: str

    @property
    def random(self) -> bool:
        """Whether it draws random numbers, whatever its options say of them."""
        return bool(re.search(r"rand|dropout|bernoulli", self.text.partition("OPTIONS = ")[0]))


def namespace() -> dict[str, Any]:
    """What a text may use."""
    return {"torch": torch, "F": torch.nn.functional, "math": math,
            "tensor": inputs.tensor, "literal": inputs.literal}


def load(text: str) -> Loaded:
    """Execute a program's text. Its lines are known to tracebacks."""
    name = f"<fuzz {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space = namespace()
    exec(compile(text, name, "exec"), space)
    return Loaded(text, space["arguments"], space["program"], tuple(space["CALLS"]), space["DYNAMIC"],
                  space.get("RETAIN", False), space["OPTIONS"], space.get("CHECK", "eager"))
