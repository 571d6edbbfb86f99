"""Calls of every fusible row of the op table: which arguments, in which dtypes, sizes and memory layouts.

Worked example: ``pointwise_samples(row_of("aten.add.Tensor"))`` yields ``x + y`` over equal sizes, broadcast sizes,
transposed and strided operands, 0-d and empty ones, in eight dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dynafuse.ops import Kind, Row
from dynafuse.ops.reductions import reduced_dims

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
LAYOUTS = ("same", "broadcast", "transposed", "strided")
ODD = ("scalar", "single", "empty", "dynamic")


@dataclass
class Sample:
    """One call: positional arguments (tensors among them), keywords, and what about it is special."""

    what: str
    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic: bool = False

    def __str__(self) -> str:
        shown = [f"{str(a.dtype)[6:]}{list(a.shape)}{a.stride()}" if isinstance(a, torch.Tensor) else repr(a)
                 for a in flat(self.args)]
        return f"{self.what}: {', '.join(shown)} {self.kwargs or ''}"


def flat(args: Sequence[Any]) -> list[Any]:
    """Arguments, those in lists included."""
    return [b for a in args for b in (flat(a) if isinstance(a, (list, tuple)) else [a])]


def values(shape: Sequence[int], dtype: torch.dtype, seed: int, low: int = -7) -> torch.Tensor:
    """Random numbers; integers are between ``low`` and 8, without 0 if ``low`` is 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(tuple(shape), generator=generator) < 0.6
    if dtype.is_floating_point:
        return (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * 2).to(dtype)
    return torch.randint(max(low, 0) if dtype is torch.uint8 else low, 8, tuple(shape), generator=generator).to(dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.dim():
        wide = tensor.repeat_interleave(2, dim=-1)
        padded = torch.cat([wide, wide], 0)
        return padded[: tensor.shape[0], ..., 1::2]
    return tensor


# Pointwise ------------------------------------------------------------------------------------------------------------

NUMBERS: dict[str, list[list[Any]]] = {
    "aten.pow.Tensor_Scalar": [[e] for e in (2, 0, 0.5, 1, 3, 4, 7, -0.5, -1, -2, 2.5)],
    "aten.float_power.Tensor_Scalar": [[2], [2.5], [-1]],
    "aten.pow.Scalar": [[2], [0.5], [1]],
    "aten.div.Tensor_mode": [["floor"], [None], ["trunc"]],
    "aten.div.Scalar_mode": [[3, "floor"], [3, None], [-3, "trunc"]],
    "aten.round.decimals": [[2], [-1], [0]],
    "aten.gelu.default": [["none"], ["tanh"]],
    "aten.gelu_backward.default": [["none"], ["tanh"]],
    "aten.clip.default": [[-1, 2]],
    "aten.clamp.default": [[-1, 2], [None, 2], [-1, None], [-0.5, 1.5]],
    "aten.lerp.Scalar": [[0.25], [0.75]],
    "aten.logit.default": [[None], [1e-2]],
    "aten.logit_backward.default": [[None], [1e-2]],
    "aten.elu_backward.default": [[1.0, 1.0, 1.0, False], [2.0, 3.0, 0.5, False]],
    "aten.where.ScalarOther": [[2], [1.5]],
    "aten.add.Tensor": [[1], [2]],
    "aten.add.Scalar": [[2], [2.5]],
    "aten.mul.Scalar": [[3], [0.1]],
    "aten.lt.Scalar": [[2], [2.5]],
    "aten.nan_to_num.default": [[None, None, None], [1.0, 2.0, 3.0]],
}
"""The arguments that are not tensors, in schema order, where one value does not show everything."""

ZERO_DIMENSIONAL = {"aten.masked_fill.Tensor": (2,), "aten.fill.Tensor": (1,)}
"""Positions of operands that eager wants 0-dimensional."""

DIVIDE = ("div", "floor_divide", "fmod", "remainder")
NONNEGATIVE = ("shift", "pow")
CONVERSIONS = tuple((source, dest) for source in DTYPES for dest in DTYPES if source is not dest)


def numbers_of(row: Row) -> list[list[Any]]:
    """Argument lists without the tensors: the table above, or defaults, or 2 for every number."""
    if str(row.target) in NUMBERS:
        return NUMBERS[str(row.target)]
    plain = [argument for argument in row.target._schema.arguments if not _is_tensor(argument)]
    return [[_default(argument) for argument in plain]]


def _is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def _default(argument: Any) -> Any:
    if argument.has_default_value():
        return argument.default_value
    return {"bool": False, "float": 2.0}.get(str(argument.type), 2)


def pointwise_samples(row: Row) -> Iterator[Sample]:
    """Every layout in float32; every other dtype in one layout; the odd sizes in float32."""
    if str(row.target) == "prims.convert_element_type.default":
        yield from _conversions()
        return
    first, *more = numbers_of(row)
    for numbers in more:
        yield pointwise_sample(row, torch.float32, "same", numbers)
        yield pointwise_sample(row, torch.int32, "same", numbers)
    for layout in (*LAYOUTS, *ODD):
        yield pointwise_sample(row, torch.float32, layout, first)
    for k, dtype in enumerate(DTYPES[1:]):
        yield pointwise_sample(row, dtype, LAYOUTS[k % len(LAYOUTS)], first)
    yield pointwise_sample(row, torch.int64, "mixed", first)


SHAPES = {
    "same": [(3, 5)] * 5,
    "broadcast": [(3, 1, 5), (4, 1), (3, 1, 1), (1, 4, 5), (5,)],
    "transposed": [(3, 2, 5)] * 5,
    "strided": [(4, 5)] * 5,
    "scalar": [()] * 5,
    "single": [(1, 1), (1,), (1, 1, 1), (1,), (1,)],
    "empty": [(0, 3)] * 5,
    "dynamic": [(3, 5)] * 5,
    "mixed": [(3, 5), (), (3, 5), (), ()],
}


def pointwise_sample(row: Row, dtype: torch.dtype, layout: str, numbers: Sequence[Any]) -> Sample:
    """One call: tensors of ``dtype`` (bool where a condition is asked for) among the numbers, in schema order."""
    rest, sample, tensors = list(numbers), Sample(f"{layout} {dtype}", [], dynamic=layout == "dynamic"), 0
    for position, argument in enumerate(row.target._schema.arguments):
        if _is_tensor(argument):
            shape = () if position in ZERO_DIMENSIONAL.get(str(row.target), ()) else SHAPES[layout][tensors]
            own = torch.float32 if layout == "mixed" and tensors else dtype
            made: Any = _operand(row, torch.bool if position in row.raw else own, shape, tensors)
            made = laid_out(made, layout if layout != "transposed" or tensors != 1 else "strided")
            tensors += 1
        elif rest:
            made = rest.pop(0)
        else:
            continue
        if argument.kwarg_only:
            sample.kwargs[argument.name] = made
        else:
            sample.args.append(made)
    return sample


def _operand(row: Row, dtype: torch.dtype, shape: Sequence[int], tensors: int) -> torch.Tensor:
    name = str(row.target)
    if (tensors or "Scalar_Tensor" in name) and any(part in name for part in DIVIDE):
        return torch.ones(tuple(shape), dtype=dtype) if dtype is torch.bool else values(shape, dtype, tensors, low=1)
    return values(shape, dtype, tensors, low=0 if any(part in name for part in NONNEGATIVE) else -7)


def _conversions() -> Iterator[Sample]:
    for k, (source, dest) in enumerate(CONVERSIONS):
        low = 0 if dest is torch.uint8 else -7
        operand = values((3, 5), source, k, low)
        operand = operand.abs() if dest is torch.uint8 and source.is_floating_point else operand
        yield Sample(f"{source} to {dest}", [laid_out(operand, LAYOUTS[k % 4]), dest])


# Reductions -----------------------------------------------------------------------------------------------------------

REDUCED: tuple[tuple[str, tuple[int, ...], Any], ...] = (  # layout, sizes, reduced dimensions
    ("same", (4, 12), [-1]),
    ("same", (12, 5), [0]),
    ("transposed", (4, 13), [-1]),
    ("strided", (3, 10, 4), [1]),
    ("same", (3, 4, 5), [0, 2]),
    ("same", (3, 4, 5), None),
    ("same", (5, 4), [-1]),  # written out
    ("same", (5, 1), [-1]),
    ("same", (), None),
    ("empty", (0, 12), [-1]),
    ("dynamic", (4, 12), [-1]),
    ("dynamic", (12, 4), [0]),
    ("nan", (4, 12), [-1]),
    ("same", (3, 600), [-1]),
    ("same", (2, 5000), [-1]),
    ("same", (2500, 3), [0]),
    ("same", (5000,), None),
)
SMALL = REDUCED[:7]


def reduction_samples(row: Row) -> Iterator[Sample]:
    """Every case in float32; every other dtype in two of the small ones."""
    for k, case in enumerate(REDUCED):
        yield from _reduction_sample(row, torch.float32, *case, keepdim=k % 3 == 1)
    for k, dtype in enumerate(DTYPES[1:]):
        yield from _reduction_sample(row, dtype, *SMALL[k % len(SMALL)], keepdim=k % 2 == 0)
        yield from _reduction_sample(row, dtype, *SMALL[(k + 3) % len(SMALL)], keepdim=False)
    yield from _reduction_sample(row, torch.bfloat16, "same", (2, 5000), [-1], keepdim=False)


def _reduction_sample(row: Row, dtype: torch.dtype, layout: str, shape: tuple[int, ...], dims: Any,
                      keepdim: bool) -> Iterator[Sample]:
    name, small = str(row.target), any(part in str(row.target) for part in ("prod", "sum", "mean"))
    operand = values(shape, dtype, 1, low=-2 if small else -7)
    if "prod" in name and dtype.is_floating_point and len(shape) > 1:
        operand = (operand * 0.3 + 1).to(dtype)
    if layout == "nan":
        operand[1, 3] = operand[2, 0] = float("nan")
    sample = Sample(f"{layout} {dtype}", [laid_out(operand, layout)], dynamic=layout == "dynamic")
    accepted = _accepted(row, dims, len(shape))
    if accepted is None:
        return
    for argument in row.target._schema.arguments[1:]:
        if argument.name in ("dim", "dims"):
            made: Any = accepted
        elif argument.name == "keepdim":
            made = keepdim
        elif argument.name == "correction":
            made = 0 if keepdim else 1
        else:
            continue
        if argument.kwarg_only:
            sample.kwargs[argument.name] = made
        else:
            sample.args.append(made)
    yield sample


SCANNED: tuple[tuple[str, tuple[int, ...], int], ...] = (  # layout, sizes, the dimension
    ("same", (4, 12), -1),
    ("same", (12, 5), 0),
    ("transposed", (4, 13), 1),
    ("transposed", (4, 13), 0),
    ("strided", (3, 10, 4), 1),
    ("same", (5, 2), 1),
    ("same", (17,), 0),
    ("same", (5, 1), 1),
    ("same", (), 0),
    ("empty", (0, 12), 1),
    ("dynamic", (4, 12), 1),
    ("dynamic", (12, 4), 0),
    ("nan", (4, 12), 1),
    ("infinite", (4, 12), 1),
    ("same", (3, 600), 1),
    ("same", (2, 20000), 1),
    ("same", (2500, 3), 0),
)


def scan_samples(row: Row) -> Iterator[Sample]:
    """Every case in float32; every other dtype in some, and as what another one is converted to."""
    for case in SCANNED:
        yield _scan_sample(row, torch.float32, *case)
    for k, dtype in enumerate(DTYPES[1:]):
        yield _scan_sample(row, dtype, *SCANNED[k % 6])
        yield _scan_sample(row, dtype, *SCANNED[(k + 3) % 6])
    if any(argument.name == "dtype" for argument in row.target._schema.arguments):
        for k, dtype in enumerate(dtype for dtype in DTYPES if dtype is not torch.bool):
            sample = _scan_sample(row, (torch.float32, torch.int64, torch.bool)[k % 3], *SCANNED[k % 6])
            yield Sample(f"{sample.what} as {dtype}", sample.args, {"dtype": dtype})


def _scan_sample(row: Row, dtype: torch.dtype, layout: str, shape: tuple[int, ...], dim: int) -> Sample:
    operand, name = values(shape, dtype, 1, low=-2), str(row.target)
    is_long = max(shape, default=1) > 1000
    if "prod" in name and dtype.is_floating_point:
        operand = operand.sign() if is_long else (operand * 0.3 + 1).to(dtype)
    elif "cumsum" in name and is_long:  # partial sums near 0 would be off by what others are rounded to
        operand = operand.round()
    if layout == "nan":
        operand[1, 3] = operand[2, 0] = float("nan")
    if layout == "infinite":
        operand[0, 3] = operand[1, 0] = operand[2, :5] = float("inf")
        operand[1, 7] = operand[3, :5] = float("-inf")
    return Sample(f"{layout} {dtype}", [laid_out(operand, layout), dim], dynamic=layout == "dynamic")


def _accepted(row: Row, dims: Any, rank: int) -> Any:
    """The reduced dimensions as the row's schema takes them; None (with a `dim` argument) for no such call."""
    argument = next((a for a in row.target._schema.arguments if a.name in ("dim", "dims")), None)
    listed = list(range(rank)) if dims is None else dims
    if argument is None:
        return [] if dims is None or len(dims) == rank else None
    if str(argument.type) in ("int", "Optional[int]"):
        return listed[0] if len(listed) == 1 else None
    if str(row.target).startswith("prims"):
        return sorted({d % rank for d in listed}) if rank else []
    return listed


# Views, index rewrites, gathers ---------------------------------------------------------------------------------------

X, IMAGE = (2, 3, 4), (2, 2, 7, 6)
ROWS_AT, COLUMNS_AT = torch.tensor([[1, 0], [-1, 1]]), torch.tensor([2, -4])
POOL = [[3, 2], [2, 2], [1, 0], False, True, None]
POOLS = [
    POOL, [[3, 2], [2, 2], [1, 0], True, True, None], [[3, 2], [2, 2], [1, 0], False, False, None],
    [[3, 2], [2, 2], [1, 0], False, True, 5], [[3, 2], [], [1, 0], False, True, None],
    [[3], [1], [1], False, True, None], [[3, 2], [3, 1], [1, 0], True, False, None],
]
MAX_POOLS = [
    [[3, 2], [2, 2], [1, 0], [1, 1], False], [[3, 2], [2, 1], [1, 1], [1, 1], True], [[2], [], [0], [1], False],
    [[2, 3], [1, 1], [1, 1], [2, 1], False],
]
VOLUME_POOL = [[2, 3, 2], [2, 2, 1], [1, 0, 1]]
VOLUME_POOLS = [[*VOLUME_POOL, [1, 1, 1], False], [[2], [], [0], [1], True], [[2, 2, 2], [1, 2, 1], [1, 1, 0], [1, 2, 1], False]]
Make = Callable[[torch.Tensor], list[Any]]


def with_indices(op: Any, pool: list[Any]) -> Make:
    """Arguments of the gradient of a max pooling."""
    def made(x: torch.Tensor) -> list[Any]:
        maxima, indices = op(x, *pool)
        return [maxima.cos(), x, *pool, indices]

    return made


def with_offsets(pool: list[Any], rank: int) -> Make:
    """Arguments of the gradient of a max pooling that takes places in windows."""
    def made(x: torch.Tensor) -> list[Any]:
        *window, ceil_mode = in_full(pool, rank)
        maxima, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(x, *window, ceil_mode)
        return [maxima.cos(), offsets, list(x.shape[-rank:]), *window]

    return made


def in_full(pool: list[Any], rank: int) -> list[Any]:
    """A window as the ops that want each number for each dimension are given it."""
    return [*((value * rank)[:rank] for value in (pool[0], pool[1] or pool[0], pool[2], pool[3])), pool[4]]


def upsampled(rank: int, *cases: tuple[list[int], list[Any]]) -> list[Make]:
    """Arguments of the gradient of upsampling: an image as the gradient, sizes from which it was made, and options."""
    def made(x: torch.Tensor, sizes: list[int], options: list[Any]) -> list[Any]:
        grad = {1: x[0], 2: x, 3: x[None]}[rank]
        return [grad, list(grad.shape[-rank:]), [*grad.shape[:-rank], *sizes[-rank:]], *options]

    return [lambda x, case=case: made(x, *case) for case in cases]


def nearest(rank: int) -> list[Make]:
    """Of windows of one size and of several, of fewer outputs than elements, of one element."""
    none = [None] * rank
    return upsampled(rank, ([1, 7, 3], none), ([2, 3, 4], none), ([3, 9, 11], none), ([1, 1, 1], none),
                     ([2, 3, 2], [1.0, 2.4, 3.3][-rank:]))


def smooth(rank: int) -> list[Make]:
    """The same with weights, between corners and between edges."""
    none = [None] * rank
    cases = [([1, 7, 3], [False, *none]), ([2, 7, 3], [True, *none]), ([3, 7, 11], [False, *none]), ([1, 1, 1], [True, *none]),
             ([2, 7, 2], [False, *[1.0, 1.0, 3.3][-rank:]])]
    return upsampled(rank, *(cases if rank < 3 else cases[:3]))


RESHAPES: list[Make] = [
    lambda x: [x, [4, 6]], lambda x: [x, [2, 12]], lambda x: [x, [24]], lambda x: [x, [8, 1, 3]],
]
SLICES: list[Make] = [
    lambda x: [x, 2, 1, 3, 1], lambda x: [x, -1, -3, 9223372036854775807, 2], lambda x: [x, 1, -100, -1, 1],
    lambda x: [x, 1, None, 100, 2],
]
INDEXES: list[Make] = [
    lambda x: [x, [ROWS_AT]], lambda x: [x, [None, ROWS_AT]], lambda x: [x, [None, ROWS_AT, COLUMNS_AT]],
    lambda x: [x, [ROWS_AT, None, COLUMNS_AT]], lambda x: [x, [ROWS_AT, ROWS_AT, COLUMNS_AT]],
    lambda x: [x, [None, None, torch.tensor(-1)]],
]

MOVES: dict[str, list[Make]] = {
    "aten.view.default aten._unsafe_view.default aten.reshape.default aten.view_copy.default prims.reshape.default":
        RESHAPES,
    "aten._reshape_alias.default": [lambda x: [x, [4, 6], [6, 1]]],
    "aten.flatten.using_ints": [lambda x: [x, 0, 1], lambda x: [x, 0, -1]],
    "aten.unflatten.int": [lambda x: [x, 2, [2, 2]]],
    "prims.collapse_view.default prims.collapse.default": [lambda x: [x, 1, 2], lambda x: [x, 0, 2]],
    "prims.split_dim.default": [lambda x: [x, 2, 2]],
    "aten.permute.default aten.permute_copy.default": [lambda x: [x, [2, 0, -2]], lambda x: [x, [1, 0, 2]]],
    "prims.transpose.default": [lambda x: [x, [2, 0, 1]]],
    "aten.transpose.int aten.transpose_copy.int": [lambda x: [x, 0, -1], lambda x: [x, 1, 2]],
    "aten.t.default aten.t_copy.default": [lambda x: [x[0]], lambda x: [x[0, 0]]],
    "aten.expand.default aten.expand_copy.default aten.broadcast_to.default": [lambda x: [x[:, :1], [5, 2, 3, 4]]],
    "prims.broadcast_in_dim.default": [lambda x: [x[0, :, :1], [3, 2, 5], [0, 2]]],
    "aten.squeeze.default aten.squeeze_copy.default": [lambda x: [x[:1, :, :1]]],
    "aten.squeeze.dim aten.squeeze_copy.dim": [lambda x: [x[:1], 0], lambda x: [x, 0]],
    "aten.squeeze.dims aten.squeeze_copy.dims": [lambda x: [x[:1, :, :1], [0, 1, -1]]],
    "prims.squeeze.default": [lambda x: [x[:1], [0]]],
    "aten.unsqueeze.default aten.unsqueeze_copy.default": [lambda x: [x, -1], lambda x: [x, 1]],
    "aten.slice.Tensor aten.slice_copy.Tensor": SLICES,
    "aten.select.int aten.select_copy.int": [lambda x: [x, 1, -1], lambda x: [x, -1, 2]],
    "aten.diagonal.default aten.diagonal_copy.default": [lambda x: [x, 1, 1, 2], lambda x: [x, -1, 2, 0]],
    "aten.unfold.default aten.unfold_copy.default": [lambda x: [x, 2, 2, 1], lambda x: [x, 1, 2, 2]],
    "aten.alias.default aten.detach.default": [lambda x: [x]],
    "aten.view_as.default": [lambda x: [x, torch.empty(4, 6)]],
    "aten.cat.default": [
        lambda x: [[x, x[:, :1], x[:, :2]], 1], lambda x: [[x, torch.ones(0), x.int()], -1],
        lambda x: [[x[:, :0], x], 1],
        lambda x: [[x, x.transpose(0, 1).contiguous().transpose(0, 1)], 0],
    ],
    "prims.cat.default": [lambda x: [[x, x[:, :1], x[:, :2]], 1]],
    "aten.stack.default": [lambda x: [[x, x.flip(0), x], 1], lambda x: [[x], -1]],
    "aten.constant_pad_nd.default": [
        lambda x: [x, [1, 2], 1], lambda x: [x, [1, -2, -1, 3], 1], lambda x: [x, [0, -1], 0],
    ],
    "aten.flip.default": [lambda x: [x, [0, -1]]],
    "prims.rev.default": [lambda x: [x, [1]]],
    "aten.roll.default": [lambda x: [x, [1, -2], [0, 2]], lambda x: [x, [5], []]],
    "aten.repeat.default": [lambda x: [x, [2, 1, 3, 1]]],
    "aten.slice_scatter.default": [
        lambda x: [x, x[:, :, :2], 2, 1, 3, 1], lambda x: [x, x[:, :2], 1, 0, 9223372036854775807, 2],
        lambda x: [x, x.flip(0), 1, 0, 9223372036854775807, 1], lambda x: [x, x[:, :, :2], -1, -2, None, 1],
    ],
    "aten.select_scatter.default": [lambda x: [x, x[:, 0], 1, -1]],
    "aten.triu.default aten.tril.default": [lambda x: [x, 1], lambda x: [x, -1], lambda x: [x[0], 0]],
    "aten.embedding.default": [lambda x: [x[0], torch.tensor([[2, 0], [1, 1]])], lambda x: [x[0], torch.tensor(1)]],
    "aten.gather.default": [
        lambda x: [x, -1, torch.tensor([[[3], [0]], [[1], [1]]])], lambda x: [x[0, 0, 0], 0, torch.tensor(0)],
    ],
    "aten.index_select.default": [
        lambda x: [x, 1, torch.tensor([2, 2, 0])], lambda x: [x, -1, torch.tensor(3)],
        lambda x: [x, 0, torch.tensor([1, 0], dtype=torch.int32)],
        lambda x: [x[0, 0, 0], 0, torch.tensor([0])], lambda x: [x[0, 0, 0], 0, torch.tensor(0)],
    ],
    "aten.index.Tensor": INDEXES,
    "aten._unsafe_index.Tensor": [*INDEXES, lambda x: [x, [None, COLUMNS_AT[:, None] % 3, COLUMNS_AT]]],
    "aten._unsafe_masked_index.default": [
        lambda x: [x, torch.tensor([True, False, True, False]), [None, None, torch.tensor([1, 99, 3, 2])], 1],
    ],
    "aten.scatter.src aten.scatter_add.default": [
        lambda x: [x, 2, torch.tensor([[[3], [0], [1]], [[1], [1], [2]]]), x[:, :, :1].flip(0)],
        lambda x: [x, 0, torch.ones(1, 3, 4, dtype=torch.int64), x[:1]],
        lambda x: [x, 2, torch.tensor([[[3, 0], [0, 2], [1, 3]]]), x.flip(1)],
    ],
    "aten.scatter.value": [lambda x: [x, 2, torch.tensor([[[3], [0], [1]], [[1], [1], [2]]]), 1],
                           lambda x: [x, 1, torch.tensor([[[2, 0], [0, 2]]]), 1]],
}
SCATTERS: dict[str, list[Make]] = {
    "aten.index_put.default": [
        lambda x: [x, [None, torch.tensor([2, -3])], x[:, :2] * 2],
        lambda x: [x, [None, torch.tensor([2, 2, -1, 0, 2])], x[:, :1] * 2, True],
        lambda x: [x, [torch.tensor([[1], [0]]), None, COLUMNS_AT], x[0, 0, 0], True],
        lambda x: [x, [torch.tensor(1)], x[0], True],
    ],
    "aten._unsafe_index_put.default": [lambda x: [x, [None, torch.tensor([2, 2, -1])], x, True]],
    "aten._unsafe_masked_index_put_accumulate.default": [
        lambda x: [x, torch.tensor([True, False, True, False]), [None, None, torch.tensor([1, 99, 3, 2])], x],
    ],
    "aten.scatter_reduce.two": [
        *(lambda x, how=how: [x, 1, torch.tensor([[[2, 0], [0, 2], [0, 0]]]), x, how] for how in ("sum", "amax", "amin")),
    ],
    "aten.index_add.default": [lambda x: [x, 2, torch.tensor([2, 2, 0, 2]), x],
                               lambda x: [x[0, 0], 0, torch.tensor(3), x[0, 0, :1]]],
    "aten.index_copy.default": [lambda x: [x, -1, torch.tensor([3, 0]), x[:, :, :2]]],
    "aten.index_fill.int_Scalar": [lambda x: [x, 1, torch.tensor([2, 0]), 1], lambda x: [x, 1, torch.tensor(1), 1]],
}
DEPTHWISE: list[tuple[int, list[list[int]]]] = [
    (1, [[1, 1], [1, 0], [1, 1]]), (1, [[2, 3], [1, 1], [1, 1]]), (3, [[2, 1], [2, 1], [1, 2]]), (2, [[1, 4], [0, 0], [1, 1]]),
]
"""Channels of a result for each of its operand's, with strides, paddings and dilations."""


def weights(x: torch.Tensor, copies: int) -> torch.Tensor:
    """Weights of windows of 3 × 2."""
    channels = copies * x.shape[1]
    return torch.arange(6 * channels).view(channels, 1, 3, 2).cos().to(x.dtype)


def depthwise_gradient(copies: int, numbers: list[list[int]]) -> Make:
    def make(x: torch.Tensor) -> list[Any]:
        result = torch.ops.dynafuse.depthwise_convolution.default(x.double(), weights(x, copies).double(), *numbers)
        return [result.cos().to(x.dtype), weights(x, copies), list(x.shape), *numbers]

    return make


IMAGES: dict[str, list[Make]] = {
    "aten.avg_pool2d.default": [*(lambda x, pool=pool: [x, *pool] for pool in POOLS), lambda x: [x[0], *POOL]],
    "aten.max_pool2d.default": [
        *(lambda x, pool=pool: [x, *pool] for pool in MAX_POOLS), lambda x: [x.where(x < 1, torch.nan), *MAX_POOLS[0]],
        lambda x: [x.where(x < 1, -torch.inf), *MAX_POOLS[0]], lambda x: [x[0], *MAX_POOLS[0]],
    ],
    "aten.max_pool3d.default": [lambda x, pool=pool: [x, *pool] for pool in VOLUME_POOLS],
    "dynafuse.max_pool_offsets.default": [
        *(lambda x, pool=pool: [x, *in_full(pool, 2)] for pool in MAX_POOLS),
        *(lambda x, pool=pool: [x.round(), *in_full(pool, 3)] for pool in VOLUME_POOLS),
        lambda x: [x.where(x < 1, torch.nan), *MAX_POOLS[0]], lambda x: [x.where(x > 9, -torch.inf), *MAX_POOLS[1]],
    ],
    "aten.max_pool2d_with_indices_backward.default": [
        with_indices(torch.ops.aten.max_pool2d_with_indices.default, pool) for pool in MAX_POOLS],
    "aten.max_pool3d_with_indices_backward.default": [
        with_indices(torch.ops.aten.max_pool3d_with_indices.default, pool) for pool in VOLUME_POOLS],
    "dynafuse.max_pool_offsets_backward.default": [
        *(with_offsets(pool, 2) for pool in MAX_POOLS), *(with_offsets(pool, 3) for pool in VOLUME_POOLS)],
    "dynafuse.depthwise_convolution.default": [
        lambda x, copies=copies, numbers=numbers: [x, weights(x, copies), *numbers] for copies, numbers in DEPTHWISE],
    "dynafuse.depthwise_convolution_backward.default": [depthwise_gradient(*row) for row in DEPTHWISE],
    "aten.avg_pool3d.default": [lambda x: [x, *VOLUME_POOL, True, False, None], lambda x: [x, *VOLUME_POOL, False, True, 5]],
    "aten.avg_pool3d_backward.default": [
        lambda x, rest=rest: [
            torch.ops.aten.avg_pool3d.default(x.double(), *VOLUME_POOL, *rest).cos().to(x.dtype), x, *VOLUME_POOL, *rest]
        for rest in ((True, False, None), (False, True, 5))
    ],
    "aten._adaptive_avg_pool3d.default": [lambda x: [x[..., :6, :], [2, 3, 2]]],
    "aten._adaptive_avg_pool3d_backward.default": [lambda x: [x[..., :3, :2], x[..., :6, :]]],
    "aten.avg_pool2d_backward.default": [
        lambda x, pool=pool: [torch.ops.aten.avg_pool2d.default(x, *pool).cos(), x, *pool] for pool in POOLS
    ],
    "aten._adaptive_avg_pool2d.default": [lambda x: [x[..., :6, :], [3, 2]]],
    "aten._adaptive_avg_pool2d_backward.default": [lambda x: [x[..., :3, :2], x[..., :6, :]]],
    "aten.glu.default": [lambda x: [x, -1], lambda x: [x, 0]],
    "aten.upsample_nearest1d_backward.default": nearest(1), "aten._upsample_nearest_exact1d_backward.default": nearest(1),
    "aten.upsample_nearest2d_backward.default": nearest(2), "aten._upsample_nearest_exact2d_backward.default": nearest(2),
    "aten.upsample_nearest3d_backward.default": nearest(3), "aten._upsample_nearest_exact3d_backward.default": nearest(3),
    "aten.upsample_linear1d_backward.default": smooth(1), "aten.upsample_bilinear2d_backward.default": smooth(2),
    "aten.upsample_trilinear3d_backward.default": smooth(3), "aten.upsample_bicubic2d_backward.default": smooth(2),
}
OFFSETS = "prims._low_memory_max_pool_offsets_to_indices.default"


def move_samples(row: Row) -> Iterator[Sample]:
    """Every case in float32; every other dtype and layout in the first case; dynamic sizes."""
    name = str(row.target)
    if name == OFFSETS:
        offsets = torch.arange(6, dtype=torch.int8).view(1, 3, 2)
        yield Sample("offsets", [offsets, [2, 3], [9, 9], [2, 1], [1, 0], [1, 2]])
        return
    shape = IMAGE if name in IMAGES else X
    cases = next((made for names, made in (MOVES | SCATTERS | IMAGES).items() if name in names.split()), [])
    for make in cases:
        yield Sample("same torch.float32", make(values(shape, torch.float32, 1)))
    for layout in LAYOUTS[2:] if cases else ():
        yield Sample(layout, cases[-1](laid_out(values(shape, torch.float32, 1), layout)))
    for k, dtype in enumerate(DTYPES[1:] if name not in IMAGES else FLOATS[1:]):
        if cases:
            yield Sample(f"same {dtype}", cases[k % len(cases)](values(shape, dtype, 1)))
    if cases:
        yield Sample("dynamic", cases[0](values(shape, torch.float32, 1)), dynamic=True)


# Creation -------------------------------------------------------------------------------------------------------------

CREATED: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {
    "aten.full.default": [([[2, 3], 1.5], {}), ([[2, 3], 3], {"dtype": torch.int32}), ([[], True], {})],
    "aten.full_like.default": [([torch.ones(2, 3), 3], {}), ([torch.ones(2, 3).t(), 3], {"dtype": torch.int64})],
    "aten.new_full.default": [([torch.ones(2, 3, dtype=torch.float16), [4], 3.3], {})],
    "prims.full.default": [
        ([[2, 3], 1.5], {"dtype": torch.bfloat16, "device": torch.device("cpu"), "requires_grad": False}),
    ],
    "prims.full_like.default": [
        ([torch.ones(2, 3), 1.5], {"dtype": torch.float64, "device": torch.device("cpu"), "requires_grad": False}),
    ],
    "prims.scalar_tensor.default": [([1.5], {"dtype": torch.float32, "device": torch.device("cpu")})],
    "aten.scalar_tensor.default": [([2.5], {}), ([2], {"dtype": torch.int64})],
    "aten.zeros.default aten.ones.default": [([[2, 3]], {}), ([[5]], {"dtype": torch.bool}), ([[0, 5]], {})],
    "aten.zeros_like.default aten.ones_like.default": [([torch.ones(2, 3)], {}), ([torch.ones(2, 3).t().bool()], {})],
    "aten.new_zeros.default aten.new_ones.default": [([torch.ones(2, 3, dtype=torch.int32), [4, 2]], {})],
    "aten.eye.default": [([3], {}), ([4], {"dtype": torch.int64})],
    "aten.eye.m": [([3, 4], {})],
    "prims.iota.default": [
        ([4], {"start": 3, "step": -2, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}),
    ],
    "aten.arange.default": [([4], {}), ([4], {"dtype": torch.float32})],
    "aten.arange.start": [([2, 9], {}), ([0.5, 3.0], {})],
    "aten.arange.start_step": [([1, 11, 3], {}), ([0.5, 3.0, 0.25], {}), ([11, 1, -3], {"dtype": torch.int32})],
    "prims.inductor_lookup_seed.default": [([torch.arange(5), 3], {})],
}


def creation_samples(row: Row) -> Iterator[Sample]:
    """The calls of the table above."""
    for names, calls in CREATED.items():
        if str(row.target) in names.split():
            yield from (Sample("created", list(args), dict(kwargs)) for args, kwargs in calls)


def samples(row: Row) -> list[Sample]:
    """All calls of a row."""
    if row.kind is Kind.POINTWISE:
        return list(pointwise_samples(row))
    if row.kind is Kind.REDUCTION:
        return list(reduction_samples(row))
    if row.kind is Kind.SCAN:
        return list(scan_samples(row))
    if row.kind in (Kind.CREATION, Kind.RANDOM):
        return list(creation_samples(row))
    return list(move_samples(row))


def reduced_count(row: Row, sample: Sample) -> int:
    """How many elements a reduction adds up per result."""
    named = dict(zip((a.name for a in row.target._schema.arguments), sample.args, strict=False)) | sample.kwargs
    operand, count = sample.args[0], 1
    for dim in reduced_dims(named, operand.dim()):
        count *= operand.shape[dim]
    return count
