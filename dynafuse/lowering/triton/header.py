"""What modules of generated kernels begin with, and what their asserts leave room for.

Worked example: ``HEADER + QUICK`` is what a module begins with whose kernels call functions of ``libm_quick``.
"""

HEADER = """\
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dynafuse.lowering.triton import libm as lm
"""
QUICK = "from dynafuse.lowering.triton import libm_quick as lq\n"
"""The line that kernels with quick functions need besides."""

SCANS = "from dynafuse.lowering.triton import libm_scans as ls\n"
"""The same for kernels with scans."""

PLACE_WIDTH = 160
"""Bytes that a kernel's asserts leave for the user's line: it is put into the binary that is loaded, and into no key."""
