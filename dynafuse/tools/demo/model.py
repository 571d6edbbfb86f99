"""The demo's model: a small decoder with rotary positions, RMS norms and gated feed-forward networks.

Worked example: ``model, batch = build(INTERPRETED, "cpu")``; ``model(*batch)`` is the loss, near log 64 before training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and of its batches."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    batch: int
    length: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, width {self.width}, {self.heads} heads, vocabulary {self.vocabulary}, "
            f"batch {self.batch} × {self.length}, {str(self.dtype)[6:]}"
        )


ON_GPU = Sizes(4, 1024, 16, 2816, 8192, 4, 1024, torch.bfloat16)
ON_CPU = Sizes(2, 256, 4, 768, 2048, 4, 256, torch.float32)  # two cores take a fifth of a second for a step
INTERPRETED = Sizes(2, 32, 2, 64, 64, 1, 16, torch.float32)


def wide(x: Tensor) -> Tensor:
    """Convert to float32 what is narrower, as norms and losses need it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """Scale every row to a root mean square of one, then by a learnt weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x_ = wide(x)
        return (x_ * torch.rsqrt(x_.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding: pairs of channels, half a head apart, turn with their position.

    Args:
        x: Queries or keys, [batch, heads, positions, channels of a head].
        cos, sin: Of the angle of each channel at each position, [positions, channels of a head].
    """
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what every position takes from those up to it.

        Args:
            x: [batch, positions, width].
            cos, sin: As for :func:`rotated`.
        """
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and feed-forward network, each behind a norm and beside a residual path."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = RMSNorm(sizes.width), RMSNorm(sizes.width)
        self.attention = Attention(sizes.width, sizes.heads)
        self.mlp = SwiGLU(sizes.width, sizes.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``x`` with what attention and feed-forward network add to it.

        Args:
            x: [batch, positions, width].
            cos, sin: As for :func:`rotated`.
        """
        x = x + self.attention(self.before_attention(x), cos, sin)
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder that returns the loss of predicting ``targets`` from ``tokens``; embedding and head share a weight."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        nn.init.normal_(self.embedding.weight, std=sizes.width**-0.5)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.width)
        channels = torch.arange(0, sizes.width // sizes.heads, 2) / (sizes.width // sizes.heads)
        angles = torch.arange(sizes.length)[:, None] * 10000.0**-channels
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())


def build(sizes: Sizes, device: str) -> tuple[Transformer, Batch]:
    """Make a model with its batch: sequences that count up in steps of their own, each token predicting the next."""
    torch.manual_seed(0)
    model = Transformer(sizes).to(device, sizes.dtype)
    start, step = torch.randint(1, 8, (2, sizes.batch, 1))
    sequence = (start + step * torch.arange(sizes.length + 1)).remainder(sizes.vocabulary).to(device)
    return model, (sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous())
