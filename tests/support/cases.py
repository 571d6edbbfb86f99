"""Subtle functions with their arguments: what fused code gets wrong first. Each runs on any device and in any dtype.

A case is made by a function of ``(device, dtype)`` that returns the function under test and its arguments, so that the
same cases run in Triton's interpreter and on a GPU. Sizes cross tile borders (130, 1030) and sit on them (1, 2, 128).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]
Build = Callable[["Maker"], tuple[Any, ...]]


@dataclass(frozen=True)
class Maker:
    """Makes arguments on a device in a dtype."""

    device: str
    dtype: torch.dtype

    def __call__(self, *shape: int, grad: bool = True, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normally distributed numbers; differentiable if they are floats."""
        made = torch.randn(shape, dtype=torch.float64).to(self.device, dtype or self.dtype)
        return made.requires_grad_(grad and made.is_floating_point())

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers of ``[low, high)``."""
        return torch.randint(low, high, shape).to(self.device, dtype)

    def values(self, *numbers: Any, dtype: torch.dtype | None = None, grad: bool = True) -> torch.Tensor:
        """The numbers as a tensor."""
        made = torch.tensor(numbers, dtype=dtype or self.dtype, device=self.device)
        return made.requires_grad_(grad and made.is_floating_point())


@dataclass(frozen=True)
class Case:
    """A function and how its arguments are made; ``grad`` is off where eager has no gradient, ``precise`` where
    float64 says something else (a cast, a tie, a threshold). ``places`` is on where the point is which elements go where:
    in the interpreter, where each takes seconds, these run in one dtype."""

    name: str
    function: Function
    build: Build
    grad: bool = True
    precise: bool = True
    known: str = ""  # why it fails: a fault that stands
    places: bool = False


CASES: list[Case] = []


def case(build: Build, *, grad: bool = True, precise: bool = True, name: str = "", known: str = "",
         places: bool = False) -> Callable[[Function], Function]:
    """Add the decorated function as a case."""

    def add(function: Function) -> Function:
        CASES.append(Case(name or function.__name__, function, build, grad, precise, known, places))
        return function

    return add


def each(build: Callable[..., Build], *parameters: Any, **options: Any) -> Callable[[Callable[..., Function]], Any]:
    """Add one case per parameter: ``function(parameter)`` returns the function under test."""

    def add(factory: Callable[..., Function]) -> Any:
        for parameter in parameters:
            arguments = parameter if isinstance(parameter, tuple) else (parameter,)
            text = "_".join(str(a).replace(" ", "").replace("torch.", "") for a in arguments)
            case(build(*arguments), name=f"{factory.__name__}[{text}]", **options)(factory(*arguments))
        return factory

    return add


# ---------------------------------------------------------------------- dtypes


@each(lambda a, b: lambda make: (make(7, 130, dtype=a) if a.is_floating_point else make.ints(-5, 5, 7, 130, dtype=a),
                                 make(130, dtype=b) if b.is_floating_point else make.ints(1, 9, 130, dtype=b)),
      *itertools.combinations((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8), 2),
      precise=False)
def promotion(a: torch.dtype, b: torch.dtype) -> Function:
    return lambda x, y: (x + y, x * y, torch.where(x > y, x, y), x / y, x * 2.5, y - 1, torch.maximum(x, y))


@case(lambda make: (make(7, 130), make.values(3.0, dtype=torch.float64).squeeze().detach()))
def zero_dim_does_not_promote(x, s):
    return x * s, x + s.to(torch.int64), (x > s) * x


@case(lambda make: (make(7, 130, grad=False), torch.tensor(2.5), torch.tensor(3)))
def scalars_of_the_cpu(x, a, b):
    return x * a + b, x / b, torch.where(x > a, x, a), x.sum() * a


@case(lambda make: (make.ints(0, 256, 1030, dtype=torch.uint8), make.ints(0, 256, 1030, dtype=torch.uint8)))
def unsigned_bytes_wrap(x, y):
    return x + y, x - y, x * y, -x, x << 3, x >> 1, ~x, x ^ y, x // (y | 1), x % (y | 1), x.sum(), x.float() - y


@each(lambda dtype: lambda make: (make.ints(-100, 100, 7, 130, dtype=dtype), make.ints(1, 9, 7, 130, dtype=dtype)),
      torch.int8, torch.int16, torch.int32, torch.int64)
def integers(dtype: torch.dtype) -> Function:
    return lambda x, y: (x * x * y, x // y, -x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc"), x / y,
                         x.abs(), x.sign(), x & y, x | y, x << (y & 3), x.clamp(-7, 30), x.sum(1), x.prod(1), x.amax(0),
                         torch.bitwise_not(x), x == y, x.float().mean(), x.pow(2), x.to(torch.uint8), x.bool())


@case(lambda make: (make.ints(0, 2, 7, 130, dtype=torch.bool), make.ints(0, 2, 130, dtype=torch.bool)))
def bools(x, y):
    return (x & y, x | y, x ^ y, ~x, x == y, x.any(), x.all(1), x.any(0), x.sum(), x.sum(1), x.float() * 3, x + y, x * 5,
            torch.where(x, y, ~y), x.int().prod(1), torch.logical_and(x, ~y), x > y, x.amax(1), torch.minimum(x, y), x.long().argmax(1))


@case(lambda make: (make.values(2.7, -2.7, 0.5, 300.0, -1.5, 126.9, -129.0, 255.4, grad=False),), precise=False)
def casts_truncate(x):
    small = x.clamp(-128, 127)
    return x.to(torch.int32), x.to(torch.int64), small.to(torch.int8), x.abs().clamp(max=255).to(torch.uint8), x.bool(), x.to(torch.int16).float()


@case(lambda make: (make(1030, dtype=torch.float64),))
def doubles(x):
    return (x * 0.1 + 1 / 3).exp(), torch.where(x > 0.1, x, 0.1), x.clamp(min=0.1), x + torch.full_like(x, 0.3), x.sum() / 3, F.gelu(x), x.softmax(0)


@case(lambda make: (make(5, 130, grad=False),))
def complex_numbers(x):
    z = torch.complex(x.float(), x.float() + 1)
    return (z * z).abs() + x.relu(), z.real * 2, torch.view_as_real(z) + 1


@case(lambda make: (make.values(0.0, -0.0, 1e-30, -1e-30, grad=False), make.values(2.0, 3.0, -1.0, 5.0, grad=False)), precise=False)
def signed_zeros(x, y):
    return torch.copysign(y, x), x * y, -x, 1 / (x * 0), x.sign(), torch.atan2(x, y), x.abs(), torch.signbit(x * y)


# ---------------------------------------------------------------------- mutation, views and aliases


@case(lambda make: (make(7, 130, grad=False), make(130, grad=False)))
def adds_in_place(x, y):
    x.add_(y)
    x.mul_(2).relu_()
    return x.sum(1)


@case(lambda make: (make(7, 130, grad=False), make(7, 130, grad=False)))
def writes_after_reading(x, y):
    before = x + y
    x.copy_(before * 2)
    y.sub_(x)
    return before, x * y


@case(lambda make: (make(130, 130, grad=False),))
def writes_its_transpose(x):
    x.copy_(x.t() + 1)
    return x.sum(0)


@case(lambda make: (make(9, 130, grad=False),))
def writes_through_views(x):
    x[1:4].mul_(3)
    x[:, 5].zero_()
    x.view(-1)[::7].add_(1)
    x.t()[2].neg_()
    return x.amax(0)


@case(lambda make: (make(130, grad=False),))
def swaps_halves(x):
    x[:65], x[65:] = x[65:].clone(), x[:65].clone()


@case(lambda make: (make(130, grad=False),))
def overlapping_move(x):
    x[1:] = x[:-1] * 2
    return x


@case(lambda make: (make(7, 130, grad=False), make(7, 130, grad=False)))
def returns_its_inputs(x, y):
    return x, y + 1, x, y


@case(lambda make: (make(6, 130, grad=False),))
def returns_views_of_inputs(x):
    return x.t(), x[2:4], x.view(3, 2, 130).permute(2, 0, 1), x[:, 3], x.unsqueeze(0), x.diagonal(), x + 1


@case(lambda make: (make(6, 130, grad=False),))
def returns_aliased_results(x):
    y = x * 2 + 1
    return y, y.t(), y[1:3], y.view(-1), y


@case(lambda make: (make(6, 130),))
def returns_aliased_differentiable(x):
    y = x.sin() * 2
    return y.t(), y[1:3] + 1, y


@case(lambda make: (make(6, 130, grad=False),))
def mutates_and_returns_input(x):
    y = x.add_(1)
    return y, x.t(), y * 2


@case(lambda make: (make(6, 130, grad=False),))
def mutates_metadata(x):
    y = x.clone()
    y.t_()
    y.unsqueeze_(0)
    return y + 1, y


@case(lambda make: (make(2, 3, 8, 8), torch.nn.BatchNorm2d(3).to(make.device, make.dtype)), name="mutates_statistics", grad=False, precise=False)
def mutates_statistics(x, norm):
    norm.reset_running_stats()
    y = norm(x)
    return y, norm.running_mean * 1, norm.running_var * 1, norm.num_batches_tracked * 1


@case(lambda make: (make(7, 130, grad=False),))
def constants_from_nothing(x):
    return (torch.zeros(3, 130, device=x.device), torch.arange(130, device=x.device) * 2, torch.ones_like(x), x.new_full((5,), 2.5).exp(),
            torch.arange(5, device=x.device).float().sum(), torch.eye(7, device=x.device, dtype=x.dtype) @ x, torch.full((300,), 2.0, device=x.device).sum(),
            torch.linspace(0, 1, 33, device=x.device) * 2, torch.tensor([1.0, 2.0], device=x.device) + 1, torch.tril(torch.ones(9, 9, device=x.device)))


@case(lambda make: (make(7, 130, grad=False),), grad=False)
def python_values(x):
    return x + 1, 3, None, "text", [x * 2, {"a": x.sum()}], (x.shape[0],)


# ---------------------------------------------------------------------- layouts


LAYOUTS: dict[str, Callable[[Maker], torch.Tensor]] = {
    "channels_last": lambda make: make(2, 5, 6, 7, grad=False).contiguous(memory_format=torch.channels_last),
    "transposed": lambda make: make(70, 65, grad=False).t(),
    "permuted": lambda make: make(3, 4, 13, 2, grad=False).permute(2, 0, 3, 1),
    "expanded": lambda make: make(7, 1, 130, grad=False).expand(7, 5, 130),
    "expanded_whole": lambda make: make(1, grad=False).expand(7, 9),  # few: a sum of n equal numbers is off by n/4 units or not at all
    "sliced": lambda make: make(20, 140, grad=False)[3:17:2, 1:131],
    "offset_by_one": lambda make: make(1031, grad=False)[1:],
    "size_one": lambda make: make(1, 1, 1, grad=False),
    "ones_inside": lambda make: make(5, 1, 7, 1, grad=False),
    "zero_dim": lambda make: make(grad=False),
    "empty": lambda make: make(0, 130, grad=False),
    "empty_inside": lambda make: make(7, 0, 3, grad=False),
    "one_element": lambda make: make(1, grad=False),
    "long": lambda make: make(1030, grad=False),
    "overlapping": lambda make: make(140, grad=False).as_strided((12, 20), (5, 3)),
    "gaps": lambda make: make(3000, grad=False).as_strided((12, 20), (200, 7), 11),
}


@each(lambda name: lambda make: (LAYOUTS[name](make),), *LAYOUTS, places=True)
def layout(name: str) -> Function:
    def pointwise_and_reductions(x):
        y = (x * 2).sin()
        flat = y.reshape(-1)
        parts = [y, y + x, x.clone(), torch.zeros_like(x), y.sum(), y.mean(), flat * 2, (x > 0) & (y > 0), x.contiguous() + y]
        if x.dim():
            parts += [y.sum(0), y.sum(-1), y.cumsum(0), x.transpose(0, -1) * 3, x.relu().mean(-1, keepdim=True)]
            parts += [y.softmax(-1), y.var(-1)] if x.shape[-1] > 1 else []
        return parts

    return pointwise_and_reductions


@each(lambda name: lambda make: (LAYOUTS[name](make).clone().requires_grad_(), LAYOUTS[name](make)), "channels_last", "transposed", "permuted",
      "sliced", "zero_dim", "empty", "ones_inside", "gaps", places=True)
def layout_backward(name: str) -> Function:
    return lambda x, y: ((x * y).tanh() + x.sum(), (x + y.t() if x.dim() == 2 and x.shape[0] == x.shape[1] else x - y).exp().mean())


@case(lambda make: (make(70, 65), make(65, 70)), places=True)
def adds_a_transpose(x, y):
    return x + y.t(), (x.t() * y).sum(1), (x.t() + y).softmax(-1)


@case(lambda make: (make(5, 1, 13), make(7, 1), make(13), make()))
def broadcasts_every_way(a, b, c, d):
    return (a * b + c) * d, (a + b).sum((0, 2)), a.expand(5, 7, 13).exp(), (c * d).expand(2, 13).sum(0)


# ---------------------------------------------------------------------- NaN and Inf


NASTY = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -3.5, 1e4)


def nasty(make: Maker) -> torch.Tensor:
    """Every ordered pair of nasty values as rows, and rows that hold one among ordinary numbers."""
    pairs = torch.tensor(list(itertools.product(NASTY, NASTY)), dtype=torch.float64)
    padded = torch.nn.functional.pad(pairs, (0, 17), value=0.25)
    return padded.to(make.device, make.dtype)


@case(lambda make: (nasty(make),))
def nan_in_order_reductions(x):
    return (x.amax(1), x.amin(1), x.max(1), x.min(1), x.argmax(1), x.argmin(1), x.amax(), x.argmin(), x.max(), x.amax(0), x.argmax(0), x.aminmax(dim=1))


@case(lambda make: (nasty(make),), precise=False)
def nan_in_sums(x):
    return x.sum(1), x.mean(1), x.prod(1), x.var(1), x.std(0), x.sum(0), x.logsumexp(1), x.norm(dim=1), x.any(1), x.all(1), (x != x).sum(1)


@case(lambda make: (nasty(make),), precise=False)
def nan_in_softmax(x):
    return x.softmax(1), x.log_softmax(1), x[:, :2].softmax(1), x[:, :2].logsumexp(1)


@case(lambda make: (nasty(make)[:, :2],), precise=False)
def nan_pairwise(p):
    x, y = p[:, 0], p[:, 1]
    return (torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), torch.fmin(x, y), x.clamp(-1, 2), x.clamp(min=y), torch.clamp(x, max=y),
            x == y, x < y, x >= y, x != y, torch.where(x > y, x, y), x.relu(), x.sign(), x.sigmoid(), x.tanh(), F.gelu(x), F.silu(x), F.softplus(x),
            F.leaky_relu(x), x.abs(), x * y, x + y, x - y, x / y, x.isnan(), x.isinf(), x.isfinite(), x.nan_to_num(), x.exp(), x.log(), x.sqrt(), x.rsqrt(),
            x.floor(), x.round(), x.trunc(), torch.pow(x, y), torch.fmod(x, y), torch.remainder(x, y), torch.atan2(x, y), torch.hypot(x, y),
            torch.heaviside(x, y), torch.nextafter(x, y) if x.dtype is not torch.float16 else x, F.hardtanh(x), F.elu(x), F.relu6(x), torch.logaddexp(x, y))


@case(lambda make: (make.values(-100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 80.0, 100.0),))
def extremes_do_not_overflow(x):
    return F.softplus(x), x.sigmoid(), F.logsigmoid(x), x.tanh(), F.silu(x), F.gelu(x), F.gelu(x, approximate="tanh"), x.logsumexp(0), x.softmax(0), F.mish(x)


@case(lambda make: (make(7, 130), make.ints(0, 2, 7, 130, dtype=torch.bool)))
def fully_masked_softmax(x, mask):
    full = torch.cat([torch.zeros_like(mask[:2]), mask[2:]])
    return x.masked_fill(~full, -math.inf).softmax(-1)


# ---------------------------------------------------------------------- reductions


REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin, "var": torch.var, "std": torch.std,
    "logsumexp": torch.logsumexp, "any": lambda x, dim, keepdim=False: torch.any(x > 1, dim, keepdim),
    "norm": lambda x, dim, keepdim=False: torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim),
}
DIMS = [d for n in (1, 2, 3) for d in itertools.combinations(range(3), n)]


@each(lambda name: lambda make: (make(3, 5, 130),), *REDUCTIONS)
def over_every_dim(name: str) -> Function:
    function = REDUCTIONS[name]
    return lambda x: [function(x, dim=d, keepdim=n % 2 == 1) for n, d in enumerate(DIMS)]


@each(lambda name: lambda make: (make(4, 9, 17),), "sum", "mean", "amax", "var")
def then_broadcast(name: str) -> Function:
    function = REDUCTIONS[name]
    return lambda x: [x - function(x, dim=d, keepdim=True) for d in DIMS]


@case(lambda make: (make(600, 130), make(130)))
def of_all_that_rows_are_reduced_for(x, weight):
    """Of many rows each is reduced first, in the kernel that has read it."""
    y, z = x.log_softmax(1), x.view(20, 30, 130)
    deviation = z - z.mean(-1, keepdim=True)
    return (y * weight).sum(), y.mean(), (y.exp() * y).sum((0, 1), keepdim=True), deviation.max(), (deviation * weight).amin((0, 2)), F.layer_norm(x, (130,), weight).sum()


@case(lambda make: (make(2, 6, 8, 10),))
def reads_of_constants(x):
    """What is read at other places is a literal in the kernel."""
    y = x.new_full(x.shape, 0.3)
    return (F.glu(y, 1), y.flip(1), y.roll(1, 2), F.pad(y, (1, 2)), F.max_pool2d(y, 3, 2, 1), F.avg_pool2d(y, 3, 2, 1), F.adaptive_avg_pool2d(y, 3),
            F.interpolate(y, scale_factor=2), F.interpolate(y, scale_factor=2, mode="bilinear"), F.pixel_shuffle(y[:, :4], 2), y.triu(),
            y[:, torch.tensor([0, 3], device=x.device)], torch.cat([y, x, y * 2], 1), torch.stack([y, y]), F.unfold(y, 2), F.unfold(y, 2) * x.sum())


REPEATED = (((1, 2), (8, 2)), ((1, 3), (4096, 3)), ((5, 1), (5, 64)), ((3, 1), (3, 65536)), ((1, 1), (64, 128)))


def halves_that_repeat(make):
    """Tensors of numbers of which sums and means are exact, expanded along a dimension."""
    return tuple((make.ints(-3, 4, *shape).float() / 2).expand(expanded) for shape, expanded in REPEATED)


@each(lambda name: halves_that_repeat, *REDUCTIONS)
def of_repeated_elements(name: str) -> Function:
    """What does not vary along the rows is as many elements nevertheless."""
    function = REDUCTIONS[name]
    return lambda *tensors: [function(x, dim=d) for x in tensors for d in (0, 1)] + [function(x, dim=(0, 1)) for x in tensors]


@case(lambda make: (make(3, 40, 5),))
def unusual_dims(x):
    return x.sum((-1, 0)), x.mean(dim=[1]), x.sum(()), x.permute(2, 0, 1).sum((0, 2)), x.amax((-2,)), x.prod(-1), x.prod(1), x.prod()


@each(lambda rows, length: lambda make: (make(rows, length),), (1, 9000), (2, 4099), (3, 2048), (1, 20000))
def long_rows(rows: int, length: int) -> Function:
    return lambda x: (x.sum(1), (x * x).mean(), x.amax(1), x.var(1), x.exp().sum(), x.argmax(1), (x > 0).sum(1), (x > 3).any(1))


@each(lambda rows, width: lambda make: (make(rows, width),), (3000, 3), (2100, 20), (130, 65), (4100, 1))
def columns(rows: int, width: int) -> Function:
    return lambda x: (x.sum(0), (x * 2).amax(0), x.var(0), x.mean(0), x.argmin(0), x.square().sum(0))


@each(lambda rows, length: lambda make: (make(rows, length),), (3, 1030), (66, 7), (2, 1), (65, 128), (1, 5000))
def rows_then_rows(rows: int, length: int) -> Function:
    return lambda x: (x.softmax(1) * x, (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt(), x.log_softmax(1))


@case(lambda make: (make(7, 40000, grad=False),), precise=True)
def rows_beyond_registers(x):
    return x.softmax(1), x.var(1), x.argmax(1)


def extreme_rows(make):
    """Long rows of -inf, with a NaN, with inf, that begin with -inf, of large numbers."""
    x = make(6, 33000, grad=False)
    x[1], x[2, 5], x[3, 32000], x[4, :20000] = -math.inf, math.nan, math.inf, -math.inf
    x[5] *= 300
    return (x,)


@case(extreme_rows, grad=False)
def softmax_of_extreme_rows(x):
    return x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1), (x - x.amax(-1, keepdim=True)).exp().sum(-1)


@case(lambda make: (make(5, 33000), make.ints(0, 33000, 5)))
def cross_entropy_of_a_large_vocabulary(x, labels):
    return F.cross_entropy(x.float(), labels), torch.softmax(x, -1)[:, :7], ((x - x.amax(-1, keepdim=True)).exp() * x.cos()).sum(-1)


@each(lambda n, correction: lambda make: (make(5, n),), (1, 1), (1, 0), (2, 1), (2, 2), (3, 5), (7, 0), (130, 1), (130, 0))
def variances(n: int, correction: int) -> Function:
    return lambda x: (x.var(1, correction=correction), x.std(1, correction=correction), *torch.var_mean(x, 1, correction=correction), x.var(correction=correction))


@case(lambda make: (make(5, 1030, grad=False) + 1000,))
def variance_far_from_zero(x):
    return x.var(1), x.var(0), x.std()


@case(lambda make: (make.ints(0, 3, 9, 130).float(), make.ints(0, 3, 5000)))
def ties(x, y):
    return x.argmax(1), x.argmin(1), x.argmax(0), x.argmin(), x.max(1), x.min(0), y.argmax(), y.view(50, 100).argmin(0), x.argmax(1, keepdim=True), torch.ones_like(x).argmax(1)


@case(lambda make: (make.ints(0, 3, 9, 130).to(make.dtype).requires_grad_(),))
def ties_share_gradients(x):
    return x.amax(1), x.amin(0), x.amax()


@case(lambda make: (make(5, 6), make(5, 8), make(5, 3)))
def short_reductions(x, y, z):
    return x.sum(1), y.mean(1), z.prod(1), z.amax(1) * x.sum(0).sum(), (z.sum(1, keepdim=True) + x).softmax(1), x.argmax(1), z.var(1)


@case(lambda make: (make(6, 10, 12), make(6, 10, 12)))
def different_reductions_of_one_input(x, y):
    return x.sum(0), x.sum(1), x.sum(2), (x * y).sum((0, 1)), x.sum((0, 2)), x.amax(), (x + y).mean(-1)


@case(lambda make: (make(33, 1, 20),))
def reductions_of_one_element(x):
    return x.sum(1), x.amax(1), x.mean(1, keepdim=True), x.var(1, correction=0), x.prod(1), x.argmax(1), x.logsumexp(1)


@case(lambda make: (make(0, 5, grad=False), make(5, 0, grad=False)))
def reductions_of_nothing(x, y):
    return x.sum(), x.sum(0), x.mean(0), y.sum(1), x.prod(0), y.any(1), y.all(1), x.amax(1), (x * 2).sum(1), y.mean(), y.var(1)


# ---------------------------------------------------------------------- index rewrites


@case(lambda make: (make(5, 7), make(5, 130), make(5, 1)), places=True)
def concatenates(x, y, z):
    both = torch.cat([x, y, z], 1)
    return both * 2, both.sum(1), torch.cat([x.sin(), x], 0), both[:, 3:100], torch.cat([both, both.flip(1)], 0).amax(0)


@case(lambda make: (make(2, 256), make(3, 512), make(2, 4, 128)), places=True)
def whole_blocks_are_chosen(x, y, z):
    """Which piece an element comes from is the same all over a block."""
    parts = torch.cat([x * 2, y[:, 256:], y[:, :256].exp(), torch.ones_like(x), x.round().to(torch.int32) + 1])
    stacked = torch.stack([z.transpose(0, 1).reshape(8, 128), (z > 0).view(8, 128), z.sin().view(8, 128)])
    padded = F.pad(y, (0, 0, 1, 2), value=-1.5)
    return parts + 1, parts[3:5].cos(), stacked, stacked > 0, padded.abs(), torch.slice_scatter(y, y[:1] * 3, 0, 1, 2)[:, 128:].neg()


@case(lambda make: (make(5, 7), make(5, 7)), places=True)
def stacks(x, y):
    return torch.stack([x, y * 2]), torch.stack([x, y], -1).sum(-1), torch.stack([x, y], 1).softmax(1), torch.cat([x[:, ::2], y[:, 1::2]], 1)


@each(lambda pads, value: lambda make: (make(5, 13),), ((1, 2), 0.0), ((3, 0, 0, 2), 1.5), ((-2, 1), 0.0), ((-1, -1, 2, -3), -math.inf), ((0, 115), math.nan), places=True)
def pads(pads: tuple[int, ...], value: float) -> Function:
    return lambda x: (F.pad(x * 2, pads, value=value), F.pad(x, pads, value=value).sum(0) if math.isfinite(value) else x, F.pad(x, pads).softmax(-1))


@case(lambda make: (make(6, 1, 1, grad=False),))
def pad_that_leaves_nothing_of_a_reduction(x):
    """The reduction is needed beside the padding, too."""
    deviation = x.std(0, correction=0, keepdim=True)
    return F.pad(deviation, (-1, 1)), deviation.abs()


@case(lambda make: (make(3, 6, 9),), places=True)
def reflections(x):
    return F.pad(x, (2, 3), mode="reflect") * 2, F.pad(x, (1, 2), mode="replicate").sum(-1), F.pad(x, (2, 1), mode="circular"), x.flip(0, 2), x.roll(4, 2), x.roll((1, -2), (0, 1)), x.rot90(1, (1, 2))


@case(lambda make: (make(12, 20),), places=True)
def slices(x):
    return x[::3, 1::4] * 2, x[-5:, :-3].sum(1), x[4], x[:, -2].exp(), x[3:3], x[:, 5:6] * x, x.narrow(1, 3, 9).amax(1), x[2:9][::2][1:].cos()


@case(lambda make: (make(9, 9), make(4, 9, 9)), places=True)
def diagonals(x, y):
    return x.diagonal() * 2, x.diagonal(2).sum(), x.diagonal(-3), y.diagonal(dim1=1, dim2=2).exp(), torch.diag_embed(x[0]) + 1, x.tril() @ x, x.triu(1).sum(0), torch.diag(x[1]), x.trace()


@case(lambda make: (make(8, 12), make(3, 12), make(8, 4)), places=True)
def slices_are_scattered(x, y, z):
    return torch.slice_scatter(x, y, 0, 1, 8, 3) * 2, torch.select_scatter(x, y[0], 0, -1).sum(0), torch.diagonal_scatter(x, z[:, 0]).exp()


@case(lambda make: (make(8, 12),))
def writes_to_slices_of_new(x):
    y = torch.zeros_like(x)
    y[1:5, ::2] = x[1:5, ::2] * 2
    y[:, 3] += x[:, 4]
    y[-1] = 7
    return y, y.sum(0)


@case(lambda make: (make(3, 8, 10),), places=True)
def reshapes(x):
    y = x * 2
    return y.view(24, 10).sum(1), y.reshape(3, 4, 2, 10).transpose(1, 2).reshape(6, 40) + 1, y.permute(2, 0, 1).reshape(10, 24).softmax(-1), y.flatten().unflatten(0, (5, 48)), y.unfold(2, 4, 3).sum(-1), y.movedim(0, -1).contiguous().view(-1), y.repeat(2, 1, 3).sum(1), y.repeat_interleave(2, 1), y.tile(2), y.expand(4, 3, 8, 10).sum(0)


@case(lambda make: (make(3, 8, 10),))
def splits(x):
    a, b, c = (x * 2).chunk(3, -1)
    d, e = x.split([3, 5], 1)
    return a * b.sigmoid(), c.sum(), d.amax(1), e.transpose(0, 2) * 2, [p + 1 for p in x.unbind(0)], F.glu(x)


@case(lambda make: (make(8, 8), make(8, 8)))
def reads_of_one_tensor_at_shifted_places(x, y):
    return x[1:] - x[:-1], (x[:, 1:] + x[:, :-1]) * y[:, 1:], x.roll(1, 0) + x, x + x.t(), x.flip(0) * x.flip(1)


# ---------------------------------------------------------------------- gathers


@case(lambda make: (make(20, 13), make.ints(0, 20, 7), make.ints(0, 20, 7, 13), make.ints(-20, 20, 4, 3)))
def gathers(x, i, j, k):
    return x[i] * 2, x.gather(0, j), x.index_select(0, i).sum(1), x[k], x[i, i % 13], x[:, i % 13].exp(), x[i][:, None] + 1, torch.take_along_dim(x, j, 0), x.take(j), x[k].sum(0)


@case(lambda make: (make(20, 13), make.ints(0, 20, 4, 6)))
def embeds(weight, tokens):
    return F.embedding(tokens, weight) * 2, F.embedding(tokens, weight, padding_idx=3).sum(1), F.one_hot(tokens, 20).float() @ weight.float()


@case(lambda make: (make(20, 13), make.ints(0, 2, 20, 13, dtype=torch.bool), make(20, 13)))
def masks(x, mask, y):
    return torch.where(mask, x, y), x.masked_fill(mask, 2.0), x * mask, torch.where(mask.any(1, keepdim=True), x.exp(), 0.0), x.masked_fill(mask, -math.inf).amax(1)


@case(lambda make: (make(20, 13), make.ints(0, 20, 6), make(6, 13)))
def scatters(x, i, y):
    once = torch.arange(6, device=x.device) * 3
    return x.index_add(0, i, y), x.index_copy(0, once, y) * 2, x.scatter_add(0, i[:, None].expand(6, 13), y), torch.index_put(x, (once,), y).sin(), x.scatter(0, once[:, None].expand(6, 13), y)


# ---------------------------------------------------------------------- norms, losses, attention


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


@case(lambda make: (make(2, 3, 9, 16), make(2, 3, 9, 16), make(9, 16, grad=False), make(9, 16, grad=False)))
def rotary(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@case(lambda make: (make(2, 9, 3, 16), make(9, 8, grad=False)))
def rotary_interleaved(q, angles):
    pairs = q.transpose(1, 2).float().unflatten(-1, (8, 2))
    cos, sin = angles.float().cos(), angles.float().sin()
    a, b = pairs.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(q.dtype)


@each(lambda *shape: lambda make: (make(*shape), make(shape[-1]), make(shape[-1]), make(*shape)), (7, 130), (2, 3, 64), (65, 8), (3, 1030))
def layer_norm(*shape: int) -> Function:
    return lambda x, w, b, r: F.layer_norm(x + r, (shape[-1],), w, b)


@case(lambda make: (make(4, 1), make(1), make(1)), grad=False)  # gradients are 0 but for roundings, eager's or a kernel's
def layer_norm_of_one_element(x, w, b):
    return F.layer_norm(x, (1,), w, b)


@each(lambda *shape: lambda make: (make(*shape), make(shape[-1]), make(*shape)), (7, 130), (2, 3, 64), (3, 1030))
def rms_norm(*shape: int) -> Function:
    def function(x, w, r):
        h = x + r
        wide = h.float()
        return h, w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), F.rms_norm(h, (shape[-1],), w, 1e-6)

    return function


@case(lambda make: (make(3, 5, 6, 64), make(6, 64), make(6, 64)))
def layer_norm_of_two_dims(x, w, b):
    return F.layer_norm(x, (6, 64), w, b), F.layer_norm(x, (6, 64)).relu()


@case(lambda make: (make(2, 6, 5, 7), make(6), make(6)))
def group_norm(x, w, b):
    return F.group_norm(x, 3, w, b) * 2, F.instance_norm(x), F.group_norm(x.contiguous(memory_format=torch.channels_last), 2, w, b)


@each(lambda training: lambda make: (make(6, 5, 4, 7), make(5), make(5), make(5, grad=False), make(5, grad=False).abs() + 0.5), True, False)
def batch_norm(training: bool) -> Function:
    def function(x, w, b, mean, var):
        return F.relu(F.batch_norm(x, mean, var, w, b, training, 0.1, 1e-5))

    return function


@case(lambda make: (make(6, 5, 4, 7, grad=False).contiguous(memory_format=torch.channels_last).requires_grad_(), make(5), make(5), make(5, grad=False), make(5, grad=False).abs()))
def batch_norm_channels_last(x, w, b, mean, var):
    return F.batch_norm(x, mean, var, w, b, True, 0.1, 1e-5) + x


@case(lambda make: (make(9, 130), make.values(*([3, -100, 7, 129, -100, 0, 5, 64, -100]), dtype=torch.int64)))
def cross_entropy(x, target):
    return F.cross_entropy(x, target), F.cross_entropy(x, target, reduction="sum", label_smoothing=0.1), F.cross_entropy(x, target, reduction="none")


@case(lambda make: (make(2, 9, 5), make.ints(0, 9, 2, 5), make(9, grad=False).abs()))
def cross_entropy_of_images(x, target, weight):
    return F.cross_entropy(x, target, weight), F.nll_loss(x.log_softmax(1), target), F.cross_entropy(x, target, ignore_index=3)


@case(lambda make: (make(9, 13), make(9, 13)))
def losses(x, y):
    p = y.sigmoid().detach()
    return (F.mse_loss(x, y), F.l1_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y), F.binary_cross_entropy_with_logits(x, p),
            F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), F.cosine_similarity(x, y), F.normalize(x, dim=1))


@case(lambda make: (make(9, 130),))
def activations(x):
    return (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.elu(x), F.selu(x), F.leaky_relu(x, 0.1), F.hardswish(x), F.hardsigmoid(x), F.softplus(x),
            F.logsigmoid(x), F.tanhshrink(x), F.softsign(x), F.relu6(x), F.hardtanh(x), F.softshrink(x), F.celu(x), x.sigmoid(), x.tanh(), x.exp(), x.erf(), x.rsqrt().nan_to_num(0, 0, 0))


@case(lambda make: (make(9, 32), make(64, 32), make(64, 32), make(32, 64)))
def swiglu(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) + x


@case(lambda make: (make(2, 3, 9, 16), make(2, 3, 9, 16), make(2, 3, 9, 16)))
def attention_by_hand(q, k, v):
    scores = q @ k.transpose(-2, -1) / 4
    keep = torch.ones(9, 9, dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v, F.scaled_dot_product_attention(q, k, v, is_causal=True)


@case(lambda make: (make(8, 7, 7, 96, grad=False), make(8, 7, 7, 96, grad=False), make(8, 96, 7, 7, grad=False), make(96, grad=False)))
def norm_backward_beside_a_residual_of_other_strides(grad, x, residual, weight):
    """Rows and columns in one kernel, whose largest store is contiguous along the rows' number."""
    wide = grad * weight
    inner = wide * 96 - wide.sum(-1, keepdim=True) - x * (wide * x).sum(-1, keepdim=True)
    return (grad * x).sum((0, 1, 2)), grad.sum((0, 1, 2)), residual.permute(0, 2, 3, 1) + inner


