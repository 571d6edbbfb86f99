"""Fold families: specs that differ only in the length of a fold, and share kernels of a few widths.

A fold is a chain of one op, ``((t0 + t1) + t2) + ...``, whose steps nothing else reads and whose terms, except ``t0``, are
computed alike from inputs of their own. A family's kernel has as many terms as its width. Terms from the argument ``count``
on are not loaded, and their steps pass the sum on unchanged: the results are bit for bit those of the fold's own kernel.

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
"""The numbers of terms that family kernels have; a fold takes the next one that is not smaller."""


@dataclass(frozen=True)
class Member(FoldFit):
    """A spec as a member of its fold family. ``code`` is the family's spec.

    ``inputs`` and ``hoisted`` are the arguments of ``code`` for this member: positions of the spec's own inputs, and values
    of its hoisted scalars.
    """

    code: Spec
    inputs: tuple[int, ...]  # per input of the code; terms that the member lacks repeat the last term's inputs
    hoisted: tuple[float, ...]


@dataclass(frozen=True)
class Term:
    """An operand of a step of a fold: how it is computed (``form``), and from which values, each once (``leaves``)."""

    form: Any
    leaves: tuple[Ref | HoistedScalar, ...]


@dataclass(frozen=True)
class Fold:
    """A fold: the positions of its steps (``links``), what the first one starts from, and the term of each step."""

    links: tuple[int, ...]
    first: Ref
    terms: tuple[Ref, ...]
    leaves: tuple[tuple[Ref | HoistedScalar, ...], ...]  # per term
    own: frozenset[int]  # positions of the leaves that differ between terms; the others are the same in all

    def inputs(self) -> set[int]:
        """Return the inputs that belong to single terms."""
        own_leaves = (leaves[p] for leaves in self.leaves for p in self.own)
        return {leaf.position for leaf in own_leaves if isinstance(leaf, Ref)}


def member(code: Spec, hoisted: Sequence[float], least: int) -> Member | None:
    """Return a spec as a member of its fold family, or None if it has no fold of ``least`` terms or more.

    Args:
        code: The spec, with hoisted scalars.
        hoisted: The values of the hoisted scalars.
        least: The least number of terms of a fold. Of several folds the longest counts.
    """
    fold = None if code.nests else _Folds(code).longest()
    if fold is None or not least <= len(fold.links) + 1 <= WIDTHS[-1]:
        return None
    if any(store.into in fold.inputs() for store in code.stores):  # an input that is read twice could be overwritten between
        return None
    return _Widened(code, hoisted, fold).member()


class _Folds:
    """Finds the folds of a spec."""

    def __init__(self, code: Spec) -> None:
        self.code = code
        self.uses = Counter(ref.position for op in code.ops for ref in references(op.args) if ref.kind == "op")
        self.uses.update(store.op for store in code.stores)
        self.before: dict[int, int] = {}  # the previous link of a link
        self.depth: dict[int, int] = {}  # the number of links up to and including a link

    def longest(self) -> Fold | None:
        """Return the longest fold, the first of equal ones; None without a fold."""
        for position, op in enumerate(self.code.ops):
            if _is_link(op):
                self._link(position, op)
        chains = (self._chain(last) for last in sorted(set(self.depth) - set(self.before.values())))
        folds = [fold for chain in chains if len(chain) > 1 for fold in self._folds(chain)]
        return max(folds, key=lambda fold: len(fold.links), default=None)

    def _link(self, position: int, op: OpSpec) -> None:
        """Note the previous link of a link: of two, the one at the end of the longer chain."""
        befores = [ref.position for ref in _sides(op) if ref.kind == "op" and self.uses[ref.position] == 1
                   and ref.position in self.depth and _rule(self.code.ops[ref.position]) == _rule(op)]
        self.depth[position] = 1 + max((self.depth[b] for b in befores), default=0)
        if befores:
            self.before[position] = max(befores, key=lambda b: self.depth[b])

    def _chain(self, last: int) -> list[int]:
        """Return the chain of links that ends with one, the first link first."""
        chain = [last]
        while chain[-1] in self.before:
            chain.append(self.before[chain[-1]])
        return chain[::-1]

    def _folds(self, chain: Sequence[int]) -> Iterator[Fold]:
        """Yield the longest stretches of a chain whose terms are computed alike."""
        steps = [self._split(link, self.before.get(link)) for link in chain]
        terms = [self._term(term) for _, term in steps]
        (start, term), begin = steps[0], 0
        if len(_sides(self.code.ops[chain[0]])) == 2 and terms[0].form != terms[1].form:
            steps[0], terms[0] = (term, start), self._term(start)
        for end in range(1, len(chain) + 1):
            if end == len(chain) or terms[end].form != terms[begin].form:
                fold = self._fold(chain[begin:end], steps[begin:end], terms[begin:end])
                begin = end
                if fold is not None:
                    yield fold

    def _split(self, link: int, before: int | None) -> tuple[Ref, Ref]:
        """Return what a link starts from, and its term."""
        (_, left), (_, right), *_ = self.code.ops[link].args
        return (right, left) if right == Ref("op", before if before is not None else -1) else (left, right)

    def _fold(self, links: Sequence[int], steps: Sequence[tuple[Ref, Ref]], terms: Sequence[Term]) -> Fold | None:
        """Return the fold of some links; None if its terms have no inputs of their own, or results of other ops."""
        if len(links) < 2:
            return None
        by_position = list(zip(*(term.leaves for term in terms), strict=True))
        own = frozenset(position for position, leaves in enumerate(by_position)
                        if isinstance(leaves[0], HoistedScalar) or len(set(leaves)) > 1)
        inputs = [by_position[p][0] for p in own if isinstance(by_position[p][0], Ref)]
        if not inputs or any(isinstance(leaf, Ref) and leaf.kind == "op" for leaf in inputs):
            return None
        return Fold(tuple(links), steps[0][0], tuple(term for _, term in steps), tuple(t.leaves for t in terms), own)

    def _term(self, ref: Ref) -> Term:
        leaves: dict[Ref | HoistedScalar, int] = {}
        return Term(self._form(ref, leaves), tuple(leaves))

    def _form(self, value: Any, leaves: dict[Ref | HoistedScalar, int]) -> Any:
        """Return how a value is computed, with numbers for the values it is computed from, which are added to ``leaves``."""
        if isinstance(value, tuple):
            return tuple(self._form(item, leaves) for item in value)
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
        """Return whether a value is computed for the one term that reads it, and is a part of that term."""
        if ref.kind == "in" or self.uses[ref.position] > 1:
            return False
        row = lookup(overload(self.code.ops[ref.position].target))
        return row is not None and row.kind in (Kind.POINTWISE, Kind.VIEW)


def _is_link(op: OpSpec) -> bool:
    """Return whether an op could be a step of a fold: its arguments are two tensors, followed by numbers if any."""
    row = lookup(overload(op.target))
    return (row is not None and row.kind is Kind.POINTWISE and row.cast is Cast.OUTPUT and not row.raw and len(op.args) > 1
            and all(isinstance(value, Ref) == (k < 2) for k, (_, value) in enumerate(op.args)) and not op.guard)


def _sides(op: OpSpec) -> tuple[Ref, ...]:
    """Return the operands that a link may start from: both if it commutes."""
    (_, left), (_, right), *_ = op.args
    return (left, right) if commutes(overload(op.target), dict(op.args)) else (left,)


def _rule(op: OpSpec) -> Any:
    """Return what all links of a fold have in common. Hoisted scalars may differ."""
    named = [(name, value.inverse if isinstance(value, HoistedScalar) else repr(value)) for name, value in op.args[2:]]
    return op.target, named, op.shape, op.dtype


class _Widened:
    """Rewrites a spec with a fold of as many terms as its family has; ops are numbered in the order that stores need.

    Operands of commutative ops are sorted by digests that do not depend on the fold's length.
    """

    def __init__(self, code: Spec, hoisted: Sequence[float], fold: Fold) -> None:
        self.code, self.fold, self.values = code, fold, hoisted
        self.width = next(width for width in WIDTHS if width > len(fold.links))
        self.least = max((width for width in WIDTHS if width < self.width), default=2)
        self.ops: list[OpSpec] = []
        self.inputs: list[int] = []
        self.hoisted: list[float] = []
        self.placed: dict[Ref, Ref] = {}
        self.digests: dict[Ref, str] = {Ref("in", i): f"~{layout}" for i, layout in enumerate(code.inputs)}
        for position, op in enumerate(code.ops):
            self.digests[Ref("op", position)] = self._digest(position, op)

    def member(self) -> Member:
        """Return the rewritten spec with its arguments."""
        for store in self.code.stores:
            self._visit(Ref("op", store.op))
        stores = tuple(replace(store, op=self.placed[Ref("op", store.op)].position,
                               into=None if store.into is None else self._place(Ref("in", store.into)).position)
                       for store in self.code.stores)
        reductions, scans = (tuple(sorted((self.placed[Ref("op", op)].position, dims) for op, dims in given))
                             for given in (self.code.reductions, self.code.scans))
        code = replace(self.code, inputs=tuple(self.code.inputs[i] for i in self.inputs), ops=tuple(self.ops),
                       reductions=reductions, stores=stores, scans=scans)
        return Member(len(self.fold.links) + 1, self.width, code, tuple(self.inputs), tuple(self.hoisted))

    # ------------------------------------------------------------------ order

    def _digest(self, position: int, op: OpSpec) -> str:
        """Return a digest of what an op computes, which does not depend on the length of the fold."""
        if position == self.fold.links[-1]:
            arguments: Any = "fold", self.digests[self.fold.first], self.digests[self.fold.terms[0]]
        else:
            arguments = [(name, self._argument(value)) for name, value in self._ordered(op).args]
        return hashlib.sha256(f"{op.target} {arguments} {op.shape} {op.dtype} {op.accuracy}".encode()).hexdigest()[:16]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [self._argument(item) for item in value]
        if isinstance(value, Ref):
            return self.digests[value]
        return "number" if isinstance(value, HoistedScalar) else repr(value)

    def _ordered(self, op: OpSpec) -> OpSpec:
        """Return an op with its operands sorted, if they commute."""
        pair = op.args[:2]
        if not commutes(overload(op.target), dict(op.args)) or not all(isinstance(value, Ref) for _, value in pair):
            return op
        ordered = sorted((value for _, value in pair), key=lambda ref: self.digests[ref])
        return replace(op, args=(*((name, ref) for (name, _), ref in zip(pair, ordered, strict=True)), *op.args[2:]))

    def _visit(self, root: Ref) -> None:
        """Write an op and what it needs, operands first, without recursion: chains may be long."""
        stack = [(root, False)]
        while stack:
            ref, ready = stack.pop()
            if ref in self.placed:
                continue
            if ref.kind == "in":
                self._place(ref)
            elif ready:
                self.placed[ref] = self._write(ref.position)
            else:
                stack.append((ref, True))
                stack.extend((needed, False) for needed in reversed(self._needed(ref.position)))

    def _needed(self, position: int) -> list[Ref]:
        """Return what has to be written before an op: of a fold what it starts from, and what all terms share."""
        if position != self.fold.links[-1]:
            return list(references(self._ordered(self.code.ops[position]).args))
        shared = (leaf for p, leaf in enumerate(self.fold.leaves[0]) if p not in self.fold.own)
        return [self.fold.first, *(leaf for leaf in shared if isinstance(leaf, Ref))]

    # ------------------------------------------------------------------ ops

    def _write(self, position: int) -> Ref:
        if position == self.fold.links[-1]:
            return self._write_fold()
        return self._add(self._ordered(self.code.ops[position]), self.placed)

    def _write_fold(self) -> Ref:
        """Write the whole fold; terms that the member lacks are written like its last one. Return the result."""
        total = self._place(self.fold.first)
        for number in range(1, self.width):
            at = min(number, len(self.fold.links)) - 1
            link = self.code.ops[self.fold.links[at]]
            (left, _), (right, _), *rest = link.args
            term = self._write_term(self.fold.terms[at], self._leaves(at))
            guarded = replace(link, args=((left, total), (right, term), *rest), guard=number if number > self.least else 0)
            total = self._add(guarded, {total: total, term: term})
        return total

    def _leaves(self, at: int) -> dict[Ref, Ref]:
        """Return the written leaves of a term: new inputs for its own ones, and those that all terms share."""
        refs = ((p, leaf) for p, leaf in enumerate(self.fold.leaves[at]) if isinstance(leaf, Ref))
        return {leaf: self._input(leaf.position) if p in self.fold.own else self.placed[leaf] for p, leaf in refs}

    def _write_term(self, ref: Ref, written: dict[Ref, Ref]) -> Ref:
        """Write the ops of a term, over leaves that are ``written``."""
        if ref not in written:
            op = self.code.ops[ref.position]
            operands = {operand: self._write_term(operand, written) for operand in references(op.args)}
            written[ref] = self._add(op, written | operands)
        return written[ref]

    def _place(self, ref: Ref) -> Ref:
        if ref not in self.placed:
            self.placed[ref] = self._input(ref.position)
        return self.placed[ref]

    def _input(self, position: int) -> Ref:
        self.inputs.append(position)
        return Ref("in", len(self.inputs) - 1)

    def _add(self, op: OpSpec, written: dict[Ref, Ref]) -> Ref:
        self.ops.append(replace(op, args=self._rename(op.args, written)))
        return Ref("op", len(self.ops) - 1)

    def _rename(self, value: Any, written: dict[Ref, Ref]) -> Any:
        """Return an argument over the rewritten spec; hoisted scalars get the next numbers."""
        if isinstance(value, tuple):
            return tuple(self._rename(item, written) for item in value)
        if isinstance(value, HoistedScalar):
            self.hoisted.append(self.values[value.position])
            return HoistedScalar(len(self.hoisted) - 1, value.inverse)
        return written[value] if isinstance(value, Ref) else value
