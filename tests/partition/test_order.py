"""Cycles and schedules, against brute force on random graphs of fused ops, matrix products and views."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule, Node

from dynafuse.cost import device as devices
from dynafuse.ir import Region
from dynafuse.ops.overloads import moves_generator
from dynafuse.partition.grow import Group
from dynafuse.partition.iteration_space import COPIES_INTO, Spaces
from dynafuse.partition.order import Dependencies, UnitOrder, schedule
from dynafuse.partition.releases import Releases
from dynafuse.partition.search import partition
from tests.support import graphs

SEEDS = range(60)
FUSED = ("aten.add.Tensor", "aten.mul.Tensor", "aten.maximum.default")


def random_graph(seed: int, size: int = 18, overwrite: bool = False) -> GraphModule:
    """A graph whose nodes take random earlier ones; every third or so runs eager, some are views."""
    pick = random.Random(seed)

    def write(build: graphs.Builder, *inputs: Node) -> list[Node]:
        made = list(inputs)
        for _ in range(size):
            left, right = pick.choice(made[-7:]), pick.choice(made)
            target = pick.choices(["fused", "mm", "view"], [6, 3, 2])[0]
            if target == "view":
                made.append(build.op("aten.permute.default", left, [1, 0]))
            else:
                made.append(build.op("aten.mm.default" if target == "mm" else pick.choice(FUSED), left, right))
        if overwrite:
            source = next((n for n in reversed(made) if n.target is not torch.ops.aten.permute.default), made[-1])
            build.op("aten.copy_.default", inputs[0], source)
        return [n for n in made if not n.users and n.op != "placeholder"] or made[-1:]

    return graphs.built(write, torch.randn(4, 4), torch.randn(4, 4))


def spaces_of(module: GraphModule) -> Spaces:
    return Spaces(graphs.annotated(module), recompute=False)


# Brute force ----------------------------------------------------------------------------------------------------------


def solid_users(spaces: Spaces, node: Node) -> set[Node]:
    """What needs a node, looking through views."""
    found: set[Node] = set()
    for user in node.users:
        found |= solid_users(spaces, user) if spaces.facts[user].role == "view" else {user}
    return found


def reaches(spaces: Spaces, starts: Iterable[Node], goals: set[Node], merged: Sequence[frozenset[Node]]) -> bool:
    """Whether a path leads from ``starts`` over a node outside both to ``goals``; groups are crossed as a whole."""
    whole = {node: group for group in merged for node in group}
    starts = set(starts)
    stack = [u for s in starts for u in solid_users(spaces, s) if u not in goals and u not in starts]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        if node not in seen:
            seen.add(node)
            for member in whole.get(node, frozenset({node})):
                seen.add(member)
                stack.extend(solid_users(spaces, member))
    return False


# Tests ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_cycles_are_those_of_brute_force(seed: int) -> None:
    spaces, pick = spaces_of(random_graph(seed)), random.Random(seed)
    group = {unit: Group([unit], []) for unit in spaces.dims}
    order = UnitOrder(Dependencies(spaces), group)
    units = list(group)
    for _ in range(40):
        first, second = group[pick.choice(units)], group[pick.choice(units)]
        if first is second:
            continue
        held = [frozenset(g.nodes) for g in {id(g): g for g in group.values()}.values()]
        a, b = set(first.nodes), set(second.nodes)
        cycle = reaches(spaces, a, b, held) or reaches(spaces, b, a, held)
        assert order.would_cycle(first, second) == cycle, (first.nodes, second.nodes)
        if not cycle:
            both = Group(sorted(first.nodes + second.nodes, key=order.dependencies.position), [])
            order.merged(first, second, both)
            group.update((node, both) for node in both.nodes)


def test_a_path_over_an_eager_op_is_a_cycle() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        a = build.op("aten.exp.default", x)
        return build.op("aten.add.Tensor", a, build.op("aten.mm.default", a, a))

    spaces = spaces_of(graphs.built(write, torch.randn(4, 4)))
    group = {unit: Group([unit], []) for unit in spaces.dims}
    first, second = group.values()
    assert UnitOrder(Dependencies(spaces), group).would_cycle(first, second)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_steps_come_after_what_they_need(seed: int, overwrite: bool) -> None:
    module = random_graph(seed, overwrite=overwrite)
    annotated = graphs.annotated(module)
    plan = partition(annotated, devices.describe("h200"))
    spaces = Spaces(annotated, recompute=True)
    there = {node for node in annotated.graph.nodes if node.op == "placeholder"}
    overwritten: set[Node] = set()
    for step in plan.steps:
        needed = step.inputs if isinstance(step, Region) else [spaces.annotated.base(a) for a in step.all_input_nodes]
        assert set(needed) <= there, (step, plan)
        assert not set(needed) & overwritten, f"{step} reads what has been overwritten"
        there.update(step.outputs if isinstance(step, Region) else [step])
        if isinstance(step, Region):
            overwritten.update(step.copies.values())
    assert {spaces.annotated.base(a) for a in annotated.graph.output_node().all_input_nodes} <= there
    assert bool(overwritten) == overwrite


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_random_graphs_compute_what_eager_does(seed: int) -> None:
    module = random_graph(seed, size=10, overwrite=seed % 2 == 0)
    inputs = [torch.randn(4, 4, dtype=torch.float32) * 0.3 for _ in range(2)]
    theirs, ours = [t.clone() for t in inputs], [t.clone() for t in inputs]
    expected = [t.clone() for t in module(*theirs)]
    found = graphs.compiled(module, inputs).call(list(ours))
    for mine, other in zip([*found, *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_schedule_keeps_the_graphs_order_where_it_may() -> None:
    def write(build: graphs.Builder, x: Node, y: Node) -> list[Node]:
        return [build.op("aten.mm.default", x, y), build.op("aten.mm.default", y, x)]

    spaces = spaces_of(graphs.built(write, torch.randn(4, 4), torch.randn(4, 4)))
    steps = schedule(spaces, [], Releases(spaces, Dependencies(spaces).after))
    assert [str(step) for step in steps] == ["mm_default", "mm_default_1"]


def test_a_copy_into_an_input_waits_for_the_inputs_readers() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        product = build.op("aten.mm.default", x, x)
        build.op("aten.copy_.default", x, build.op("aten.neg.default", x))
        return product

    steps = graphs.planned(graphs.built(write, torch.randn(4, 4))).steps
    product, copy = steps
    assert isinstance(product, Node) and product.target is torch.ops.aten.mm.default
    assert isinstance(copy, Region) and [n.target for n in copy.outputs] == [COPIES_INTO]


def test_draws_keep_the_graphs_order() -> None:
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        late = build.op("aten.native_dropout.default", build.op("aten.exp.default", build.op("aten.mm.default", x, x)), 0.5, True)
        return [late, build.op("aten.rand.default", [4], device="cpu")]

    steps = graphs.planned(graphs.built(write, torch.randn(4, 4))).steps
    draws = [step.target for step in steps if isinstance(step, Node) and moves_generator(step)]
    assert draws == [torch.ops.aten.native_dropout.default, torch.ops.aten.rand.default]


def test_draws_keep_fused_ops_apart_that_would_close_a_cycle() -> None:
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        early = build.op("aten.exp.default", x)  # before the first draw, and the other one of the pair after the second
        first = build.op("aten.bernoulli.default", early)
        late = build.op("aten.mul.Tensor", build.op("aten.rand.default", [4, 4], device="cpu"), x)
        return [first, late]

    spaces = spaces_of(graphs.built(write, torch.randn(4, 4)))
    group = {unit: Group([unit], []) for unit in spaces.dims}
    assert UnitOrder(Dependencies(spaces), group).would_cycle(*group.values())


@pytest.mark.parametrize(("dropout", "moves"), [(0.0, False), (0.5, True)])
def test_attention_draws_with_dropout_alone(dropout: float, moves: bool) -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        return build.op(operator.getitem, build.op("aten._scaled_dot_product_flash_attention_for_cpu.default", x, x, x, dropout), 0)

    module = graphs.built(write, torch.randn(1, 2, 4, 8))
    assert [moves_generator(node) for node in module.graph.nodes if node.op == "call_function"] == [moves, False]


# What is not functional ------------------------------------------------------------------------------------------------


def _doubled(tensor: torch.Tensor, others: Sequence[torch.Tensor], *, also: torch.Tensor | None = None) -> None:
    tensor.mul_(2)
    for other in (*others, *([] if also is None else [also])):
        other.add_(1)


@pytest.fixture(scope="module")
def writes() -> Iterator[str]:
    """An op that writes to what it is given, among others to a list and to a keyword."""
    with torch.library._scoped_library("dynafuse_order", "FRAGMENT") as library:
        library.define("doubled_(Tensor(a!) tensor, Tensor(b!)[] others, *, Tensor(c!)? also=None) -> ()")
        library.impl("doubled_", _doubled, "CompositeExplicitAutograd")
        yield "dynafuse_order.doubled_.default"


def _between(build: graphs.Builder, op: str, x: Node) -> list[Node]:
    """Fusible readers before and after, through a view and of what could be computed again."""
    before, other, third = (build.op("aten.add.Tensor", x, value) for value in (1.0, 2.0, 3.0))
    views = [build.op("aten.permute.default", value, [1, 0]) for value in (before, other, third)]
    early = [build.op("aten.mul.Tensor", view, 3.0) for view in views]
    build.op(op, before, [other], also=third)
    late = [build.op("aten.mul.Tensor", view, 3.0) for view in views]
    again = [build.op("aten.sub.Tensor", one, two) for one, two in zip(late, early, strict=True)]
    return [*early, *late, *again, before]


def _input(build: graphs.Builder, op: str, x: Node) -> list[Node]:
    """An input that is read before and after it is written to."""
    early = build.op("aten.mul.Tensor", x, 3.0)
    build.op(op, x, [])
    return [early, build.op("aten.mul.Tensor", x, 3.0)]


def _copied(build: graphs.Builder, op: str, x: Node) -> list[Node]:
    """What is written to is then copied into the input that it is made from."""
    copy = build.op("aten.clone.default", x)
    build.op(op, copy, [])
    build.op("aten.copy_.default", x, copy)
    return []


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize("write", [_between, _input, _copied])
def test_what_writes_stays_between_its_readers(writes: str, write: Callable[..., list[Node]], misaligned: bool) -> None:
    module = graphs.built(lambda build, x: write(build, writes, x), torch.randn(4, 6))
    ours, eager = (torch.arange(25.0)[int(misaligned):][:24].view(4, 6) for _ in range(2))
    expected = torch.fx.Interpreter(module).run(eager)
    results = graphs.compiled(module, [ours]).call([ours])
    torch.testing.assert_close(tuple(results), tuple(expected))
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("through_view", [False, True])
def test_what_needs_nothing_comes_just_before_what_reads_it(through_view: bool) -> None:
    """Zeros that a scatter adds to would take memory from the first product to the last."""
    def write(build: graphs.Builder, x: Node, at: Node) -> Node:
        zeros = build.op("aten.full.default", [16, 4], 0.0, dtype=torch.float32, device=torch.device("cpu"), pin_memory=False)
        base = build.op("aten.view.default", zeros, [16, 4]) if through_view else zeros
        for _ in range(3):
            x = build.op("aten.mm.default", x, x)
        return build.op("aten.index_put.default", base, [at], x, True)

    module = graphs.built(write, torch.randn(4, 4), torch.tensor([3, 1, 1, 15]))
    plan = partition(graphs.annotated(module), devices.describe("h200"))
    made = {node.target: i for i, step in enumerate(plan.steps) for node in (step.nodes if isinstance(step, Region) else [step])}
    assert made[torch.ops.aten.full.default] > made[torch.ops.aten.mm.default], plan


@pytest.mark.parametrize("kept", ["", "saved", "read later", "small"])
def test_what_lets_go_of_memory_comes_as_early_as_it_may(kept: str) -> None:
    """A mask for the backward stands behind all else in the graph; what it is made of would be kept until then."""
    def write(build: graphs.Builder, x: Node, y: Node, z: Node) -> list[Node]:
        product = build.op("aten.mm.default", x, y)
        between = build.op("aten.mm.default", z, z)
        if kept == "read later":
            between = build.op("aten.mm.default", build.op("aten.mm.default", product, y), y)
        last = build.op("aten.mm.default", between, between if kept != "read later" else y)
        mask = build.op("aten.gt.Scalar", product, 0.0)
        return [last, mask, *([product] if kept == "saved" else [])]

    rows = 16 if kept == "small" else 1024
    plan = graphs.planned(graphs.built(write, torch.empty(rows, 512), torch.empty(512, 512), torch.empty(64, 64)))
    place = next(i for i, step in enumerate(plan.steps) if isinstance(step, Region))
    assert place == {"": 1, "saved": len(plan.steps) - 1, "read later": 2, "small": len(plan.steps) - 1}[kept]


def test_a_step_comes_when_the_first_of_its_results_is_needed() -> None:
    """The one that is copied into an input stands at the end of the graph, behind an input's other layout."""
    def write(build: graphs.Builder, x: Node, state: Node, weight: Node) -> Node:
        other = build.op("aten.clone.default", build.op("aten.permute.default", weight, [1, 0]),
                         memory_format=torch.contiguous_format)
        changed = build.op("aten.add.Tensor", build.op("aten.mm.default", x, x), 1.0)
        last = build.op("aten.mm.default", build.op("aten.mm.default", changed, x), other)
        build.op("aten.copy_.default", state, changed)
        return last

    plan = graphs.planned(graphs.built(write, *(torch.empty(1200, 1200) for _ in range(3))))
    kinds = ["mm" if isinstance(step, Node) else "changed" if len(step.outputs) == 2 else "other" for step in plan.steps]
    assert kinds == ["mm", "changed", "mm", "other", "mm"], plan


