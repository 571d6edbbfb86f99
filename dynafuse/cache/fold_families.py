"""Folds of any length in kernels of a few widths: the family that a spec belongs to.

A fold is a chain of one op, ``((t0 + t1) + t2) + ...``, whose steps nothing else reads and whose terms, but for ``t0``, are
computed alike from inputs of their own. A family's kernel has as many terms as its width; those beyond the argument
``count`` are not loaded, and their steps pass on what they are given: the bits are those of the fold's own kernel.

Worked example: ``member`` of ``tanh(in0 + in1 + in2)`` has width 4 and, with ``(0, 1, 2, 2)`` for its inputs, the code::

    %0 = aten.add.Tensor(in0, in1)
    %1 = aten.add.Tensor(%0, in2)
    %2 = aten.add.Tensor(%1, in3) if count > 3
    %3 = aten.tanh.default(%2)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynafuse.ir import MAX_TENSORS, FoldFit, OpSpec, Ref, Spec, references
from dynafuse.ops import Cast, Kind, lookup
from dynafuse.ops.algebra import commutes
from dynafuse.ops.literals import HoistedScalar
from dynafuse.ops.overloads import overload

WIDTHS = (4, 8, 16, 32, 64, MAX_TENSORS)
"""Terms of a family's kernel; every count between two of them goes to the larger one."""


@dataclass(frozen=True)
class Member(FoldFit):
    """A spec in its family's form. ``inputs`` and ``numbers`` are what the code's arguments are in this spec."""

    code: Spec
    inputs: tuple[int, ...]  # of the spec, per input of the code; those of terms that are not there repeat others
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Term:
    """What a step of a fold takes in: how it is computed, and from what, each once."""

    form: Any
    leaves: tuple[Ref | HoistedScalar, ...]


@dataclass(frozen=True)
class Fold:
    """The ops of a fold in order, what the first of them starts from, and the term of each."""

    links: tuple[int, ...]
    first: Ref
    terms: tuple[Ref, ...]
    leaves: tuple[tuple[Ref | HoistedScalar, ...], ...]  # of each term
    own: frozenset[int]  # positions of the leaves that every term has for itself; the others are the same for all

    def inputs(self) -> set[int]:
        """The inputs that terms have for themselves."""
        own = (leaves[p] for leaves in self.leaves for p in self.own)
        return {leaf.position for leaf in own if isinstance(leaf, Ref)}


def member(code: Spec, numbers: Sequence[float], least: int) -> Member | None:
    """The family's form of a spec without its floats, if it has a fold of at least ``least`` terms and it is not too long.

    Of several folds the longest counts.
    """
    fold = _Folds(code).longest()
    if fold is None or not least <= len(fold.links) + 1 <= WIDTHS[-1]:
        return None
    if any(store.into in fold.inputs() for store in code.stores):  # a term that is there twice could be overwritten between
        return None
    return _Widened(code, numbers, fold).member()


