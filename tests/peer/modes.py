"""What is run: the classes of tests of a mode, on a device.

A mode is a name of ``MODES``, or any file of PyTorch's tests (``inductor/test_unbacked_symints.py``), which is run as it stands.
Tests are called ``test_name`` in modes, without the suffix of the device, and ``Class.test_name`` in files.
"""

from __future__ import annotations

import importlib
import sys
import unittest
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import aot, checks, internals, shims
from .fetch import FOLDERS

Tests = dict[str, tuple[type[unittest.TestCase], str]]
"""The class and the method of each test, by its name."""

NO_BACKEND = ("test_aoti_",)
"""Tests of AOTInductor, which compiles without a backend of Dynamo's."""

DYNAMIC = {"assume_static_by_default": False}


class Peer:
    """PyTorch's tests from ``folder`` on ``device``, loaded mode by mode; ``replace`` puts dynafuse in the place of torch's backends."""

    def __init__(self, folder: Path, device: str, settings: internals.Settings, replace: bool = True) -> None:
        self.folder, self.device, self.settings = folder, device, settings
        self.replace = replace
        self.compared = checks.Compared()
        self._loaded: dict[str, Tests] = {}
        sys.path[:0] = [str(folder), *(str(folder / name) for name in FOLDERS)]
        shims.install()
        if replace:
            internals.install(settings)
            aot.install(settings)

    def tests(self, mode: str) -> Tests:
        """The tests of a mode by name."""
        if mode not in self._loaded:
            self._loaded[mode] = MODES[mode](self) if mode in MODES else _of_file(self, mode)
        return self._loaded[mode]

    def module(self, name: str) -> ModuleType:
        """A file of the suite, imported."""
        with internals.while_importing(self.settings) if self.replace else nullcontext():
            module = importlib.import_module(name)
        internals.forget_kernels(module)
        shims.adapt(module)
        return module


def _inductor(peer: Peer, check: Callable[..., checks.Check] | None = None, dynamo: Mapping[str, Any] | None = None,
              changed: Mapping[str, Any] | None = None) -> Tests:
    """Inductor's suite: ``check`` makes a mode's own check from the suite's, ``dynamo`` is Dynamo's configuration."""
    suite: Any = peer.module("test_torchinductor")
    suites_own = suite.check_model_gpu if peer.device == "cuda" else suite.check_model

    class Common(suite.TestCase):  # type: ignore[misc,name-defined]
        device = peer.device
        common = check(suites_own, compared=peer.compared) if check else partial_method(suites_own, check_lowp=False)
        compares = check is not None

        def setUp(self) -> None:
            super().setUp()
            peer.settings.changed = dict(changed or {})
            patch: AbstractContextManager[Any] = torch._dynamo.config.patch(dict(dynamo or {}))
            patch.__enter__()
            self.addCleanup(patch.__exit__, None, None, None)

    class Sweep(suite.SweepInputs2, Common):  # type: ignore[misc,name-defined]
        gen = suite.InputGen(10, peer.device)

    suite.copy_tests(suite.CommonTemplate, Common, peer.device)
    tests: Tests = {name.removesuffix(f"_{peer.device}"): (Common, name) for name in _methods(Common)
                    if not name.startswith(NO_BACKEND)}
    if check is None:  # the sweep has nothing but the suite's own check
        Sweep.populate()
        tests |= {name.replace(f"_{peer.device}_", "_sweep_"): (Sweep, name) for name in vars(Sweep) if name.startswith("test_")}
    return tests


def partial_method(function: Callable[..., None], **named: Any) -> Callable[..., None]:
    """A method with some arguments given: a ``partial`` in a class is no method."""
    def method(self: unittest.TestCase, *args: Any, **kwargs: Any) -> None:
        function(self, *args, **{**kwargs, **named})

    return method


def _methods(case: type[unittest.TestCase]) -> list[str]:
    return unittest.TestLoader().getTestCaseNames(case)  # type: ignore[return-value]


def _aot(peer: Peer, classes: Callable[[ModuleType, internals.Settings], list[type[unittest.TestCase]]]) -> Tests:
    """AOTAutograd's suite, with dynafuse's compilers in the place of those that do nothing."""
    peer.settings.changed = {}
    suite = peer.module("test_aotdispatch")
    return {f"{case.__name__}.{name}": (case, name) for case in classes(suite, peer.settings) for name in _methods(case)}


def _of_file(peer: Peer, file: str) -> Tests:
    """All tests of a file, with dynafuse also for Dynamo's backends that run a graph as it is."""
    path = Path(file)
    if not path.is_absolute():
        path = peer.folder / path
    sys.path.insert(0, str(path.parent))
    peer.settings.changed = {}
    if peer.replace:
        internals.install_for_eager(peer.settings)
    _forget_namesake(path)
    module = peer.module(path.stem)
    cases = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    return {f"{case.__name__}.{name}": (case, name) for case in cases for name in _methods(case)}


def _forget_namesake(path: Path) -> None:
    """Have a file imported even where one of another folder is called the same."""
    known = sys.modules.get(path.stem)
    if known is not None and Path(known.__file__ or "") != path:
        del sys.modules[path.stem]


MODES: dict[str, Callable[[Peer], Tests]] = {
    "base": _inductor,
    "deep": partial(_inductor, check=checks.deep, changed={"fallback_random": True}),
    "dynamic": partial(_inductor, dynamo=DYNAMIC),
    "half": partial(_inductor, check=partial(checks.cast, dtype=torch.half)),
    "bf16": partial(_inductor, check=partial(checks.cast, dtype=torch.bfloat16)),
    "aot": partial(_aot, classes=aot.programs),
    "aot-ops": partial(_aot, classes=aot.exhaustive),
}
