"""The unifier of axes, against brute-force enumeration of indices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from dynafuse.partition.axes import Axis, AxisDims, Unifier, divides, fresh, leaves

N, M = sympy.symbols("n m", integer=True, positive=True)


def flat(dims: AxisDims) -> list[Axis]:
    return [axis for dim in dims for axis in dim]


def sizes(dims: AxisDims) -> list[list[int]]:
    return [[axis.size for axis in leaves(dim)] for dim in dims]


def test_a_dimension_of_size_one_has_no_axis() -> None:
    assert sizes(fresh((3, 1, 4))) == [[3], [], [4]]


def test_equal_sizes_become_one_axis() -> None:
    unifier, left, right = Unifier(), fresh((8, 6)), fresh((8, 6))
    assert unifier.unify_dims(left, right)
    assert leaves(flat(left)) == leaves(flat(right))


def test_a_finer_list_splits_the_coarser() -> None:
    unifier, left, right = Unifier(), fresh((8, 6)), fresh((8, 2, 3))
    assert unifier.unify(flat(left), flat(right))
    assert sizes(left) == [[8], [2, 3]]
    assert leaves(flat(left)) == leaves(flat(right))


@pytest.mark.parametrize(("left", "right"), [((4, 6), (6, 4)), ((4, 6), (4, 5)), ((4,), (4, 2)), ((), (2,))])
def test_what_does_not_line_up_is_refused(left: Sequence[int], right: Sequence[int]) -> None:
    assert not Unifier().unify(flat(fresh(left)), flat(fresh(right)))


def test_dimensions_do_not_mix() -> None:
    assert not Unifier().unify_dims(fresh((2, 3)), fresh((6, 1)))
    assert not Unifier().unify_dims(fresh((2, 3)), fresh((2, 3, 1)))


def test_undo_takes_back_a_half_done_merge() -> None:
    unifier, left, right = Unifier(), fresh((8, 6)), fresh((4, 2, 5))
    mark = unifier.mark()
    assert not unifier.unify(flat(left), flat(right))
    unifier.undo(mark)
    assert (sizes(left), sizes(right)) == ([[8], [6]], [[4], [2], [5]])


def test_undo_keeps_what_came_before_the_mark() -> None:
    unifier, left, middle, right = Unifier(), fresh((8,)), fresh((2, 4)), fresh((2, 2, 2))
    assert unifier.unify(flat(left), flat(middle))
    mark = unifier.mark()
    assert unifier.unify(flat(middle), flat(right))
    assert sizes(left) == [[2, 2, 2]]
    unifier.undo(mark)
    assert sizes(left) == [[2, 4]]


def test_split_forwards_to_its_parts() -> None:
    unifier, axis = Unifier(), Axis(12)
    outer, inner = unifier.split(axis, 3, 4)
    assert leaves([axis]) == [outer, inner]
    assert (outer.size, inner.size) == (3, 4)


def test_symbolic_sizes_split_where_the_quotient_is_whole() -> None:
    unifier, dims = Unifier(), fresh((N * 4, M))
    assert sizes(unifier.regroup(dims, (N, 4, M)) or ()) == [[N], [4], [M]]
    assert unifier.regroup(fresh((N, M)), (N * M,)) is not None
    assert unifier.regroup(fresh((N, M)), (M, N)) is None


@pytest.mark.parametrize(("divisor", "size", "quotient"), [
    (3, 12, 4), (5, 12, None), (4, 4 * N, N), (N, 4 * N, 4), (N, N * M, M), (N, M, None), (2, N, None), (N, N, 1),
])
def test_divides(divisor: object, size: object, quotient: object) -> None:
    assert divides(divisor, size) == quotient  # type: ignore[arg-type]


# Properties -----------------------------------------------------------------------------------------------------------

FACTORS = st.lists(st.sampled_from([1, 2, 2, 3, 4, 6]), max_size=4).filter(lambda shape: math.prod(shape) <= 96)


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of equally many elements: factors in one order, multiplied together in two ways."""
    factors = draw(FACTORS)
    first = _grouped(factors, draw(st.lists(st.booleans(), min_size=4, max_size=4)))
    other = factors if draw(st.booleans()) else draw(st.permutations(factors))
    return first, _grouped(other, draw(st.lists(st.booleans(), min_size=4, max_size=4)))


def _grouped(factors: Sequence[int], joined: Sequence[bool]) -> tuple[int, ...]:
    shape: list[int] = []
    for factor, join in zip(factors, joined, strict=False):
        if join and shape:
            shape[-1] *= factor
        else:
            shape.append(factor)
    return tuple(shape)


def cuts(shape: Sequence[int]) -> set[int]:
    """How many elements lie inside each boundary between dimensions."""
    return {math.prod(shape[k:]) for k in range(len(shape) + 1)}


def have_common_cuts(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether one list of axes refines both shapes: then every boundary divides the next larger one."""
    chain = sorted(cuts(left) | cuts(right))
    return all(large % small == 0 for small, large in itertools.pairwise(chain))


def positions(dims: AxisDims, shape: Sequence[int], where: dict[Axis, int]) -> int:
    """The row-major position in ``shape`` of the element at ``where``."""
    total = 0
    for dim, size in zip(dims, shape, strict=True):
        at = 0
        for axis in leaves(dim):
            at = at * axis.size + where[axis]
        assert 0 <= at < size
        total = total * size + at
    return total


def assert_same_elements(left: AxisDims, first: Sequence[int], right: AxisDims, second: Sequence[int]) -> None:
    """Both see every element once, and the same one at the same point of the axes."""
    axes = leaves(flat(left))
    assert len(set(axes)) == len(axes) and set(axes) == set(leaves(flat(right)))
    seen = set()
    for point in itertools.product(*(range(axis.size) for axis in axes)):
        where = dict(zip(axes, point, strict=True))
        at = positions(left, first, where)
        assert at == positions(right, second, where)
        seen.add(at)
    assert len(seen) == math.prod(first)


@given(two_shapes())
def test_regroup_is_a_reshape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    first, second = shapes
    unifier, dims = Unifier(), fresh(first)
    grouped = unifier.regroup(dims, second)
    assert (grouped is not None) == have_common_cuts(first, second)
    if grouped is not None:
        assert_same_elements(dims, first, grouped, second)


@given(two_shapes())
def test_unify_is_a_reshape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    first, second = shapes
    unifier, left, right = Unifier(), fresh(first), fresh(second)
    assert unifier.unify(flat(left), flat(right)) == have_common_cuts(first, second)
    if have_common_cuts(first, second):
        assert_same_elements(left, first, right, second)


@given(st.lists(two_shapes(), min_size=1, max_size=4))
def test_undo_restores_every_axis(merges: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    unifier = Unifier()
    tensors = [fresh(shape) for pair in merges for shape in pair]
    states, marks = [], []
    for k in range(len(merges)):
        states.append([sizes(dims) for dims in tensors])
        marks.append(unifier.mark())
        unifier.unify(flat(tensors[2 * k]), flat(tensors[2 * k + 1]))
        unifier.unify(flat(tensors[0]), flat(tensors[2 * k]))
    for mark, state in zip(reversed(marks), reversed(states), strict=True):
        unifier.undo(mark)
        assert [sizes(dims) for dims in tensors] == state
