"""Indices that are out of range raise as in eager, wherever they are used; those that are not used, or proven, are no matter.

Triton's interpreter runs here; a program of its own runs the same on the default executor of CPU tensors.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dynafuse import backend
from dynafuse.errors import IndexOutOfRange
from dynafuse.lowering.inductor import availability
from dynafuse.lowering.triton.lower import lower
from tests.support import graphs
from tests.support.processes import environment, python

Function = Callable[..., torch.Tensor]
N = 10
TABLE = torch.randn(N, 8)
COLUMN = TABLE[:, 0].contiguous()
T = torch.tensor

WRAPPING: dict[str, Function] = {
    "index": lambda w, i: w[i] * 2,
    "index of columns": lambda w, i: w.t()[:, i].exp(),
    "index by two": lambda w, i: w[i, (i % 8).abs()] * 2,
    "index of an index": lambda w, i: w[torch.arange(N)[i]] * 2,
    "reduced": lambda w, i: w[i].sum(),
    "softmax of rows": lambda w, i: w[i].softmax(-1),
    "int32": lambda w, i: w[i.int()] * 2,
    "index_put": lambda w, i: torch.index_put(w * 1, (i,), w[:2]) * 2,
    "index_fill": lambda w, i: (w * 1).index_fill(0, i, 3.0) * 2,
    "take": lambda w, i: torch.take(w[:, 0] * 1, i) * 2,
}
"""What negative indices count from the end in."""

STRICT: dict[str, Function] = {
    "embedding": lambda w, i: F.embedding(i, w) * 2,
    "gather": lambda w, i: w.gather(0, i[:, None].expand(2, 8)) * 2,
    "gather without dimensions": lambda w, i: w.sum().gather(0, i // N) + (i // N).gather(0, i * 0),
    "index_select": lambda w, i: w.index_select(0, i) * 2,
    "index_select of columns": lambda w, i: (w.t() * 1).index_select(-1, i) * 2,
    "index_select without dimensions": lambda w, i: w[0, 0].mul(1).index_select(0, (i // N)[1:]) * 2,
    "index_copy": lambda w, i: (w * 1).index_copy(0, i, w[:2]) * 2,
    "scatter of a row": lambda w, i: (w * 1).scatter(0, i[1:, None].expand(1, 8), w[:1]) * 2,
    "scatter of a value": lambda w, i: (w * 1).scatter(0, i[1:, None].expand(1, 8), 1.5) * 2,
    "scatter_add of a row": lambda w, i: (w * 1).scatter_add(0, i[1:, None].expand(1, 8), w[:1]) * 2,
    "scatter": lambda w, i: (w * 1).scatter(0, i[:, None].expand(2, 8), w[:2]) * 2,
    "scatter_add": lambda w, i: (w * 1).scatter_add(0, i[:, None].expand(2, 8), w[:2]) * 2,
    "scatter_reduce": lambda w, i: (w * 1).scatter_reduce(0, i[:, None].expand(2, 8), w[:2], "amax") * 2,
    "nll_loss": lambda w, i: F.nll_loss(w.t()[:2].log_softmax(1), i),
    "cross_entropy": lambda w, i: F.cross_entropy(w.t()[:2], i),
    "cross_entropy with weights": lambda w, i: F.cross_entropy(w.t()[:2], i, w[:, 1]),
}
"""What takes no negative indices."""

FAR = 2**30
BAD = [*((name, at) for name in WRAPPING for at in (N, -N - 1, FAR)), *((name, at) for name in STRICT for at in (N, -1, -FAR, FAR))]
GOOD = [*((name, at) for name in WRAPPING for at in (N - 1, -1, -N)), *((name, N - 1) for name in STRICT)]


def compiled(function: Function, dynamic: bool = False, **options: Any) -> Function:
    return torch.compile(function, backend=backend.dynafuse, fullgraph=True, dynamic=dynamic, options=options or None)


@pytest.mark.parametrize(("name", "at", "dynamic"), [
    *((name, at, False) for name, at in BAD if at != -FAR or name == "embedding"),
    *((name, N if number % 2 else -N - 1, True) for number, name in enumerate(WRAPPING | STRICT))])
def test_an_index_out_of_range_raises(name: str, at: int, dynamic: bool) -> None:
    function, indices = (WRAPPING | STRICT)[name], T([0, at])
    with pytest.raises((IndexError, RuntimeError)):
        function(TABLE, indices)
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|out of bounds"):
        compiled(function, dynamic)(TABLE, indices)


@pytest.mark.parametrize(("name", "at"), GOOD)
def test_an_index_in_range_does_not(name: str, at: int) -> None:
    function = (WRAPPING | STRICT)[name]
    torch.testing.assert_close(compiled(function)(TABLE, T([0, at])), function(TABLE, T([0, at])))


def test_the_error_names_op_range_and_the_users_line() -> None:
    def model(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return F.embedding(i, w) + w[0]

    with pytest.raises(IndexOutOfRange) as found:
        compiled(model)(TABLE, T([0, N]))
    line = model.__code__.co_firstlineno + 1
    assert str(found.value) == f"index out of range: aten.embedding.default: 0 <= index < {N}, at {__file__}:{line}"


# ---------------------------------------------------------------------- what is not used

TARGET = T([1, -100, 9, 0])
LOGITS = torch.randn(4, N)
MASK = T([True, False, True, False])
WILD = T([3, 10**9, 0, -(10**9)])

UNUSED: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "ignored targets": (lambda x, t: F.cross_entropy(x, t), (LOGITS, TARGET)),
    "all targets ignored": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), (LOGITS, torch.full_like(TARGET, -100))),
    "an ignored class": (lambda x, t: F.nll_loss(x, t, ignore_index=77), (LOGITS, T([1, 77, 9, 77]))),
    "ignored pixels": (lambda x, t: F.cross_entropy(x, t), (torch.randn(2, N, 3), T([[0, -100, 9], [-100, 3, 1]]))),
    "indices behind where": (lambda w, i, m: w[torch.where(m, i, 0)] * 2, (TABLE, WILD, MASK)),
    "indices under a mask": (lambda w, i, m: torch.ops.aten._unsafe_masked_index(w[:, 0] * 1, m, [i], 0.0), (TABLE, WILD, MASK)),
    "no indices": (lambda w, i: w[i] * 2 + F.embedding(i, w), (TABLE, WILD[:0])),
    "no rows": (lambda w, i: w[i].sum(0), (TABLE, WILD[:0])),
    "a branch of a cat": (lambda w, i: torch.cat([w, F.embedding(i, w), w], 0) * 2, (TABLE, T([1, 2, 3]))),
    "padding": (lambda w, i: F.pad(F.embedding(i, w), [3, 2, 5, 1]) * 2, (TABLE, T([1, 2, 3]))),
    "a slice": (lambda w, i: F.embedding(i, w)[::2] * 2, (TABLE, WILD.clamp(0, 3))),
    "a tile's rest": (lambda w, i: w[i].softmax(-1).sum(), (torch.randn(N, 131), torch.arange(7) - 7)),
    "a reversal": (lambda w, i: w[i].flip(0, 1) * 2, (TABLE, T([1, 2, -3]))),
    "a sum of embeddings": (lambda w, i: F.embedding(i, w) + F.embedding(i + 1, w) + F.embedding(i + 2, w), (TABLE, T([1, 7]))),
}
"""Programs that eager runs, though some number among the indices is out of range or beside the range in memory."""


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_not_used_is_not_checked(name: str, dynamic: bool) -> None:
    function, inputs = UNUSED[name]
    torch.testing.assert_close(compiled(function, dynamic)(*inputs), function(*inputs), equal_nan=True)


def test_gradients_of_ignored_targets() -> None:
    def loss(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, t)

    ours, eager = (LOGITS.clone().requires_grad_() for _ in range(2))
    compiled(loss)(ours, TARGET).backward()
    loss(eager, TARGET).backward()
    torch.testing.assert_close(ours.grad, eager.grad)


# ---------------------------------------------------------------------- what is not checked

PROVEN: dict[str, Function] = {
    "a literal": lambda w, i: w[torch.full((2,), 3)] * 2,
    "positions": lambda w, i: w[torch.arange(N)] * 2 + F.embedding(torch.arange(N), w),
    "positions backwards": lambda w, i: w[N - 1 - torch.arange(N)] * 2,
    "distances": lambda w, i: w[torch.arange(5)[:, None] - torch.arange(5)[None, :] + 4] * 2,
    "clamped": lambda w, i: F.embedding(i.clamp(0, N - 1), w) * 2,
    "a remainder": lambda w, i: w.index_select(0, i % N) * 2,
    "wrapped": lambda w, i: w[i.clamp(-N, N - 1)] * 2,
    "a mask": lambda w, i: F.embedding((i > 3).long(), w) * 2,
    "bytes": lambda w, i: F.embedding(i.to(torch.uint8).long(), w.repeat(26, 1)) * 2,
    "a choice": lambda w, i: w[torch.where(i > 3, i % N, torch.full_like(i, N - 1))] * 2,
    "take_along_dim": lambda w, i: w[torch.minimum(i % 99, torch.full_like(i, N - 1))] * 2,
}


def sources(function: Function, *inputs: torch.Tensor, dynamic: bool = False, **options: Any) -> str:
    """The kernels of a function, and its result as eager's."""
    with graphs.recorded() as found:
        result = compiled(function, dynamic, **options)(*inputs)
    torch.testing.assert_close(result, function(*inputs))
    return "".join(lower(bound.code).source for graph in found for bound in graph.bounds.values())


