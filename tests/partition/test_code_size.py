"""How much kernels compute in their code, and that regions stay small enough to be compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from dynafuse.ir import Plan, RefusalKind
from dynafuse.partition.code_size import FEW_MOVES, MOST_EXPRESSIONS, CodeSize
from dynafuse.partition.iteration_space import Spaces
from tests.support import graphs
from tests.support.differential import check

X = torch.randn(64, 96)
Write = Callable[..., Node]


def expressions(write: Write, *inputs: torch.Tensor) -> int:
    """What the code of a kernel computes that computes the whole of a graph."""
    annotated = graphs.annotated(graphs.built(write, *inputs))
    computed = [node for node in annotated.graph.nodes if node.op == "call_function"]
    times = CodeSize(Spaces(annotated, True)).times(computed[-1:], computed)
    assert times is not None
    return sum(times.values())


def plan_of(write: Write, *inputs: torch.Tensor) -> Plan:
    return graphs.planned(graphs.built(write, *inputs))


def differences(steps: int) -> Write:
    """Each element less its neighbour, again and again."""
    def write(build: graphs.Builder, x: Node) -> Node:
        for step in range(steps):
            size = 96 - step
            x = build.op("aten.sub.Tensor", build.op("aten.slice.Tensor", x, 1, 1, size),
                         build.op("aten.slice.Tensor", x, 1, 0, size - 1))
        return x

    return write


def test_neighbours_are_computed_at_one_offset_more_each_step() -> None:
    steps = 8
    assert expressions(differences(steps), X) == sum(3 * (step + 1) for step in range(steps))


def test_pieces_that_are_put_together_are_computed_once() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        for _ in range(FEW_MOVES):
            halves = [build.op("aten.slice.Tensor", x, 1, start, start + 48) for start in (0, 48)]
            x = build.op("aten.cat.default", halves, 1)
        return x

    assert expressions(write, X) == 3 * FEW_MOVES


def test_what_loaded_indices_tell_is_computed_for_each_reader() -> None:
    def write(build: graphs.Builder, x: Node, at: Node) -> Node:
        for _ in range(FEW_MOVES + 1):
            x = build.op("aten.add.Tensor", build.op("aten.gather.default", x, 1, at), x)
        return x

    assert expressions(write, X, torch.zeros(64, 96, dtype=torch.int64)) > 1 << FEW_MOVES


def stencil(steps: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """An explicit scheme in two dimensions: differences of neighbours, put into what is zero at the edges."""
    def flow(x: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            y = torch.zeros_like(x)
            for dim in range(2):
                inner, left, right = (x.narrow(dim, start, x.shape[dim] - 2) for start in (1, 0, 2))
                y.narrow(dim, 1, x.shape[dim] - 2).add_(left - 2 * inner + right)
            x = x + 0.1 * y
        return x

    return flow


def test_a_stencil_of_a_step_is_one_kernel() -> None:
    (graph,) = check(stencil(1), torch.randn(20, 24), grad=False)
    assert len(graph.plan.regions) == 1


def test_regions_of_a_stencil_of_many_steps_stay_small() -> None:
    assert not plan_of(differences(8), X).refusals
    plan = plan_of(differences(80), X)
    assert any(refusal.kind is RefusalKind.TOO_MUCH_CODE for refusal in plan.refusals)
    times = [CodeSize(Spaces(plan.annotated, True)).times(region.outputs, region.nodes) for region in plan.regions]
    assert 1 < len(times) < 40 and all(time is not None and sum(time.values()) <= MOST_EXPRESSIONS for time in times)


def test_windows_of_windows_count_all_their_elements() -> None:
    def pooled(size: int) -> Write:
        def write(build: graphs.Builder, x: Node) -> Node:
            x = build.op("aten.relu.default", x)
            for _ in range(2):
                x = build.op("aten.avg_pool2d.default", x, [size, size])
            return x

        return write

    images = torch.randn(2, 3, 50, 50)
    assert expressions(pooled(2), images) == 0, "few, and not counted"
    assert expressions(pooled(3), images) > 1 + 9 + 9
    annotated = graphs.annotated(graphs.built(pooled(5), images))
    computed = [node for node in annotated.graph.nodes if node.op == "call_function"]
    assert CodeSize(Spaces(annotated, True)).times(computed[-1:], computed) is None


def test_what_several_readers_pick_from_counts_once_for_each() -> None:
    """An upsampled image is padded in the kernel that computes it: its six neighbours are counted as six, not 36."""
    def write(build: graphs.Builder, x: Node, *neighbours: Node) -> Node:
        rows, columns = neighbours[:3], neighbours[3:]
        x = build.op("aten.relu.default", x)
        picked = [build.op("aten.index.Tensor", x, [None, row, column]) for row in rows for column in columns]
        mean = picked[0]
        for other in picked[1:]:
            mean = build.op("aten.add.Tensor", mean, other)
        return build.op("aten.constant_pad_nd.default", mean, [0, 1], 0.0)

    rows, columns = (torch.arange(size).div(2, rounding_mode="floor").view(shape) for size, shape in ((80, (80, 1)), (118, (118,))))
    module = graphs.built(write, torch.randn(512, 40, 59), rows, rows, rows, columns, columns)
    assert len(graphs.planned(module).regions) == 1


def test_sizes_that_are_symbols_are_no_zeros() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        size = build.op("aten.sym_size.int", x, 1)
        for _ in range(FEW_MOVES + 1):
            x = build.op("aten.view_copy.default", build.op("aten.flip.default", x, [1]), [size, -1])
            x = build.op("aten.view_copy.default", x, [-1, size])
        return x

    module = graphs.built(write, X, dynamic=True)
    assert graphs.planned(module).regions


def recurrence(steps: int, dim: int) -> Write:
    """Slices along a dimension, each computed from the one before, put side by side."""
    def write(build: graphs.Builder, x: Node) -> Node:
        last = result = build.op("aten.select.int", x, dim, 0)
        result = build.op("aten.sigmoid.default", x)
        for step in range(steps):
            last = build.op("aten.exp.default", build.op("aten.mul.Tensor", last, build.op("aten.select.int", x, dim, step)))
            result = build.op("aten.select_scatter.default", result, last, dim, step)
        return result

    return write


def test_columns_side_by_side_are_each_computed_with_all_before_it() -> None:
    """Rows that are long in memory are computed apart from one another."""
    steps = FEW_MOVES + 2
    expected = {1: steps * (steps + 1) // 2, 0: steps}
    for dim, times in expected.items():
        annotated = graphs.annotated(graphs.built(recurrence(steps, dim), X))
        computed = [node for node in annotated.graph.nodes if node.op == "call_function"]
        counted = CodeSize(Spaces(annotated, True)).times(computed[-1:], computed)
        assert counted is not None
        assert sum(count for node, count in counted.items() if node.name.startswith("exp")) == times


def test_columns_that_follow_from_one_another_are_stored() -> None:
    """Else the last one is computed from the first one for every element of a row; they are as many bytes as the result."""
    x = torch.empty(1 << 16, 64)
    assert [len(plan_of(recurrence(16, dim), x if dim else x.t().contiguous()).regions) for dim in (0, 1)] == [1, 2]


def test_windows_side_by_side_are_no_windows_of_windows() -> None:
    """The maxima of windows and where they are come from the same elements, computed once for both."""
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        x = build.op("aten.relu.default", x)
        return [build.op("aten.avg_pool2d.default", x, [3, 3], [2, 2]), build.op("aten.avg_pool2d.default", x, [3, 3], [2, 2], [1, 1])]

    annotated = graphs.annotated(graphs.built(write, torch.empty(2, 8, 65, 65)))
    computed = [node for node in annotated.graph.nodes if node.op == "call_function"]
    assert CodeSize(Spaces(annotated, True)).times(computed[-2:], computed) == {}
