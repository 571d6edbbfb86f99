"""Keys of random small graphs: two regions share one exactly if they compute the same of tensors laid out alike.

What a graph computes is written out here as an expression, apart from the code that makes keys: operands that may change
places in alphabetical order, no names of nodes, no order of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from dynafuse.cache import canonical as key
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.cache.hoisted import hoist_scalars
from dynafuse.config import OPTIONS, Option, resolve
from dynafuse.ir import Classed
from tests.support import graphs

ONE = ("aten.exp.default", "aten.sin.default", "aten.neg.default")
SWAPPED = ("aten.add.Tensor", "aten.mul.Tensor", "aten.maximum.default")
ORDERED = ("aten.sub.Tensor", "aten.div.Tensor", "aten.atan2.default")
INPUTS = (torch.randn(6, 8), torch.randn(8), torch.randn(6, 1))
"""No two alike: of inputs that are, which is which may be seen by names alone."""

few = settings(max_examples=25, deadline=None)


@dataclass(frozen=True)
class Step:
    """An op over earlier values; ``operands`` count inputs first, then steps."""

    op: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Steps, of which the last is the result, and what else makes a region another one."""

    steps: tuple[Step, ...]
    dim: int | None = None  # the result is summed over it
    dtype: torch.dtype = torch.float32
    transposed: bool = False  # the first input lies in memory column by column
    into: bool = False  # the result overwrites the first input
    rows: int = 6  # of the inputs that have some

    @property
    def meaning(self) -> str:
        """What it computes of which tensors, and where that goes."""
        return f"{values(self.steps)[-1]} {self.dim} {self.dtype} {self.transposed} {self.into} {self.rows}"

    @property
    def of_any_rows(self) -> str:
        """The same with the class of its number of rows, where kernels serve one."""
        exact = self.transposed or self.dim == 0 or self.rows < 2
        rows = self.rows if exact else (self.rows % 16 == 0, self.rows.bit_length())
        return f"{replace(self, rows=0).meaning} {rows}"


