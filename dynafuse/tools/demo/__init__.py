"""``dynafuse demo``: a small transformer, trained through dynafuse and checked against eager at every step.

With a GPU it prints the plan, trains there, and measures a step against eager and Inductor. Without one it prints the plan
for an H200, trains on the CPU in C++ kernels where there is a C++ compiler, and then runs the Triton kernels of a tiny
model in Triton's interpreter.

Worked example, what it ends with; the exit status is 1 if a check failed::

    ok: losses and gradients agree with eager's
    every check passed, in 58 s
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

NATIVE, INTERPRETED = "native", "interpreted"


def main(page: str | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the demo and return the exit status: 1 if a check failed. ``page`` is where to write the plan as HTML.

    Each phase is a process of its own: Triton decides when it is imported whether to interpret, and compile times only
    compare when nobody's caches are warm.
    """
    import torch

    began = time.perf_counter()
    phases = [NATIVE]
    if not torch.cuda.is_available() or environ.get("TRITON_INTERPRET"):
        phases.append(INTERPRETED)
    with tempfile.TemporaryDirectory(prefix="dynafuse_demo_") as folder:
        failed = [phase for phase in phases if _run(phase, page, environ, folder)]
    verdict = f"{' and '.join(failed)} phase failed" if failed else "every check passed"
    print(f"{verdict}, in {time.perf_counter() - began:.0f} s", flush=True)
    return 1 if failed else 0


def _run(phase: str, page: str | None, environ: Mapping[str, str], folder: str) -> int:
    """Run a phase and return its exit status."""
    environment = {name: value for name, value in environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    environment |= {"DYNAFUSE_CACHE": "0", "DYNAFUSE_STRICT": environ.get("DYNAFUSE_STRICT", "1")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    if phase == INTERPRETED:
        environment["TRITON_INTERPRET"] = "1"
    arguments = [phase] if page is None else [phase, page]
    return subprocess.call([sys.executable, "-m", "dynafuse.tools.demo", *arguments], env=environment)