@pytest.mark.parametrize("name", PROVEN)
def test_an_index_that_is_proven_is_not_checked(name: str) -> None:
    text = sources(PROVEN[name], TABLE, T([0, 7]))
    assert "tl.load" in text and "device_assert" not in text


@pytest.mark.parametrize("function", [
    lambda w, i: w[torch.arange(w.shape[0])] * 2,
    lambda w, i: F.embedding(i.clamp(0, w.shape[0] - 1), w) * 2,
    lambda w, i: w.index_select(0, i % w.shape[0]) * 2,
])
def test_an_index_below_a_dynamic_size_is_proven(function: Function) -> None:
    text = sources(function, TABLE, T([0, 7]), dynamic=True)
    assert "tl.load" in text and "device_assert" not in text


@pytest.mark.parametrize("name", [name for name in WRAPPING | STRICT if "index_put" not in name])
def test_checks_are_turned_off(name: str) -> None:
    text = sources((WRAPPING | STRICT)[name], TABLE, T([0, 7]), check_indices=False)
    assert "device_assert" not in text


def test_an_environment_variable_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    function = STRICT["embedding"]
    assert "device_assert" in sources(function, TABLE, T([0, 7]))
    monkeypatch.setenv("DYNAFUSE_CHECK_INDICES", "0")
    assert "device_assert" not in sources(lambda w, i: function(w, i), TABLE, T([0, 7]))


