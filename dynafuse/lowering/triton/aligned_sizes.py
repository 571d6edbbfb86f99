"""Kernels of dynamic sizes in two forms: for sizes that leave rows aligned in memory, and for any.

A size or stride that is an argument may be any number, so the compiler moves what lies behind it element by element. Where
rows begin and end at multiples of 8 elements in the examples because of such numbers, a kernel asks whether they are
multiples again, and then runs the same lines with each written as a multiple: by this the compiler sees that it may move 16
bytes at a time.

Worked example: rows of ``s1`` numbers begin at ``s1*x``, images of ``s1`` by ``s1`` at ``s1*s1*x``. In the examples ``s1``
is 64, or 28. The kernel is ::

    if s1 % 8 == 0:                                                   # of images, multiples of 4 suffice
        dynafuse_flat_relu_any(in0, out0, s0, s1 // 8 * 8, XBLOCK, WAITS)
    else:
        dynafuse_flat_relu_any(in0, out0, s0, s1, XBLOCK, WAITS)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from dynafuse.ir import Size
from dynafuse.ops.indexing_math import IndexSymbol, expanded

MOVED = 8
"""Elements that are moved at a time: of 16 bits, 16 bytes, which is the most."""

ANY = "_any"
"""What the name of the function ends in that has the lines of both forms."""


@dataclass(frozen=True)
class Product:
    """A term of an offset or a number of points: its factor, and how often each symbol is one."""

    factor: int
    powers: Mapping[str, int]

    def multiple(self, multiples: Mapping[str, int]) -> int:
        """Return what it is a multiple of, up to what is moved at a time, if symbols are multiples."""
        known = math.prod(multiples.get(name, 1) ** power for name, power in self.powers.items())
        return math.gcd(self.factor * known, MOVED)


def multiples_of(offsets: Iterable[sympy.Expr], totals: Iterable[Size], examples: Mapping[str, int]) -> dict[str, int]:
    """Return the symbols that have to be multiples for aligned accesses, each with the power of two.

    Args:
        offsets: The offsets that are accessed, in elements, over axes and symbols.
        totals: How many points there are along the tile dimensions that neighbouring lanes walk.
        examples: The symbols with their values in the example inputs, which are such multiples.
    """
    products = [product for offset in offsets for product in _products(offset)]
    products += [_product(total) for total in totals if isinstance(total, sympy.Expr)]
    multiples: dict[str, int] = {}
    for product in sorted(products, key=lambda product: len(product.powers)):
        for name in sorted(product.powers, key=list(examples).index, reverse=True):
            multiple = math.gcd(examples[name], MOVED)
            if multiple > 1 and name not in multiples and product.multiple(multiples) < MOVED:
                multiples[name] = multiple
    return {name: multiples[name] for name in examples if name in multiples}


def _products(offset: sympy.Expr) -> Iterator[Product]:
    """Yield the terms of an offset beside the axis that it walks along; none if there is none, or nothing aligns it."""
    terms = sympy.Add.make_args(sympy.expand(offset))
    products = [_product(term) for term in terms if not isinstance(term, IndexSymbol)]
    if len(products) < len(terms) and all(product.powers or product.factor % MOVED == 0 for product in products):
        yield from products


def _product(term: sympy.Expr) -> Product:
    factor, rest = expanded(term).as_coeff_Mul()
    bases = Counter[str]()
    for part in sympy.Mul.make_args(rest):
        base, power = part.as_base_exp()
        if base.is_Symbol and not isinstance(base, IndexSymbol) and power.is_Integer:
            bases[str(base)] += int(power)
    return Product(int(factor) if factor.is_Integer else 1, bases)


def in_two_forms(name: str, parameters: Sequence[str], multiples: Mapping[str, int], prologue: Sequence[str]) -> str:
    """Return a kernel that calls the function of its lines, with symbols as multiples where they are.

    Args:
        name: The kernel's name; the function's ends in ANY.
        parameters: The parameters of both, as in a definition.
        multiples: The symbols among them, each with the number.
        prologue: What is done before memory is touched. In the function, it would keep Triton from seeing the multiples.
    """
    names = [parameter.partition(":")[0] for parameter in parameters]
    aligned = [f"{given} // {multiples[given]} * {multiples[given]}" if given in multiples else given for given in names]
    asked = " and ".join(f"{symbol} % {multiple} == 0" for symbol, multiple in multiples.items())
    lines = (*prologue, f"if {asked}:", f"    {name}{ANY}({', '.join(aligned)})", "else:",
             f"    {name}{ANY}({', '.join(names)})")
    return f"@triton.jit\ndef {name}({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in lines)
