"""An nvFuser fusion as it runs: defined when it is made, compiled when it first runs, then one call into its executor cache.

Worked example: ``FusionKernel(key, recipe, define).run([x, y], 0)`` returns the stored tensors in the order of the stores;
one that overwrites an input is that input.

nvFuser allocates its outputs. Two that compute the same may be one tensor, and one that only moves an input's elements may
be the input: the first call shows which, and those are copied from then on. Its executor cache looks at sizes, strides and
alignment, not at dtypes: those are fixed by the key of the spec that the recipe was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dynafuse.forks import Lock


@dataclass
class FusionKernel:
    """What a spec became. ``recipe`` is a ``lowering.nvfuser.recipe.Recipe``; ``define`` makes a FusionDefinition of it.

    One definition serves all devices: the executor cache compiles for each.
    """

    key: str
    recipe: Any
    define: Callable[[Any], Any]
    _defined: Any = field(default=None, init=False, repr=False)
    _execute: Callable[..., Any] | None = field(default=None, init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        outputs = self.recipe.outputs
        self._doubtful = {i for i, output in enumerate(outputs) if output.copies and output.into is None}
        self._plain = not self._doubtful and all(output.into is None for output in outputs)

    @property
    def source(self) -> str:
        """Return the recipe as text."""
        return str(self.recipe)

    @property
    def scalars(self) -> tuple[int, ...]:
        """Return which of the spec's size symbols follow the tensors as arguments."""
        return tuple(symbol for _, symbol in self.recipe.scalars)

    def prepare(self) -> FusionKernel:
        """Record the definition, so that what nvFuser rejects is known before the first call. Needs no GPU."""
        with self._lock:
            if self._defined is None:
                self._defined = self.define(self.recipe)
        return self

    def run(self, inputs: list[Any], device: int) -> list[torch.Tensor]:
        """Return the stored tensors. ``inputs`` are the spec's tensors and then the sizes that :attr:`scalars` names."""
        execute = self._execute
        outputs: list[torch.Tensor] = self._first(inputs, device) if execute is None else execute(inputs, device=device)
        return outputs if self._plain else self._stored(inputs, outputs)

    def _first(self, inputs: list[Any], device: int) -> list[torch.Tensor]:
        """Compile and run: once, though several threads may ask."""
        with self._lock:
            if self._execute is None:
                fd = self.prepare()._defined
                outputs: list[torch.Tensor] = fd.execute(inputs, device=torch.device("cuda", device))
                self._look(inputs, outputs)
                self._execute = fd.fec.execute
                return outputs
        return self._execute(inputs, device=device)  # type: ignore[no-any-return]

    def _look(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Note which outputs share memory with an input, or with an output before them."""
        ordered = self._ordered(inputs, outputs)
        self._doubtful |= {i for i, output in enumerate(self.recipe.outputs)
                           if output.into is None and _shares(ordered[i], [*inputs, *ordered[:i]])}
        self._plain = self._plain and not self._doubtful

    def _stored(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return nvFuser's outputs in the order of the stores, in memory of their own; an overwritten input as itself."""
        stored = self._ordered(inputs, outputs)
        for i in sorted(self._doubtful):
            if _shares(stored[i], [*inputs, *stored[:i]]):
                stored[i] = stored[i].clone()
        return stored

    def _ordered(self, inputs: Sequence[Any], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what was stored in the order of the stores.

        Whether nvFuser lists what it wrote into inputs among its results is its own business: both are taken.
        """
        outputs = self.recipe.outputs
        if len(results) == len(outputs):
            results = [tensor for tensor, output in zip(results, outputs, strict=True) if output.into is None]
        rest = iter(results)
        return [next(rest) if output.into is None else inputs[output.into] for output in outputs]


def _shares(tensor: torch.Tensor, others: Sequence[Any]) -> bool:
    """Return whether a tensor lies in memory of another; one without elements lies in none."""
    address = tensor.untyped_storage().data_ptr()
    return address != 0 and any(
        isinstance(other, torch.Tensor) and other.untyped_storage().data_ptr() == address for other in others)
