"""Measuring where the cost model is unsure: which executor is the fastest for a region, found out by running it."""

from dynafuse.lowering.interpret import eager
from dynafuse.select.measurement import Measurement, MeasurementStore, Timing, measurement_key
from dynafuse.select.tuner import MEASUREMENTS, Tuner, contenders, needs

__all__ = [
    "MEASUREMENTS",
    "Measurement",
    "MeasurementStore",
    "Timing",
    "Tuner",
    "contenders",
    "eager",
    "measurement_key",
    "needs",
]
