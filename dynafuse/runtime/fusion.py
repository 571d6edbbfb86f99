"""An nvFuser fusion as it runs: defined and compiled at the first call, then one call into its executor cache.

Worked example: ``FusionKernel(key, recipe, define).run([x, y], 0)`` returns the stored tensors in the order of the stores;
one that overwrites an input is that input.

nvFuser allocates its outputs. Its executor cache looks at sizes, strides and alignment, not at dtypes: those are fixed by
the key of the spec that the recipe was made from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


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
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False)

    def __post_init__(self) -> None:
        outputs = self.recipe.outputs
        self._plain = all(output.into is None and not output.copies for output in outputs)

    @property
    def source(self) -> str:
        """The recipe as text."""
        return str(self.recipe)

    @property
    def scalars(self) -> tuple[int, ...]:
        """Which of the spec's size symbols follow the tensors as arguments."""
        return tuple(symbol for _, symbol in self.recipe.scalars)

    def prepare(self) -> FusionKernel:
        """Record the definition, so that what nvFuser rejects is known before the first call. Needs no GPU."""
        with self._lock:
            if self._defined is None:
                self._defined = self.define(self.recipe)
        return self

    def run(self, inputs: list[Any], device: int) -> list[torch.Tensor]:
        """The stored tensors. ``inputs`` are the spec's tensors and then the sizes that :attr:`scalars` names."""
        execute = self._execute
        made: list[torch.Tensor] = self._first(inputs, device) if execute is None else execute(inputs, device=device)
        return made if self._plain else self._stored(inputs, made)

    def _first(self, inputs: list[Any], device: int) -> list[torch.Tensor]:
        """Compile and run: once, though several threads may ask."""
        with self._lock:
            if self._execute is None:
                fd = self.prepare()._defined
                made: list[torch.Tensor] = fd.execute(inputs, device=torch.device("cuda", device))
                self._execute = fd.fec.execute
                return made
        return self._execute(inputs, device=device)  # type: ignore[no-any-return]

    def _stored(self, inputs: Sequence[Any], made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """nvFuser's outputs in the order of the stores. An overwritten input is returned itself.

        Whether nvFuser lists what it wrote into inputs among its results is its own business: both are taken.
        """
        outputs = self.recipe.outputs
        if len(made) == len(outputs):
            made = [tensor for tensor, output in zip(made, outputs, strict=True) if output.into is None]
        rest = iter(made)
        stored: list[torch.Tensor] = []
        for output in outputs:
            tensor = next(rest) if output.into is None else inputs[output.into]
            stored.append(_own(tensor, [*inputs, *stored]) if output.copies and output.into is None else tensor)
        return stored


def _own(tensor: torch.Tensor, others: Sequence[Any]) -> torch.Tensor:
    """A tensor in memory of its own: a copy where it shares another's."""
    address = tensor.untyped_storage().data_ptr()
    shared = any(isinstance(other, torch.Tensor) and other.untyped_storage().data_ptr() == address for other in others)
    return tensor.clone() if shared else tensor
