"""Every fusible row of the op table through the whole pipeline, against float64 (integers exactly).

A test is a row; it runs the row's calls (``tests/support/samples.py``) one by one, each as a graph of its own, and asserts that the
call was fused unless the row refuses it. A dynamic graph runs on a second set of sizes too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import dynafuse.ops as ops
from dynafuse.ops import Kind, Row
from tests.support import graphs
from tests.support.row_calls import compare, copied, eager, reference, tensors, write
from tests.support.samples import Sample, reduced_count, samples

ROWS = [row for row in ops.rows() if row.fusible]

UNCALLED: dict[str, str] = {
    "prims.inductor_random.default": "test_random_numbers",
    "prims.inductor_randint.default": "test_random_integers",
}
"""Rows without samples here, with where they are tested or why they cannot be called."""

KNOWN: dict[str, str] = {}
"""Rows that fail, with the fault."""

TAKES_SIZES = {"dynafuse.depthwise_convolution_backward.default"}
"""Rows that take the sizes of their result, which do not grow with their operands'."""

NOT_DENSE = "its output is not dense"


def parameters() -> list[Any]:
    found = []
    for row in ROWS:
        name = str(row.target)
        marks = [pytest.mark.xfail(strict=True, reason=KNOWN[name])] if name in KNOWN else []
        found.append(pytest.param(row, id=name, marks=marks))
    return found


@pytest.mark.parametrize("row", parameters())
def test_row(row: Row) -> None:
    if str(row.target) in UNCALLED:
        pytest.skip(UNCALLED[str(row.target)])
    compared = [check(row, sample) for sample in samples(row)]
    assert any(compared), "eager ran none of its calls"


def check(row: Row, sample: Sample) -> bool:
    """Compare one call; False where eager does not take it."""
    expected = eager(row, sample)
    if expected is None:
        return False
    inputs = tensors(sample)
    try:
        module = graphs.built(lambda build, *nodes: write(build, row, sample, nodes), *inputs, dynamic=sample.dynamic)
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
        return False  # torch's own shape function does not take these arguments
    promised = module.graph.output_node().args[0][0].meta["val"]
    if (promised.dtype, tuple(map(int, promised.shape))) != (expected.dtype, tuple(expected.shape)):
        return False  # a prim that eager runs although its contract forbids the dtypes
    run = graphs.compiled(module, inputs)
    assert_fused(row, sample, run)
    found = run.call([copied(t) for t in inputs])[0]
    if sample.dynamic and not guards(module) and str(row.target) not in TAKES_SIZES:
        assert_larger(row, sample, run)
    assert strides(found) == strides(promised), f"{row.target} {sample}: {found.stride()}"
    compare(found, expected, reference(row, sample, expected), f"{row.target} {sample}")
    return True


def guards(module: torch.fx.GraphModule) -> bool:
    """Whether tracing found conditions on the sizes."""
    value = next(n.meta["val"] for n in module.graph.nodes if n.op == "placeholder")
    return bool(value.fake_mode.shape_env.guards)


def assert_larger(row: Row, sample: Sample, run: graphs.Run) -> None:
    """The same kernels on twice the sizes."""
    larger = Sample("larger", *tree_map(doubled, (sample.args, sample.kwargs)))
    expected = eager(row, larger)
    assert expected is not None
    found = run.call([copied(t) for t in tensors(larger)])[0]
    compare(found, expected, reference(row, larger, expected), f"{row.target} {larger}")


def doubled(value: Any) -> Any:
    return value.repeat([2] * value.dim()) if isinstance(value, torch.Tensor) else value


def assert_fused(row: Row, sample: Sample, run: graphs.Run) -> None:
    """The plan is one region, unless the row refuses the call or there is nothing to compute.

    A scatter has its base made before it and, where it adds in a wider dtype, its result rounded after it.
    """
    facts = run.plan.annotated.facts
    refused = [f.call is not None and ops.refusal(f.row, f.call) for f in facts.values() if f.row]
    trivial = any(not t.numel() for t in tensors(sample)) or _empty(run) or (
        row.kind in (Kind.REDUCTION, Kind.SCAN) and reduced_count(row, sample) <= 1)
    if trivial or any(refused) or NOT_DENSE in run.reasons:
        return
    assert not run.computed, f"{sample}: not fused: {run.reasons}"
    most = 3 if any(f.scatters_into is not None for f in facts.values()) else 1
    assert 1 <= len(run.plan.regions) <= most or _returns_input(run), f"{sample}: {run.plan}"


def _empty(run: graphs.Run) -> bool:
    output = run.plan.annotated.graph.output_node()
    return any(not node.meta["val"].numel() for node in output.all_input_nodes)


def _returns_input(run: graphs.Run) -> bool:
    return all(n.op == "placeholder" for n in run.plan.annotated.graph.output_node().all_input_nodes)


def strides(tensor: torch.Tensor) -> list[int]:
    """The strides that say where elements are: those of dimensions with more than one element."""
    if not tensor.numel():
        return []
    return [int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


# Random numbers -------------------------------------------------------------------------------------------------------


def drawn(target: str, *args: Any, seed: int, **kwargs: Any) -> torch.Tensor:
    """The numbers of a random prim for a seed; ``SEED`` in ``args`` stands for it."""
    value = torch.tensor(seed)
    module = graphs.built(lambda b, node: b.op(target, *(node if a is SEED else a for a in args), **kwargs), value)
    run = graphs.compiled(module, [value])
    assert not run.computed, run.reasons
    return run.call([value])[0]


SEED = object()


@pytest.mark.parametrize(("mode", "mean", "deviation"), [("rand", 0.5, 12**-0.5), ("randn", 0.0, 1.0)])
def test_random_numbers(mode: str, mean: float, deviation: float) -> None:
    first, again, other = (drawn("prims.inductor_random.default", [40, 50], SEED, mode, seed=s) for s in (7, 7, 8))
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.99
    assert first.unique().numel() > 1950
    assert abs(first.mean() - mean) < 0.08 and abs(first.std() - deviation) < 0.08
    if mode == "rand":
        assert first.min() >= 0 and first.max() < 1


@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
def test_random_numbers_of_one_element(shape: list[int]) -> None:
    """Their place is a literal, and they are those of the first place of any tensor."""
    for name, *args in (("prims.inductor_random.default", "rand"), ("prims.inductor_random.default", "randn")):
        single, several = (drawn(name, size, SEED, *args, seed=7) for size in (shape, [40]))
        assert single.shape == tuple(shape) and single.item() == several[0].item()
    single, several = (drawn("prims.inductor_randint.default", -3, 5, size, SEED, seed=7) for size in (shape, [40]))
    assert single.item() == several[0].item()


def test_random_integers() -> None:
    first, again = (drawn("prims.inductor_randint.default", -3, 5, [40, 50], SEED, seed=7) for _ in range(2))
    assert torch.equal(first, again)
    assert first.dtype is torch.int64
    assert first.unique().tolist() == list(range(-3, 5))
    assert (first.flatten() + 3).bincount().min() > 150


def test_every_fusible_row_is_called() -> None:
    """A row without samples would pass unseen."""
    assert not [str(row.target) for row in ROWS if not samples(row) and str(row.target) not in UNCALLED]