def test_lines_do_not_tell_kernels_apart() -> None:
    keys: list[str] = []
    for function in (STRICT["embedding"], lambda w, i: F.embedding(i, w) * 2):
        with graphs.recorded() as found:
            compiled(function)(TABLE, T([0, 7]))
        keys += [bound.key for graph in found for bound in graph.bounds.values()]
    assert len(keys) == 2 and len(set(keys)) == 1


# ---------------------------------------------------------------------- the default on CPU

SCRIPT = '''
import torch
from tests.backend import test_indices as t
from tests.support.graphs import recorded

# C++ takes a while: all in one graph, of every other function, and not what reads as another does; one end of each range.
SAME = {"int32", "reduced", "softmax of rows", "index of columns", "index_select of columns"}
OTHERS = [name for name in t.WRAPPING | t.STRICT if name not in SAME][::2]
GOOD = [torch.tensor([0, t.N - 1]) for _ in OTHERS]
indexed = lambda w, *indices: [(t.WRAPPING | t.STRICT)[name](w, i) for name, i in zip(OTHERS, indices)]
with recorded() as graphs:
    call = t.compiled(indexed)
    torch.testing.assert_close(call(t.TABLE, *GOOD), indexed(t.TABLE, *GOOD))
    for number, name in enumerate(OTHERS):
        at = t.N if number % 2 else -t.N - 1
        try:
            call(t.TABLE, *GOOD[:number], torch.tensor([0, at]), *GOOD[number + 1:])
        except (IndexError, RuntimeError) as error:
            assert "out of" in str(error), (name, at, error)
        else:
            raise SystemExit(f"{name} at {at} raised nothing")
    torch._dynamo.reset()
    functions, inputs = zip(*t.UNUSED.values())
    every = lambda *given: [function(*one) for function, one in zip(functions, given)]
    torch.testing.assert_close(t.compiled(every)(*inputs), every(*inputs), equal_nan=True)
executors = {region.executor for graph in graphs for region in graph.plan.regions}
assert executors == {"inductor"}, executors
'''


@pytest.mark.skipif(not availability.find("cpu").available, reason=str(availability.find("cpu")))
def test_the_default_on_cpu_raises_as_well() -> None:
    python("-c", SCRIPT, env=environment(interpreted=False), timeout=600)


# ---------------------------------------------------------------------- on a GPU

ON_GPU = '''
import sys
import torch
from tests.backend import test_indices as t

name, at = sys.argv[1], int(sys.argv[2])
function = t.compiled((t.WRAPPING | t.STRICT)[name])
table, good, bad = t.TABLE.cuda(), torch.tensor([0, 3]).cuda(), torch.tensor([0, at]).cuda()
torch.testing.assert_close(function(table, good), (t.WRAPPING | t.STRICT)[name](table, good))
try:
    function(table, bad)
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error)
    raise SystemExit("device-side assert" not in str(error))
raise SystemExit("nothing was raised")
'''


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "at"), [
    ("embedding", N), ("embedding", -1), ("gather", -FAR), ("index", FAR), ("index_select", -1), ("reduced", N),
    ("softmax of rows", -N - 1), ("scatter of a value", N), ("cross_entropy", N)])
def test_a_device_assert_names_op_range_and_the_users_line(name: str, at: int) -> None:
    command = [sys.executable, "-c", ON_GPU, name, str(at)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Assertion `index out of range: aten\.\S+: -?\d+ <= index < \d+, at .*test_indices\.py:\d+` failed", done.stderr)
