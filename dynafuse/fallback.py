"""Where failures end that are not the user's: what the failed stage would have added is left out, and the step goes on.

A stage of the pipeline runs under a :class:`Guard`, together with what is done in its place. Its failure is told by one
warning; in strict mode, and where an error tells users of a mistake of theirs, it is raised as it is. :func:`answered` is
for questions that only inform a decision, :func:`attempted` for what may fail, strict or not. Nothing else in this package
catches whatever is raised, but for what hands an error on to whoever waits for a result (``Future.set_exception``) and what
cleans up and raises again.

Worked example::

    >>> answered(lambda: 1 / 2)
    0.5
    >>> answered(lambda: 1 / 0) is None
    True
    >>> Guard(strict=False).stage("fold families", lambda: 1 / 0, lambda: 7)  # doctest: +SKIP
    DynafuseWarning: fold families failed: ZeroDivisionError: division by zero
      every region runs on a kernel of its own
      with DYNAFUSE_STRICT=1 it is raised instead
    7
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dynafuse.errors import DynafuseWarning, ExecutorError, ForceError, OptionError, told

log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")

EAGER = "the graph runs eager"
STAGES: Mapping[str, str] = {
    "worker processes": "kernels are compiled in threads of this process",
    "choice of executors": EAGER,
    "force patterns": "patterns that match nothing are not told of",
    "rewrites of the Dynamo graph": "the graph stays as it came",
    "repeated layers": "the graph stays whole",
    "set-up of AOTAutograd": EAGER,
    "what the backward keeps": "torch's min-cut says what the backward keeps",
    "split into forward and backward": "torch's default partition splits the graph",
    "what is made again": EAGER,
    "inputs saved for the backward": EAGER,
    "normalization": EAGER,
    "layout": "convolutions stay in the layout that they have",
    "products that are written out": "sums of products are computed as the model writes them",
    "convolutions that keep channels apart": "they are calls of a library",
    "sizes of matrix products": "matrix products run in the sizes that they have",
    "reductions by rows": "what rows are reduced for is read again where all of it is reduced",
    "bases of scatters": "ops that write at loaded indices run eager",
    "planning": EAGER,
    "fold families": "every region runs on a kernel of its own",
    "measuring": "executors are chosen by the cost model alone",
    "plans on disk": "the graph is planned anew",
    "kernels on disk": "the kernel is made without the cache",
    "requests for kernels": EAGER,
    "reuse of buffers": "every result gets memory of its own",
    "interim plan": "the first call waits for the compiler",
    "trace": "a value of the pipeline is not written",
    "reports": "a report lacks the graph",
    "generated function": EAGER,
    "CUDA graphs": "the graph is launched kernel by kernel",
    "watching memory": "recordings begin with no piece of memory",
    "first call": EAGER,
    "specialization": "the graph runs on what was compiled for any sizes",
    "kernel for new sizes": "the region runs eager at these sizes",
}
"""The stages that may fail, and what happens instead."""

MISTAKES = (OptionError, ForceError, ExecutorError, DynafuseWarning)
"""Errors that tell users what they asked for cannot be; and warnings, where they have asked for these to be errors."""


def attempted(run: Callable[[], T], instead: Callable[[Exception], U]) -> T | U:
    """Return what ``run`` returns, or what ``instead`` makes of its failure: for what may fail, strict or not.

    Args:
        run: What is attempted.
        instead: Makes the result of any ``Exception`` that it raises; what ``instead`` raises is not caught.
    """
    try:
        return run()
    except Exception as error:  # whatever it is: a damaged entry, a candidate's compiler, an assertion of others' code
        return instead(error)


def answered(ask: Callable[[], T]) -> T | None:
    """Return what is answered to a question that only informs a decision; None, an unknown, where that fails."""
    return attempted(ask, lambda error: log.debug("not known: %s: %s", type(error).__name__, error, exc_info=error))


def nothing(error: Exception) -> Sequence[str]:
    """Tell no more about a failure."""
    return ()


def left_out() -> None:
    """Stand in for a stage that only adds something."""


@dataclass(frozen=True)
class Guard:
    """How far failures of stages reach. ``more`` are further lines about one: where it comes from, what repeats it."""

    strict: bool
    more: Callable[[Exception], Sequence[str]] = nothing

    def stage(self, name: str, run: Callable[[], T], instead: Callable[[], T]) -> T:
        """Return what ``run`` returns; where it fails, warn and return what ``instead`` returns.

        Args:
            name: The stage, one of STAGES, which says for the warning what happens instead.
            run: The stage. What it raises of MISTAKES is raised on, and so is every ``Exception`` under ``strict``.
            instead: Makes the result after a failure. It is not guarded.
        """
        try:
            return run()
        except MISTAKES:
            raise
        except Exception as error:  # whatever is wrong in a stage is not the user's
            if self.strict:
                raise
            self._warn(name, error)
        return instead()

    def _warn(self, name: str, error: Exception) -> None:
        log.info("%s failed", name, exc_info=error)
        more = answered(lambda: self.more(error)) or ()
        lines = [f"{name} failed: {told(error)}", STAGES[name], *more, "with DYNAFUSE_STRICT=1 it is raised instead"]
        warnings.warn("\n  ".join(lines), DynafuseWarning, stacklevel=4)


STRICT = Guard(strict=True)
"""What raises every failure."""
