"""Statements with the program's integers and with sizes, which are symbols in a dynamic graph."""

from __future__ import annotations

from tests.fuzz.grammar import maker, proposed
from tests.fuzz.state import State

OF_INTEGERS = ("{n}", "max({n}, 1)", "min({n}, 2)", "abs({n})", "{n} // 2", "{n} % 3", "-{n}", "{n} * {n}", "({n} + 1)", "2 * {n} - 1",
               "max({n}, 0)", "{n} // -2", "{n} % -3", "(3 - {n})", "abs({n} - 1)", "{n} * 0.5", "int({n} > 0)", "{n} / 2")
OF_SIZES = ("{s}", "{s} // 2", "({s} - 3)", "{s} * 2", "({s} + 1) // 2", "max({s}, 4)", "{s} % 3", "-{s}", "(2 - {s}) // 2", "{s} ** 0.5",
            "math.ceil({s} * 0.5)", "math.floor({s} * 0.7)", "round({s} / 2)", "int({s} * 1.5)", "1 / ({s} + 1)", "min({s}, 3)")


def number(state: State) -> str | None:
    """An expression over an integer parameter or a size of a value."""
    rng = state.rng
    if state.integers and rng.random() < 0.6:
        return rng.choice(OF_INTEGERS).format(n=rng.choice(state.integers))
    name = state.pick(lambda t: t.dim() > 0)
    if name is None:
        return None
    return rng.choice(OF_SIZES).format(s=f"{name}.shape[{rng.randrange(state.rank(name))}]")


@maker(4)
def with_number(state: State) -> bool:
    """A value computed with an integer."""
    name, n = state.pick(), number(state)
    if name is None or n is None or not (state.integers or len(state.calls) > 1 or state.rng.random() < 0.2):
        return False
    rng = state.rng
    made = [f"{name} * {n}", f"{name} + {n}", f"{name} - {n}", f"{n} - {name}", f"torch.where({name} > {n}, {name}, {n})",
            f"{name}.clamp(max={n})", f"{name} + torch.full((), {n}, device={name}.device)", f"{name} / (abs({n}) + 1)",
            f"torch.full_like({name}, {n})", f"torch.pow({name}, 2) * {n}", f"({name} < {n})"]
    return proposed(state, rng.choice(made))


@maker(3)
def shaped_by_number(state: State) -> bool:
    """A shape or a place that an integer decides."""
    name, n = state.pick(lambda t: t.dim() > 0 and t.numel() > 0), number(state)
    if name is None or n is None or not (state.integers or len(state.calls) > 1 or state.rng.random() < 0.2):
        return False
    rng = state.rng
    dim = rng.randrange(state.rank(name))
    size, before = f"{name}.shape[{dim}]", ":, " * dim
    made = [f"{name}[{before}: max(1, {n})]", f"{name}[{before}{n}:]", f"{name}[{before}:{n}]", f"{name}.roll({n}, {dim})",
            f"{name}.select({dim}, {n} % {size})", f"torch.full((abs({n}) + 1,), 2, device={name}.device)",
            f"torch.arange(abs({n}) + 1, device={name}.device)", f"{name}.narrow({dim}, 0, max(1, {size} // 2))",
            f"F.pad({name}, (abs({n}), 0))", f"{name}.split(max(1, {size} // 2), {dim})[0]", f"{name}.chunk(2, {dim})[0]",
            f"torch.arange({n}, {n} + 4, device={name}.device)", f"{name}.expand({size} // {size} + 1, {', '.join(['-1'] * state.rank(name))})",
            f"torch.cat([{name}, {name}[{before}: {size} // 2]], {dim})", f"{name}.tril({n})" if state.rank(name) > 1 else f"{name}.roll({n})",
            f"{name}.sum({dim}) / {size}", f"torch.zeros(({size}, abs({n}) + 1), device={name}.device)",
            f"{name}.reshape({size}, -1)" if dim == 0 else f"{name}.reshape(-1, {size})"]
    return proposed(state, rng.choice(made))
