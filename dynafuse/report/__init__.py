"""Reports of what dynafuse decided about a function: :func:`explain` plans it, a :class:`Report` shows the plan.

Worked example, for a machine without a GPU::

    >>> import torch
    >>> report = explain(lambda x: torch.softmax(x, -1) * 2, torch.randn(64, 1024), device="h200")
    >>> [step["ops"] for step in report.to_dict()["graphs"][0]["steps"]]  # doctest: +NORMALIZE_WHITESPACE
    [['aten.amax.default', 'aten.sub.Tensor', 'aten.exp.default', 'aten.sum.dim_IntList', 'aten.div.Tensor',
      'aten.mul.Tensor']]
    >>> print(report)  # doctest: +SKIP
    plan for NVIDIA H200: 1 graph, 1 distinct kernel
    <BLANKLINE>
    graph 1, inference: 6 ops → 1 kernel (1 distinct), 0 eager calls; fused part 2.9 µs
    ...
    >>> report.save("plan.html")  # doctest: +SKIP

Planning compiles no kernel and runs the graphs node by node, on whatever device the tensors are.
"""

from dynafuse.report.breaks import Break
from dynafuse.report.data import Price, Relative, Report, ReportedGraph, ReportedStep, Reuse
from dynafuse.report.tracing import explain

__all__ = ["Break", "Price", "Relative", "Report", "ReportedGraph", "ReportedStep", "Reuse", "explain"]