def values(steps: tuple[Step, ...]) -> list[str]:
    """Every value as an expression."""
    known = ["x", "y", "z"]
    for step in steps:
        operands = [known[k] for k in step.operands]
        known.append(f"{step.op}({', '.join(sorted(operands) if step.op in SWAPPED else operands)})")
    return known


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Every step computes something new, of the value before it and perhaps of an earlier one."""
    steps: tuple[Step, ...] = (Step("aten.sub.Tensor", (0, 1)),)  # as large as the result
    for _ in range(draw(st.integers(1, 6))):
        last = len(INPUTS) + len(steps) - 1
        single = draw(st.booleans())
        other = draw(st.integers(0, last))
        step = (Step(draw(st.sampled_from(ONE)), (last,)) if single else
                Step(draw(st.sampled_from(SWAPPED + ORDERED)), draw(st.sampled_from(((last, other), (other, last))))))
        known = values((*steps, step))
        steps = (*steps, step) if len(set(known)) == len(known) else steps
    return Program(steps)


def bound(program: Program, swap: bool = False, order: tuple[int, ...] = (), prefix: str = "", target: str = "sm90",
          classes: bool = False, **options: Any) -> CanonicalRegion:
    """The region of a program: its steps in some order, with operands in the other order where that is the same."""
    def write(build: graphs.Builder, *inputs: Node) -> Node:
        known = dict(enumerate(inputs))
        for k in order or range(len(program.steps)):
            step = program.steps[k]
            operands = [known[i] for i in step.operands]
            known[len(INPUTS) + k] = build.op(step.op, *(operands[::-1] if swap and step.op in SWAPPED else operands))
        result = known[len(INPUTS) + len(program.steps) - 1]
        if program.dim is not None:
            result = build.op("aten.sum.dim_IntList", result, [program.dim])
        return build.op("aten.copy_.default", inputs[0], result) if program.into else result

    first, *others = (_with_rows(value, program.rows).to(program.dtype) for value in INPUTS)
    module = graphs.built(write, first.t().contiguous().t() if program.transposed else first, *others)
    plan = graphs.planned(_named(module, prefix))
    (region,) = plan.regions
    return key.canonical(plan.annotated, region, resolve(options=options, environ={}).key(), target, classes)


def _with_rows(value: torch.Tensor, rows: int) -> torch.Tensor:
    return value[:1].expand(rows, -1).contiguous() if value.dim() > 1 else value


def _named(module: GraphModule, prefix: str) -> GraphModule:
    """The graph with other names of its nodes, as of another layer of a model."""
    for node in module.graph.nodes if prefix else ():
        if node.op == "call_function":
            node.name = f"{prefix}_{node.name[::-1]}"
            node.meta["nn_module_stack"] = {prefix: (prefix, torch.nn.Module)}
    return module


def same(first: CanonicalRegion, second: CanonicalRegion) -> bool:
    """Whether two regions share a key, which is when nothing is said of their difference."""
    assert (first.key == second.key) == (key.diff(first, second) == []) == (key.diff(second, first) == [])
    return first.key == second.key


def sides(program: Program) -> Program:
    """The program with a side chain that its steps do not need before the end, so that there is an order to choose."""
    last = len(INPUTS) + len(program.steps) - 1
    side = (Step("aten.exp.default", (1,)), Step("aten.sin.default", (last + 1,)), Step("aten.div.Tensor", (last, last + 2)))
    return replace(program, steps=(*program.steps, *side))


# What does not matter -------------------------------------------------------------------------------------------------


@few
@given(programs(), st.integers(0, 99))
def test_names_and_layers_do_not_matter(program: Program, layer: int) -> None:
    assert same(bound(program), bound(program, prefix=f"layers_{layer}"))


@few
@given(programs())
def test_the_order_of_operands_that_may_change_places_does_not_matter(program: Program) -> None:
    assert same(bound(program), bound(program, swap=True))


@few
@given(programs(), st.data())
def test_the_order_of_independent_steps_does_not_matter(program: Program, data: st.DataObject) -> None:
    program = sides(program)
    count = len(program.steps)
    first, second = sorted(data.draw(st.lists(st.integers(0, count - 3), min_size=2, max_size=2)))
    main = list(range(count - 3))
    order = (*main[:first], count - 3, *main[first:second], count - 2, *main[second:], count - 1)
    assert same(bound(program), bound(program, order=order))


# What does ------------------------------------------------------------------------------------------------------------


@few
@given(programs(), st.data())
def test_another_op_or_edge_matters_exactly_if_it_computes_another_thing(program: Program, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(program.steps) - 1))
    step = program.steps[at]
    operands = list(step.operands)
    operands[data.draw(st.integers(0, len(operands) - 1))] = data.draw(st.integers(0, len(INPUTS) + at - 1))
    ops = ONE if step.op in ONE else SWAPPED + ORDERED
    changed = Step(data.draw(st.sampled_from((step.op, *ops))), tuple(operands))
    other = replace(program, steps=(*program.steps[:at], changed, *program.steps[at + 1:]))
    known = values(other.steps)
    assume(len(set(known)) == len(known) and "sub.Tensor(x, y)" in known[-1])
    assert same(bound(program), bound(other)) == (program.meaning == other.meaning)


@few
@given(programs(), programs())
def test_programs_share_a_key_exactly_if_they_compute_the_same(program: Program, other: Program) -> None:
    assert same(bound(program), bound(other)) == (program.meaning == other.meaning)


@few
@given(programs(), st.sampled_from([{"dtype": torch.float64}, {"transposed": True}, {"into": True}, {"dim": 0}]))
def test_dtypes_strides_aliases_and_sums_matter(program: Program, changed: dict[str, Any]) -> None:
    assert not same(bound(program), bound(replace(program, **changed)))


@few
@given(programs())
def test_the_dimension_of_a_sum_matters(program: Program) -> None:
    assert not same(bound(replace(program, dim=0)), bound(replace(program, dim=1)))


@few
@given(programs(), st.sampled_from([option for option in OPTIONS if option.in_key]))
def test_options_in_the_key_matter(program: Program, option: Option) -> None:
    assert not same(bound(program), bound(program, **{option.name: not option.default}))


@few
@given(programs(), st.sampled_from(["nvfuser", "inductor"]))
def test_executors_matter(program: Program, executor: str) -> None:
    first = bound(program)
    assert not same(first, key.rekeyed(first, replace(first.region, executor=executor), executor))


# Classes of sizes -----------------------------------------------------------------------------------------------------

rows = st.one_of(st.integers(2, 200).filter(lambda n: n != 8), st.sampled_from([16, 32, 48, 64, 80, 4096, 4112]))
variants = st.sampled_from([{}, {"dim": 0}, {"dim": 1}, {"transposed": True}, {"into": True}])


@few
@given(programs(), variants, rows, rows)
def test_sizes_share_a_key_exactly_if_they_share_a_class(program: Program, variant: dict[str, Any], first: int,
                                                          second: int) -> None:
    one, other = (replace(program, rows=n, **variant) for n in (first, second))
    assert same(bound(one, classes=True), bound(other, classes=True)) == (one.of_any_rows == other.of_any_rows)
    assert same(bound(one), bound(other)) == (first == second)


@few
@given(programs(), programs(), rows, rows)
def test_a_class_tells_programs_apart(program: Program, other: Program, first: int, second: int) -> None:
    one, another = replace(program, rows=first), replace(other, rows=second)
    assert same(bound(one, classes=True), bound(another, classes=True)) == (one.of_any_rows == another.of_any_rows)


@few
@given(programs(), variants, rows)
def test_a_class_has_the_region_for_one_of_its_sizes(program: Program, variant: dict[str, Any], size: int) -> None:
    made = bound(replace(program, rows=size, **variant), classes=True)
    if isinstance(made.code, Classed):
        assert made.code.at(*made.sizes) == hoist_scalars(made.spec)[0]
        assert made.code.least <= made.sizes[0] <= made.code.most
    else:
        assert made.code == hoist_scalars(made.spec)[0] and made.sizes == ()


@few
@given(programs(), rows)
def test_the_order_of_operands_does_not_matter_to_a_class(program: Program, size: int) -> None:
    made = replace(program, rows=size)
    assert same(bound(made, classes=True), bound(made, swap=True, classes=True))
