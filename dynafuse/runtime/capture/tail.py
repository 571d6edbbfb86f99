"""Which last steps of a captured graph are launched behind its replay: those that make large results.

A replay writes where it has written before, so that what leaves is copied out, and is in memory twice. What a launched step
makes is in new memory of its own. The host launches such a step while the device replays those before it.

Worked example: of a language model of 2 × 512 tokens the last step is the product that makes 134 MB of logits. Replayed and
copied out they take 80 microseconds more on an H100, of 400, and a third more memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import is_call, step_prediction
from dynafuse.cost.model import NOTHING, Prediction
from dynafuse.cost.replay import Copies, replay_of
from dynafuse.ir import Plan, Region

LARGE = 8 << 20
"""Bytes of results from which on it is worth launching the steps that make them."""

MOST_LAUNCHED = 8
"""Steps behind a replay: the host has to launch them before the device is done with it."""

AS_LARGE = 0.5
"""Of what the steps behind it make, from which on something that only these read is not kept for replays either."""

AS_FAST = 1.02
"""How many times as long as by other last steps a call may take if that spares memory: launches leave small gaps."""


@dataclass(frozen=True)
class Tail:
    """The steps of a plan from ``begin`` on, ``count`` of which launch something."""

    begin: int
    count: int
    launched: Prediction
    copies: Copies  # that are left, in and out
    bytes: int  # of the results that need no copies

    def __str__(self) -> str:
        steps = "step" if self.count == 1 else f"{self.count} steps"
        return f"its last {steps} launched behind it ({self.bytes / 1e6:.0f} MB of results)"


def tail_of(plan: Plan, price: Prediction, copies: Copies, device: Device) -> Tail | None:
    """Return the last steps that are launched behind a replay of the others; None if that is slower, or there are none.

    Args:
        plan: The plan of a graph whose results all leave.
        price: What it costs.
        copies: What a replay of the whole graph copies.
        device: The device that is priced.
    """
    results = {*map(plan.annotated.memory, plan.annotated.graph.output_node().all_input_nodes)}
    best, least_us = None, replay_of(price, copies, device).us
    launched, left, count = NOTHING, copies, 0
    for begin in range(len(plan.steps) - 1, 0, -1):
        step = plan.steps[begin]
        count += isinstance(step, Region) or is_call(step, plan.annotated.facts)
        if count > MOST_LAUNCHED:
            break
        launched += step_prediction(step, plan.annotated.facts, device)
        sizes = {node: tensor.bytes for node, tensor in plan.made_by(step).items()}
        leaving = [size for node, size in sizes.items() if node in results]
        left = left.less(Copies(len(leaving), sum(leaving)))
        spared = copies.bytes - left.bytes
        us = replay_of(price, left, device, launched).us
        if spared >= LARGE and sum(sizes.values()) >= AS_LARGE * spared and us <= AS_FAST * least_us:
            best, least_us = Tail(begin, count, launched, left, spared), min(us, least_us)
    return best
