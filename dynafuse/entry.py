"""What torch loads for ``torch.compile(model, backend="dynafuse")``, before Dynamo has looked at the model.

Worker processes that compile kernels take seconds to be ready. They start here, and Dynamo and AOTAutograd trace meanwhile.
``DYNAFUSE_WORKERS=0`` keeps them from starting.
"""

from __future__ import annotations

import torch

from dynafuse.backend import dynafuse
from dynafuse.config import resolve
from dynafuse.fallback import answered
from dynafuse.lowering.triton import pool
from dynafuse.report import history  # noqa: F401  (notes what runs)

__all__ = ["dynafuse"]

if torch.cuda.is_available():
    answered(lambda: pool.warm(resolve().workers))  # the backend itself says what is wrong with a variable, or with workers
