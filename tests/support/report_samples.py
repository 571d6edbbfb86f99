"""Reports that were never planned, for tests of what shows them."""

from __future__ import annotations

from dataclasses import replace

from dynafuse.ir import FoldFamily, Override, Refusal, RefusalKind
from dynafuse.report import Price, Relative, Report, ReportedGraph, ReportedStep

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \" ' {{ 7 * 7 }} <!-- \u2028"
FLIP = Override("efficiency_nvfuser_row", 1.10)


def small() -> Report:
    """A report with something of everything in it."""
    prices = (Price("triton", 10.4, 5.0), Price("nvfuser", 12.0, 6.8, FLIP))
    softmax = ReportedStep(
        "r0", "triton", ("aten.amax.default", "aten.sub.Tensor", "aten.exp.default"), "5f0c" * 8, 33_554_432, 10.4,
        host_us=5.0, eager_us=25.4, eager_host_us=16.1, prices=prices, margin=0.17, unsure=("triton", "nvfuser"), measured_us={"triton": 11.0, "nvfuser": 10.1},
        kernel_class="row", merges=("sub + exp",), nodes=("amax", "sub", "exp"), lines=("model.py:3, in f: x.softmax(-1)",),
    )
    product = ReportedStep(
        "mm", "eager", ("aten.mm.default",), None, 4_981_000, 10.0, reason="contraction: stays with the vendor's library",
        host_us=5.0, eager_us=10.0, eager_host_us=5.0, prices=(Price("eager", 10.0, 5.0),), reads=("r0",), nodes=("mm",),
    )
    moved = ReportedStep(
        "r1", "triton", ("aten.mul.Tensor", "aten.mul.Tensor", "prims.convert_element_type.default"), "77aa" * 8, 1_000, 2.0,
        host_us=5.0, eager_us=6.1, eager_host_us=16.1, prices=(Price("triton", 2.0, 5.0),), notes=("not on nvFuser: an input overlaps itself",),
        fallback=("nvfuser: nvFuser has no complex64",), reads=("mm",), nodes=("mul", "mul_1", "cast"),
        relative=Relative("r0", 1, ("op 2: mul with other 2.0 against k0", "input 0: dtype float32 against bfloat16")),
        family=FoldFamily(3, 4, 0.1, 3.67),
    )
    forced = replace(
        softmax, name="r2", executor="nvfuser", prices=prices[::-1], reused=True, forced="nvfuser", margin=9.6, measured_us={},
        predicted_us=12.0, reads=("mm", "r0"), unsure=(), nodes=("amax_1", "sub_1", "exp_1"),
    )
    refusals = (
        Refusal(RefusalKind.DOES_NOT_PAY, "exp", "mul", "7.5 us together, 3.2 + 3.5 us apart"),
        Refusal(RefusalKind.DIMENSIONS_DIFFER, "mul_1", "amax_1"),
    )
    graph = ReportedGraph("inference", (softmax, product, moved, forced), 10, refusals)
    return Report("h200", "NVIDIA H200", (graph,), {"nvfuser": "nvFuser is not available: no module nvfuser_direct"})


def large(steps: int) -> Report:
    """A deep model: every fourth step is fused and reads one from far above as well."""
    made = []
    (fused, product, *_), pairs = small().graphs[0].steps, []
    for i in range(steps):
        reads = tuple(f"s{j}" for j in {i - 1, i - 4, i % 3} if 0 <= j < i)
        base = fused if i % 4 == 0 else product
        made.append(replace(base, name=f"s{i}", reads=reads, nodes=(f"n{i}",), lines=(f"model.py:{i}, in forward: x = f{i}(x)",)))
        pairs.append(Refusal(RefusalKind.DOES_NOT_PAY, f"n{i}", f"n{max(i - 1, 0)}", f"{i}.5 us together, 3.2 + 3.5 us apart"))
    return Report("h200", "NVIDIA H200", (ReportedGraph("forward", tuple(made), steps, tuple(pairs)),))


def hostile() -> Report:
    """Names that try to get out of where they stand."""
    step = small().graphs[0].steps[0]
    bad = replace(
        step, name=HOSTILE, ops=(HOSTILE,), reason=HOSTILE, notes=(HOSTILE,), lines=(HOSTILE,), fallback=(HOSTILE,),
        merges=(HOSTILE,), executor=HOSTILE, kernel_class=HOSTILE, nodes=(HOSTILE,), relative=Relative(HOSTILE, 2, (HOSTILE,)),
    )
    graph = ReportedGraph(HOSTILE, (bad,), 1, (Refusal(HOSTILE, HOSTILE, HOSTILE, HOSTILE),))  # type: ignore[arg-type]
    return Report("h200", HOSTILE, (graph,), {"nvfuser": HOSTILE})
