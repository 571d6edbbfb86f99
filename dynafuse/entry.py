"""What torch loads for ``torch.compile(model, backend="dynafuse")``, before Dynamo has looked at the model.

The process that compiles kernels starts here, before what takes longest to import, and is ready while Dynamo and AOTAutograd
trace. ``DYNAFUSE_WORKERS=0`` keeps it from starting.
"""

from __future__ import annotations

import torch

from dynafuse.config import resolve
from dynafuse.fallback import answered
from dynafuse.lowering.triton import pool

__all__ = ["dynafuse"]

if torch.cuda.is_available():
    answered(lambda: pool.warm(resolve().workers))  # the backend itself says what is wrong with a variable, or with workers

from dynafuse.backend import dynafuse
from dynafuse.report import history  # noqa: F401  (notes what runs)
