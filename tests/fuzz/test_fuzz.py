"""A few random programs with every run of the tests, and the fuzzer itself: that it repeats, finds and shrinks."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dynafuse import backend, ops
from dynafuse.lowering.triton.schedule import choose_schedule
from dynafuse.lowering.triton.tiles import Schedule
from dynafuse.ops import table
from tests.fuzz import models
from tests.fuzz.generate import LONG_ROWS, differentiable, generate, is_of_long_rows, of_long_rows, returned
from tests.fuzz.grammar import MAKERS, Maker, step
from tests.fuzz.noise import FLOAT32, Noise
from tests.fuzz.parameters import Parameters
from tests.fuzz.program import Argument, Program, Statement, load
from tests.fuzz.shrink import shrink
from tests.fuzz.state import State
from tests.fuzz.subject import COMPILED, TORCHS_OWN, Verdict, examine, witnesses

SEED = 7
CHUNKS, EACH = 10, 7


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs(chunk: int) -> None:
    for index in range(chunk * EACH, (chunk + 1) * EACH):
        text = str(generate(SEED, index))
        verdict = examine(text)
        assert not verdict.failed, f"program {index}\n{text}\n{verdict.status} {verdict.where}\n{verdict.detail}"


def test_random_programs_captured() -> None:
    for index in range(1000, 1000 + EACH):
        text = str(generate(SEED, index))
        verdict = examine(text, captured=True)
        assert not verdict.failed, f"program {index}\n{text}\n{verdict.status} {verdict.where}\n{verdict.detail}"


@pytest.mark.parametrize("maker", [maker for maker, _ in MAKERS if maker.__module__ == models.__name__], ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_models_are_made_of(maker: Maker, seed: int) -> None:
    """Over an image and rows, with statements of any kind after it."""
    rng = random.Random(seed)
    state = State(rng, [], [[]], [])
    state.argue(Argument("a0", ("2", "3", "4", "6"), "float32", seed, grad=True))
    state.argue(Argument("a1", ("5", "6"), "float32", seed, grad=True))
    assert any(maker(state) for _ in range(4))
    for _ in range(3):
        step(state)
    text = str(differentiable(state.program(returned(state), options={"executors": "triton", "fallback_random": True})))
    verdict = examine(text)
    assert not verdict.failed, f"{text}\n{verdict.status} {verdict.where}\n{verdict.detail}"


def test_some_programs_are_of_long_rows() -> None:
    found = [index for index in range(1000) if is_of_long_rows(SEED, index)]
    assert 0.5 * LONG_ROWS < len(found) / 1000 < 2 * LONG_ROWS
    program = generate(SEED, found[0])
    assert "cost" in program.options and str(program) == str(of_long_rows(SEED, found[0]))
    assert any(size.isdigit() and int(size) > 4096 for argument in program.arguments for size in argument.shape)


def test_programs_of_long_rows_reduce_rows_and_columns_in_one_kernel() -> None:
    """In each of the ways in which a kernel may take rows: most programs do, so that few are needed to see them all."""
    missing = {"rowcol", "rowcol loads_next", "rowcol reads_again", "rowcol parts"}
    for index in range(80):
        for chosen in _planned(of_long_rows(SEED, index)):
            ways = {"loads_next": chosen.loads_next, "reads_again": chosen.reads_again, "parts": chosen.parts > 1}
            missing -= {chosen.schedule_class, *(f"{chosen.schedule_class} {way}" for way, applies in ways.items() if applies)}
        if not missing:
            break
    assert not missing


def _planned(program: Program) -> list[Schedule]:
    """The schedules of a program's kernels, none of which is written."""
    loaded, graphs = load(str(program)), list[backend.Compiled]()
    torch._dynamo.reset()
    with backend.listening(graphs.append, plan_only=True):
        torch.compile(loaded.program, backend=backend.dynafuse, dynamic=loaded.dynamic, options=loaded.options)(*loaded.arguments())
    return [choose_schedule(bound.code) for graph in graphs for bound in graph.bounds.values()]


def test_parameters_stay_where_they_are() -> None:
    """Those that share memory with others, or have elements that are one, are made anew."""
    def make(size: int) -> tuple[Any, ...]:
        base = torch.randn(size, 3)
        leaves = [torch.randn(size, 3, requires_grad=True) for _ in range(2)]
        spread = torch.randn(1, 3).expand(size, 3).requires_grad_()
        return size, leaves[0], base, leaves[1], leaves[1].detach(), spread

    parameters = Parameters(make)
    first, again, other = parameters(4), parameters(4), parameters(5)
    assert [a is b for a, b in zip(first[1:], again[1:], strict=True)] == [True, False, False, False, False]
    assert other[1] is not first[1] and other[1].shape == (5, 3)


