"""What becomes of a planned graph under option ``capture``: whether it is captured, and then its function.

Worked example: ``intent_of(setting, plan)`` is None with ``capture="never"``; else ``intent.apply(call)`` is ``call`` itself
or, where the verdict is to capture, a :class:`Captured` around it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import plan_prediction
from dynafuse.ir import Plan
from dynafuse.passes.given_numbers import is_sent
from dynafuse.runtime.capture.calls import Captured
from dynafuse.runtime.capture.decide import Layout, Verdict, layout_of, obstacle, saving_of, verdict
from dynafuse.runtime.capture.gradients import handed_gradients, writable
from dynafuse.runtime.capture.recorder import Recorder, recorder_for
from dynafuse.runtime.capture.tail import Tail, tail_of
from dynafuse.runtime.capture.traffic import Traffic
from dynafuse.runtime.observers import Replays, plan_only
from dynafuse.runtime.setting import Setting
from dynafuse.runtime.written import Call, Written

NEVER, AUTO, ALWAYS = "never", "auto", "always"


@dataclass(frozen=True)
class Intent:
    """Whether a graph is captured, and what that takes."""

    verdict: Verdict
    layout: Layout | None = field(default=None, compare=False)
    tail: Tail | None = field(default=None, compare=False)
    recorder: Recorder | None = field(default=None, compare=False)
    gradients: frozenset[Node] = field(default_factory=frozenset, compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    replays: Replays = field(default_factory=Replays, compare=False)

    def pays_as(self, recorded: Plan, launched: Plan, device: Device) -> bool:
        """Return whether the graph is to run by another plan, which is meant to be recorded.

        Args:
            recorded: That plan.
            launched: The plan that the verdict is on: it may take the device longer where the host counts as well.
            device: The device that is priced.
        """
        if self.verdict.captured or self.layout is None:
            return self.verdict.captured
        prices = plan_prediction(launched, device), plan_prediction(recorded, device)
        return saving_of(*prices, self.layout, device, self.tail).pays

    @property
    def apart(self) -> int:
        """Return how many of the first steps are to be a function of their own, which is captured; 0 if all are captured."""
        return self.tail.begin if self.tail is not None and self.verdict.may_be_recorded else 0

    @property
    def placed(self) -> frozenset[Node]:
        """Return the results that a recording may be told to make in memory that is no pool's: gradients that are held."""
        return self.gradients if self.verdict.may_be_recorded else frozenset()

    def apply(self, written: Written, kind: str, strict: bool) -> Call:
        """Return the function of a graph, captured if it is to be, or with its first steps captured.

        Args:
            written: The function as it launches kernel by kernel.
            kind: forward, backward or inference.
            strict: Whether what goes wrong with a recording is raised.
        """
        if not self.verdict.may_be_recorded or self.layout is None or self.recorder is None:
            return written.call
        head, layout = written.head, self.layout
        if head is not None and self.tail is not None:
            layout = layout.of_part(head.inputs, head.staying, self.tail, head.bytes)
        captured = Captured(written.call if head is None else head.call, layout, self.recorder, kind, strict,
                            self.verdict.least_host_us, self.replays, written if written.placed else None, self.traffic)
        return captured if head is None else written.with_head(captured)


def intent_of(setting: Setting, plan: Plan) -> Intent | None:
    """Return whether a planned graph is captured; None where that is out of the question, or for a graph inside another."""
    shared, mode, device = setting.shared, setting.config.capture, _device(setting)
    if mode == NEVER or setting.config.cudagraphs or shared is None:
        return None
    recorder = None if device is None else recorder_for(device)
    can_record = recorder is not None or _only_planned_for_another(setting)
    if mode == AUTO and not can_record:
        return None
    gradients = frozenset[Node]()
    if setting.kind == "backward":
        given = handed_gradients(setting.module, plan, shared.described)
        layout = layout_of(setting.module, plan, frozenset(), shared.parameters, shared.produced(setting.module),
                           shared.handed(setting.module), frozenset(given))
        gradients = frozenset(given.values()) & writable(plan)
    else:
        layout = layout_of(setting.module, plan, setting.static_inputs or shared.marked)
    tail = None
    if device is None or not can_record:
        decision = Verdict(False, f"nothing is captured on {device}" if device else "it has no tensors")
    elif (reason := obstacle(setting.module, plan.annotated, device.type)) is not None:
        decision = Verdict(False, reason)
    else:
        price = plan_prediction(plan, setting.device)
        if setting.kind == "inference" and layout.is_static:
            tail = tail_of(plan, price, layout.copies, setting.device)
        decision = verdict(price, layout, setting.device, always=mode == ALWAYS, tail=tail)
    if setting.kind == "forward":
        shared.note_forward(plan.annotated, layout, decision.may_be_recorded)
    return Intent(decision, layout, tail, recorder, gradients, shared.traffic)


def _only_planned_for_another(setting: Setting) -> bool:
    """Return whether a graph is planned as if its tensors were on a device that need not be here."""
    return plan_only() and setting.config.device is not None


def _device(setting: Setting) -> torch.device | None:
    values = (node.meta.get("val") for node in setting.module.graph.nodes if not is_sent(node))
    return next((value.device for value in values if isinstance(value, torch.Tensor)), None)
