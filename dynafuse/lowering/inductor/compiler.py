"""From a program to a compiled function: traced over fake tensors, compiled by torch's own ``compile_fx_inner``.

Inductor may rely on what it knows of the sizes it is shown: such guards come with the function, and whoever calls it asks
``holds`` first. It is called from within other compilations, so nothing of theirs is visible to it: it has its own fake
tensors, its own tracing context, no modes. One program is compiled at a time.

Worked example: ``build(lower(spec), torch.device("cpu"), (48, 130))`` is a function for dynamic sizes that are, say, at
least 2; its ``call([48, 130, x, y])`` returns the tensors of the stores that overwrite nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from dynafuse.forks import Lock, in_child
from dynafuse.fx import extent
from dynafuse.ir import ALIGNED, Layout
from dynafuse.lowering.inductor.lower import Program
from dynafuse.lowering.interpret import size_at

_one_at_a_time = Lock()


def _forget_threads() -> None:
    """Forget the threads in which Inductor compiles C++: torch forgets its processes after a fork, but not these."""
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        inductor.AsyncCompile.pool.cache_clear()


in_child(_forget_threads)


@dataclass(frozen=True)
class Compiled:
    """What Inductor made. ``call`` takes sizes and tensors in a list, which it empties; ``guards`` are about the sizes."""

    call: Callable[[list[Any]], Sequence[torch.Tensor]]
    guards: str
    source: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "_guards", compile(self.guards, "<guards>", "eval"))

    def holds(self, sizes: Sequence[int]) -> bool:
        """Return whether the function is right for the sizes."""
        names = {f"t{i}": size for i, size in enumerate(sizes)}
        return bool(eval(self._guards, SYMPY_INTERP, {"L": names}))  # type: ignore[attr-defined]


def build(program: Program, device: torch.device, sizes: Sequence[int]) -> Compiled:
    """Return the function of a program, for tensors on a device.

    Args:
        program: The program.
        device: The device.
        sizes: Examples of its size symbols, in order; none if it has no symbols.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    checks = bool(dict(program.spec.options).get("check_indices", True))
    with _one_at_a_time, _undisturbed(), torch.no_grad(), config.patch(assert_indirect_indexing=checks):
        mode = FakeTensorMode(shape_env=ShapeEnv() if sizes else None)
        with tracing(TracingContext(mode)):
            lengths, named = _lengths(program), zip(program.symbols, sizes, strict=True)
            symbols = [_symbol(mode.shape_env, i, size, name in lengths) for i, (name, size) in enumerate(named)]
            inputs = [*symbols, *_fakes(program, mode, symbols, device)]
            module = traced(program, mode, inputs, device)
            function: Any = compile_fx_inner(module, inputs, cudagraphs=BoxedBool(False), is_inference=True)
        guards = mode.shape_env.produce_guards_expression(symbols, ignore_static=False) if mode.shape_env else ""
    return Compiled(function, guards or "True", getattr(function, "source_code", "") or str(module.graph))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the modes of a compilation that is going on."""
    with _disable_current_modes():
        yield


def _lengths(program: Program) -> frozenset[str]:
    """Return the symbols of which the sizes of tensors are made; others, and those of any sign, are numbers like any."""
    shapes = [given.shape for given in program.spec.inputs] + [op.shape for op in program.spec.ops]
    sizes = (size for shape in shapes for size in shape if isinstance(size, sympy.Expr))
    return frozenset(str(symbol) for size in sizes for symbol in size.free_symbols if symbol.is_nonnegative)


def _symbol(env: ShapeEnv | None, position: int, value: int, is_length: bool) -> Any:
    """Return an integer that is known at run time. Of lengths, 0 and 1 are not: they are what they are."""
    assert env is not None
    source = ConstantSource(f"size{position}")
    create = env.create_symbol if is_length else env.create_unspecified_symbol
    symbol = create(value, source, DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=value, source=source)


def _fakes(program: Program, mode: FakeTensorMode, symbols: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    known = dict(zip(program.symbols, symbols, strict=True))
    with mode:
        return [_fake(given, known, device) for given in program.spec.inputs]


def _fake(given: Layout, known: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return an input as far from the beginning of its memory as tells Inductor how it is aligned."""
    shape, stride = ([size_at(size, known) for size in sizes] for sizes in (given.shape, given.stride))
    if given.alignment == ALIGNED:
        return torch.empty_strided(shape, stride, dtype=given.dtype, device=device)
    offset = given.alignment // given.dtype.itemsize
    return torch.empty(offset + extent(shape, stride), dtype=given.dtype, device=device).as_strided(shape, stride, offset)


def traced(program: Program, mode: FakeTensorMode, inputs: Sequence[Any], device: torch.device) -> GraphModule:
    """Return the FX graph of a program, in ops that Inductor lowers; its outputs keep the strides that it gives them.

    Args:
        program: The program.
        mode: In which it is traced.
        inputs: Its size symbols, then its inputs as fake tensors.
        device: Where tensors are made that no input goes into.
    """
    from torch._inductor.decomposition import select_decomp_table

    count = len(program.symbols)

    def run(*given: Any) -> tuple[torch.Tensor, ...]:
        return program.run(given[count:], given[:count], device)

    with mode, enable_python_dispatcher():
        module: GraphModule = make_fx(run, decomposition_table=select_decomp_table())(*inputs)
    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    return module