class _Folds:
    """Finds folds in a spec."""

    def __init__(self, code: Spec) -> None:
        self.code = code
        self.uses = Counter(ref.position for op in code.ops for ref in references(op.args) if ref.kind == "op")
        self.uses.update(store.op for store in code.stores)
        self.before: dict[int, int] = {}  # the link before a link
        self.depth: dict[int, int] = {}  # links up to a link

    def longest(self) -> Fold | None:
        """The longest fold, the first of equal ones."""
        for position, op in enumerate(self.code.ops):
            if _is_link(op):
                self._link(position, op)
        chains = (self._chain(last) for last in sorted(set(self.depth) - set(self.before.values())))
        found = [fold for chain in chains if len(chain) > 1 for fold in self._folds(chain)]
        return max(found, key=lambda fold: len(fold.links), default=None)

    def _link(self, position: int, op: OpSpec) -> None:
        befores = [ref.position for ref in _sides(op) if ref.kind == "op" and self.uses[ref.position] == 1
                   and ref.position in self.depth and _rule(self.code.ops[ref.position]) == _rule(op)]
        self.depth[position] = 1 + max((self.depth[b] for b in befores), default=0)
        if befores:
            self.before[position] = max(befores, key=lambda b: self.depth[b])

    def _chain(self, last: int) -> list[int]:
        chain = [last]
        while chain[-1] in self.before:
            chain.append(self.before[chain[-1]])
        return chain[::-1]

    def _folds(self, chain: Sequence[int]) -> Iterator[Fold]:
        """The longest stretches of a chain whose terms are computed alike."""
        steps = [self._split(link, self.before.get(link)) for link in chain]
        terms = [self._term(term) for _, term in steps]
        (first, term), begin = steps[0], 0
        if len(_sides(self.code.ops[chain[0]])) == 2 and terms[0].form != terms[1].form:
            steps[0], terms[0] = (term, first), self._term(first)
        for end in range(1, len(chain) + 1):
            if end == len(chain) or terms[end].form != terms[begin].form:
                fold = self._fold(chain[begin:end], steps[begin:end], terms[begin:end])
                begin = end
                if fold is not None:
                    yield fold

    def _split(self, link: int, before: int | None) -> tuple[Ref, Ref]:
        """What a link starts from, and its term."""
        (_, left), (_, right), *_ = self.code.ops[link].args
        return (right, left) if right == Ref("op", before if before is not None else -1) else (left, right)

    def _fold(self, links: Sequence[int], steps: Sequence[tuple[Ref, Ref]], terms: Sequence[Term]) -> Fold | None:
        if len(links) < 2:
            return None
        places = list(zip(*(term.leaves for term in terms), strict=True))
        own = frozenset(p for p, leaves in enumerate(places) if isinstance(leaves[0], HoistedScalar) or len(set(leaves)) > 1)
        inputs = [places[p][0] for p in own if isinstance(places[p][0], Ref)]
        if not inputs or any(isinstance(leaf, Ref) and leaf.kind == "op" for leaf in inputs):
            return None
        return Fold(tuple(links), steps[0][0], tuple(term for _, term in steps), tuple(t.leaves for t in terms), own)

    def _term(self, ref: Ref) -> Term:
        leaves: dict[Ref | HoistedScalar, int] = {}
        return Term(self._form(ref, leaves), tuple(leaves))

    def _form(self, value: Any, leaves: dict[Ref | HoistedScalar, int]) -> Any:
        """A value without the names of what it is made from: those are the leaves."""
        if isinstance(value, tuple):
            return tuple(self._form(one, leaves) for one in value)
        if isinstance(value, HoistedScalar):
            return "number", value.inverse, leaves.setdefault(value, len(leaves))
        if not isinstance(value, Ref):
            return repr(value)
        if not self._inside(value):
            layout = self.code.inputs[value.position] if value.kind == "in" else ""
            return value.kind, str(layout), leaves.setdefault(value, len(leaves))
        op = self.code.ops[value.position]
        return op.target, self._form(op.args, leaves), op.shape, op.dtype

    def _inside(self, ref: Ref) -> bool:
        """Whether an op belongs to the one term that reads it: then it is computed for that term alone."""
        if ref.kind == "in" or self.uses[ref.position] > 1:
            return False
        row = lookup(overload(self.code.ops[ref.position].target))
        return row is not None and row.kind in (Kind.POINTWISE, Kind.VIEW)


def _is_link(op: OpSpec) -> bool:
    """Whether an op could be a step of a fold: two tensors and, whatever it is called with besides, numbers."""
    row = lookup(overload(op.target))
    return (row is not None and row.kind is Kind.POINTWISE and row.cast is Cast.OUTPUT and not row.raw and len(op.args) > 1
            and all(isinstance(value, Ref) == (k < 2) for k, (_, value) in enumerate(op.args)) and not op.guard)


def _sides(op: OpSpec) -> tuple[Ref, ...]:
    """The operands that may be what a link starts from."""
    (_, left), (_, right), *_ = op.args
    return (left, right) if commutes(overload(op.target), dict(op.args)) else (left,)


def _rule(op: OpSpec) -> Any:
    """What the links of a fold have in common. Floats that are arguments of the kernel may differ, as terms' may."""
    named = [(name, value.inverse if isinstance(value, HoistedScalar) else repr(value)) for name, value in op.args[2:]]
    return op.target, named, op.shape, op.dtype


