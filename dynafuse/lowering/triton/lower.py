"""From a spec to Triton source: schedule, then the kernels of the chosen class.

Worked example: ``lower(spec)`` of a row softmax returns one launch whose source is a kernel named
``dynafuse_persistent_amax_sub_exp_sum_div``.
"""

from __future__ import annotations

from dynafuse.ir import Lowered, Spec
from dynafuse.lowering.triton.kernels import lowered
from dynafuse.lowering.triton.schedule import schedule


def lower(spec: Spec) -> Lowered:
    """Source and launches of a spec's kernels. Raises LoweringError if an op's row promises too much."""
    return lowered(spec, schedule(spec), bool(dict(spec.options).get("round_like_eager")))
