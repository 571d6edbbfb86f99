"""Rows of ops without a tensor operand: constants, ranges and random numbers.

Random numbers are functions of a seed and of the element's row-major position, so forward and backward draw the same
ones. Torch's ``replace_random`` pass turns rand, randn and dropout into these prims before partitioning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy
import torch

from dynafuse.ops.indexing_math import as_expr, flatten, limits
from dynafuse.ops.literals import HoistedScalar
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Builder, Call, Index, Kind, Value, eager, register, rewrite

INT32_MOST = 2**31 - 1
COUNTED = "{2} + {1} * {0}"
"""An element of a range of integers: its place, the step and the start."""

_RANDOM_FLOPS = 50.0  # ten rounds of Philox make four numbers; measured on an H200


def number(build: Builder, value: Any, dtype: torch.dtype) -> Value:
    """Return a fill value.

    Args:
        build: Builds it.
        value: A Python number, or a size that is known when the kernel runs.
        dtype: The dtype of the result.
    """
    if isinstance(value, bool | int | float):
        return build.constant(value, dtype)
    return build.cast(build.index_value(as_expr(value)), dtype)


def _full(build: Builder, call: Call, index: Index) -> Value:
    fill = next(call.args[name] for name in ("fill_value", "s", "scalar") if name in call.args)
    return number(build, fill, call.dtype)


def _zeros(build: Builder, call: Call, index: Index) -> Value:
    return build.constant(0, call.dtype)


def _ones(build: Builder, call: Call, index: Index) -> Value:
    return build.constant(1, call.dtype)


def _range(build: Builder, call: Call, index: Index) -> Value:
    start, step = call.args.get("start", 0), call.args.get("step", 1)
    if isinstance(start, float) or isinstance(step, float):
        position = build.cast(build.index_value(index[0]), call.dtype)
        return build.expression("{1} + {0} * {2}", call.dtype, position, number(build, start, call.dtype),
                                number(build, step, call.dtype))
    return build.cast(_counted(build, as_expr(start), as_expr(step), index[0]), call.dtype)


def _counted(build: Builder, start: sympy.Expr, step: sympy.Expr, index: sympy.Expr) -> Value:
    """Return ``start + step * index`` in int64, which may not fit in 32 bits where the index does."""
    expr = start + step * index
    known = [limit for limit in limits(sympy.expand(expr)) if limit is not None and limit.is_Integer]
    if expr == index or (len(known) == 2 and max(map(abs, known)) <= INT32_MOST):
        return build.index_value(expr)
    operands = [build.index_value(part) for part in (index, step, start)]
    return build.expression(COUNTED, torch.int64, *operands)


def _accepts_range(call: Call) -> str:
    """Refuse float bounds of an integer range: eager rounds each of them to an integer first."""
    mixed = not call.dtype.is_floating_point and any(
        isinstance(call.args.get(name), float) for name in ("start", "step")
    )
    return "an integer range with float bounds" if mixed else ""


def _eye(build: Builder, call: Call, index: Index) -> Value:
    return build.cast(build.compare(index[0], "==", index[1]), call.dtype)


def _random(build: Builder, call: Call, index: Index) -> Value:
    return build.drawn(call["mode"], build.operand(call["seed"], ()), flatten(index, call.shape))


def _accepts_random(call: Call) -> str:
    if call["mode"] not in ("rand", "randn"):
        return f"random numbers of mode {call['mode']!r}"
    return "" if call.args.get("align_dtype") is None else "random numbers with eager's bits"


def _randint(build: Builder, call: Call, index: Index) -> Value:
    seed = build.operand(call["seed"], ())
    position, low, high = map(build.index_value, (flatten(index, call.shape), as_expr(call["low"]), as_expr(call["high"])))
    return build.expression("lm.randint64({0}, {1}, {2}, {3})", torch.int64, seed, position, low, high)


def _lookup_seed(build: Builder, call: Call, index: Index) -> Value:
    which = call["index"]
    if not isinstance(which, HoistedScalar):
        return build.operand(call["seeds"], (sympy.Integer(which),))
    # Triton's interpreter passes a bare Python float, which has no `to`.
    place = build.expression(f"tl.full([], {which.name}, tl.float32).to(tl.int64)", torch.int64)
    return build.operand(call["seeds"], (build.indirect(place, build.shape(call["seeds"])[0]),))


_CREATIONS = {
    "aten.full.default aten.full_like.default aten.new_full.default aten.scalar_tensor.default prims.full.default "
    "prims.full_like.default prims.scalar_tensor.default": _full,
    "aten.zeros.default aten.zeros_like.default aten.new_zeros.default": _zeros,
    "aten.ones.default aten.ones_like.default aten.new_ones.default": _ones,
    "aten.eye.default aten.eye.m": _eye,
}
_UNFILLED = (
    "aten.empty.memory_format aten.empty_like.default aten.empty_strided.default aten.new_empty.default "
    "aten.new_empty_strided.default aten.empty_permuted.default prims.empty_strided.default prims.empty_permuted.default "
    "prims.empty.default")
_EAGER = {
    "prims.inductor_seeds.default prims.inductor_seed.default": "draws from the generator's state, once per graph",
    "prims.inductor_rand_eager_offset.default prims.inductor_rand_eager_offsets.default": "reserves generator state",
    "aten.rand.default aten.rand.generator aten.randn.default aten.randn.generator aten.rand_like.default "
    "aten.randn_like.default aten.randint.default aten.randint.low aten.randint.generator aten.randint.low_generator "
    "aten.randint_like.default aten.randint_like.low_dtype aten.bernoulli.default aten.bernoulli.p "
    "aten.bernoulli.Tensor "
    "aten.native_dropout.default aten.random.default aten.random.from aten.random.to aten.uniform.default "
    "aten.normal_functional.default aten.exponential.default aten.rrelu_with_noise.default prims.normal.default "
    "prims._uniform_helper.default prims.uniform.default": "random numbers with eager's bits",
    "aten.randperm.default aten.randperm.generator aten.multinomial.default aten.poisson.default aten.binomial.default "
    "aten._standard_gamma.default": "random numbers that need a sort or a loop",
    "aten.range.default aten.range.step aten.bartlett_window.default aten.blackman_window.default "
    "aten.hamming_window.default aten.kaiser_window.default aten.tril_indices.default aten.triu_indices.default":
        "small and made once",
}

for _names, _lower in _CREATIONS.items():
    for _target in overloads(_names):
        register(rewrite(_target, Kind.CREATION, _lower))
for _target in overloads("prims.iota.default aten.arange.default aten.arange.start aten.arange.start_step"):
    register(rewrite(_target, Kind.CREATION, _range, accepts=_accepts_range))
for _target in overloads("prims.inductor_random.default"):
    register(rewrite(_target, Kind.RANDOM, _random, accepts=_accepts_random, flops=_RANDOM_FLOPS))
for _target in overloads("prims.inductor_randint.default"):
    register(rewrite(_target, Kind.RANDOM, _randint, flops=_RANDOM_FLOPS))
for _target in overloads("prims.inductor_lookup_seed.default"):
    register(replace(rewrite(_target, Kind.RANDOM, _lookup_seed), hoists=(1,)))
for _names, _reason in _EAGER.items():
    for _target in overloads(_names):
        register(eager(_target, _reason))
for _target in overloads(_UNFILLED):
    register(replace(eager(_target, "uninitialised memory"), unfilled=True))