@pytest.mark.parametrize(("rows", "is_late"), [(1024, True), (16, False)])
@pytest.mark.parametrize("through_view", [False, True])
def test_an_input_in_another_layout_is_made_just_before_it_is_read(rows: int, is_late: bool, through_view: bool) -> None:
    def write(build: graphs.Builder, x: Node, y: Node) -> Node:
        other = build.op("aten.clone.default", build.op("aten.permute.default", x, [1, 0]),
                         memory_format=torch.contiguous_format)
        other = build.op("aten.view.default", other, [512, rows]) if through_view else other
        for _ in range(3):
            y = build.op("aten.mm.default", y, y)
        return build.op("aten.mm.default", y, other)

    plan = graphs.planned(graphs.built(write, torch.empty(rows, 512), torch.empty(512, 512)))
    names = ["clone" if isinstance(step, Region) else step.name for step in plan.steps]
    assert (names.index("clone") > names.index("mm_default_2")) == is_late, names


@pytest.mark.parametrize("picks", [(min, max), (max, min)])
def test_where_steps_lie_in_memory_does_not_tell_which_comes_first(picks: tuple[Callable[..., Region], ...]) -> None:
    """Two inputs in another layout, both just before the product that reads them."""
    def write(build: graphs.Builder, x: Node, y: Node) -> Node:
        left, right = (build.op("aten.clone.default", build.op("aten.permute.default", operand, [1, 0]),
                                memory_format=torch.contiguous_format) for operand in (x, y))
        return build.op("aten.mm.default", left, right)

    module = graphs.built(write, torch.empty(8192, 8192), torch.empty(4096, 8192))
    spaces, regions = spaces_of(module), graphs.planned(module).regions
    copies = [[replace(region) for _ in range(8)] for region in regions]
    chosen = [pick(same, key=id) for pick, same in zip(picks, copies, strict=True)]
    steps = schedule(spaces, chosen, Releases(spaces, Dependencies(spaces).after))
    assert steps[:2] == tuple(chosen)
