"""Runs a program compiled and in eager, and gives a verdict."""

from __future__ import annotations

import functools
import itertools
import re
import traceback
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode

from dynafuse import backend
from dynafuse.runtime.capture.calls import WARM_UPS
from tests.fuzz import inputs
from tests.fuzz.noise import Noise, WithoutMasks
from tests.fuzz.oracle import Different, References, differences, same_bits
from tests.fuzz.parameters import Parameters
from tests.fuzz.program import Loaded, load
from tests.fuzz.state import LARGEST
from tests.support.differential import Outcome
from tests.support.fake_recorder import recording_on_cpu

NOISES, MANY, MANY_OF_LARGE = 4, 40, 12
"""How often eager runs with noise: of every program, and before a value is called wrong, of large values so that time suffices."""

ROUNDS = WARM_UPS + 3
"""How often every call of a captured program is made: until it is recorded, and twice after its first replay."""

SEED = 20
TORCHS_OWN = "aot_eager"
"""A backend of torch that runs graphs as they are: what fails with it too is not ours."""

DECOMPOSED = "aot_eager_decomp_partition"
"""One that runs them after Inductor's decompositions: strides that it gives as well are those of torch's own compiler."""

COMPILED = "inductor"
"""One that runs generated code: what raises in torch's code alone, and with it as well, is not ours; nor are strides that it gives."""

TRACING = "backend.py:_compile_joint"
"""Where torch's own tracing and decompositions are called."""

PRODUCT = re.compile(r"@|matmul|einsum|linear|attention")
"""What libraries compute: the order in which they add up depends on where memory begins."""


@dataclass(frozen=True)
class Verdict:
    """``ok``, ``wrong`` or ``raises``; ``torch`` if torch's own backend fails alike; ``invalid`` if eager raises."""

    status: str
    kind: str = ""  # what differs, or the exception
    detail: str = ""
    where: str = ""  # the innermost line of dynafuse that raised

    @property
    def failed(self) -> bool:
        """Whether it is a fault of ours."""
        return self.status in ("wrong", "raises")

    def like(self, other: Verdict) -> bool:
        """Whether it says the same of another backend."""
        return (self.status, self.kind, self._told) == (other.status, other.kind, other._told)

    @property
    def _told(self) -> str:
        """Which value is wrong, or how the message of an exception begins."""
        return self.detail.partition("]")[0] if self.status == "wrong" else _worded(self.detail)

    @property
    def signature(self) -> str:
        """What alike failures have in common."""
        if self.status == "raises":
            return f"raises {self.kind} {self.where} {_worded(self.detail)}"
        return f"{self.status} {self.kind}"


def _worded(detail: str) -> str:
    """The beginning of a message, without its numbers."""
    return re.sub(r"[0-9]+", "#", (detail.strip().splitlines() or [""])[0])[:90]


def examine(text: str, device: str = "cpu", captured: bool = False) -> Verdict:
    """The verdict on a program's text; ``captured``, all graphs are recorded that can be, and replayed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = load(text)
            references = [references_of(loaded, call, device, NOISES) for call in loaded.calls]
        except Exception as error:  # whatever eager raises: the program is no program
            return Verdict("invalid", type(error).__name__, str(error)[:300])
        options = {**loaded.options, **({"capture": "always"} if captured else {})}
        found = verdicts(loaded, references, device, backend.dynafuse, options)
        if any(verdict.status == "wrong" and verdict.kind == "value" for verdict in found):
            references = [references_of(loaded, call, device, _many(references)) for call in loaded.calls]
            found = verdicts(loaded, references, device, backend.dynafuse, options)
        if any(verdict.kind == "strides" for verdict in found):
            references = [replace(r, promised=promised(loaded, c, device)) for r, c in zip(references, loaded.calls, strict=True)]
            found = verdicts(loaded, references, device, backend.dynafuse, options)
        # Else its backward refuses to run twice; and with random numbers of eager's torch keeps draws that nothing uses.
        draws = torch._inductor.config.patch(fallback_random=bool(loaded.options.get("fallback_random")))
        with torch._functorch.config.patch(donated_buffer=False), draws:
            return decided(found, lambda own: verdicts(loaded, references, device, own, None))


def _many(references: Sequence[References]) -> int:
    """How often eager is to run with noise before a value is called wrong."""
    tensors = [a for reference in references for a in reference.eager.arguments if isinstance(a, torch.Tensor)]
    return MANY_OF_LARGE if any(a.numel() > LARGEST for a in tensors) else MANY


def decided(found: Sequence[Verdict], by_backend: Callable[[str], Sequence[Verdict]]) -> Verdict:
    """The first failure that none of torch's own backends shares, whatever else is wrong with what those make of the program.

    ``torch`` if they share all there are; ``by_backend`` gives the verdicts on one of them.
    """
    by_backend = functools.cache(by_backend)
    failures = [verdict for verdict in found if verdict.failed]
    for failure in failures:
        if not any(other.like(failure) for own in witnesses(failure) for other in by_backend(own)):
            return failure
    return replace(failures[0], status="torch") if failures else found[0]


def witnesses(verdict: Verdict) -> tuple[str, ...]:
    """The backends of torch with any of which a failure is torch's own if it fails alike."""
    if verdict.kind in ("strides", "form"):  # of which torch's shape functions may tell a compiler other than eager has
        return TORCHS_OWN, DECOMPOSED, COMPILED
    return (TORCHS_OWN, COMPILED) if verdict.status == "raises" and verdict.where in ("", TRACING) else (TORCHS_OWN,)


