"""A subject: one (case, system) in one process, driven by requests (plain dicts) so that rounds of systems interleave.

Example:
    >>> subject = ModelSubject({"case": "llama", "system": "eager", "device": "cpu", "scale": "tiny"})
    >>> sorted(subject.prepare())[:2], len(subject.round(steps=3, warmup=1)["step_ms"])
    (['cold_s', 'eager_loss'], 3)

`prepare` runs eager once first: it loads the math libraries' kernels, which is nobody's compile time, and gives the
outcome that the system is checked against. The same module is compiled afterwards, so the weights agree.
"""
from __future__ import annotations

import copy
import gc
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from bench import measure, systems
from bench.draws import Draw, compare_draws, draws
from bench.host import HostSubject
from bench.measure import Metrics, Outcome
from bench.models import CASES, Build, Workload

PROFILES = 3
"""Profiles of a step, of which the one with the least device time counts: other processes may use the device meanwhile."""


class Buildable(Protocol):
    """A row of a table of models."""

    def build(self, how: Build) -> Workload:
        """Return the model and its inputs; raises Skip when something is not installed."""


class ModelSubject:
    """A whole model under one system; inference with `train: False`, values dropped at random with `dropout: True`."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.device = request["device"]
        self.train = request.get("train", True)
        self.drops = request.get("dropout", False)
        self.with_reference = request.get("reference", True)
        self.system = systems.find(request["system"])
        dtype: torch.dtype = getattr(torch, request.get("dtype", "bfloat16"))
        # TensorFloat-32 would make float32 runs, which exist to check results, as coarse as float16.
        # torch's test utilities forbid setting the flag once they are imported.
        if self.device == "cuda":
            torch.backends.cudnn.allow_tf32 = False
        how = Build(self.device, request["scale"], request.get("layers"), self.train, dtype, dropout=self.drops)
        self.work: Workload = catalog(request)[request["case"]].build(how)
        self.runner: Callable[..., Tensor] = self.work.module
        self.expected: tuple[Outcome, Outcome | None, Metrics] | None = None
        self.drawn: list[Draw] = []

    def expect(self) -> Metrics:
        """Run what the system will be compared with, apart from `prepare`: several processes may do that at once."""
        if self.drops:
            self.drawn = self._draws()
        else:
            self.expected = (self._eager_outcome(), *self._reference_outcome())
        return {}

    def prepare(self) -> Metrics:
        """Cold compile seconds (`torch.compile` and a step), the first three steps, and the numerics of a warm step."""
        if self.expected is None and not self.drawn:
            self.expect()
        importlib.import_module("torch._dynamo")  # which all backends share
        start = time.perf_counter()
        self.runner = self.system.compile(self.work.module)
        loading = time.perf_counter() - start  # of the backend
        first = [self._first_step() for _ in range(3)]
        phases = measure.compile_phases()
        found = {} if self.drops else self._compared()  # draws are compared while nothing else is timed
        self._release()
        cold = {"cold_s": loading + first[0], "first_steps_s": first, "phases_s": phases, "parameters": self._parameters()}
        return {**cold, **found, **measure.compile_stats()}

    def round(self, steps: int, warmup: int) -> Metrics:
        """Samples of one round, after warm-up steps that refill the allocator's pools."""
        for _ in range(warmup):
            self._before()
            self._step()
        samples = measure.step_samples(self._step, self._before, self.device, steps)
        pipelined = measure.pipelined_ms(self._step, self._before, self.device, steps)
        self._release()
        return {**samples, "pipelined_ms": [pipelined]}

    def profile(self, steps: int) -> Metrics:
        """Peak memory and device time by kernel, warm; the numerics of steps that drop values at random."""
        self._before()
        self._step()
        peak = measure.peak_gb(self._step, self._before, self.device)
        reserved = measure.reserved_gb(self._step, self._before, self.device)
        profiles = [measure.device_profile(self._step, self._before, self.device, steps) for _ in range(PROFILES)]
        found = min(profiles, key=lambda profile: profile.get("device_ms", 0.0))
        found |= compare_draws(self._draws(), self.drawn) if self.drops else {}
        self._release()
        return {"peak_gb": peak, "reserved_gb": reserved, **found, **measure.compile_stats()}

    def _compared(self) -> Metrics:
        """Differences of a warm step from what is expected, which is kept no longer."""
        assert self.expected is not None
        (eager, reference, note), self.expected = self.expected, None
        self._before()
        return {**note, **measure.compare(Outcome(self._step(), self.work.module, keep=False), eager, reference)}

    def _draws(self) -> list[Draw]:
        return draws(self._step, self._before, self.work.module)

    def _first_step(self) -> float:
        self._before()
        return measure.timed_once(self._step, self.device)

    def _before(self) -> None:
        measure.clear_gradients(self.work.module)

    def _step(self) -> Tensor:
        if self.train:
            loss = self.runner(*self.work.inputs)
            loss.backward()
            return loss
        with torch.no_grad():
            return self.runner(*self.work.inputs)

    def _eager_outcome(self) -> Outcome:
        measure.clear_gradients(self.work.module)
        outcome = Outcome(self._step(), self.work.module)
        measure.synchronize(self.device)
        return outcome

    def _reference_outcome(self) -> tuple[Outcome | None, Metrics]:
        """The outcome in the next wider type by eager, where it fits in memory."""
        if not self.with_reference:
            return None, {}
        try:
            return wider_outcome(self.work, self.train), {}
        except torch.OutOfMemoryError:
            return None, {"reference": "the wider copy ran out of memory"}
        finally:
            self._release()

    def _release(self) -> None:
        """Give memory back between rounds, so that other systems' processes fit beside this one."""
        measure.clear_gradients(self.work.module)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.work.module.parameters())


