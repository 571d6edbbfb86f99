"""A region that Inductor runs: compiled ahead where its sizes are known, else at the first call, then one call.

Worked example: ``DelegateKernel(key, program, build).prepare().run([x, y], None)`` returns the stored tensors in the order
of the stores; one that overwrites an input is that input.

Inductor allocates its outputs. A function that it made for dynamic sizes comes with guards: sizes that they do not hold
for get another function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dynafuse.fallback import STRICT, Guard
from dynafuse.forks import Lock


@dataclass
class _Variant:
    """A compiled function; ``plain`` once a call has shown that its outputs are what the stores promise."""

    compiled: Any  # a lowering.inductor.compiler.Compiled
    plain: bool = False


@dataclass(frozen=True)
class _Eager:
    """A program as torch runs it, for sizes that it could not be compiled for."""

    program: Any
    device: torch.device
    sizes: int

    def call(self, given: list[Any]) -> Sequence[torch.Tensor]:
        """Return the tensors of the stores that overwrite nothing. ``given`` are sizes, then tensors."""
        outputs: Sequence[torch.Tensor] = self.program.run(given[self.sizes:], given[:self.sizes], self.device)
        return outputs


def _device(index: int | None) -> torch.device:
    return torch.device("cpu") if index is None else torch.device("cuda", index)


@dataclass
class DelegateKernel:
    """What a spec became. ``program`` is a ``lowering.inductor.lower.Program``; ``build`` compiles it.

    ``build(program, device, sizes)`` is called once per device and kind of sizes.
    """

    key: str
    program: Any
    build: Callable[[Any, torch.device, Sequence[int]], Any]
    guard: Guard = STRICT
    _variants: dict[int | None, list[_Variant]] = field(default_factory=dict, init=False, repr=False)
    _direct: dict[int | None, Callable[[list[Any]], Sequence[torch.Tensor]]] = field(
        default_factory=dict, init=False, repr=False)  # by device: what needs no look at sizes or at outputs
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._into: tuple[int | None, ...] = self.program.into
        self._tensors = len(self.program.spec.inputs)
        self._static = not self.program.symbols

    @property
    def source(self) -> str:
        """Return the generated code of what has been compiled; before that, the program."""
        sources = [variant.compiled.source for variants in self._variants.values() for variant in variants]
        return "\n\n".join(sources) or str(self.program)

    @property
    def scalars(self) -> tuple[int, ...]:
        """Return which of the spec's size symbols follow the tensors as arguments: all."""
        return tuple(range(len(self.program.symbols)))

    def prepare(self, sizes: Sequence[int] = (), device: int | None = None, made_up: bool = False) -> DelegateKernel:
        """Compile, so that what Inductor rejects is known before the first call. Needs no tensors.

        Args:
            sizes: Examples of the spec's size symbols, in order; without them a spec that has any waits for its first call.
            device: A CUDA device's index; None for the CPU.
            made_up: Whether the sizes need not fit one another: what cannot be compiled for them waits for its first call as
                well.

        Returns:
            The kernel itself.
        """
        if len(sizes) != len(self.program.symbols):
            return self
        try:
            self._variant(sizes, device)
        except RuntimeError:
            if not made_up:
                raise
        return self

    def run(self, inputs: list[Any], device: int | None) -> Sequence[torch.Tensor]:
        """Return the stored tensors. ``inputs`` are the spec's tensors and then the sizes that :attr:`scalars` names."""
        direct = self._direct.get(device)
        return self._run(inputs, device) if direct is None else direct([*inputs])

    def _run(self, inputs: list[Any], device: int | None) -> list[torch.Tensor]:
        tensors, sizes = inputs[: self._tensors], inputs[self._tensors :]
        variant = self.guard.stage("kernel for new sizes", lambda: self._variant(sizes, device),
                                   lambda: _Variant(_Eager(self.program, _device(device), len(sizes))))
        outputs = variant.compiled.call([*sizes, *tensors])
        if not variant.plain:
            outputs = self._settled(variant, outputs, tensors, sizes)
            if variant.plain and self._static and self._into.count(None) == len(self._into):
                self._direct[device] = variant.compiled.call
        rest = iter(outputs)
        return [next(rest) if into is None else tensors[into] for into in self._into]

    def _variant(self, sizes: Sequence[int], device: int | None) -> _Variant:
        """Return the function for these sizes, compiled if there is none: once, though several threads may ask."""
        variant = self._found(sizes, device)
        if variant is not None:
            return variant
        with self._lock:
            variant = self._found(sizes, device)
            if variant is None:
                variant = _Variant(self.build(self.program, _device(device), tuple(sizes)))
                self._variants[device] = [*self._variants.get(device, ()), variant]
        return variant

    def _found(self, sizes: Sequence[int], device: int | None) -> _Variant | None:
        variants = self._variants.get(device, ())
        return next((variant for variant in variants if self._static or variant.compiled.holds(sizes)), None)

    def _settled(self, variant: _Variant, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor],
                 sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return outputs in memory of their own and in the strides of the stores, as the function may not make them."""
        settled: list[torch.Tensor] = []
        for tensor, strides in zip(outputs, self.program.strides(sizes), strict=True):
            settled.append(_promised(tensor, strides, [*tensors, *settled]))
        variant.plain = all(a is b for a, b in zip(outputs, settled, strict=True))
        return settled


def _promised(tensor: torch.Tensor, strides: Sequence[int], others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor as promised: a copy where it shares another's memory or has other strides."""
    address = tensor.untyped_storage().data_ptr()
    shared = any(other.untyped_storage().data_ptr() == address for other in others)
    same = all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))
    if same and not shared:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
