"""Whether a change of the sources left plans, keys and kernels as they were: write them down before and after, and compare.

Example:
    python -m bench.plans --out before.json           # in the old checkout, with a copy of this file in its bench/
    python -m bench.plans --out after.json            # in the new one
    python -m bench.plans --compare before.json after.json

It asks only what users can ask (`dynafuse.explain`, `torch.compile`, `dynafuse.process_report`, `dynafuse.stats`, the folder
of the kernel cache), so that one file runs in checkouts whose modules have other names. A *subject* is a function, its
arguments and its options. Small ones are compiled and called in Triton's interpreter, with a cache folder of their own: its
entries have the source and the launches of every kernel. Large ones are only planned. Both for an H200; no GPU is needed.

Of every graph the file has its steps: executor, ops, nodes, kernel class, what is read, bytes, predicted times, the region's
key, and a digest of the kernel. A key is a digest of a text in which classes of the package are named, so renaming one
changes all keys; the comparison therefore takes other keys as "renamed one-to-one" where the same regions share them.
What a kernel imports from the package is not part of its digest.
"""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import operator
import os
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "h200"
TRITON = {"executors": "triton", "tune": "never"}
BOTH = {"executors": "triton,nvfuser", "tune": "never"}
FORMERLY = {"family": "near"}
"""What parts of a step were called before."""

PLAN = ("executor", "ops", "nodes", "kernel_class", "reads", "forced", "reason", "fallback", "family", "bytes",
        "predicted_us", "host_us")
"""What of a step is its plan, as fields of the report; how it came about, and the user's lines, are left out."""

HEADER, LENGTH = 56, 4
"""Bytes of a cache entry before its body, and of the length with which that begins (docs/cache.md)."""

