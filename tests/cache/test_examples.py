"""What dynamic sizes are in example inputs, and what torch is asked to check of them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import sympy
import torch
from torch._dynamo.variables.builder import TrackedFake
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dynafuse.cache import canonical
from dynafuse.cache.examples import checked_at_most, example_of, hint_of
from dynafuse.fx import UNKNOWN_SIZE
from tests.support.differential import compiled
from tests.support.environments import environment_of


def test_examples_are_the_values_that_were_traced() -> None:
    environment, (s, t) = environment_of(12, 40)
    assert example_of(s * t + 3, environment) == hint_of(s * t + 3, environment) == 483
    unknown = environment.create_unbacked_symint().node.expr
    assert example_of(s + unknown, environment) is None
    assert hint_of(unknown, environment) == hint_of(s, None) == UNKNOWN_SIZE


def test_torch_is_asked_once_for_the_largest_of_each_kind() -> None:
    environment, (s, t) = environment_of(12, 40)
    assert checked_at_most([s * t, 768 * s * t, 3 * s], 1 << 20, environment)
    assert [guard.expr for guard in environment.guards] == [768 * s * t <= 1 << 20, 3 * s <= 1 << 20]


def test_nothing_is_asked_of_what_is_larger_or_only_data_tell() -> None:
    environment, (s, t) = environment_of(12, 40)
    unknown = environment.create_unbacked_symint().node.expr
    assert not checked_at_most([3 * s, s * t], 479, environment)
    assert not checked_at_most([3 * s, s * unknown], 1 << 20, environment)
    assert not checked_at_most([sympy.Integer(480)], 479, environment)
    assert not checked_at_most([s], 1 << 20, None)
    assert not environment.guards


@pytest.mark.parametrize("is_input", [False, True])
def test_nothing_is_asked_of_what_no_input_has(is_input: bool) -> None:
    """Torch looks at inputs alone, not at what one is a view of or was traced as first, and would not compile."""
    source = torch._dynamo.source
    tracked: list[TrackedFake] = []
    environment = ShapeEnv(tracked_fakes=tracked)
    size = environment.create_symbol(12, source.ConstantSource("size"), DimDynamic.DYNAMIC)
    if is_input:
        symint = environment.create_symintnode(size, hint=12)
        tracked.append(TrackedFake(symint, source.ConstantSource("size"), None))
    assert checked_at_most([3 * size], 1 << 20, environment) == is_input and bool(environment.guards) == is_input


@pytest.mark.parametrize("frozen", [False, True])
def test_what_torch_would_forget_is_not_taken_for_granted(frozen: bool) -> None:
    environment, (s,) = environment_of(12)
    environment.constrain_symbol_range(s, 2, 1000)
    if frozen:
        environment.freeze()
    with nullcontext() if frozen else environment.suppress_guards():
        assert not checked_at_most([3 * s], 2999, environment)
        assert checked_at_most([3 * s], 3000, environment)
    assert not environment.guards


def test_sizes_beyond_32_bits_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch compiles anew for them, and keeps what it has for others."""
    wide: list[bool] = []
    key_of = canonical.key_of
    monkeypatch.setattr(canonical, "key_of", lambda spec, target: (wide.append(spec.wide), key_of(spec, target))[1])
    monkeypatch.setattr(canonical, "INT32_LIMIT", 4000)
    call = compiled(lambda x: torch.softmax(x * 2, -1), dynamic=True, executors="triton")
    for rows, compiles in ((10, False), (40, None), (50, True), (60, None), (20, None)):
        x = torch.randn(rows, 90)
        torch.testing.assert_close(call(x), torch.softmax(x * 2, -1))
        assert set(wide) == (set() if compiles is None else {compiles})
        wide.clear()
