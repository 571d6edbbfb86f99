"""Joint graphs in two: what the forward keeps, what of random numbers, and what is done where a step fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch.fx import GraphModule, Node

from dynafuse.config import FORCE_MARK
from dynafuse.errors import DynafuseWarning
from dynafuse.fallback import Guard
from dynafuse.partition.forcing import Forcing
from dynafuse.passes import joint
from dynafuse.passes.decompositions import decompositions
from dynafuse.passes.joint import NotSplit, split_joint

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))  # of any data a gradient in float16 may be a tie


class Split:
    """A function's forward and backward graphs, and its outputs and gradients when those are run."""

    def __init__(self, function: Callable[..., Any], *arguments: Tensor, split: Callable[..., Any] = split_joint,
                 **options: Any) -> None:
        self.graphs: list[GraphModule] = []
        inputs = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in arguments]

        def kept(module: GraphModule, example: Any) -> Any:
            self.graphs.append(module)
            return make_boxed_func(module.forward)

        partition = functools.partial(split, **{"fallback_random": False, **options})
        compiled = aot_function(function, fw_compiler=kept, bw_compiler=kept, partition_fn=partition, decompositions=decompositions())
        self.output = compiled(*inputs)
        self.output.sum().backward()
        self.forward, self.backward = self.graphs
        self.gradients = [value.grad for value in inputs]

    def targets(self, graph: GraphModule) -> list[str]:
        return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]

    @property
    def saved(self) -> list[str]:
        """What the forward hands over beside its result."""
        (outputs,) = self.forward.graph.output_node().args
        return [node.name for node in outputs[1:]]  # type: ignore[index,union-attr]


def expected(function: Callable[..., Tensor], *arguments: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    inputs = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in arguments]
    output = function(*inputs)
    output.sum().backward()
    return output, [value.grad for value in inputs]


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def waves(x: Tensor) -> Tensor:
    return x.cos().sin()


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5)