Built = tuple[Callable[..., Any], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is compiled: ``build`` gives a function and its arguments. ``calls`` is off where it is only planned;
    ``direct`` says that the function compiles by itself what it is given, and is only called."""

    name: str
    build: Callable[[], Built]
    options: Mapping[str, Any] = dataclasses.field(default_factory=lambda: TRITON)
    calls: bool = True
    dynamic: bool = False
    device: str | None = DEVICE
    direct: bool = False


# ---------------------------------------------------------------------- what is compiled


def subjects(skipped: dict[str, str]) -> Iterator[Subject]:
    """All subjects; what cannot be imported here goes into ``skipped``, with the reason."""
    for group in (bench_models, test_models, cases, folds, rows):
        try:
            yield from group(skipped)
        except ImportError as error:
            skipped[group.__name__] = f"{type(error).__name__}: {error}"


VARIANTS: dict[str, Mapping[str, Any]] = {
    "nvfuser": BOTH,
    "layers": {**TRITON, "reuse_layers": "always"},
    "cost": {**TRITON, "rematerialize": "cost"},
    "rounded": {**TRITON, "round_like_eager": True},
    "small regions": {**TRITON, "max_region_ops": 6, "recompute": False},
    "whole": {**TRITON, "reuse_layers": "never"},
}


def bench_models(skipped: dict[str, str]) -> Iterator[Subject]:
    """The benchmarks' models: small ones are called, wide ones planned with every variant, a deep one for its time."""
    import torch

    from bench import models

    def built(name: str, train: bool = True, wide: bool = False, layers: int = 2) -> Callable[[], Built]:
        case = models.CASES[name]
        if wide and isinstance(case.sizes["tiny"], models.Language):
            sizes = {"tiny": dataclasses.replace(case.sizes["full"], hidden=1024, vocab=4096, batch=1, tokens=256)}
            case = dataclasses.replace(case, sizes=sizes)
        how = models.Build(device="cpu", scale="tiny", layers=layers, train=train,
                           dtype=torch.float32 if wide else torch.bfloat16)

        def build() -> Built:
            work = case.build(how)
            return work.module.requires_grad_(train), work.inputs

        return build

    for name in models.CASES:
        try:
            built(name, layers=1)()
        except models.Skip as reason:
            skipped[f"models/{name}"] = str(reason)
            continue
        yield Subject(f"models/{name}/train", built(name))
        yield Subject(f"models/{name}/infer", built(name, train=False))
        variants = VARIANTS if name == "llama" else {variant: VARIANTS[variant] for variant in ("nvfuser", "layers")}
        for variant, options in variants.items():
            yield Subject(f"models/{name}/wide/{variant}", built(name, wide=True), options, calls=False)
        yield Subject(f"models/{name}/inductor", built(name), {"executors": "inductor"}, calls=False, device=None)
    if "models/llama" not in skipped:
        deep = {**TRITON, "reuse_layers": "never", "cache": False}
        yield Subject("models/llama/32 layers", built("llama", layers=32), deep, calls=False)


def test_models(skipped: dict[str, str]) -> Iterator[Subject]:
    """The models of the tests that need no other package, with and without gradients and dropout."""
    import torch

    models = of_tests("backend", "test_models")

    def built(dropout: float) -> Callable[[], Built]:
        return lambda: (models.Convolutions(dropout).train(), models.images())

    def inference() -> Built:
        model = models.Convolutions(0.0).eval().requires_grad_(False)
        return model.to(memory_format=torch.channels_last), models.images()

    yield Subject("convolutions/train", built(0.0))
    yield Subject("convolutions/infer", inference)
    yield Subject("convolutions/dropout", built(0.5))
    yield Subject("convolutions/fallback_random", built(0.5), {**TRITON, "fallback_random": True})
    yield Subject("convolutions/dynamic", built(0.0), dynamic=True)
    yield Subject("convolutions/nvfuser", built(0.5), BOTH, calls=False)
    yield Subject("convolutions/inductor", built(0.5), {"executors": "inductor"}, calls=False, device=None)


def cases(skipped: dict[str, str]) -> Iterator[Subject]:
    """The functions of the tests of numbers, forward and backward; some with dynamic sizes, size classes or nvFuser."""
    import torch

    shared = of_tests("support", "cases")
    listed, maker = shared.CASES, shared.Maker

    def built(case: Any, dtype: torch.dtype) -> Callable[[], Built]:
        return lambda: (case.function, case.build(maker("cpu", dtype)))

    for case in listed:
        if case.known:
            continue
        k = zlib.crc32(case.name.encode()) % 4  # the same share of them, whichever are added
        single, half = built(case, torch.float32), built(case, torch.bfloat16)
        yield Subject(f"cases/{case.name}", single)
        if k == 0:
            yield Subject(f"cases/{case.name}/dynamic", single, dynamic=True)
        if k == 1:
            yield Subject(f"cases/{case.name}/size_classes", half, {**TRITON, "size_classes": True})
        if k == 2:
            yield Subject(f"cases/{case.name}/nvfuser", half, BOTH, calls=False)


def folds(skipped: dict[str, str]) -> Iterator[Subject]:
    """Sums of several lengths, which may share a kernel, and random numbers in layers that repeat themselves."""
    import torch

    def sums(x: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor:
        for length in range(3, 8):
            for term in terms[:length]:
                x = x + term
            x = torch.tanh(x) @ terms[0]
        return x

    def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x + torch.dropout(torch.nn.functional.layer_norm(x, (16,)) @ weight, 0.25, True).relu()
        return x

    def built(function: Callable[..., Any], count: int) -> Callable[[], Built]:
        return lambda: (function, [torch.randn(16, 16, requires_grad=True) for _ in range(count)])

    yield Subject("folds/near", built(sums, 9))
    yield Subject("folds/apart", built(sums, 9), {**TRITON, "near_match": False})
    yield Subject("layers/random", built(layers, 2))
    yield Subject("layers/fallback_random", built(layers, 3), {**TRITON, "fallback_random": True})
    yield Subject("layers/dynamic", built(layers, 2), dynamic=True)
    yield Subject("layers/whole", built(layers, 17), {**TRITON, "reuse_layers": "never"}, calls=False)
    yield Subject("layers/reused", built(layers, 17), {**TRITON, "reuse_layers": "always"}, calls=False)


def rows(skipped: dict[str, str]) -> Iterator[Subject]:
    """Some calls of every fusible row of the op table, each as a graph of its own that AOTAutograd has not taken apart."""
    samples = of_tests("support", "samples").samples

    import dynafuse.ops

    def built(row: Any) -> Built:
        listed = [sample for sample in samples(row) if eager_takes(row, sample)]
        dynamic = [sample for sample in listed if sample.dynamic]
        chosen = (*listed[:1], *listed[len(listed) // 2:][:1], *listed[-1:], *dynamic[:1])
        return call_row, [row, list({id(sample): sample for sample in chosen}.values())]

    for row in dynafuse.ops.rows():
        if row.fusible and samples(row):  # random numbers have none
            yield Subject(f"rows/{row.target}", partial(built, row), {}, direct=True)


REFUSED = (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError)


def eager_takes(row: Any, sample: Any) -> bool:
    """Whether eager runs a call of a row's op."""
    try:
        row.target(*sample.args, **sample.kwargs)
    except REFUSED:
        return False
    return True


def call_row(row: Any, listed: Sequence[Any]) -> None:
    """Compile calls of a row by the tests' helper and run each; those whose sizes torch cannot tell are left out."""
    import torch
    from torch.utils._pytree import tree_map

    graphs, flat = of_tests("support", "graphs"), of_tests("support", "samples").flat

    for sample in listed:
        inputs = [a for a in flat([*sample.args, *sample.kwargs.values()]) if isinstance(a, torch.Tensor)]

        def write(build: Any, *nodes: Any, sample: Any = sample) -> Any:
            rest = iter(nodes)
            args, kwargs = tree_map(lambda given: next(rest) if isinstance(given, torch.Tensor) else given,
                                    (sample.args, sample.kwargs))
            made = build.op(row.target, *args, **kwargs)
            if isinstance(made.meta["val"], tuple):
                made = build.op(operator.getitem, made, 0)
            return build.op("aten.clone.default", made)

        try:
            module = graphs.built(write, *inputs, dynamic=sample.dynamic)
        except REFUSED:
            continue
        graphs.compiled(module, inputs).call(list(inputs))


def of_tests(folder: str, name: str) -> Any:
    """Return a module of the tests: of a package, or as it was before they were one, by its bare name."""
    try:
        return importlib.import_module(f"tests.{folder}.{name}")
    except ModuleNotFoundError:
        sys.path[:0] = [str(ROOT / "tests" / older) for older in ("", "backend", "lowering")]
        return importlib.import_module(name)


# ---------------------------------------------------------------------- what is written down


def record(subject: Subject) -> dict[str, Any]:
    """A subject's graphs and kernels as data, and what it took; an error, where it raises one, as text."""
    import torch
    from torch._dynamo.utils import compilation_time_metrics as phases

    torch.compile(record, backend="dynafuse")  # torch resets only backends that it has been asked for
    torch.compiler.reset()
    torch.manual_seed(0)
    phases.clear()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"DYNAFUSE_CACHE_DIR": folder}):
        function, arguments = subject.build()
        start = time.perf_counter()
        try:
            found = called(subject, function, arguments) if subject.calls else planned(subject, function, arguments)
        except Exception as error:  # what it raises is a result as well: it has to stay as it is
            found = {"graphs": [], "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        seconds = time.perf_counter() - start
        kernels = entries(Path(folder))
    graphs = [graph_of(graph, kernels) for graph in found["graphs"]]
    used = {step["key"] for graph in graphs for step in graph["steps"]}
    own = {name: round(sum(spent), 4) for name, spent in phases.items() if name.startswith("dynafuse.")}
    others = sorted(digest for region, digest in kernels.items() if region not in used)
    return {"graphs": graphs, "other_kernels": others, "counts": found.get("counts", {}), "error": found.get("error", ""),
            "unusable": found.get("unusable", {}), "seconds": round(seconds, 3), "phases": own}


def planned(subject: Subject, function: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Any]:
    """The report of a plan."""
    import dynafuse

    options = dict(subject.options)
    return dynafuse.explain(function, *arguments, device=subject.device, options=options).to_dict()


def called(subject: Subject, function: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Any]:
    """The report of what a call and its backward compiled, with the numbers of kernels and of their launches."""
    import torch
    from torch.utils._pytree import tree_leaves

    import dynafuse

    if subject.direct:
        function(*arguments)
    else:
        options = {**subject.options, **({"device": subject.device} if subject.device else {})}
        compiled = torch.compile(function, backend="dynafuse", dynamic=subject.dynamic, options=options)
        leaves = tree_leaves(compiled(*arguments))
        results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    counts = {name: count for name, count in dynafuse.stats().items() if name in ("kernels", "launch_sites", "compiled")}
    return {**dynafuse.process_report().to_dict(), "counts": counts}


def entries(folder: Path) -> dict[str, str]:
    """Per region that has kernels in a cache folder, a digest of them."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in folder.glob("kernels/*"):
        body = path.read_bytes()[HEADER:] if path.is_file() else b""
        size = int.from_bytes(body[:LENGTH], "little")
        if path.suffix or not size:
            continue
        fields, blobs = json.loads(body[LENGTH:LENGTH + size]), body[LENGTH + size:]
        if "region" in fields["data"]:
            found[fields["data"]["region"]].append(kernel_digest(fields["data"], blobs))
    return {region: digest(sorted(kernels)) for region, kernels in found.items()}


def kernel_digest(data: Mapping[str, Any], source: bytes) -> str:
    """A digest of a kernel's source without what it imports from the package, and of its launches and workspaces."""
    lines = [line for line in source.splitlines() if not line.startswith((b"from dynafuse", b"import dynafuse"))]
    return digest([b"\n".join(lines).decode(), {name: value for name, value in data.items() if name != "region"}])


def digest(value: Any) -> str:
    """Sixteen digits for a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def graph_of(graph: Mapping[str, Any], kernels: Mapping[str, str]) -> dict[str, Any]:
    """A graph of a report as it is kept; steps that are neither planned nor run otherwise are equal."""
    steps = []
    for step in graph["steps"]:
        plan = {name: rounded(step[name] if name in step else step[FORMERLY[name]]) for name in PLAN}
        steps.append({**plan, "key": step["key"], "kernel": kernels.get(step["key"], "")})
    whole = digest([[step[name] for name in PLAN] for step in steps])
    return {"kind": graph["kind"], "called": graph["called"], "ops": graph["ops"], "plan": whole, "steps": steps}


def rounded(value: Any) -> Any:
    """A number to six digits; all else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(out: Path, patterns: Sequence[str]) -> None:
    """Record all subjects whose names fit a pattern, into one file."""
    import torch

    skipped: dict[str, str] = {}
    recorded: dict[str, Any] = {}
    begin = time.perf_counter()
    for subject in subjects(skipped):
        if any(fnmatch(subject.name, pattern) for pattern in patterns):
            recorded[subject.name] = found = record(subject)
            spent = time.perf_counter() - begin
            print(f"{spent:6.1f} s  {subject.name}: {len(found['graphs'])} graphs {found['error']}", flush=True)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    out.write_text(json.dumps({"versions": versions, "skipped": skipped, "subjects": recorded}, indent=1) + "\n")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    print(f"{len(recorded)} subjects in {time.perf_counter() - begin:.0f} s: {out}")


# ---------------------------------------------------------------------- what is compared

Steps = list[tuple[str, dict[str, Any], dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Keys:
    """Which keys of one file stand where which of the other do, over all steps with equal ops."""

    forward: Mapping[str, set[str]]
    back: Mapping[str, set[str]]

    def say(self, before: str | None, after: str | None) -> str:
        """``equal``, ``renamed one-to-one`` or ``different``."""
        if before is None or after is None:
            return "equal" if before == after else "different"
        if len(self.forward.get(before, ())) > 1 or len(self.back.get(after, ())) > 1:
            return "different"
        return "equal" if before == after else "renamed one-to-one"


def keys_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> Keys:
    """The keys that stand in the same places."""
    forward: dict[str, set[str]] = defaultdict(set)
    back: dict[str, set[str]] = defaultdict(set)
    for name in before.keys() & after.keys():
        for _, old, new in paired(before[name], after[name]):
            if old.get("key") and new.get("key") and old["ops"] == new["ops"]:
                forward[old["key"]].add(new["key"])
                back[new["key"]].add(old["key"])
    return Keys(forward, back)


def paired(before: Mapping[str, Any], after: Mapping[str, Any]) -> Steps:
    """Steps at the same places of two subjects; one that the other lacks is paired with an empty one."""
    absent: dict[str, Any] = {}
    nothing: dict[str, Any] = {"kind": "no graph", "steps": []}
    pairs: Steps = []
    for k, (old, new) in enumerate(zip_longest(before["graphs"], after["graphs"], fillvalue=nothing), 1):
        kind = " / ".join(dict.fromkeys((str(old["kind"]), str(new["kind"]))))
        for i, (one, other) in enumerate(zip_longest(old["steps"], new["steps"], fillvalue=absent), 1):
            pairs.append((f"graph {k} ({kind}) step {i}", one, other))
    return pairs


def differences(before: Mapping[str, Any], after: Mapping[str, Any], keys: Keys) -> list[str]:
    """What is not as it was in a subject, a line each."""
    lines = [f"{what}: {before[what]} → {after[what]}" for what in ("error", "unusable", "counts", "other_kernels")
             if before[what] != after[what]]
    for what in ("kind", "called", "ops"):
        was, now = ([graph[what] for graph in subject["graphs"]] for subject in (before, after))
        if was != now:
            lines.append(f"{what} of its graphs: {was} → {now}")
    for place, old, new in paired(before, after):
        if not old or not new:
            lines.append(f"{place}: {brief(old)} → {brief(new)}")
            continue
        lines += [f"{place}, {what}: {old[what]} → {new[what]}" for what in (*PLAN, "kernel") if old[what] != new[what]]
        if keys.say(old["key"], new["key"]) == "different":
            lines.append(f"{place}, key: {old['key']} → {new['key']}, which are not shared by the same regions")
    return lines


def brief(step: Mapping[str, Any]) -> str:
    """A step in a few words."""
    return f"{step['executor']} {' '.join(step['ops'])}" if step else "nothing"


def compare(before: Mapping[str, Any], after: Mapping[str, Any], most: int = 12) -> int:
    """Print what differs; 1 if anything does, else 0. Subjects that only the second file has are named and do not count."""
    old, new = before["subjects"], after["subjects"]
    keys, wrong = keys_of(old, new), 0
    for name, reason in after["skipped"].items():
        if before["skipped"].get(name) != reason:
            print(f"skipped now: {name}: {reason}")
    for name in old:
        lines = differences(old[name], new[name], keys) if name in new else ["not there any more"]
        wrong += bool(lines)
        for line in lines[:most]:
            print(f"{name}: {line}")
        if len(lines) > most:
            print(f"{name}: and {len(lines) - most} more")
    for name in new.keys() - old.keys():
        print(f"only in the second: {name}")
    told = Counter(keys.say(a, b) for a, found in keys.forward.items() for b in found)
    print("keys: " + (", ".join(f"{count} {what}" for what, count in sorted(told.items())) or "none"))
    times(old, new)
    print(f"{len(old)} subjects: {wrong} differ" if wrong else f"{len(old)} subjects: equal")
    return 1 if wrong else 0


def times(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Print how long planning took, of the deep model and of everything, after over before; nothing depends on it."""
    for name in [name for name in old if "32 layers" in name and name in new]:
        print(ratio(name, old[name]["seconds"], new[name]["seconds"]))
    both = [name for name in old if name in new]
    phases: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name in both:
        for side, subject in enumerate((old[name], new[name])):
            for phase, spent in subject["phases"].items():
                phases[phase][side] += spent
    for phase, (first, second) in sorted(phases.items()):
        print(ratio(phase, first, second))
    print(ratio("everything", *(sum(side[name]["seconds"] for name in both) for side in (old, new))))


def ratio(name: str, before: float, after: float) -> str:
    """A line with two times and their quotient."""
    return f"  {name:28} {before:8.2f} s → {after:8.2f} s" + (f"  × {after / before:.2f}" if before else "")


def prepare() -> None:
    """Set what has to be there before Triton is imported, this file's own checkout included; where nvFuser is not installed,
    an empty module is planned with.

    Planning loads nothing of nvFuser, it only asks whether there is a module of that name.
    """
    os.environ.update({"TRITON_INTERPRET": "1", "DYNAFUSE_STRICT": "1", "DYNAFUSE_CACHE": "1",
                       "DYNAFUSE_NVFUSER_UNMATCHED": "1"})
    sys.path.insert(0, str(ROOT))
    from importlib.util import find_spec

    if find_spec("nvfuser_direct") is None:
        folder = tempfile.mkdtemp()
        (Path(folder) / "nvfuser_direct.py").write_text("raise ImportError('only to plan with')\n")
        sys.path.append(folder)
    warnings.filterwarnings("ignore")


def main(arguments: list[str] | None = None) -> int:
    """Write a file or compare two; the exit status is 1 where they differ."""
    about = "Whether plans, keys and kernels are as they were."
    parser = argparse.ArgumentParser(prog="python -m bench.plans", description=about)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="write plans, keys and digests of kernels there")
    what.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--models", default="*", help="patterns of names, comma separated: models/*,rows/aten.add*")
    options = parser.parse_args(arguments)
    if options.compare:
        return compare(*(json.loads(path.read_text()) for path in options.compare))
    prepare()
    write(options.out, options.models.split(","))
    return 0


if __name__ == "__main__":
    sys.exit(main())
