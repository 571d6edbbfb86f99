"""The values of the pipeline as text, one file a stage: ``DYNAFUSE_TRACE=folder`` or ``options={"trace": folder}``.

Each graph has a folder of its own, ``000-forward`` and so on, whose files are numbered as the stages follow each other.
Torch's structured trace (``TORCH_TRACE``, read by tlparse) gets the same texts as artifacts ``dynafuse_<stage>``.

Worked example, of a graph of one region::

    000-inference/0-aten.txt        the ATen graph as AOTAutograd hands it over
    000-inference/1-normalized.txt  after the clean-ups
    000-inference/2-facts.txt       what is known of each node
    000-inference/3-plan.txt        regions, eager steps, views
    000-inference/4-regions.txt     regions in canonical form, with their keys, each on an executor that takes it
    000-inference/5-decided.txt     the same after fold families and measurements
    000-inference/6-kernels.txt     what was generated
    000-inference/7-buffers.txt     which results are written over which operands
    000-inference/8-function.txt    the function of the graph
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch._logging._internal import trace_structured

from dynafuse.fallback import Guard


@dataclass
class Trace:
    """Writes the values of one graph's stages; ``folder`` is None if nobody asked for files."""

    folder: Path | None
    guard: Guard
    _numbers: itertools.count[int] = field(default_factory=itertools.count, repr=False)

    @staticmethod
    def of(folder: Path | None, kind: str, guard: Guard) -> Trace:
        """Return the trace of a graph.

        Args:
            folder: Where it gets a folder of its own; None if nobody asked for files.
            kind: forward, backward or inference, which is in that folder's name.
            guard: How far a failure to write reaches.
        """
        own = None if folder is None else guard.stage("trace", lambda: _new_folder(folder, kind), lambda: None)
        return Trace(own, guard)

    def note(self, stage: str, text: Callable[[], str]) -> None:
        """Write the value of a stage; ``text`` is called only if somebody asked for a trace."""
        trace_structured("artifact", lambda: {"name": f"dynafuse_{stage}", "encoding": "string"}, payload_fn=text)
        if self.folder is not None:
            path = self.folder / f"{next(self._numbers)}-{stage}.txt"
            self.guard.stage("trace", lambda: path.write_text(text() + "\n", encoding="utf-8"), lambda: 0)


def _new_folder(folder: Path, kind: str) -> Path:
    """Return a folder that no other graph has, of this process or another."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(len(list(folder.iterdir()))):
        new = folder / f"{number:03d}-{kind}"
        if not any(folder.glob(f"{number:03d}-*")):
            new.mkdir(exist_ok=True)
            return new
    raise AssertionError
