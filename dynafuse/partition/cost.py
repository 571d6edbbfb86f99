"""What a region costs: a roofline with a launch term.

``time = max(bytes / (bandwidth × efficiency × share of the device in use), flops / rate) + launches × launch_us``.
The share in use is how many of the device's processors the kernel's programs keep busy.

Worked example, on an H200: adding two ``bfloat16[8192, 4096]`` moves 201 MB; at 0.92 × 4.28 TB/s that is 51 µs, and
2 µs for the launch. The formula is the roofline model (Williams, Waterman, Patterson, CACM 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from dynafuse.partition.device import Device


@dataclass(frozen=True)
class Work:
    """What a kernel does: bytes read and written, flops, programs it can spread over, launches, kernel class."""

    bytes: int
    flops: float
    programs: int
    kernel_class: str  # pointwise | transpose | row | column | split | rowcol
    launches: int = 1


PROGRAMS_PER_PROCESSOR = 2  # that many programs in flight keep a processor's memory pipes full


def region_us(work: Work, device: Device) -> float:
    """Predicted device time of a fused region, microseconds."""
    efficiency = {
        "pointwise": device.efficiency_pointwise, "transpose": device.efficiency_transpose,
    }.get(work.kernel_class, device.efficiency_reduction)
    share = min(1.0, max(work.programs, 1) / (PROGRAMS_PER_PROCESSOR * device.processors))
    memory = work.bytes / (device.bandwidth_tbs * 1e6 * efficiency * share)
    arithmetic = work.flops / (device.flops_tflops * 1e6 * share)
    return max(memory, arithmetic) + work.launches * device.launch_us


def eager_us(bytes_moved: int, device: Device) -> float:
    """Predicted device time of a memory-bound op that runs eager, microseconds."""
    return bytes_moved / (device.bandwidth_tbs * 1e6 * device.efficiency_eager) + device.launch_us
