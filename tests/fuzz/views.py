"""Statements that move data without computing: views, chains of them, and what makes one tensor of several."""

from __future__ import annotations

from tests.fuzz.grammar import maker, proposed
from tests.fuzz.state import State


def view_of(state: State, name: str) -> str | None:
    """One view (or flip) of a value as text, of the values that can have it, in every call."""
    rank, rng = state.rank(name), state.rng
    if not rank:
        return rng.choice((f"{name}.unsqueeze(0)", f"{name}.expand(3)", f"{name}.reshape(1, 1)", f"{name}.view(-1)"))
    dim = rng.randrange(rank)
    at = dim - rank if rng.random() < 0.4 else dim
    least = state.least(name, dim)
    made = [
        f"{name}.flip({at})",
        f"{name}.transpose({at}, {rng.randrange(-rank, rank)})",
        f"{name}.permute({', '.join(map(str, rng.sample(range(rank), rank)))})",
        f"{name}.unsqueeze({rng.randrange(-rank - 1, rank + 1)})",
        f"{name}.reshape(-1)",
        f"{name}.flatten({dim})",
        f"{name}.roll({rng.randint(-3, 3)}, {at})",
        sliced(state, name, dim),
        sliced(state, name, dim),
        sliced(state, name, dim),
        f"{name}.movedim({at}, {rng.randrange(rank)})",
        f"{name}.squeeze({at})",
        f"{name}.reshape({merged(state, name)})",
        f"{name}.reshape({merged(state, name)})",
    ]
    if least:
        made += [f"{name}.select({at}, {rng.randrange(-least, least)})", f"{name}.narrow({at}, {rng.randrange(least)}, 1)",
                 f"{name}.unfold({at}, {rng.randint(1, min(3, least))}, {rng.randint(1, 2)})"]
    if rank > 1:
        made += [f"{name}.diagonal({rng.randint(-1, 1)}, {at}, {(at + 1 if at + 1 < rank else 0) if at >= 0 else (at + 1 if at < -1 else 0)})",
                 f"{name}.mT", f"{name}.T" if rank == 2 else f"{name}.mT"]
    if least == 1 and all(t.shape[dim] == 1 for t in state.values(name)):
        made += [f"{name}.expand({', '.join(str(rng.randint(2, 4)) if k == dim else '-1' for k in range(rank))})"] * 3
    if rank < 4:
        made.append(f"{name}.expand({rng.randint(1, 3)}, {', '.join(['-1'] * rank)})")
    return rng.choice(made)


def sliced(state: State, name: str, dim: int) -> str:
    """A slice of one dimension."""
    rng = state.rng
    start, stop = rng.choice(("", "", "1", "2", "-3", "-2")), rng.choice(("", "", "-1", "3", "5", "4", "100"))
    step = rng.choice(("", "", "", ":2", ":3"))
    if dim and rng.random() < 0.3 and dim == state.rank(name) - 1:
        return f"{name}[..., {start}:{stop}{step}]"
    return f"{name}[{':, ' * dim}{start}:{stop}{step}]"


def merged(state: State, name: str) -> str:
    """Sizes of a reshape: neighbours merged, one split in two, or factors of the whole."""
    rng, rank, shape = state.rng, state.rank(name), state.value(name).shape
    dim = rng.randrange(rank)
    if rank > 1 and rng.random() < 0.4:
        first = rng.randrange(rank - 1)
        sizes = [f"{name}.shape[{k}]" for k in range(first)] + ["-1"] + [f"{name}.shape[{k}]" for k in range(first + 2, rank)]
        return ", ".join(sizes)
    factors = [k for k in (2, 3, 4, 5) if shape[dim] and shape[dim] % k == 0]
    if factors:
        sizes = [f"{name}.shape[{k}]" for k in range(rank)]
        factor = rng.choice(factors)
        pair = [str(factor), "-1"] if rng.random() < 0.5 else ["-1", str(factor)]
        return ", ".join(sizes[:dim] + pair + sizes[dim + 1:])
    return ", ".join(rng.sample(["-1", "1", str(rng.choice((1, 2, 3)))], 2) if rng.random() < 0.5 else ["-1", "1"])


