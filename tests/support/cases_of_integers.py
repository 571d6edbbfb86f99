"""Functions of tensors and integers, of sizes and what is computed from them, and of views of views.

Worked example: ``ARITHMETIC["floor_divide"](X, -3)`` is ``X - 2``, however it is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]
INTEGERS = (3, 4, 0, -3, -1, 1)
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

ARITHMETIC: dict[str, Function] = {
    "add": lambda x, n: x + n,
    "subtract_from": lambda x, n: n - x,
    "multiply": lambda x, n: x * n,
    "negate": lambda x, n: x * -n,
    "power": lambda x, n: x * n**2 + n**3,
    "max": lambda x, n: x + max(n, 1),
    "min": lambda x, n: x + min(n, 0),
    "of_three": lambda x, n: x + max(n, 1, x.size(0) - 7),
    "between": lambda x, n: x + min(max(n, -2), 2),
    "abs": lambda x, n: x * abs(n - 1),
    "floor_divide": lambda x, n: x + n // 2,
    "floor_divide_by_negative": lambda x, n: x + n // -2 + (-n) // 3,
    "floor_divide_a_size": lambda x, n: x + (x.size(0) - 5 * n) // 4,
    "remainder": lambda x, n: x + n % 3,
    "remainder_of_negative": lambda x, n: x + n % -3 + (-n) % 4,
    "shift": lambda x, n: x + (n << 2) + (n >> 1),
    "bits": lambda x, n: x + (n & 3) + (n | 1) + (n ^ 1),
    "true_divide": lambda x, n: x + n / 2,
    "floor": lambda x, n: x + math.floor(n / 2),
    "ceil": lambda x, n: x + math.ceil(n / 2),
    "trunc": lambda x, n: x + math.trunc(n / 2) + math.trunc(n * 0.7),
    "round": lambda x, n: x + round(n / 2),
    "compare": lambda x, n: x > n,
    "choose": lambda x, n: torch.where(x > 0, n, 0) * 1.0,
    "fill": lambda x, n: x.new_full((6, 4), n) + x,
    "of_integers": lambda x, n: ((x * 4).int() // 3 * n, torch.div((x * 4).int(), 2 * n + 1, rounding_mode="floor")),
    "clamp": lambda x, n: (x.clamp(max=n), x.clamp(-abs(n), n + 2), (x * 4).int().clamp(n - 1, n)),
    "float_bounds": lambda x, n: ((x * 4).int().clamp(max=n / 2), (x * 4).int().clamp(n / 2, 7), x.half().clamp(min=n / 2)),
    "reduced": lambda x, n: ((x * n).sum(0), (x * n).amax(1), (x * n).softmax(1)),
}
INDEXING: dict[str, Function] = {
    "range": lambda x, n: torch.arange(n, n + 5) * 2,
    "slice_from": lambda x, n: (x * 2)[n:] + 1,
    "slice_to": lambda x, n: (x * 2)[:n] + 1,
    "slice_of_reshaped": lambda x, n: (x * 2).t().reshape(-1)[n:].sin() * 2,
    "reshape_of_slice": lambda x, n: (x * 2)[n:].t().reshape(-1) + 1,
    "triangles": lambda x, n: (x.tril(n), (x * 2).triu(n) + 1),
    "diagonal": lambda x, n: (x * 2).diagonal(n) + 1,
    "roll": lambda x, n: (x * 2).roll(n, 0) + 1,
    "pad": lambda x, n: (F.pad(x * 2, (n, 3)) + 1, F.pad(x * 2, (3, n + 3, 2, 2), value=7.0) + 1),
    "select": lambda x, n: (x * 2)[n % 6] + 1,
    "sizes": lambda x, n: x.new_zeros(abs(n) + 1, 3) + n,
    "repeat": lambda x, n: (x * 2).repeat(n % 3 + 1, 1) + 1,
}
COMPUTED: dict[str, Function] = {
    "range_of_ceil": lambda x: torch.arange(math.ceil(x.size(1) * 1.5)) * 2,
    "add_floor": lambda x: x + math.floor(x.size(0) * 0.7),
    "add_ceil_of_quotient": lambda x: x + math.ceil(x.size(0) / 4),
    "add_trunc": lambda x: x + math.trunc(x.size(0) * 1.3) - math.trunc(x.size(1) / 3),
    "add_round": lambda x: x * round(x.size(0) * 0.5),
    "slice_to_round": lambda x: x[: round(x.size(0) / 2)] * 2,
    "slice_from_floor": lambda x: (x.t() * 2)[:, math.floor(x.size(0) * 0.3):].flip(1) + 1,
    "sizes": lambda x: x.new_zeros(math.ceil(x.size(0) * 0.4), math.floor(x.size(1) * 1.6)) + x.size(0),
    "reshaped": lambda x: (x.new_ones(math.ceil(x.size(0) * 0.4), x.size(1)) * 2).t().reshape(-1) + x.sum(),
    "reduced": lambda x: (x[: math.ceil(x.size(0) * 0.6)] * 2).sum(0) / math.ceil(x.size(0) * 0.6),
    "square_root": lambda x: x * x.size(1) ** -0.5 + math.floor(x.size(0) ** 0.5),
    "pad": lambda x: F.pad(x, (0, math.ceil(x.size(1) * 0.5))) + 1,
    "split": lambda x: [piece * 2 for piece in x.split(math.ceil(x.size(0) / 2))],
}
SHAPES = [(7, 5), (12, 9), (4, 30)]
PIECES: dict[str, Function] = {
    "split": lambda x, n: [piece * 2 + i for i, piece in enumerate(x.split(n))],
    "split_along_last": lambda x, n: [piece * 2 + i for i, piece in enumerate(x.split(n, -1))],
    "split_of_computed": lambda x, n: [piece.flip(0) for piece in (x * 2).split(n, 1)],
    "given_sizes": lambda x, n: [piece * 2 + i for i, piece in enumerate(x.split([n, x.size(0) - n]))],
    "three_given_sizes": lambda x, n: [piece * 2 for piece in (x + 1).split([n, 1, x.size(0) - n - 1], -2)],
    "as_views": lambda x, n: x.split([n, x.size(0) - n]),
    "unsafe": lambda x, n: [piece.relu() for piece in torch.unsafe_split(x, n)],
    "chunk": lambda x, n: [piece * 2 + n for piece in x.chunk(2)],
    "chunk_of_computed": lambda x, n: [piece * 2 + n for piece in (x + 1).chunk(3, -1)],
    "tensor_split": lambda x, n: [piece * 2 + n for piece in x.tensor_split(3)],
    "unbind": lambda x, n: [piece * 2 + n for piece in x.unbind(1)],
    "gated": lambda x, n: F.glu(x, 0) * n,
}
CALLS = [(torch.randn(8, 6), 3), (torch.randn(10, 7), 4), (torch.randn(10, 5), 3), (torch.randn(12, 9), 5)]
CHAINS: dict[str, Function] = {
    "flip_slice_reshape": lambda a: (a.t() * 2).reshape(-1)[0:3].flip(0) + 1,
    "flip_reshape": lambda a: (a * 2).reshape(-1).flip(0).reshape(a.size(1), a.size(0)).t() + 1,
    "slices": lambda a: (a.t() * 2).reshape(-1)[1:-1].flip(0)[1::2] + 1,
    "steps": lambda a: (a.t() * 2).reshape(-1)[1::2].flip(0)[::2] + 1,
    "flips": lambda a: (a * 2).flip(0).t().reshape(-1).flip(0)[2:] + 1,
    "into_blocks": lambda a: (a.t() * 2).reshape(-1).flip(0)[: a.numel() // 4 * 4].reshape(2, 2, -1).flip(1, 2).transpose(0, 2).reshape(-1) + 1,
    "pad_reshape": lambda a: F.pad(a * 2, (1, 2)).reshape(-1).flip(0)[1:] + 1,
    "pad_flip_reshape": lambda a: F.pad((a * 2).t().reshape(-1).flip(0), (3, 1)) + 1,
    "cat_reshape": lambda a: torch.cat([(a * 2).t().reshape(-1), a.reshape(-1).exp()]).flip(0)[3:] + 1,
    "roll": lambda a: (a.t() * 2).reshape(-1).roll(1).flip(0) + 1,
    "diagonal": lambda a: (a.t() * 2).reshape(-1).flip(0)[1:].unfold(0, 3, 2).flip(1) + 1,
    "reduced": lambda a: (a.t() * 2).reshape(-1).flip(0)[2:].sum(0) + a.flip(1).t().reshape(-1)[1:].amax(0),
    "put": lambda a: torch.slice_scatter((a.t() * 2).reshape(-1), a.reshape(-1)[2:4].flip(0), 0, 1, 5, 2).flip(0) + 1,
}
MATRICES = [(torch.randn(shape),) for shape in ((2, 4), (3, 5), (6, 4), (5, 7))]