def promised(loaded: Loaded, call: Sequence[int], device: str) -> Any:
    """The result by torch's shape functions alone, as its compiler calls them."""
    with inputs.place(device):
        arguments = loaded.arguments(*call)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    with suppress(RuntimeError, TypeError, ValueError), mode, enable_python_dispatcher():
        return loaded.program(*faked)
    return None


def references_of(loaded: Loaded, call: Sequence[int], device: str, noises: int) -> References:
    """Eager, eager with noise, and float64 where the program can be run so."""
    eager = run(loaded, loaded.program, call, device)
    others = [run(loaded, loaded.program, call, device, Noise(k, device)) for k in range(noises)]
    if "attn_mask" in loaded.text:
        others.append(run(loaded, loaded.program, call, device, WithoutMasks()))
    if not loaded.random:
        with suppress(RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):  # for the casts in the text
            others.append(run(loaded, loaded.program, call, device, wide=True))
    drawn = loaded.random and not loaded.options.get("fallback_random")
    return References(eager, tuple(others), drawn)


def run(loaded: Loaded, function: Callable[..., Any], call: Sequence[int], device: str, mode: Any = None,
        wide: bool = False, parameters: Parameters | None = None, lets_go: bool = False) -> Outcome:
    """Make the arguments, call, and back-propagate numbers that depend only on the shapes.

    ``parameters`` makes the arguments; ``lets_go``: gradients are let go of, and copies of them kept.
    """
    with inputs.place(device, wide):
        arguments = (parameters or loaded.arguments)(*call)
    torch.manual_seed(SEED)
    with mode or nullcontext():
        result = function(*arguments)
        leaves = list({id(a): a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad and a.is_leaf}.values())
        roots = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        gradients: list[torch.Tensor | None] = []
        if leaves and roots:
            tangents = [_tangent(t) for t in roots]
            for again in range(1 + loaded.retain):
                keep = loaded.retain and not again
                made = torch.autograd.grad(roots, leaves, tangents, allow_unused=True, retain_graph=keep)
                gradients += [g if g is None or not lets_go else g.clone(memory_format=torch.preserve_format) for g in made]
                del made
    return Outcome(result, arguments, gradients)


def _tangent(tensor: torch.Tensor) -> torch.Tensor:
    """Multiples of an eighth, the same for a shape whatever the dtype, device and strides."""
    values = torch.arange(tensor.numel(), device=tensor.device).mul(7).add(3).remainder(17).sub(8).div(8)
    return values.view(tensor.shape).to(tensor.dtype)


def verdicts(loaded: Loaded, references: Sequence[References], device: str, compiler: Any, options: Any) -> list[Verdict]:
    """A verdict on each thing that is wrong with what a backend makes of a program, in order; a single one if nothing is."""
    fresh()
    captured = options is not None and options.get("capture") == "always"
    try:
        with recording_on_cpu() if captured and device == "cpu" else nullcontext():
            outcomes = compiled_outcomes(loaded, device, compiler, options, ROUNDS if captured else 1)
        judged = zip(outcomes, itertools.cycle(references), strict=False)
        wrong = [different for outcome, reference in judged for different in differences(outcome, reference)]
        if not wrong and loaded.check != "eager" and compiler is backend.dynafuse and not captured:
            again(loaded, outcomes, device, options)
    except Different as different:
        wrong = [different]
    except Exception as error:  # the point of it all
        return [Verdict("raises", *described(error))]
    finally:
        fresh()
    return [Verdict("wrong", different.kind, str(different)) for different in wrong] or [Verdict("ok")]


def again(loaded: Loaded, outcomes: Sequence[Outcome], device: str, options: Any) -> None:
    """Compile and run a second time, for ``disk`` from what the first left there: the same bits, where bits repeat at all.

    Dynamo forgets in between which sizes have changed: a dynamic graph need not round like a static one.
    """
    if PRODUCT.search(loaded.text):
        return
    if loaded.check == "disk":
        fresh()
    repeated = []
    for _ in range(2):
        torch._dynamo.reset()
        repeated.append(compiled_outcomes(loaded, device, backend.dynafuse, options))
    second, third = repeated
    try:
        for one, other in zip(second, third, strict=True):
            same_bits(one, other, "repeated")
    except Different:
        if device == "cuda":  # eager ops that add in any order
            return
        raise
    for one, other in zip(outcomes, second, strict=True):
        same_bits(one, other, loaded.check)


def compiled_outcomes(loaded: Loaded, device: str, compiler: Any, options: Any, rounds: int = 1) -> list[Outcome]:
    """The outcomes of all calls of one compiled object, round after round: they are held while it is called again.

    Of several rounds those of two programs in three have parameters, and of one in three the gradients are let go of.
    """
    function = torch.compile(loaded.program, backend=compiler, dynamic=loaded.dynamic, options=options)
    kind = zlib.crc32(loaded.text.encode()) % 3 if rounds > 1 else 0
    parameters = Parameters(loaded.arguments) if kind else None
    return [run(loaded, function, call, device, parameters=parameters, lets_go=kind == 2)
            for _ in range(rounds) for call in loaded.calls]


def fresh() -> None:
    """Forget everything that was compiled."""
    torch._dynamo.reset()
    backend.reset()


def described(error: BaseException) -> tuple[str, str, str]:
    """Type, message and place of an exception, of the one that caused it if Dynamo wrapped it."""
    inner = getattr(error, "inner_exception", None) or error
    ours = [frame for frame in traceback.extract_tb(inner.__traceback__) if "/dynafuse/" in frame.filename]
    where = f"{ours[-1].filename.split('/dynafuse/')[-1]}:{ours[-1].name}" if ours else ""
    return type(inner).__name__, str(inner)[:2000], where