def test_a_program_is_the_same_every_time() -> None:
    assert str(generate(3, 11)) == str(generate(3, 11))
    assert str(generate(3, 11)) != str(generate(3, 12))


def test_a_text_is_all_that_is_needed() -> None:
    text = str(generate(3, 11))
    loaded = load(text)
    assert len(loaded.program(*loaded.arguments(*loaded.calls[0]))) > 0


LONG = Program(
    sizes=(), arguments=(Argument("a0", ("4", "6"), "float32", 1), Argument("a1", ("4", "6"), "float32", 2, layout="transposed")),
    parameters=(("p0", "a0"), ("p1", "a1")),
    statements=(Statement("v0 = p0 + p1", ("v0",)), Statement("v1 = v0.flip(0)", ("v1",)), Statement("v2 = v1.sinh()", ("v2",)),
                Statement("v3 = v2[1:] * 2", ("v3",)), Statement("v4 = p1.t().exp()", ("v4",))),
    returns=("v3", "v4"), calls=((),), options={"executors": "triton"})


@pytest.fixture
def _wrong_sinh() -> object:
    """A wrong row, as a mistake in the op table would be."""
    row = ops.lookup(torch.ops.aten.sinh.default)
    ops.register(dataclasses.replace(row, emit="{0} * 1.01"))
    yield None
    table.register(row)


@pytest.mark.usefixtures("_wrong_sinh")
def test_a_wrong_op_is_found_and_shrunk_to_itself() -> None:
    verdict = examine(str(LONG))
    assert (verdict.status, verdict.kind) == ("wrong", "value")
    least, verdict = shrink(LONG, verdict, examine, 30)
    assert verdict.status == "wrong"
    assert [statement.text.partition(" = ")[2] for statement in least.statements] == ["p0.sinh()"]
    assert len(least.arguments) == 1 and least.arguments[0].layout == "contiguous"


def test_right_programs_pass() -> None:
    assert examine(str(LONG)).status == "ok"


def test_what_rounding_decides_is_not_compared() -> None:
    """Sums in another order: one of them is above the other by rounding alone."""
    text = """
def arguments():
    return (tensor((50, 64), "float32", seed=1),)

def program(p0):
    return (p0.sum(1) > p0.flip(1).cumsum(1)[:, -1], p0.sum(1) - p0.flip(1).cumsum(1)[:, -1])

CALLS = [()]
DYNAMIC = False
OPTIONS = {"executors": "triton"}
"""
    assert examine(text).status == "ok"


def test_noise_leaves_exact_results_alone() -> None:
    values = torch.arange(24.0).reshape(4, 6)
    with Noise(0):
        assert torch.equal(values.flip(0) * 2 + 1, values.flip(0).mul(2).add(1))
        assert torch.equal(values.long().float(), values) and torch.equal(values.long() / 2, values / 2)
        assert torch.equal(values.sum(1), torch.tensor([15.0, 51.0, 87.0, 123.0]))
        assert not torch.equal(values.sin(), torch.sin(values.clone()))


CANCELLED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "a product and itself": lambda x: ((product := x * x) - product, product),
    "through a view": lambda x: ((product := x * x).view(5, 10).t() - product.view(5, 10).t(), product.view(5, 10).t()),
    "deviation of equal numbers": lambda x: (x.expand(3, 50).std(0), x),
    "distance from the mean of equal numbers": lambda x: (x.expand(4, 50) - x.expand(4, 50).mean(0), x),
    "a norm in 16 bits": lambda x: ((norm := torch.layer_norm(x.bfloat16(), (50,))) - norm, norm),
    "a norm of one number": lambda x: (torch.layer_norm((third := x[:, None] / 3), (1,), eps=1.0), third),
}


@pytest.mark.parametrize("name", CANCELLED)
def test_products_may_go_into_sums_before_they_are_rounded(name: str) -> None:
    """What eager cancels to 0 may be the rounding error of its terms, and no more than that."""
    with Noise(0):
        off, term = CANCELLED[name](torch.randn(50, generator=torch.Generator().manual_seed(1)))
    assert off.abs().max() > 0
    assert bool((off.abs() <= 8 * torch.finfo(off.dtype).eps * term.abs()).all())


@pytest.mark.parametrize("function", [torch.logsumexp, lambda x, dim: torch.log_softmax(x, dim)[1]], ids=["sum", "softmax"])
def test_a_logarithm_of_nearly_1_is_off_by_units_of_1(function: Callable[..., torch.Tensor]) -> None:
    values = torch.tensor([-9.0, 0.0])
    with Noise(0):
        off = function(values.expand(50, 2).t(), 0) - function(values, 0)
    assert FLOAT32 / 4 < off.abs().max() < 8 * FLOAT32


def test_comparisons_see_one_value() -> None:
    """Only what is computed with is held in more bits."""
    x = torch.randn(50, generator=torch.Generator().manual_seed(1))
    with Noise(0):
        y = x.sin()
        assert bool((y == y).all()) and bool((y.max() == y).any())


