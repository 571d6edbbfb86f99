"""AOTAutograd's suite with dynafuse's decompositions, partitioner and compilers in the place of those that do nothing.

What tests look at graphs with is called as before, on a copy of the graph; what is then run is dynafuse's.
"""

from __future__ import annotations

import copy
import inspect
import unittest
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import functorch.compile
import torch
import torch.testing._internal.optests.aot_autograd as op_check
from torch.fx import GraphModule

from dynafuse import pipeline
from dynafuse.config import resolve
from dynafuse.passes.decompositions import decompositions
from dynafuse.passes.joint import split_joint
from dynafuse.runtime.capture.decide import Shared

from .internals import Settings

Compiler = Callable[[GraphModule, Sequence[Any]], Any]


def install(settings: Settings) -> None:
    """Have the entry points of ``functorch.compile`` use dynafuse, for files of tests imported afterwards."""
    entry: Any = functorch.compile
    op_check.compiled_function = _entry_point(op_check.compiled_function, settings)
    entry.aot_module_simplified = _entry_point(entry.aot_module_simplified, settings)
    entry.aot_module = partial(_module, entry.aot_module, inspect.signature(entry.aot_function), settings)
    entry.aot_function = entry.compiled_function = _entry_point(entry.aot_function, settings)
    entry.compiled_module = entry.aot_module


def _entry_point(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        _put_dynafuse(given.arguments, settings)
        return function(*given.args, **given.kwargs)

    return call


def _module(function: Callable[..., Any], signature: inspect.Signature, settings: Settings, module: Any, *args: Any,
            **kwargs: Any) -> Any:
    """``aot_module`` passes on what ``aot_function`` takes."""
    given = signature.bind(module, *args, **kwargs)
    _put_dynafuse(given.arguments, settings)
    return function(module, *given.args[1:], **given.kwargs)


def _put_dynafuse(arguments: dict[str, Any], settings: Settings) -> None:
    """Replace compilers, partitioner and decompositions among the arguments of an entry point."""
    config = resolve(None, settings.now())
    forward = arguments["fw_compiler"]
    for argument, kind in (("fw_compiler", "forward"), ("bw_compiler", "backward"), ("inference_compiler", "inference")):
        looked_at = arguments.get(argument) or forward
        arguments[argument] = partial(_compile, kind, config, looked_at)
    if arguments.get("disable_functionalization"):
        return
    arguments["partition_fn"] = partial(split_joint, fallback_random=config.fallback_random)
    if arguments.get("decompositions") is None:
        arguments["decompositions"] = decompositions(config.fallback_random)


def _copied(module: GraphModule) -> GraphModule:
    """The graph with its attributes themselves, which may be fake tensors that cannot be copied."""
    return GraphModule(module, copy.deepcopy(module.graph))


def _compile(kind: str, config: Any, look: Compiler, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    look(_copied(graph), inputs)
    return pipeline.compile_graph(kind, config, graph, inputs, shared=Shared())


def programs(suite: ModuleType, settings: Settings) -> list[type[unittest.TestCase]]:
    """The tests of small programs: AOTAutograd alone, behind Dynamo, and as backends call it."""
    suite_: Any = suite
    suite_.AOTTestCase.assertExpectedInline = lambda *_, **__: None

    class TestAOTAutogradWithDynamo(suite_.TestAOTAutogradWithDynamo):  # type: ignore[misc,name-defined]
        def run_autograd(self, f: Callable[..., Any], fw_graph_cell: list[Any], *_: Any) -> Callable[..., Any]:
            """``f`` as ``torch.compile`` has it compiled, by the backend as it is."""
            compile_graph = pipeline.compile_graph

            def seen(kind: str, config: Any, graph: GraphModule, *args: Any, **kwargs: Any) -> Callable[..., Any]:
                if kind != "backward":
                    fw_graph_cell[0] = _copied(graph)
                return compile_graph(kind, config, graph, *args, **kwargs)

            def call(*args: Any) -> Any:
                torch._dynamo.reset()
                try:
                    with patch.object(pipeline, "compile_graph", seen):
                        return torch.compile(f, backend=settings.compile)(*args)
                except torch._dynamo.exc.BackendCompilerFailed as error:
                    raise error.inner_exception from error

            return call

    return [suite_.TestAOTAutograd, TestAOTAutogradWithDynamo, suite_.TestAOTModuleSimplified, suite_.TestPythonKeyCPU]


def exhaustive(suite: ModuleType, _: Settings) -> list[type[unittest.TestCase]]:
    """A test for every op and every module that torch has samples of, with static and symbolic sizes."""
    suite_: Any = suite
    return [suite_.TestEagerFusionOpInfoCPU, suite_.TestEagerFusionModuleInfoCPU]
