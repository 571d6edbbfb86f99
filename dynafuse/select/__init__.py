"""Selection among executors: where the cost model is unsure, regions are measured on random data.

Worked example: see :mod:`dynafuse.select.tuner`.
"""

from dynafuse.select.measurement import Measurement, MeasurementStore, Timing, measurement_key
from dynafuse.select.tuner import MEASUREMENTS, Tuner, contenders, needs_measuring

__all__ = [
    "MEASUREMENTS",
    "Measurement",
    "MeasurementStore",
    "Timing",
    "Tuner",
    "contenders",
    "measurement_key",
    "needs_measuring",
]
