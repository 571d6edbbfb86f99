"""Measuring where the cost model is unsure: which executor is the fastest for a region, found out by running it."""

from dynafuse.lowering.interpret import eager
from dynafuse.select.measurement import Measured, Verdict, VerdictStore, verdict_key
from dynafuse.select.tuner import VERDICTS, Tuner, contenders, needs

__all__ = [
    "VERDICTS", "Measured", "Tuner", "Verdict", "VerdictStore", "contenders", "eager", "needs", "verdict_key",
]
