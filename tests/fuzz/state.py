"""A program under construction: every statement runs in eager, for every call, as soon as it is proposed.

What raises, grows too large, is not a number nearly everywhere, or depends on rounding is rejected, so that a finished program
says something.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fuzz import inputs
from tests.fuzz.noise import Noise
from tests.fuzz.program import Argument, Program, Statement, namespace

LARGEST = 6000
"""Most elements of a value, where the kind of a program does not say otherwise."""

HEALTHY = 0.6
"""Least part of a float tensor's elements that is finite."""

STEADY = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.04, torch.bfloat16: 0.15}
"""Largest part of a value's magnitude that may be rounding error."""

SIZES = (1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 8, 9, 13, 16, 17, 32, 33)
ODD_SIZES = (0, 1, 64, 130, 257, 600, 1030)
TALL_SIZES = (264, 300, 511, 640)
"""Rows enough to be worth reducing one by one before they are reduced together."""


@dataclass
class State:
    """The program so far, and what its names hold in each call: in eager, and in eager with noise."""

    rng: random.Random
    sizes: list[str]
    calls: list[list[int]]
    integers: list[str]
    special: bool = False
    largest: int = LARGEST
    arguments: list[Argument] = field(default_factory=list)
    parameters: list[tuple[str, str]] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    envs: list[dict[str, Any]] = field(default_factory=list)
    shadows: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)  # name inside of each tensor argument
    counter: int = 0

    # ------------------------------------------------------------------ what there is

    def fresh(self) -> str:
        """A new name of a value."""
        self.counter += 1
        return f"v{self.counter - 1}"

    def value(self, name: str, call: int = 0) -> torch.Tensor:
        """What a name holds in a call."""
        return self.envs[call][name]  # type: ignore[no-any-return]

    def values(self, name: str) -> list[torch.Tensor]:
        """What a name holds in every call."""
        return [env[name] for env in self.envs]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self.value(name).dtype

    def rank(self, name: str) -> int:
        """How many dimensions a tensor has."""
        return self.value(name).dim()

    def least(self, name: str, dim: int) -> int:
        """The smallest size of a dimension in any call."""
        return min(value.shape[dim] for value in self.values(name))

    def where(self, condition: Callable[[torch.Tensor], bool]) -> list[str]:
        """The tensors for which a condition holds in every call."""
        return [name for name in self.tensors if all(condition(value) for value in self.values(name))]

    def pick(self, condition: Callable[[torch.Tensor], bool] | None = None) -> str | None:
        """A tensor, a recent one rather than an old one."""
        found = self.tensors if condition is None else self.where(condition)
        if not found:
            return None
        depth = self.rng.random()
        return found[-1] if depth < 0.4 else self.rng.choice(found[-3:]) if depth < 0.7 else self.rng.choice(found)

    def partner(self, name: str, condition: Callable[[torch.Tensor], bool] | None = None) -> str | None:
        """A tensor that can be broadcast with another, often of its dtype."""
        first = self.values(name)

        def fits(other: str) -> bool:
            return all(_broadcasts(a, b, self.largest) for a, b in zip(first, self.values(other), strict=True))

        found = [t for t in (self.tensors if condition is None else self.where(condition)) if fits(t)]
        alike = [t for t in found if self.dtype(t) == first[0].dtype]
        if alike and self.rng.random() < 0.7:
            found = alike
        return self.rng.choice(found) if found else None

    # ------------------------------------------------------------------ arguments

    def argue(self, argument: Argument, times: Sequence[str] = ()) -> None:
        """Make a tensor argument of every call, and pass it in as often as expressions are given (as itself if none is)."""
        self.arguments.append(argument)
        for expression in times or (argument.name,):
            inside = f"p{len(self.parameters)}"
            self.parameters.append((inside, expression))
            self.tensors.append(inside)
        self.rebuild()

    def rebuild(self) -> None:
        """Run everything again from fresh arguments."""
        self.envs = [self._start(call) for call in self.calls]
        self.shadows = [self._start(call) for call in self.calls]
        for statement in self.statements:
            self._run(statement)

    def _start(self, call: Sequence[int]) -> dict[str, Any]:
        outside = namespace() | dict(zip(self.sizes, call, strict=True))
        for argument in self.arguments:
            exec(str(argument), outside)
        inside = {name: eval(expression, outside) for name, expression in self.parameters}
        return namespace() | inside

    # ------------------------------------------------------------------ statements

    def _run(self, statement: Statement) -> None:
        for k, (env, shadow) in enumerate(zip(self.envs, self.shadows, strict=True)):
            for place, noise in ((env, nullcontext()), (shadow, Noise(17 * k + 5))):
                torch.manual_seed(len(self.statements))
                with noise:
                    exec(statement.text, place)

    def propose(self, statement: Statement) -> bool:
        """Take a statement up if it runs and leaves values that say something."""
        try:
            self._run(statement)
            good = all(map(self._sound, statement.binds)) and (not statement.writes or all(map(self._sound, self.tensors)))
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError, OverflowError):
            good = False
        if good:
            self.statements.append(statement)
            self.tensors += [name for name in statement.binds if isinstance(self.value(name), torch.Tensor)]
            return True
        if statement.writes:
            self.rebuild()
        for env in (*self.envs, *self.shadows):
            for name in statement.binds:
                env.pop(name, None)
        return False

    def add(self, expression: str) -> str | None:
        """Bind an expression to a new name, if it is any good."""
        name = self.fresh()
        return name if self.propose(Statement(f"{name} = {expression}", (name,))) else None

    def _sound(self, name: str) -> bool:
        found = self.values(name)
        if not isinstance(found[0], torch.Tensor):
            return True
        if len({value.dim() for value in found}) > 1 or len({value.dtype for value in found}) > 1:
            return False
        return all(self._healthy(value, shadow[name]) for value, shadow in zip(found, self.shadows, strict=True))

    def _healthy(self, value: torch.Tensor, shadow: torch.Tensor) -> bool:
        if value.numel() > self.largest or value.is_complex() or value.layout is not torch.strided:
            return False
        value, shadow = value.detach(), shadow.detach()
        if value.shape != shadow.shape:
            return False
        if not value.is_floating_point():
            return bool((value == shadow).all())
        if not value.numel():
            return True
        finite = value.isfinite()
        if not self.special and finite.double().mean() < HEALTHY:
            return False
        if not torch.equal(finite, shadow.isfinite()):
            return False
        if not finite.any():
            return self.special
        plain, noisy = value[finite].double(), shadow[finite].double()
        magnitude = plain.square().mean().sqrt().item()
        if not (magnitude == 0 or 1e-4 < magnitude < 1e4):
            return False
        return (noisy - plain).square().mean().sqrt().item() <= STEADY[value.dtype] * magnitude

    # ------------------------------------------------------------------ the end

    def program(self, returns: Sequence[str], **how: Any) -> Program:
        """The finished program."""
        return Program(tuple(self.sizes), tuple(self.arguments), tuple(self.parameters), tuple(self.statements),
                       tuple(returns), tuple(map(tuple, self.calls)), **how)


def _broadcasts(a: torch.Tensor, b: torch.Tensor, largest: int) -> bool:
    try:
        shape = torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return False
    return shape.numel() <= largest


def float_dtype(rng: random.Random) -> str:
    """A float dtype, float32 most often."""
    return rng.choice(("float32",) * 5 + ("float16", "bfloat16") * 2 + ("float64",))


def any_dtype(rng: random.Random) -> str:
    """Any dtype."""
    return float_dtype(rng) if rng.random() < 0.7 else rng.choice((*inputs.INTEGERS[:3], "int64", "bool", "bool", "int8"))