@maker(8)
def view(state: State) -> bool:
    """A view by itself."""
    name = state.pick()
    return bool(name and (text := view_of(state, name)) and proposed(state, text))


@maker(6)
def chain(state: State) -> bool:
    """Views of views, one statement each."""
    name = state.pick()
    taken = 0
    for _ in range(state.rng.randint(2, 5)):
        text = view_of(state, name) if name else None
        made = state.add(text) if text else None
        if made is not None:
            name, taken = made, taken + 1
    return taken > 0


@maker(4)
def joined(state: State) -> bool:
    """cat and stack of values and of their views."""
    first = state.pick(lambda t: t.dim() > 0)
    if first is None:
        return False
    rng = state.rng
    dim = rng.randrange(state.rank(first))
    parts = [first]
    for _ in range(rng.randint(1, 3)):
        other = state.pick(lambda t: t.dim() == state.rank(first)) or first
        parts.append(rng.choice((other, f"{first}.flip(0)", sliced(state, first, dim), f"{first} * 2", f"-{first}")))
    rng.shuffle(parts)
    return proposed(state, f"torch.{rng.choice(('cat', 'cat', 'stack'))}([{', '.join(parts)}], {dim})")


@maker(3)
def padded(state: State) -> bool:
    """Padding, also negative, with constants, or by reflecting and repeating."""
    name = state.pick(lambda t: 0 < t.dim() <= 4)
    if name is None:
        return False
    rng = state.rng
    count = rng.randint(1, min(2, state.rank(name)))
    amounts = [rng.choice((0, 1, 2, 1, -1, 3)) for _ in range(2 * count)]
    mode = rng.choice(("constant",) * 4 + ("reflect", "replicate", "circular"))
    if mode == "constant":
        return proposed(state, f"F.pad({name}, {amounts}, value={rng.choice((0, 1, -2.5, 3))})")
    if mode == "circular":  # of fewer elements than there are eager copies some onto themselves
        amounts = [abs(amount) for amount in amounts]
    return proposed(state, f"F.pad({name}[None], {amounts}, mode={mode!r})")


@maker(4)
def parted(state: State) -> bool:
    """split, chunk and unbind, all of whose parts are there."""
    name = state.pick(lambda t: t.dim() > 0 and t.numel() > 0)
    if name is None:
        return False
    rng, dim = state.rng, state.rng.randrange(state.rank(name))
    count = rng.choice((2, 2, 3))
    return proposed(state, rng.choice((
        f"{name}.chunk({count}, {dim})[{rng.randrange(count)}]",
        f"{name}.split({count}, {dim})[{rng.choice((0, -1))}]",
        f"{name}.split([1, {name}.shape[{dim}] - 1], {dim})[{rng.choice('01')}]",
        f"{name}.unbind({dim})[{rng.choice((0, -1))}]",
        f"torch.cat({name}.chunk({count}, {dim})[::-1], {dim})",
        f"torch.stack({name}.unbind({dim}), -1)",
        f"torch.tensor_split({name}, {count}, {dim})[{rng.randrange(count)}]",
    )))


@maker(3)
def copied(state: State) -> bool:
    """Copies into another layout, repetitions, triangles."""
    name = state.pick()
    if name is None:
        return False
    rng, rank = state.rng, state.rank(name)
    made = [f"{name}.contiguous()", f"{name}.clone()", f"{name}.detach()"]
    if rank:
        made += [f"{name}.repeat({', '.join(str(rng.randint(1, 2)) for _ in range(rank))})",
                 f"{name}.repeat_interleave(2, {rng.randrange(rank)})", f"torch.tile({name}, ({rng.randint(1, 2)},))"]
    if rank >= 2:
        made += [f"{name}.{rng.choice(('tril', 'triu'))}({rng.randint(-2, 2)})", f"torch.rot90({name})",
                 f"{name}.transpose(0, 1).contiguous()"]
    if rank == 4:
        made += [f"{name}.contiguous(memory_format=torch.channels_last)", f"F.pixel_shuffle({name}[:, :1].expand(-1, 4, -1, -1), 2)"]
    return proposed(state, rng.choice(made))