NAN = torch.full((16,), math.nan)
UNDECIDED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "vectors and what has gaps": (lambda x: torch.ops.aten.hardtanh_backward(x, x, -1, 1), NAN),
    "vectors and what has gaps, of exponentials": (lambda x: torch.ops.aten.elu_backward(torch.ones(16), 1, 1, 1, False, x), NAN),
    "sign of what is not a number": (lambda x: x.signbit().float(), NAN),
    "the larger of two zeros": (lambda x: 1 / x.relu(), torch.tensor([-0.0, 0.0])),
    "the larger of two zeros, in place": (lambda x: 1 / x.clone().clamp_(min=0), torch.tensor([-0.0, 0.0])),
    "which NaN is the largest": (lambda x: F.adaptive_max_pool2d(x.view(1, 4, 4), 1, return_indices=True)[1].float(), NAN),
    "a function of integers": (lambda x: x.long().erf(), torch.tensor([0.0, 1.0, 2.0])),
    "mean and sum over count": (lambda x: torch.std_mean(x, 0)[1], torch.tensor([1.0, -math.inf, 2.0])),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_eager_leaves_open_differs_under_noise(name: str) -> None:
    function, values = UNDECIDED[name]
    plain, noisy = function(values), []
    for seed in (0, 1):
        with Noise(seed):
            noisy.append(function(values))
    assert not all(torch.equal(result.nan_to_num(7.0), plain.nan_to_num(7.0)) for result in noisy)


def test_what_raises_in_torchs_code_with_its_own_compiler_too_is_torchs() -> None:
    verdict = Verdict("raises", "RuntimeError", "the message")
    assert witnesses(verdict) == (TORCHS_OWN, COMPILED)
    assert witnesses(dataclasses.replace(verdict, where="backend.py:_compile_joint")) == (TORCHS_OWN, COMPILED)
    assert witnesses(dataclasses.replace(verdict, where="backend.py:dynafuse")) == (TORCHS_OWN,)
    assert witnesses(Verdict("wrong", "value")) == (TORCHS_OWN,)


def test_a_dtype_that_torchs_own_compiler_returns_as_well_is_torchs() -> None:
    assert COMPILED in witnesses(Verdict("wrong", "form")) and COMPILED in witnesses(Verdict("wrong", "strides"))


UNFOLDED = """
def arguments(s1, s2):
    return (tensor((s1, s2), "float32", seed=277, values="exact", layout="transposed"),)

def program(p1):
    v0 = p1.unfold(0, 1, 2)
    v1 = v0.reshape(2, -1, v0.shape[1], v0.shape[2])
    v1.zero_()
    return (v1,)

CALLS = [(3, 2)]
DYNAMIC = True
OPTIONS = {"executors": "triton"}
"""


def test_what_is_wrong_with_torchs_own_backend_too_is_torchs_whatever_else_is() -> None:
    """AOTAutograd loses what windows leave out where one is written to, and gives the result other strides."""
    verdict = examine(UNFOLDED)
    assert (verdict.status, verdict.kind, verdict.detail[:19]) == ("torch", "value", "value: arguments[0]")


UNUSED_DRAW = """
def arguments():
    return (tensor((1, 1, 1, 1), 'float32', seed=102),)


def program(p):
    torch.utils.checkpoint.checkpoint(lambda x: F.scaled_dot_product_attention(x, x * 0.5, x, attn_mask=x), p, use_reentrant=False)
    return (p + 1,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton', 'fallback_random': True}
"""


def test_torchs_own_backend_draws_as_the_program_asks_for() -> None:
    """It keeps what draws random numbers like eager then, also where nothing uses it, and refuses to compute that again."""
    assert examine(UNUSED_DRAW).status == "torch"


@pytest.mark.usefixtures("_wrong_sinh")
def test_what_is_torchs_hides_nothing_of_ours() -> None:
    verdict = examine(UNFOLDED.replace("v1.zero_()", "v2 = p1.sinh()\n    v1.zero_()").replace("(v1,)", "(v1, v2)"))
    assert (verdict.status, verdict.detail[:16]) == ("wrong", "value: result[1]")


def test_a_dynamic_graph_need_not_round_like_the_static_one_before_it() -> None:
    text = """
def arguments(s0):
    return (tensor((s0,), "float16", seed=985, grad=True),)

def program(p0):
    return (torch.ops.aten.var_mean.correction(p0, [-1], correction=1, keepdim=False),)

CALLS = [(4,), (3,)]
DYNAMIC = None
OPTIONS = {"executors": "triton"}
CHECK = CHECKED
"""
    for check in ("reproducible", "disk"):
        assert examine(text.replace("CHECKED", repr(check))).status == "ok"
