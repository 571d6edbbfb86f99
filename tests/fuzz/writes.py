"""Statements that read or write at indices, and those that write in place: to arguments, values and views of either."""

from __future__ import annotations

import torch

from tests.fuzz.grammar import maker, proposed
from tests.fuzz.program import Argument, Statement
from tests.fuzz.state import State
from tests.fuzz.views import sliced, view_of


def index_for(state: State, name: str, dim: int) -> str | None:
    """Indices that are in range in every call, as text: a value of integers, an argument, or an arange."""
    least = state.least(name, dim)
    if not least:
        return None
    rng, size = state.rng, f"{name}.shape[{dim}]"
    known = state.where(lambda t: t.dtype is torch.int64 and t.dim() == 1 and t.numel() > 0)
    if not known or rng.random() < 0.3:
        state.argue(Argument(f"i{len(state.arguments)}", (str(rng.randint(1, 6)),), "int64", rng.randrange(1000), "index"))
        known = [state.parameters[-1][0]]
    found = rng.choice(known)
    return rng.choice((f"({found} % {size})", f"({found} % {size})", f"({found} % {size} - {size})", f"({found} % {least})"))


@maker(5)
def read_at(state: State) -> bool:
    """Elements or rows at indices."""
    name = state.pick(lambda t: t.dim() > 0 and t.numel() > 0)
    if name is None:
        return False
    rng, dim = state.rng, state.rng.randrange(state.rank(name))
    index = index_for(state, name, dim)
    if index is None:
        return False
    positive = index.replace(f" - {name}.shape[{dim}])", ")")
    made = [f"{name}.index_select({dim}, {positive})", f"{name}[{':, ' * dim}{index}]", f"{name}[{':, ' * dim}{index}[:, None]]",
            f"{name}[{':, ' * dim}{index}] * 2", f"torch.gather({name}, {dim}, ({name}.detach() * 0).nan_to_num(0, 0, 0).long() + {positive}[0])",
            f"torch.take_along_dim({name}, {name}.argsort({dim}), {dim})", f"{name}.take({positive})"]
    if state.rank(name) == 2:
        made += [f"F.embedding({positive if dim == 0 else index_for(state, name, 0)}, {name})".replace(f" - {name}.shape[0])", ")"),
                 f"{name}[{index}, {index}]" if dim == 0 else f"{name}[:, {index}, None]"]
    return proposed(state, rng.choice(made))


@maker(4)
def write_at(state: State) -> bool:
    """Scatters and index writes, out of place: each element is written once, or all writes are added up."""
    name = state.pick(lambda t: t.dim() > 0 and t.numel() > 0)
    if name is None:
        return False
    rng, dim = state.rng, state.rng.randrange(state.rank(name))
    index = index_for(state, name, dim)
    if index is None:
        return False
    index = index.replace(f" - {name}.shape[{dim}])", ")")
    every = f"torch.arange({name}.shape[{dim}], device={name}.device)"
    once = rng.choice((every, f"{every}.flip(0)", f"{every}.roll(1)", f"{every}[1:]", f"{every}[::2]"))
    rows = f"{name}.index_select({dim}, {index})"
    same = f"{name}.index_select({dim}, {once})"
    made = [f"{name}.index_add({dim}, {index}, {rows})", f"{name}.index_copy({dim}, {once}, {same}.flip({dim}))",
            f"{name}.index_fill({dim}, {index}, 2)", f"{name}.index_put(({index if dim == 0 else 'None'},), {name}.new_ones(()), accumulate=True)",
            f"torch.zeros_like({name}).index_add({dim}, {index}, {rows} * 2)",
            f"{name}.scatter({dim}, torch.zeros_like({name}, dtype=torch.int64)[{':, ' * dim}:1], 3)",
            f"{name}.scatter_add({dim}, torch.zeros_like({name}, dtype=torch.int64) + {index}[0], {name})",
            f"torch.slice_scatter({name}, {sliced_plain(name, dim)} * 2, {dim}, 1)", f"torch.select_scatter({name}, {name}.select({dim}, 0) + 1, {dim}, -1)"]
    return proposed(state, rng.choice(made))


def sliced_plain(name: str, dim: int) -> str:
    """All but the first along a dimension."""
    return f"{name}[{':, ' * dim}1:]"


@maker(5)
def in_place(state: State) -> bool:
    """A write to a value or argument, or through a view of it; what shares its memory changes too."""
    name = state.pick()
    if name is None:
        return False
    rng, target = state.rng, name
    if rng.random() < 0.5:
        target = view_of(state, name) or name
        if any(part in target for part in ("flip", "roll", "reshape")):
            target = sliced(state, name, rng.randrange(state.rank(name))) if state.rank(name) else name
    other = state.partner(name) if rng.random() < 0.4 else None
    amount = other if other and target == name else rng.choice(("2", "-1", "0.5", "1.5"))
    made = [f"{target}.add_({amount})", f"{target}.mul_({amount})", f"{target}.sub_({amount})", f"{target}.zero_()",
            f"{target}.clamp_(min=0)", f"{target}.neg_()", f"{target}.fill_(3)", f"{target}.sigmoid_()", f"{target}.relu_()",
            f"{target}.masked_fill_({target} > 1, 0)", f"{target}.copy_({amount if other and target == name else target + ' * 2'})"]
    return state.propose(Statement(rng.choice(made), writes=True))


@maker(3)
def assigned(state: State) -> bool:
    """An assignment to a slice, to indices, or under a mask."""
    name = state.pick(lambda t: t.dim() > 0)
    if name is None:
        return False
    rng = state.rng
    dim = rng.randrange(state.rank(name))
    part = sliced(state, name, dim)
    made = [f"{part} = {rng.choice(('0', '1.5', part + ' * 2', part + '.flip(0)'))}", f"{part} += {rng.choice(('1', part))}",
            f"{part} *= 2", f"{name}[{name} > 0] = 1", f"{name}[{name} < 0] *= 2" if rng.random() < 0.2 else f"{name}[{name} < 0] = -1"]
    index = index_for(state, name, 0) if rng.random() < 0.4 else None
    if index:
        made += [f"{name}[{index}] = 2", f"{name}.index_fill_(0, {index.replace(f' - {name}.shape[0])', ')')}, 1)"]
    return state.propose(Statement(rng.choice(made), writes=True))


@maker(1.5)
def new_value_written(state: State) -> bool:
    """A new tensor that is filled part by part."""
    name = state.pick(lambda t: t.dim() > 0)
    if name is None:
        return False
    made = state.add(state.rng.choice((f"{name}.clone()", f"torch.zeros_like({name})", f"torch.empty_like({name}).fill_(1)")))
    if made is None:
        return False
    part = sliced(state, made, state.rng.randrange(state.rank(made)))
    same = part.replace(made, name)
    return state.propose(Statement(state.rng.choice((f"{part} = {same} * 2", f"{part}.copy_({same})", f"{part}.add_({same})",
                                                     f"{part}.mul_({same})")), writes=True))
