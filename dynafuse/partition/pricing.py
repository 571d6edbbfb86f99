"""Prices of regions while they grow: of the executors that can take a region the cheapest, beside all that there is.

What counts is what a region adds to the time that the user waits for (``cost.objective``): beside work that keeps the
device busy that is its device time, in a graph that the host bounds its host time.

Worked example: a softmax over ``bfloat16[8192, 4096]`` among matrix products costs 40 µs on Triton and 38 µs on nvFuser;
over ``[8, 64]``, with nothing beside it, 6 µs and 11 µs.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynafuse.cost.device import Device
from dynafuse.cost.model import NOTHING, Choice, Prediction, Work, choose, objective
from dynafuse.partition.kernels import Kernel

OFF_US = 1.0  # by which predictions may be off however small they are: about what a kernel takes besides its work


@dataclass(frozen=True)
class Priced:
    """A region's kernel, the cheapest executor that can take it, and whether its ops run eager.

    They do where they cost less one by one even if both predictions are off.
    """

    kernel: Kernel
    choice: Choice
    is_eager: bool = False

    @property
    def us(self) -> float:
        """Return the microseconds that the user waits longer for the kernel."""
        return self.choice.us

    @property
    def work(self) -> Work:
        """Return what the kernel does."""
        return self.kernel.work

    @property
    def fused(self) -> Prediction:
        """Return what the region costs on the executor that fuses it."""
        return self.kernel.predictions[self.choice.executor]

    @property
    def prediction(self) -> Prediction:
        """Return what the region costs."""
        return self.kernel.eager if self.is_eager else self.fused


class Pricing:
    """The prices of a graph's regions on a device.

    ``total`` is what the graph's calls and the regions of the moment cost together, and what is assumed to run beside them.
    Prices are what a region adds to it, so whoever adds or replaces a region says so.
    """

    def __init__(self, device: Device, captured: bool, calls: Prediction, beside: Prediction = NOTHING) -> None:
        self.device = device
        self.captured = captured
        self.beside = beside
        self.total = calls + beside

    def replace(self, before: Prediction, after: Prediction) -> None:
        """Price from now on beside ``after`` instead of ``before``.

        Args:
            before: What has counted so far.
            after: What counts from now on.
        """
        self.total = self.total.less(before) + after

    @property
    def now(self) -> Prediction:
        """Return what the graph's calls and the regions of the moment cost together."""
        return self.total.less(self.beside)

    @property
    def us(self) -> float:
        """Return the microseconds that the user waits for that."""
        return objective(self.now, self.device, self.captured)

    def adds(self, prediction: Prediction, rest: Prediction) -> float:
        """Return the microseconds that the user waits longer if ``prediction`` comes to ``rest``."""
        return objective(rest + prediction, self.device, self.captured) - objective(rest, self.device, self.captured)

    def price(self, kernel: Kernel, instead_of: Prediction = NOTHING) -> Priced:
        """Price a kernel in place of a part of ``total``.

        Args:
            kernel: The kernel.
            instead_of: The part of ``total`` that it replaces.
        """
        rest = self.total.less(instead_of)
        choice = choose(kernel.predictions, self.device, self.captured, rest)
        fused = kernel.predictions[choice.executor]
        is_eager = (kernel.may_be_eager and self._is_less(kernel.eager, fused, choice.error)
                    and self.adds(kernel.eager, rest) < choice.us)
        return Priced(kernel, choice, is_eager)

    def _is_less(self, eager: Prediction, fused: Prediction, error: float) -> bool:
        """Return whether the device takes less time, even if both predictions are off. Host times are too close for that."""
        return eager.device_us * (1 + error) + OFF_US < fused.device_us * (1 - error)
