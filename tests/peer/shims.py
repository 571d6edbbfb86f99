"""Gives torch back the names that PyTorch 2.6's tests import and newer versions have renamed or lost.

Without them a file of tests fails where it is imported. A name that torch has is left as it is, but for ``skipOps``.
"""

from __future__ import annotations

import importlib
import unittest
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.testing._internal import common_device_type, common_methods_invocations, inductor_utils
from torch.utils._dtype_abbrs import dtype_abbrs

Decorator = Callable[[Any], Any]


class IncorrectUsage(Exception):
    """What Dynamo raised for a decorator in the wrong place."""


def _unchanged(function: Any) -> Any:
    return function


def _skip_ops(_: str, __: str, skipped: Any) -> Decorator:
    """The decorator as it was, when it was told the names of the class and of the test."""
    decorator: Decorator = common_device_type.skipOps(skipped)
    return decorator


def _told_of_known_ops(skip_ops: Callable[[str, str, Any], Decorator]) -> Callable[[str, str, Any], Decorator]:
    """``skipOps`` of versions that fail for an op they lack, told only of ops they have."""
    known = {(op.name, op.variant_test_name) for op in common_methods_invocations.op_db}

    def skip(case: str, test: str, skipped: Any) -> Decorator:
        return skip_ops(case, test, [entry for entry in skipped if entry[:2] in known])

    return skip


def _names() -> dict[str, dict[str, Any]]:
    cuda = inductor_utils.HAS_CUDA_AND_TRITON
    needs_cuda = unittest.skipUnless(cuda, "requires cuda")
    return {
        "torch.testing._internal.inductor_utils": {"HAS_CUDA": cuda, "HAS_XPU": False},
        "torch.testing._internal.triton_utils": {"HAS_CUDA": cuda, "requires_cuda": needs_cuda},
        "torch.testing._internal.common_methods_invocations": {"skipOps": _skip_ops},
        "torch.testing._internal.common_utils": {"dtype_abbrs": dtype_abbrs, "disable_translation_validation_if_dynamic_shapes": _unchanged},
        "torch.testing._internal.common_cuda": {"tf32_is_not_fp32": lambda: False},
        "torch._inductor.compile_fx": {"complex_memory_overlap": lambda _: False},
        "torch._dynamo.testing": {"requiresPy310": _unchanged},
        "torch._dynamo.exc": {"IncorrectUsage": IncorrectUsage},
    }


def install() -> None:
    """Add what this version of torch lacks, for the rest of this process."""
    methods: Any = common_methods_invocations
    if hasattr(methods, "skipOps"):
        methods.skipOps = _told_of_known_ops(methods.skipOps)
    for module_name, names in _names().items():
        module = importlib.import_module(module_name)
        for name, value in names.items():
            if not hasattr(module, name):
                setattr(module, name, value)


def adapt(module: ModuleType) -> None:
    """Have a file's own hook take what newer versions call it with."""
    for case in vars(module).values():
        if hasattr(case, "guard_manager_clone_hook_fn"):
            case.guard_manager_clone_hook_fn = lambda *_: None
