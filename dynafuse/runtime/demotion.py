"""What happens to a region that fails to lower or compile: Triton takes it from another executor, eager takes it from
Triton, with one warning and a file that shows why.

That a library rejects a region is no failure where another executor can take it: see ``select.place.reject``.

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
    """What runs eager from now on, with the reason, and pairs of another executor and a node that it has failed on."""

    to_eager: Mapping[Node, str] = field(default_factory=dict)
    denied: frozenset[tuple[str, Node]] = frozenset()

    def without_executor(self, nodes: Mapping[Node, str]) -> Demoted:
        """This, and nodes that no executor takes: nothing has failed."""
        return replace(self, to_eager={**self.to_eager, **nodes})


def demote(plan: CanonicalPlan, errors: Mapping[str, BaseException], config: Config, before: Demoted) -> Demoted:
    """``before`` with the regions that failed. Raises CompileError instead when strict."""
    to_eager, denied = dict(before.to_eager), set(before.denied)
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
        if others:
            denied.update((region.executor, n) for n in region.nodes)
        else:
            to_eager.update((n, "demoted") for n in region.nodes if plan.annotated.facts[n].role is Role.FUSED)
    return Demoted(to_eager, frozenset(denied))


def _lines(region: Region) -> list[str]:
    """The user's lines that a region computes."""
    return list(dict.fromkeys(filter(None, map(user_line, region.nodes))))[:MOST_LINES]


def _repro(region: Region, error: BaseException, config: Config) -> Path:
    """A script that compiles the region again, with the error's traceback."""
    options = dict(config.key()) | ({"executors": config.executors} if config.executors else {})
    return save(script(region, error, options), config.repro_dir)