def wider_outcome(work: Workload, train: bool) -> Outcome:
    """One eager step of a copy in float32, or in float64 when the model is float32."""
    is_single = next(work.module.parameters()).dtype == torch.float32
    wide = torch.float64 if is_single else torch.float32
    module = copy.deepcopy(work.module).to(wide)
    measure.clear_gradients(module)
    inputs = [x.to(wide) if x.is_floating_point() else x for x in work.inputs]
    with torch.set_grad_enabled(train):
        output = module(*inputs)
        if train:
            output.backward()
    return Outcome(output, module, keep=False)


def catalog(request: Mapping[str, Any]) -> Mapping[str, Buildable]:
    """Return the table of cases that a request is about."""
    if request.get("catalog") != "zoo":
        return CASES
    from bench import zoo_models

    return zoo_models.CASES


def hello(request: dict[str, Any]) -> Metrics:
    """Import whatever a model imports, by building its tiny version, so that no measurement waits for imports."""
    if case := catalog(request).get(request.get("case") or ""):
        case.build(Build(device="cpu", scale="tiny"))
    return {}


def reset() -> None:
    """Forget compiled code and its count, so that the next case neither meets a warm graph nor a recompile limit."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    if inductor := sys.modules.get("torch._inductor.metrics"):
        inductor.reset()


class Dispatch:
    """Answers requests `{"do": ..., ...}`; the same whether they come through a pipe or from this process."""

    def __init__(self) -> None:
        self.subject: ModelSubject | HostSubject | None = None

    def answer(self, request: dict[str, Any]) -> Metrics:
        """The reply to one request; raises what the measured code raises."""
        do = request["do"]
        if do == "hello":
            return hello(request)
        if do == "micro":
            from bench import micro

            return micro.measure_case(request)
        if do == "region":
            from bench import region_subject

            reset()
            return region_subject.measure_region(request)
        if do == "build":
            self.subject = None
            reset()
            self.subject = ModelSubject(request)
            return self.subject.expect()
        if do == "prepare":
            self.subject = None
            reset()
            self.subject = HostSubject(request) if "suite" in request else ModelSubject(request)
            return self.subject.prepare()
        assert self.subject is not None, "prepare comes first"
        if do == "compile":
            return self.subject.prepare()
        if do == "round":
            return self.subject.round(request["steps"], request["warmup"])
        assert do == "profile", do
        return self.subject.profile(request["steps"])
