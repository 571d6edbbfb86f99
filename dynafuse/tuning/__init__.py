"""Measuring where the cost model is unsure: which executor is the fastest for a region, found out by running it."""

from dynafuse.tuning.evaluate import eager
from dynafuse.tuning.tuner import VERDICTS, Tuner, contenders, hints_of, needs
from dynafuse.tuning.verdict import Measured, Verdict, VerdictStore, verdict_key

__all__ = [
    "VERDICTS", "Measured", "Tuner", "Verdict", "VerdictStore", "contenders", "eager", "hints_of", "needs", "verdict_key",
]
