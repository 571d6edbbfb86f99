"""Writes docs/walk.md: one graph, a Llama block, through every stage of the pipeline, with the text of each value.

    python -m bench.walk > docs/walk.md

The block runs once in a process of its own, in Triton's interpreter, with the option ``trace``; the page shows what the
trace holds, shortened to the lines that matter. No GPU is needed.
"""
from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dynafuse.tools.demo.model import Layer, RMSNorm, Sizes

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"^( *#  +\S+:\d+, in \w+): .*$", re.MULTILINE)
SIZES = Sizes(layers=1, width=256, heads=4, hidden=512, vocabulary=0, batch=2, length=64, dtype=torch.bfloat16)

INTRODUCTION = """\
# A graph's way

One graph, the block of a small Llama, through every stage of `dynafuse/pipeline.py`, with the text of each value as
`DYNAFUSE_TRACE=folder` writes it. [architecture.md](architecture.md) says which file each stage is in. `python -m
bench.walk > docs/walk.md` makes this page; a test holds it fresh.

The block is that of `dynafuse/tools/demo/model.py`, in bfloat16, {batch} × {length} positions of width {width}, for
inference. In training there are two such graphs, a forward and a backward. It runs on CPU tensors in Triton's
interpreter, and is planned for an H200.

```python
{code}```

We follow one region, the residual add with the norm behind it: the first line of `Layer.forward` and the second call
of `RMSNorm.forward`. `… 52 lines` stands for what is left out.
"""


@dataclass(frozen=True)
class Stage:
    """A value of the trace: what it is, and which of its lines are shown.

    ``shown`` are pairs of what the first and the last line begin with; without any, all lines are shown.
    """

    name: str
    title: str
    text: str
    shown: tuple[tuple[str, str], ...] = ()
    language: str = ""


STAGES = (
    Stage("aten", "the graph that AOTAutograd hands over", """\
Functional ATen ops, decomposed: the norm is eight of them and `silu` six, with the casts to float32 and back. Weights
are inputs.""",
          (("arg0_1", "arg2_1"), ("mm =", "permute_1 ="), ("mm_1 =", "mm_2 ="))),
    Stage("normalized", "after `normalize` and `optimize_layout`", """\
Outputs of `split` have become slices, each an op of its own. The casts in the norm are the user's own (`_to_copy`),
which kernels round at; those that decompositions added (`silu`, further down) remain `convert_element_type` and may
stay in float32.""",
          (("mm =", "permute_1 ="), ("mm_1 =", "mm_2 ="))),
    Stage("facts", "what `annotate` knows of each node", """\
Its role (input, view, fused, eager, output), dtype and sizes, why it runs eager, and the executor it is forced to, if
any. Fused nodes have a row in the op table.""",
          (("arg0_1", "arg0_1"), ("_scaled", "getitem_7"), ("mm_1 ", "mm_2 "))),
    Stage("plan", "what `partition` made of it", """\
The steps in order: five regions, and what is between them. Each region names its executor, its nodes in graph order,
the bytes that it reads and writes, and the predicted time. `r2` is ours: the add, the norm and the views that they
read through. The two rotations, which share a launch as `r1`, and the gate `r3` read slices of a product where it
lies. A view by itself launches nothing."""),
    Stage("regions", "every region in canonical form", """\
After the plan, the same regions as specs without names: inputs with dtype, sizes and strides, ops in the order in
which the outputs need them, stores. The key (shortened here) is a hash of that; equal regions of all layers and
graphs have one kernel. `k0` is a hoisted scalar, the norm's epsilon: the kernel takes it as an argument. `place` has
asked the executor whether it takes the region as a whole.""",
          (("r2 on", "store %9"),)),
    Stage("decided", "after fold families and measurements", """\
The plan again. Nothing has changed here: there is no fold of several lengths, and only one executor. With
`executors="triton,nvfuser"` on a GPU, regions that the cost model cannot decide are measured at this point.""",
          (("r2 [", "r2 ["),)),
    Stage("kernels", "what the executors generated", """\
One source per key. The class is `persistent`: a program holds whole rows in registers, so that the row is read once.
The add is stored and rounded to bfloat16 before the norm goes on, as its value is there in eager.""",
          (("@triton.jit;dynafuse_persistent_add", "    tl.store(out1"),), "python"),
    Stage("buffers", "results that need no memory of their own", """\
What a kernel reads only where it writes, before it writes there, and what nothing reads any more, it may write over."""),
    Stage("function", "the function of the graph", """\
What a call runs: it allocates, launches, calls eager ops and frees each tensor after its last use. Comments name the
user's lines. `reinterpret` makes views without torch's dispatcher; what is not a tensor is bound beforehand (`c_0`,
`k_…`).""",
          (("def call", "    k_dynafuse_persistent_pow"), ("    mm_1 =", "    mm_2 ="), ("    return", "    return")),
          "python"),
)


