"""Makes a failing program smaller, as long as it fails in the same way, until nothing helps or time is up."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Argument, Program, Statement
from tests.fuzz.subject import Verdict

SMALLER = (1, 2, 3, 0, 4)


def shrink(program: Program, verdict: Verdict, examine: Callable[[str], Verdict], seconds: float) -> tuple[Program, Verdict]:
    """The smallest program found that fails as ``program`` does, with its verdict."""
    deadline = time.process_time() + seconds
    seen = {str(program)}
    improved = True
    while improved and time.process_time() < deadline:
        improved = False
        for candidate in smaller(program):
            text = str(candidate)
            if text in seen:
                continue
            seen.add(text)
            if time.process_time() > deadline:
                break
            found = examine(text)
            if found.status == verdict.status and found.kind == verdict.kind:
                program, verdict, improved = candidate, found, True
                break
    return program, verdict


def smaller(program: Program) -> Iterator[Program]:
    """Programs that are a step simpler, the largest steps first."""
    for step in (_one_result, _fewer_calls, _simpler_settings, _fewer_statements, _fewer_returns, _simpler_texts, _simpler_arguments,
                 _smaller_sizes):
        yield from map(tidy, step(program))


def tidy(program: Program) -> Program:
    """The program without parameters, arguments and sizes that nothing names."""
    used = {name for s in program.statements for name in s.reads} | {r.split(".")[0] for r in program.returns}
    parameters = tuple(p for p in program.parameters if p[0] in used) or program.parameters[-1:]
    passed = " ".join(outside for _, outside in parameters)
    arguments = tuple(a for a in program.arguments if re.search(rf"\b{a.name}\b", passed))
    named = passed + " " + " ".join(size for a in arguments for size in a.shape)
    kept = [k for k, name in enumerate(program.sizes) if re.search(rf"\b{name}\b", named)]
    calls = dict.fromkeys(tuple(call[k] for k in kept) for call in program.calls)
    return replace(program, parameters=parameters, arguments=arguments, sizes=tuple(program.sizes[k] for k in kept),
                   calls=tuple(calls))


def _one_result(program: Program) -> Iterator[Program]:
    """One result, with the statements that it needs: without those that write in place, or with all of them."""
    if len(program.returns) == 1 and not any(s.binds for s in _unneeded(program, program.returns, True)):
        return
    for name in program.returns:
        for writes in (False, True):
            gone = _unneeded(program, (name,), writes)
            yield replace(program, returns=(name,), statements=tuple(s for s in program.statements if s not in gone))


def _unneeded(program: Program, returns: tuple[str, ...], writes: bool) -> list[Statement]:
    """The statements on which neither the results nor (with ``writes``) writes in place depend."""
    needed, gone = {name.split(".")[0] for name in returns}, []
    for statement in reversed(program.statements):
        if needed & set(statement.binds) or (statement.writes and writes):
            needed |= statement.reads
        else:
            gone.append(statement)
    return gone


def _fewer_calls(program: Program) -> Iterator[Program]:
    if len(program.calls) > 1:
        yield from (replace(program, calls=(call,)) for call in program.calls)
        yield from (replace(program, calls=program.calls[:k] + program.calls[k + 1:]) for k in range(len(program.calls)))


def _fewer_returns(program: Program) -> Iterator[Program]:
    if len(program.returns) > 1:
        yield from (replace(program, returns=(name,)) for name in program.returns)
        yield from (replace(program, returns=program.returns[:k] + program.returns[k + 1:]) for k in range(len(program.returns)))


def _fewer_statements(program: Program) -> Iterator[Program]:
    for k in reversed(range(len(program.statements))):
        statement = program.statements[k]
        yield from _without(program, k)
        for name in sorted(_values_in(program, statement)):
            yield _substituted(program, k, name)


def _values_in(program: Program, statement: Statement) -> set[str]:
    known = {inside for inside, _ in program.parameters} | {name for s in program.statements for name in s.binds}
    return (statement.reads & known) - set(statement.binds)


def _without(program: Program, number: int) -> Iterator[Program]:
    """Without a statement and all that depends on it."""
    gone = set(program.statements[number].binds)
    kept: list[Statement] = []
    for k, statement in enumerate(program.statements):
        if k == number or (gone and statement.reads & gone and k > number):
            gone |= set(statement.binds)
        else:
            kept.append(statement)
    returns = tuple(name for name in program.returns if name.split(".")[0] not in gone)
    if not returns and kept:
        bound = [name for statement in kept for name in statement.binds]
        returns = (bound[-1],) if bound else ()
    returns = returns or (program.parameters[-1][0],)
    yield replace(program, statements=tuple(kept), returns=returns)


def _substituted(program: Program, number: int, name: str) -> Program:
    """Without a statement: what it binds is one of the values that it reads."""
    bound = program.statements[number].binds

    def changed(text: str) -> str:
        for old in bound:
            text = re.sub(rf"\b{old}\b", name, text)
        return text

    rest = tuple(replace(s, text=changed(s.text)) for s in program.statements[number + 1:])
    return replace(program, statements=program.statements[:number] + rest, returns=tuple(map(changed, program.returns)))


def _simpler_settings(program: Program) -> Iterator[Program]:
    if program.retain:
        yield replace(program, retain=False)
    if program.check != "eager":
        yield replace(program, check="eager")
    for name in program.options:
        if name != "executors":
            yield replace(program, options={k: v for k, v in program.options.items() if k != name})
    if program.dynamic is not False:
        yield replace(program, dynamic=False)
    if program.dynamic is None:
        yield replace(program, dynamic=True)
    if any(argument.grad for argument in program.arguments):
        yield replace(program, arguments=tuple(replace(a, grad=False) for a in program.arguments))


def _simpler_arguments(program: Program) -> Iterator[Program]:
    for k, argument in enumerate(program.arguments):
        yield from (_with_argument(program, k, simpler) for simpler in _simpler(argument))


def _simpler(argument: Argument) -> Iterator[Argument]:
    if argument.literal:
        return
    if argument.layout != "contiguous":
        yield replace(argument, layout="contiguous")
    if argument.grad:
        yield replace(argument, grad=False)
    if argument.dtype not in ("float32", "int64"):
        yield replace(argument, dtype="float32")
    if argument.values not in ("normal", "index"):
        yield replace(argument, values="normal")
    if argument.shape:
        yield replace(argument, shape=())
        yield from (replace(argument, shape=argument.shape[:k] + argument.shape[k + 1:]) for k in range(len(argument.shape)))


def _with_argument(program: Program, number: int, argument: Argument) -> Program:
    arguments = program.arguments
    return replace(program, arguments=(*arguments[:number], argument, *arguments[number + 1:]))


def _smaller_sizes(program: Program) -> Iterator[Program]:
    for k, argument in enumerate(program.arguments):
        for d, size in enumerate(argument.shape):
            if size.isdigit():
                for less in _less(int(size)):
                    shape = (*argument.shape[:d], str(less), *argument.shape[d + 1:])
                    yield _with_argument(program, k, replace(argument, shape=shape))
                    alike = tuple(replace(a, shape=tuple(str(less) if s == size else s for s in a.shape)) for a in program.arguments)
                    yield replace(program, arguments=alike)
    for k, call in enumerate(program.calls):
        for d, value in enumerate(call):
            for less in _less(value):
                yield replace(program, calls=(*program.calls[:k], (*call[:d], less, *call[d + 1:]), *program.calls[k + 1:]))


def _less(value: int) -> Iterator[int]:
    tried = (*SMALLER, value // 2, value - 1) if value > 0 else (0, 1, -1) if value < -1 else ()
    yield from dict.fromkeys(n for n in tried if (n < value if value > 0 else abs(n) < -value))


def _simpler_texts(program: Program) -> Iterator[Program]:
    """Parts of a statement replaced by what they are made from: ``(a % b)`` by ``a``, ``a.flip(0)`` by ``a``."""
    for k, statement in enumerate(program.statements):
        for match in re.finditer(r"\.\w+\([^()]*\)|\[[^\[\]]*\]| [-+*/%] [\w.]+", statement.text):
            start = statement.text.find(" = ") if statement.binds else -1
            if match.start() <= start:
                continue
            text = statement.text[: match.start()] + statement.text[match.end():]
            yield replace(program, statements=(*program.statements[:k], replace(statement, text=text), *program.statements[k + 1:]))
