"""A program from a seed and an index, the same on every machine with the same torch (it is grown on the CPU)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.fuzz import computing, inputs, long_rows, models, numbers, rows, views, writes  # noqa: F401  the makers register themselves
from tests.fuzz.grammar import TRIES, step
from tests.fuzz.program import Argument, Program, Statement, load
from tests.fuzz.state import ODD_SIZES, SIZES, TALL_SIZES, State, any_dtype, float_dtype
from tests.fuzz.subject import run

LONG_ROWS = 0.03
"""How many of the programs reduce long rows, and columns of these, in one kernel."""

TOGGLES: tuple[dict[str, Any], ...] = (
    {"reuse_layers": "always"}, {"max_region_ops": 2}, {"max_region_ops": 5}, {"rematerialize": "cost"}, {"recompute": False},
    {"round_like_eager": True}, {"size_classes": True}, {"near_match": False}, {"tune": "never"}, {"interim_plan": True},
)


def generate(seed: int, index: int, executors: tuple[str, ...] = ("triton",)) -> Program:
    """The program of a seed and an index, for one of the executors."""
    if is_of_long_rows(seed, index):
        return of_long_rows(seed, index, executors)
    rng = random.Random(f"{seed}:{index}")
    dynamic = rng.random() < 0.3
    with inputs.place("cpu"):
        state = started(rng, dynamic)
        wanted = rng.choice((1, 2, 3, 4, 5, 6, 8, 10, 14))
        for _ in range(TRIES * wanted):
            step(state)
            if len(state.statements) >= wanted:
                break
        if rng.random() < 0.05:
            repeated(state)
    options = dict(rng.choice(TOGGLES)) if rng.random() < 0.35 else {}
    options["executors"] = rng.choice(executors)
    drawn = any("rand" in s.text or "dropout" in s.text or "bernoulli" in s.text for s in state.statements)
    check = "eager"
    if drawn and rng.random() < 0.3:
        check = "reproducible"
    elif drawn:
        options["fallback_random"] = True
    if check == "eager" and rng.random() < 0.08:
        check, options["cache"] = "disk", True
    program = state.program(returned(state), dynamic=_dynamic(rng, dynamic), retain=rng.random() < 0.15, options=options, check=check)
    return differentiable(program)


def is_of_long_rows(seed: int, index: int) -> bool:
    """Whether the program of a seed and an index reduces long rows and columns."""
    return random.Random(f"{seed}:{index}:kind").random() < LONG_ROWS


def of_long_rows(seed: int, index: int, executors: tuple[str, ...] = ("triton",)) -> Program:
    """The program of a seed and an index that reduces long rows and columns, for one of the executors."""
    rng = random.Random(f"{seed}:{index}:long rows")
    with inputs.place("cpu"):
        state = long_rows.grown(rng)
    options = {**long_rows.options(rng), "executors": rng.choice(executors)}
    return differentiable(state.program(returned(state), options=options))


def differentiable(program: Program) -> Program:
    """The program, without gradients if eager has none: an op lacks a derivative, or what it saved was overwritten."""
    if not any(argument.grad for argument in program.arguments):
        return program
    loaded = load(str(program))
    try:
        for call in loaded.calls:
            run(loaded, loaded.program, call, "cpu")
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return replace(program, retain=False, arguments=tuple(replace(a, grad=False) for a in program.arguments))
    return program


def _dynamic(rng: random.Random, dynamic: bool) -> bool | None:
    if dynamic:
        return rng.choice((True, True, None))
    return rng.random() < 0.05


def started(rng: random.Random, dynamic: bool) -> State:
    """A state with arguments: tensors over a few common sizes, and integers if the program is dynamic."""
    count = rng.choice((1, 2, 2, 3, 3, 4))
    named = [f"s{k}" for k in range(count)] if dynamic else []
    integers = [f"n{k}" for k in range(rng.choice((0, 1, 1, 2)))] if dynamic else []
    calls = [_call(rng, count, len(integers), k) for k in range(rng.choice((2, 3)) if dynamic else 1)]
    state = State(rng, [*named, *integers], calls if dynamic else [[]], integers, special=rng.random() < 0.06)
    state.parameters = [(name, name) for name in integers]
    sizes = named or [str(size) for size in calls[0][:count]]
    grad = rng.random() < 0.45
    for k in range(rng.choice((1, 1, 2, 2, 3))):
        argue(state, k, sizes, grad)
    if any(size in TALL_SIZES for call in calls for size in call) and rng.random() < 0.6:
        computing.gathered(state)
    return state


def _call(rng: random.Random, sizes: int, integers: int, number: int) -> list[int]:
    few = (1, 2, 3, 4, 5) if sizes > 2 else SIZES
    drawn = [rng.choice(ODD_SIZES) if rng.random() < 0.06 and sizes < 3 else rng.choice(few) for _ in range(sizes)]
    if sizes == 2 and rng.random() < 0.08:
        drawn[0] = rng.choice(TALL_SIZES)
    if number == 0:  # sizes of 0 and 1 are constants to Dynamo: the first call has others more often
        drawn = [size if size > 1 or rng.random() < 0.3 else 3 for size in drawn]
    return drawn + [rng.choice((3, 2, 4, 5)) if number == 0 else rng.choice((0, -3, 1, 7, -1, 2)) for _ in range(integers)]


def argue(state: State, number: int, sizes: list[str], grad: bool) -> None:
    """Another tensor argument, passed once, twice, or together with a view of itself."""
    rng = state.rng
    kept = sizes if rng.random() < 0.6 else sizes[rng.randrange(len(sizes) + 1):]
    shape = tuple("1" if rng.random() < 0.1 else size for size in kept)
    dtype = float_dtype(rng) if number == 0 or rng.random() < 0.6 else any_dtype(rng)
    values = "special" if state.special else rng.choice(("normal",) * 6 + ("exact", "exact", "positive"))
    layout = "contiguous" if rng.random() < 0.55 else rng.choice(inputs.LAYOUTS)
    name = f"a{number}"
    argument = Argument(name, shape, dtype, rng.randrange(1000), values, layout,
                        grad and dtype in inputs.FLOATS and rng.random() < 0.85)
    times = [name]
    if rng.random() < 0.1:
        times.append(rng.choice((name, f"{name}[1:]" if shape else name, f"{name}.detach()")))
    state.argue(argument, times)


def repeated(state: State) -> None:
    """A loop over one value, as models repeat their layers."""
    rng = state.rng
    name = state.pick(lambda t: t.is_floating_point() and t.dim() > 0 and 0 < t.numel() <= 200)
    if name is None:
        return
    other = state.partner(name) or name
    made = state.fresh()
    body = rng.choice((f"torch.tanh({made}) * 0.5 + {name}", f"F.gelu({made}) - {made}.mean(-1, keepdim=True)",
                       f"F.layer_norm({made} + {name}, {name}.shape[-1:])", f"({made} * 0.5).sin() + {other} * 0.1"))
    text = f"{made} = {name}\nfor _ in range({rng.choice((3, 6, 12))}):\n    {made} = {body}"
    state.propose(Statement(text, (made,)))


def returned(state: State) -> tuple[str, ...]:
    """What nothing else reads, and a few others: views, arguments, values twice."""
    rng = state.rng
    read = {name for statement in state.statements for name in statement.reads}
    unread = [name for name in state.tensors if name not in read and name.startswith("v")]
    found = unread[-4:] or state.tensors[-1:]
    while rng.random() < 0.3:
        found.append(rng.choice(state.tensors))
    if rng.random() < 0.05:
        found.append(f"{found[0]}.shape")
    return tuple(found)