def page() -> str:
    """Return the text of docs/walk.md."""
    with tempfile.TemporaryDirectory() as folder:
        values = dict(_traced(Path(folder)))
    assert list(values) == [stage.name for stage in STAGES], "say what each value of the trace is"
    code = "\n".join(inspect.getsource(function) for function in (RMSNorm.forward, Layer.forward))
    introduction = INTRODUCTION.format(
        batch=SIZES.batch, length=SIZES.length, width=SIZES.width, code=inspect.cleandoc(code) + "\n")
    sections = [_section(number, stage, values[stage.name]) for number, stage in enumerate(STAGES)]
    made = f"Made with torch {torch.__version__.split('+')[0]}: other versions may decompose otherwise.\n"
    return "\n".join([introduction, *sections, made])


def _traced(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Compile and run the block in a process of its own; return the lines of each value by name, in order."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DYNAFUSE_")}
    environment |= {"TRITON_INTERPRET": "1", "DYNAFUSE_TRACE": str(folder), "DYNAFUSE_CACHE": "0", "DYNAFUSE_STRICT": "1"}
    subprocess.run([sys.executable, "-c", "from bench.walk import run; run()"], env=environment, cwd=ROOT, check=True)
    (graph,) = folder.iterdir()
    for path in sorted(graph.iterdir()):
        text = path.read_text(encoding="utf-8").replace(f"{ROOT}/", "")
        text = LINE.sub(r"\1", text)  # how much of the line there is room for depends on the folder
        yield path.stem.split("-")[1], text.splitlines()


def run() -> None:
    """Compile the block and call it once."""
    from dynafuse import backend  # torch looks for it by its name only where the package is installed

    if "dynafuse" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(name="dynafuse")(backend.dynafuse)
    torch.manual_seed(0)
    layer = Layer(SIZES).to(SIZES.dtype)
    x = torch.randn(SIZES.batch, SIZES.length, SIZES.width, dtype=SIZES.dtype)
    cos, sin = torch.randn(2, SIZES.length, SIZES.width // SIZES.heads, dtype=SIZES.dtype)
    with torch.no_grad():
        torch.compile(layer, backend="dynafuse")(x, cos, sin)


def _section(number: int, stage: Stage, lines: Sequence[str]) -> str:
    shown = "\n".join(_shortened(lines, stage.shown))
    shown = re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24}\b", r"\1", shown)
    heading = f"## {number}. `{stage.name}`: {stage.title}"
    return f"{heading}\n\n{stage.text}\n\n```{stage.language}\n{shown}\n```\n"


def _shortened(lines: Sequence[str], shown: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Return the lines between the shown pairs, and how many are left out before, between and behind them."""
    end = 0
    for first, last in shown or (("", ""),):
        begin = _find(lines, first, end)
        yield from _left_out(begin - end)
        end = _find(lines, last, begin) + 1 if last else len(lines)
        yield from lines[begin:end]
    yield from _left_out(len(lines) - end)


def _find(lines: Sequence[str], beginning: str, start: int) -> int:
    """Return the first line that begins so; ``decorator;name``: the line of the decorator of a function."""
    before, _, name = beginning.rpartition(";")
    if before:
        return next(i for i in range(start, len(lines)) if lines[i] == before and lines[i + 1].startswith(f"def {name}"))
    return next(i for i in range(start, len(lines)) if lines[i].startswith(beginning))


def _left_out(count: int) -> Iterator[str]:
    if count:
        yield f"… {count} lines" if count > 1 else "… 1 line"


if __name__ == "__main__":
    print(page(), end="")
