"""Where failures end that are not the user's: what the failed stage would have added is left out, and the step goes on.

Nothing else in this package catches whatever is raised. :func:`answered` is for questions that only inform a decision.

Worked example::

    >>> answered(lambda: 1 / 2)
    0.5
    >>> answered(lambda: 1 / 0) is None
    True
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


def answered(ask: Callable[[], T]) -> T | None:
    """What others' code answers to a question that only informs a decision; None, an unknown, where it fails."""
    try:
        return ask()
    except Exception as error:  # their assertions are about their own cases
        log.debug("not known: %s: %s", type(error).__name__, error, exc_info=error)
        return None