@case(lambda make: (make(2, 3, 12, 14),))
def pooling(x):
    return F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, (3, 4)), F.interpolate(x, scale_factor=2.0), x.mean((2, 3)), F.pixel_shuffle(F.pad(x, (0, 0, 0, 0, 0, 1)), 2)


@case(lambda make: (make(7, 130),))
def scans(x):
    return x.cumsum(1) * 2, x.abs().cumprod(0).sum(), x.sort(1)[0] + 1, x.topk(3, 1)[0].sum(), x.cummax(0)[0]


@case(lambda make: (make(7, 130),))
def nothing_to_fuse(x):
    return x @ x.t(), x.sort(0)[0]


@case(lambda make: (make(7, 130),))
def only_views(x):
    return x.t().unsqueeze(1)[3:5], x.view(70, 13).permute(1, 0)


@case(lambda make: (make(7, 33),))
def a_residual_stream(x):
    h = x
    for scale in (0.5, 0.25, 2.0):
        h = h + torch.tanh(F.layer_norm(h, (33,)) * scale)
    return h


@case(lambda make: (make(130),))
def one_value_many_users(x):
    y = x.exp()
    return y, y + 1, y * 2, y.sum(), y.view(13, 10).t(), y[3], y.cumsum(0), y - y.mean()