def halved(x: Tensor) -> Tensor:
    return (x.exp() + x.exp()).half().float().tanh()


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "waves": (waves, (X,)),
    "normalized": (lambda x, w: F.layer_norm(x, (8,), w), (X, torch.randn(8))),
    "product": (lambda x, w: F.gelu(x @ w).softmax(-1), (X, torch.randn(8, 5))),
    "gathered": (lambda x, i: x[i].exp().sum(1), (X, torch.tensor([1, 1, 4]))),
    "rounded": (halved, (X,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_halves_compute_what_autograd_does(name: str) -> None:
    function, arguments = FUNCTIONS[name]
    split, (output, gradients) = Split(function, *arguments), expected(function, *arguments)
    torch.testing.assert_close(split.output, output)
    torch.testing.assert_close(split.gradients, gradients)


# What is kept ---------------------------------------------------------------------------------------------------------


def test_the_backward_computes_again_what_is_cheap() -> None:
    split = Split(waves, X)
    assert split.saved == ["primals_1"]
    assert {"aten.cos.default", "aten.sin.default"} <= set(split.targets(split.backward))


def rolled(x: Tensor) -> Tensor:
    return x.roll((1, -2), (0, 1)).exp() * x


def looked_up(x: Tensor) -> Tensor:
    """The places depend on an input."""
    return x[x[:, 0].argsort() % 4].exp()


def masked_above(x: Tensor) -> Tensor:
    """Layers that differ in their masks alone share kernels, which load them."""
    place = torch.arange(8)
    return torch.where((place[:, None] * 3 % 8 > place)[:6], x, x.sin())


def by_distance(x: Tensor) -> Tensor:
    """The places are whole, what they are computed of is not: another libm would have others."""
    return x[((torch.arange(6) + 1.0).log() * 2).long()].exp()


@pytest.mark.parametrize(("function", "integers"), [(rolled, 0), (masked_above, 1), (looked_up, 1), (by_distance, 1)])
def test_no_integers_are_kept_that_depend_on_their_place_alone(function: Callable[[Tensor], Tensor], integers: int) -> None:
    split, (output, gradients) = Split(function, X, cut=saves_all), expected(function, X)
    (outputs,) = split.forward.graph.output_node().args
    kept = [node for node in outputs[1:] if not node.meta["val"].is_floating_point()]  # type: ignore[index,union-attr]
    assert len(kept) == integers
    torch.testing.assert_close((split.output, split.gradients), (output, gradients))


def test_integers_that_a_library_takes_are_kept() -> None:
    def bags(x: Tensor) -> Tensor:
        return F.embedding_bag(torch.arange(5, -1, -1), x, torch.arange(2) * 3)

    split, (output, gradients) = Split(bags, X, cut=saves_all), expected(bags, X)
    (call,) = (node for node in split.backward.graph.nodes if "_embedding_bag" in str(node.target))
    assert {node.op for node in call.all_input_nodes if not node.meta["val"].is_floating_point()} == {"placeholder"}
    torch.testing.assert_close((split.output, split.gradients), (output, gradients))


def saves_all(module: GraphModule, sides: Any) -> list[Node]:
    """A cut that keeps all that the forward computes and the backward reads."""
    backward = set(sides.required_bw_nodes)
    return [node for node in module.graph.nodes
            if node not in backward and node.op != "output" and backward & set(node.users)
            and isinstance(node.meta.get("val"), Tensor)]


def keeping(*names: str) -> Callable[[GraphModule, Any], list[Node]]:
    """A cut that keeps the nodes of these names."""
    return lambda module, sides: [node for node in module.graph.nodes if node.name in names]


def test_a_cut_says_what_is_kept() -> None:
    split = Split(waves, X, cut=keeping("cos", "sin_1"))
    assert split.saved == ["cos", "sin_1"]
    torch.testing.assert_close(split.gradients, expected(waves, X)[1])


def test_a_cut_may_draw_a_mask_again() -> None:
    """With the seed, a number for the whole graph, in the mask's place."""
    kept, drawn = Split(dropped, X), Split(dropped, X, cut=keeping("primals_1", "inductor_seeds_default"))
    assert (kept.saved, drawn.saved) == (["primals_1", "gt"], ["primals_1", "inductor_seeds_default"])
    again = "prims.inductor_random.default"
    assert [again in split.targets(split.backward) for split in (kept, drawn)] == [False, True]


def test_a_memory_budget_is_torchs_to_keep() -> None:
    asked: list[GraphModule] = []
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        split = Split(waves, X, cut=lambda module, sides: asked.append(module) or [])
    assert asked == []
    torch.testing.assert_close(split.gradients, expected(waves, X)[1])


def test_torchs_partitioner_is_itself_again_afterwards() -> None:
    before = partitioners.choose_saved_values_set

    def failing(module: GraphModule, sides: Any) -> list[Node]:
        assert partitioners.choose_saved_values_set is not before
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Split(waves, X, cut=failing)
    assert partitioners.choose_saved_values_set is before


def with_overlapping_scatter(module: GraphModule, *inputs: Any, **options: Any) -> Any:
    """The split of a graph of which tracing says what older torch does: that a scatter into an expanded tensor is one."""
    scatter, *_ = module.graph.find_nodes(op="call_function", target=torch.ops.aten.select_scatter.default)
    scatter.meta["val"] = scatter.args[0].meta["val"]
    assert 0 in scatter.meta["val"].stride()
    return split_joint(module, *inputs, **options)


@pytest.mark.filterwarnings("ignore::dynafuse.errors.DynafuseWarning")
@pytest.mark.parametrize("merge", [joint.merge_duplicates, fail], ids=["min_cut", "default"])
def test_the_backward_knows_the_strides_of_what_it_is_given(merge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "merge_duplicates", merge)
    split = Split(lambda x: torch.select_scatter(x.expand(3, 6, 8), x + 1, 0, -1).log(), X.abs() + 1, split=with_overlapping_scatter,
                  guard=Guard(strict=False), cut=keeping("select_scatter"))
    given = {node.name: node.meta["val"] for node in split.backward.graph.nodes if node.op == "placeholder"}
    assert given["select_scatter"].stride() == (48, 8, 1)


# Random numbers and casts ---------------------------------------------------------------------------------------------


SEEDED = {"prims.inductor_seeds.default", "prims.inductor_lookup_seed.default", "prims.inductor_random.default"}


def random_targets(split: Split) -> set[str]:
    return {target for target in split.targets(split.forward) if "rand" in target or "seed" in target}


def test_random_ops_become_seeds() -> None:
    assert random_targets(Split(dropped, X)) == SEEDED


def test_eagers_random_numbers_are_kept_where_they_are_asked_for() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x.sin() * torch.rand_like(x)

    torch.manual_seed(3)
    split = Split(noisy, X, fallback_random=True)
    torch.manual_seed(3)
    output, gradients = expected(noisy, X)
    assert random_targets(split) == {"aten.rand.default"}
    torch.testing.assert_close((split.output, split.gradients), (output, gradients))


def test_what_is_forced_to_eager_draws_eagers_numbers() -> None:
    """One of two draws: the other becomes one from a seed."""
    def both(x: Tensor) -> Tensor:
        with torch.fx.traceback.annotate({FORCE_MARK: ("eager", True, "")}):
            plain = torch.rand_like(x)
        return x * plain + torch.rand_like(x)

    split = Split(both, X, forcing=Forcing(enabled=("triton", "eager")))
    assert random_targets(split) == {*SEEDED, "aten.rand.default"}


def test_equal_calls_are_one_and_written_casts_stay() -> None:
    split = Split(halved, X)
    targets = split.targets(split.forward)
    assert targets.count("aten.exp.default") == 1
    assert targets.count("aten._to_copy.default") == 2


# Failures -------------------------------------------------------------------------------------------------------------


LENIENT = Guard(strict=False)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(joint, "merge_duplicates", fail)
    yield monkeypatch


@pytest.mark.usefixtures("broken")
def test_a_failure_is_raised_when_strict() -> None:
    with pytest.raises(ZeroDivisionError):
        Split(waves, X)


@pytest.mark.usefixtures("broken")
def test_torch_splits_what_we_cannot() -> None:
    """The graph as it was before: with eager's random ops, which the step had already replaced when it failed."""
    with pytest.warns(DynafuseWarning, match="split into forward and backward failed"):
        split = Split(dropped, X, guard=LENIENT)
    assert random_targets(split) == {"aten.rand.default"}
    with pytest.warns(DynafuseWarning):
        split = Split(waves, X, guard=LENIENT)
    torch.testing.assert_close(split.gradients, expected(waves, X)[1])


def test_a_cut_that_fails_is_torchs() -> None:
    with pytest.warns(DynafuseWarning, match="torch's min-cut says what the backward keeps"):
        split = Split(waves, X, cut=fail, guard=LENIENT)
    assert split.saved == ["primals_1"]


def test_where_torch_fails_too_there_is_no_split(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(partitioners, "default_partition", fail)
    with pytest.warns(DynafuseWarning), pytest.raises(NotSplit):
        Split(waves, X, guard=LENIENT)