class _Widened:
    """Writes a spec anew with a fold of as many terms as its family has, numbered in the order that outputs need.

    Operands that may change places are put in an order that does not depend on the fold's length.
    """

    def __init__(self, code: Spec, numbers: Sequence[float], fold: Fold) -> None:
        self.code, self.fold, self.values = code, fold, numbers
        self.width = next(width for width in WIDTHS if width > len(fold.links))
        self.least = max((width for width in WIDTHS if width < self.width), default=2)
        self.ops: list[OpSpec] = []
        self.inputs: list[int] = []
        self.numbers: list[float] = []
        self.placed: dict[Ref, Ref] = {}
        self.digests: dict[Ref, str] = {Ref("in", i): f"~{layout}" for i, layout in enumerate(code.inputs)}
        for position, op in enumerate(code.ops):
            self.digests[Ref("op", position)] = self._digest(position, op)

    def member(self) -> Member:
        for store in self.code.stores:
            self._visit(Ref("op", store.op))
        stores = tuple(replace(store, op=self.placed[Ref("op", store.op)].position,
                               into=None if store.into is None else self._place(Ref("in", store.into)).position)
                       for store in self.code.stores)
        reductions = sorted((self.placed[Ref("op", op)].position, dims) for op, dims in self.code.reductions)
        code = replace(self.code, inputs=tuple(self.code.inputs[i] for i in self.inputs), ops=tuple(self.ops),
                       reductions=tuple(reductions), stores=stores)
        return Member(len(self.fold.links) + 1, self.width, code, tuple(self.inputs), tuple(self.numbers))

    # ------------------------------------------------------------------ order

    def _digest(self, position: int, op: OpSpec) -> str:
        """What an op computes, whatever the length of the fold before it."""
        if position == self.fold.links[-1]:
            said: Any = "fold", self.digests[self.fold.first], self.digests[self.fold.terms[0]]
        else:
            said = [(name, self._said(value)) for name, value in self._ordered(op).args]
        return hashlib.sha256(f"{op.target} {said} {op.shape} {op.dtype}".encode()).hexdigest()[:16]

    def _said(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [self._said(one) for one in value]
        if isinstance(value, Ref):
            return self.digests[value]
        return "number" if isinstance(value, HoistedScalar) else repr(value)

    def _ordered(self, op: OpSpec) -> OpSpec:
        pair = op.args[:2]
        if not commutes(overload(op.target), dict(op.args)) or not all(isinstance(value, Ref) for _, value in pair):
            return op
        ordered = sorted((value for _, value in pair), key=lambda ref: self.digests[ref])
        return replace(op, args=(*((name, ref) for (name, _), ref in zip(pair, ordered, strict=True)), *op.args[2:]))

    def _visit(self, root: Ref) -> None:
        """Place an op and what it needs, operands first, without recursion (chains may be long)."""
        stack = [(root, False)]
        while stack:
            ref, ready = stack.pop()
            if ref in self.placed:
                continue
            if ref.kind == "in":
                self._place(ref)
            elif ready:
                self.placed[ref] = self._written(ref.position)
            else:
                stack.append((ref, True))
                stack.extend((needed, False) for needed in reversed(self._needed(ref.position)))

    def _needed(self, position: int) -> list[Ref]:
        if position != self.fold.links[-1]:
            return list(references(self._ordered(self.code.ops[position]).args))
        shared = (leaf for p, leaf in enumerate(self.fold.leaves[0]) if p not in self.fold.own)
        return [self.fold.first, *(leaf for leaf in shared if isinstance(leaf, Ref))]

    # ------------------------------------------------------------------ ops

    def _written(self, position: int) -> Ref:
        if position == self.fold.links[-1]:
            return self._folded()
        return self._add(self._ordered(self.code.ops[position]), self.placed)

    def _folded(self) -> Ref:
        """The whole fold. Terms that are not there are written as the last one is."""
        made = self._place(self.fold.first)
        for number in range(1, self.width):
            at = min(number, len(self.fold.links)) - 1
            link = self.code.ops[self.fold.links[at]]
            (left, _), (right, _), *rest = link.args
            term = self._copied(self.fold.terms[at], self._leaves(at))
            guarded = replace(link, args=((left, made), (right, term), *rest), guard=number if number > self.least else 0)
            made = self._add(guarded, {made: made, term: term})
        return made

    def _leaves(self, at: int) -> dict[Ref, Ref]:
        """What a term is made from: inputs of its own, and what is the same for all."""
        refs = ((p, leaf) for p, leaf in enumerate(self.fold.leaves[at]) if isinstance(leaf, Ref))
        return {leaf: self._input(leaf.position) if p in self.fold.own else self.placed[leaf] for p, leaf in refs}

    def _copied(self, ref: Ref, known: dict[Ref, Ref]) -> Ref:
        """The ops of a term, over leaves that are ``known``."""
        if ref not in known:
            op = self.code.ops[ref.position]
            known[ref] = self._add(op, known | {one: self._copied(one, known) for one in references(op.args)})
        return known[ref]

    def _place(self, ref: Ref) -> Ref:
        if ref not in self.placed:
            self.placed[ref] = self._input(ref.position)
        return self.placed[ref]

    def _input(self, position: int) -> Ref:
        self.inputs.append(position)
        return Ref("in", len(self.inputs) - 1)

    def _add(self, op: OpSpec, known: dict[Ref, Ref]) -> Ref:
        self.ops.append(replace(op, args=self._renamed(op.args, known)))
        return Ref("op", len(self.ops) - 1)

    def _renamed(self, value: Any, known: dict[Ref, Ref]) -> Any:
        if isinstance(value, tuple):
            return tuple(self._renamed(one, known) for one in value)
        if isinstance(value, HoistedScalar):
            self.numbers.append(self.values[value.position])
            return HoistedScalar(len(self.numbers) - 1, value.inverse)
        return known[value] if isinstance(value, Ref) else value
