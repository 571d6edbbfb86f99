"""Demotion of a region that fails to lower or compile: to another executor, else to eager; a warning names a repro script.

Triton takes a region that fails elsewhere, eager one that fails on Triton. Where loop nests share a launch that fails, each
gets one of its own first. A region that a library rejects has not failed if another executor can take it: see
``select.place.reject``.

Worked example: with ``DYNAFUSE_STRICT=1`` the same failure raises ``CompileError`` naming the ops and that file.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.fx import Node

from dynafuse.cache.canonical import CanonicalPlan
from dynafuse.config import Config
from dynafuse.errors import CompileError, DynafuseWarning, told
from dynafuse.fallback import answered
from dynafuse.fx import user_line
from dynafuse.ir import Region, Role
from dynafuse.runtime.repro import save, script

MOST_LINES = 4  # of the user's code that an error names


@dataclass(frozen=True)
class Demoted:
    """What a graph's next plan does without: executors for some nodes, or launches that regions share."""

    to_eager: Mapping[Node, str] = field(default_factory=dict)  # nodes that run eager, with the reason
    denied: frozenset[tuple[str, Node]] = frozenset()  # executors with the nodes that they have failed on
    apart: bool = False  # whether each region has a launch of its own: one that several shared has failed

    def without_executor(self, nodes: Mapping[Node, str]) -> Demoted:
        """Return the same, with ``nodes`` run eager because no executor takes them, each with the reason."""
        return replace(self, to_eager={**self.to_eager, **nodes})


def demote(plan: CanonicalPlan, errors: Mapping[str, BaseException], config: Config, before: Demoted) -> Demoted:
    """Demote the regions of a plan whose kernels failed, with a warning each.

    Args:
        plan: The plan that they belong to.
        errors: What went wrong, by the names of regions.
        config: Where the repro scripts go, and whether it is ``strict``.
        before: What was demoted before.

    Returns:
        What is demoted now, ``before`` included.

    Raises:
        CompileError: For the first region that failed, if ``strict``.
    """
    to_eager, denied, apart = dict(before.to_eager), set(before.denied), before.apart
    for region in (whole.region for whole in plan.regions):
        error = errors.get(region.name)
        if error is None:
            continue
        others = {option.executor for option in region.decision.options} - {region.executor}
        repro = answered(lambda: _repro(region, error, config))  # noqa: B023
        failure = CompileError([str(n.target) for n in region.nodes], told(error), repro, _lines(region))
        if config.strict:
            raise failure from error
        warnings.warn(str(failure), DynafuseWarning, stacklevel=2)
        if region.nests:
            apart = True
        elif others:
            denied.update((region.executor, n) for n in region.nodes)
        else:
            to_eager.update((n, "demoted") for n in region.nodes if plan.annotated.facts[n].role is Role.FUSED)
    return Demoted(to_eager, frozenset(denied), apart)


def _lines(region: Region) -> list[str]:
    """Return the user's lines that a region computes."""
    return list(dict.fromkeys(filter(None, map(user_line, region.nodes))))[:MOST_LINES]


def _repro(region: Region, error: BaseException, config: Config) -> Path:
    """Write a script that compiles the region again, with the error's traceback, and return its path."""
    options = dict(config.key()) | ({"executors": config.executors} if config.executors else {})
    return save(script(region, error, options), config.repro_dir)
