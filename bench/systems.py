"""The systems under test as a table: a name, the `torch.compile` arguments, and environment variables that go with it.

Example:
    >>> find("inductor-reduce-overhead").mode
    'reduce-overhead'
    >>> find("dynafuse@DYNAFUSE_EXECUTORS=eager").env
    {'DYNAFUSE_EXECUTORS': 'eager'}
"""
from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class System:
    """One way to run a model: eager when `backend` is None, otherwise `torch.compile(backend=..., mode=..., dynamic=...)`.

    With `second` it is measured in a process that finds the caches of one before it.
    """

    name: str
    backend: str | None = None
    mode: str | None = None
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    second: bool = False
    dynamic: bool | None = None

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as this system runs it; an unknown backend raises here or at the first call, as torch does.

        A system of kernels alone raises Skip for what it has none for.
        """
        if self.backend is None:
            return fn
        if self.backend == "thunderfx":
            from thunder.dynamo import thunderfx

            return thunderfx(fn)  # type: ignore[no-any-return]
        if self.backend == "liger":
            from bench import liger

            return liger.kernel(fn)
        import torch

        compiled: Callable[..., Any] = torch.compile(fn, backend=self.backend, mode=self.mode, dynamic=self.dynamic)
        return announced(compiled) if self.mode == "reduce-overhead" else compiled


def announced(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Calls that tell the pool of captured CUDA graphs that a new step begins and old outputs may go."""
    import torch

    def run(*inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    return run


SYSTEMS: dict[str, System] = {
    s.name: s
    for s in (
        System("eager"),
        System("aot_eager", backend="aot_eager"),
        # Dynamo, AOTAutograd and the partitioner without a code generator: the floor of anyone's compile time.
        System("aot_only", backend="aot_eager_decomp_partition"),
        System("inductor", backend="inductor"),
        System("inductor-dynamic", backend="inductor", dynamic=True),
        System("inductor-reduce-overhead", backend="inductor", mode="reduce-overhead"),
        System("dynafuse", backend="dynafuse"),
        System("dynafuse-second", backend="dynafuse", second=True),
        # Of any size from the first call on.
        System("dynafuse-dynamic", backend="dynafuse", dynamic=True),
        System("dynafuse-reduce-overhead", backend="dynafuse", mode="reduce-overhead"),
        System("dynafuse-all", backend="dynafuse", env={"DYNAFUSE_EXECUTORS": "triton,nvfuser"}),
        # One executor each, and eager for what it cannot do: what dynafuse's own choice is compared with.
        System("dynafuse-triton", backend="dynafuse", env={"DYNAFUSE_EXECUTORS": "triton"}),
        System("dynafuse-nvfuser", backend="dynafuse", env={"DYNAFUSE_EXECUTORS": "nvfuser"}),
        # nvFuser as Thunder drives it.
        System("nvfuser", backend="thunderfx"),
        # Kernels written by hand, of the suite `micro` alone.
        System("liger", backend="liger"),
    )
}


def find(name: str) -> System:
    """The system of that name; `NAME@VAR=VALUE;VAR=VALUE` is NAME with environment variables."""
    base, _, extra = name.partition("@")
    if base not in SYSTEMS:
        raise SystemExit(f"bench: unknown system {base!r}; known: {', '.join(SYSTEMS)}")
    pairs = [item.partition("=") for item in extra.split(";") if item]
    if bad := [key for key, sign, _ in pairs if not sign]:
        raise SystemExit(f"bench: {name!r}: write {bad[0]}=VALUE after the @")
    return dataclasses.replace(SYSTEMS[base], name=name, env=SYSTEMS[base].env | {key: value for key, _, value in pairs})


def fresh_cache_env() -> dict[str, str]:
    """Environment under which a cold compile is cold: new empty cache folders, and no caches of whole graphs."""
    root = Path(tempfile.mkdtemp(prefix="bench-cache-"))
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
        "TRITON_CACHE_DIR": str(root / "triton"),
        "DYNAFUSE_CACHE_DIR": str(root / "dynafuse"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "BENCH_CACHE_ROOT": str(root),
    }


@contextlib.contextmanager
def cold_process(extra: dict[str, str]) -> Iterator[None]:
    """This process under `fresh_cache_env` and `extra`; both are undone afterwards, and the caches removed."""
    before = dict(os.environ)
    caches = fresh_cache_env()
    os.environ.update({**caches, **extra})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(caches["BENCH_CACHE_ROOT"], ignore_errors=True)
