"""Prices of matrix products in padded sizes, and which of them pay.

What is padded for several products is paid for once, so products that share something are decided together: those whose
copies cost more than they save are left out one by one, and the others have to win by more than the model's error.

A copy moves what it reads and writes; along odd rows at a share of the bandwidth (``unaligned_share``). An operand that a
pointwise kernel makes for padded products is written padded by that kernel, for nothing. If rows have to be reduced first,
it is computed by a second kernel (``cones.py``), which costs what both kernels read. Other fused ops that read it, such as
the sum that is a bias's gradient, then read the padded tensor, which costs a read where they were fused with its maker.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.fx import GraphModule, Node

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import call_prediction, product_prediction
from dynafuse.cost.model import Prediction, objective, predict, streaming
from dynafuse.cost.products import COLUMNS, ROWS, Product
from dynafuse.fx import fake_mode_of, hint, is_view, looked_at
from dynafuse.lowering.registry import PREFERRED
from dynafuse.ops import Kind, is_library, lookup
from dynafuse.ops.overloads import written_to
from dynafuse.passes.cones import Cone, count
from dynafuse.passes.stride_readers import may_look_at_strides
from dynafuse.passes.strides import is_spread


@dataclass(frozen=True)
class Pad:
    """A tensor with zeros behind its last dimensions: ``amounts`` of them, the outermost dimension's first.

    ``turned`` tells that the tensor's last two dimensions are exchanged before.
    """

    source: Node
    turned: bool
    amounts: tuple[int, ...]

    @property
    def from_last(self) -> list[int]:
        """Return what ``constant_pad_nd`` takes: the zeros before and behind each dimension, the last dimension's first."""
        inner, *outer = reversed(self.amounts)
        return [0, inner, *([0, outer[0]] if outer and outer[0] else [])]

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the elements before and after."""
        shape = [hint(size) for size in self.source.meta["val"].shape]
        if self.turned:
            shape[-2:] = reversed(shape[-2:])
        grown = list(shape)
        for place, amount in enumerate(self.amounts, len(shape) - len(self.amounts)):
            grown[place] += amount
        return math.prod(shape), math.prod(grown)


@dataclass(frozen=True)
class Padding:
    """A product, its sizes before and after, by how much m, k and n grow, and what is padded by argument name."""

    node: Node
    before: Product
    after: Product
    more: tuple[int, ...]
    pads: Mapping[str, Pad] = field(hash=False)


@dataclass(frozen=True)
class Priced:
    """A padding that pays: predicted microseconds of the product before and after, and of the copies that it needs.

    Copies that several products share count for each. ``apart`` are those of its pads whose tensors a kernel computes padded
    that runs after the reductions on which they depend; ``reread`` those that other fused ops read instead of the tensors.
    """

    padding: Padding
    before_us: float
    after_us: float
    copies_us: float
    apart: frozenset[Pad]
    reread: frozenset[Pad]

    def __str__(self) -> str:
        copies = f", and {self.copies_us:.1f} for copies" if self.copies_us else ""
        return (f"in sizes {self.padding.after}, which takes {self.after_us:.1f} µs{copies}, instead of "
                f"{self.padding.before}, {self.before_us:.1f} µs")


def worthwhile(candidates: Sequence[Padding], module: GraphModule, device: Device, device_type: str | None,
               captured: bool, seen: int, alone: Collection[Node]) -> Sequence[Priced]:
    """Return the paddings that pay, in the order of the graph.

    Args:
        candidates: All products that could be padded, in the order of the graph.
        module: The graph.
        device: The device that is priced.
        device_type: The type of device whose tensors are fused; None if nothing is.
        captured: Whether the graph is to be recorded as a CUDA graph.
        seen: How many of the graph's results, the first ones, the caller sees.
        alone: The results that share memory with no others.
    """
    prices = Prices(module, device, device_type, captured, seen, alone, candidates)
    chosen = {padding for group in _sharing(candidates) for padding in prices.worthwhile(group)}
    return [prices.priced(padding) for padding in candidates if padding in chosen]


def _sharing(candidates: Sequence[Padding]) -> Iterator[list[Padding]]:
    """Yield the paddings in groups that share no padded tensor."""
    left = list(candidates)
    while left:
        group, pads = [left.pop(0)], set()
        for padding in group:  # which grows
            pads |= set(padding.pads.values())
            joined = [other for other in left if not pads.isdisjoint(other.pads.values())]
            group += joined
            left = [other for other in left if other not in joined]
        yield group


@dataclass(frozen=True)
class Prices:
    """Prices in one graph.

    ``seen`` tells how many of its results the caller sees, ``alone`` which share memory with no others; ``candidates`` are
    all products that could be padded.
    """

    module: GraphModule
    device: Device
    device_type: str | None
    captured: bool
    seen: int
    alone: Collection[Node]
    candidates: Sequence[Padding]

    def worthwhile(self, group: Collection[Padding]) -> Collection[Padding]:
        """Return the products of a group that are best padded, together; none if that gains less than the model's error."""
        chosen = list(group)
        while chosen:
            less = [[other for other in chosen if other is not padding] for padding in chosen]
            best = min(less, key=lambda fewer: self._waited(group, fewer))
            if self._waited(group, best) >= self._waited(group, chosen):
                break
            chosen = best
        gain = self._waited(group, ()) - self._waited(group, chosen)
        error = self.device.model_error * objective(self._padded(chosen), self.device, self.captured)
        return chosen if gain > error else ()

    def priced(self, padding: Padding) -> Priced:
        """Return a padding with its prices."""
        def us(prediction: Prediction) -> float:
            return prediction.captured_us if self.captured else prediction.device_us

        return Priced(padding, us(self._plain(padding)), us(self._product(padding)),
                      us(_sum([*map(self._pad, padding.pads.values()), self._result(padding)])),
                      frozenset(filter(self.is_apart, padding.pads.values())),
                      frozenset(filter(self.is_reread, padding.pads.values())))

    def _waited(self, group: Iterable[Padding], chosen: Collection[Padding]) -> float:
        """Predict what the user waits for beside the graph's other library calls, if some products of a group are padded."""
        plain = _sum(map(self._plain, (padding for padding in group if padding not in chosen)))
        others = self._library.less(_sum(map(self._plain, group)))
        return objective(others + plain + self._padded(chosen), self.device, self.captured)

    def _padded(self, chosen: Iterable[Padding]) -> Prediction:
        """Predict what padded products cost, with their copies."""
        chosen = list(chosen)
        pads = dict.fromkeys(pad for padding in chosen for pad in padding.pads.values())
        return _sum([*map(self._product, chosen), *map(self._pad, pads), *map(self._result, chosen)])

    @cached_property
    def _library(self) -> Prediction:
        """Predict what the graph's library calls cost, unpadded."""
        return _sum(call_prediction(node, _moved(node), self.device)
                    for node in self.module.graph.nodes if node.op == "call_function" and is_library(node.target))

    def _plain(self, padding: Padding) -> Prediction:
        return call_prediction(padding.node, _moved(padding.node), self.device)

    def _product(self, padding: Padding) -> Prediction:
        return product_prediction(padding.after, self.device)

    def _pad(self, pad: Pad) -> Prediction:
        """Predict what it costs to pad a tensor: a copy, unless the kernel that makes it can do so, or another one."""
        if not self._is_made_for_products(pad):
            return self._copy_of(pad)
        if not self._cone(pad.source).reductions:
            return self._read_again(pad, 0)
        return self._apart(pad) if self.is_apart(pad) else self._copy_of(pad)

    def is_apart(self, pad: Pad) -> bool:
        """Return whether a tensor is best computed in a kernel that pads it, after the reductions on which it depends."""
        cone = self._cone(pad.source)
        if not cone.reductions or cone.read_again is None or not self._is_made_for_products(pad):
            return False
        return self._apart(pad).device_us < self._copy_of(pad).device_us

    def is_reread(self, pad: Pad) -> bool:
        """Return whether other fused ops read what is padded instead of the tensor that is padded for products."""
        if not self._is_made_for_products(pad) or not self._other_readers(pad):
            return False
        return not self._cone(pad.source).reductions or self.is_apart(pad)

    def _apart(self, pad: Pad) -> Prediction:
        """Predict what it costs that a kernel of its own pads a tensor."""
        return self._read_again(pad, self._cone(pad.source).read_again or 0)

    def _read_again(self, pad: Pad, more: int) -> Prediction:
        """Predict what it costs to read some bytes again, and what is padded, if other fused ops read it."""
        if self._other_readers(pad):
            more += pad.sizes[0] * pad.source.meta["val"].dtype.itemsize
        return self._copy(more, False) if more else Prediction()

    def _cone(self, value: Node) -> Cone:
        return Cone.of(looked_at(value, is_view))

    def _copy_of(self, pad: Pad) -> Prediction:
        """Predict what a copy with zeros costs."""
        return self._copy(sum(pad.sizes) * pad.source.meta["val"].dtype.itemsize, pad.amounts[-1] > 0)

    def _is_made_for_products(self, pad: Pad) -> bool:
        """Return whether a pointwise kernel makes a tensor, and only products that may be padded and fused ops read it."""
        maker = looked_at(pad.source, is_view)
        row = lookup(maker.target)
        if row is None or row.kind is not Kind.POINTWISE or maker.meta["val"].device.type != self.device_type:
            return False
        return all(may_read_padded(reader, pad) for reader in self._other_readers(pad))

    def _other_readers(self, pad: Pad) -> set[Node]:
        """Return what reads a tensor, or what it is a view of, besides products that may be padded."""
        return set(_readers(looked_at(pad.source, is_view))) - self._products_of.get(pad.source, set())

    @cached_property
    def _products_of(self) -> Mapping[Node, set[Node]]:
        """Return the products that may be padded, by each tensor that they would have padded."""
        products: dict[Node, set[Node]] = {}
        for padding in self.candidates:
            for pad in padding.pads.values():
                products.setdefault(pad.source, set()).add(padding.node)
        return products

    def _result(self, padding: Padding) -> Prediction:
        """Predict what it costs to copy a result, because somebody needs the strides that it has without padding."""
        value = padding.node.meta["val"]
        with fake_mode_of([padding.node]):
            shape = list(value.shape)
            shape[ROWS], shape[COLUMNS] = shape[ROWS] + padding.more[0], shape[COLUMNS] + padding.more[2]
            view = value.new_empty(shape).narrow(ROWS, 0, value.shape[ROWS]).narrow(COLUMNS, 0, value.shape[COLUMNS])
            is_copied = view.stride() != value.stride() and self._is_copied(padding.node, view)
        bytes_ = math.prod(map(hint, value.shape)) * value.dtype.itemsize
        return self._copy(2 * bytes_, padding.more[2] > 0) if is_copied else Prediction()

    def _is_copied(self, node: Node, value: torch.Tensor) -> bool:
        """Return whether somebody needs the strides that a node has, and not those of ``value``."""
        outputs = self.module.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        if node in outputs[:self.seen] and not (node in self.alone and is_spread(value, node.meta["val"].stride())):
            return True
        if node in outputs and not all(isinstance(s, int) for s in value.stride()):
            return True
        return any(self._copies(user, node, value) for user in node.users if user.op != "output")

    def _copies(self, user: Node, node: Node, value: torch.Tensor) -> bool:
        if may_look_at_strides(user):
            return True
        if not is_view(user):
            return False
        args, kwargs = torch.fx.map_arg(
            (user.args, user.kwargs), lambda operand: value if operand is node else operand.meta["val"])
        try:
            view = user.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):  # no strides make it a view
            return True
        return self._is_copied(user, view)

    def _copy(self, moved: int, is_odd: bool) -> Prediction:
        """Predict what a kernel costs that moves so many bytes, on one side along rows that are ``odd``."""
        share = self.device.unaligned_share if is_odd else 1.0
        return predict(streaming(int(moved / share)), self.device, PREFERRED, compiled=True)


def may_read_padded(reader: Node, pad: Pad) -> bool:
    """Return whether a fused op may read a part of a padded tensor instead of the tensor itself."""
    row = lookup(reader.target)
    if row is None or not row.fusible or row.kind not in (Kind.POINTWISE, Kind.REDUCTION) or list(written_to(reader)):
        return False
    return not pad.turned and pad.source in reader.all_input_nodes


def _readers(node: Node) -> Iterator[Node]:
    """Yield what reads a tensor, also by way of views."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _moved(node: Node) -> int:
    """Return the bytes of a call's tensors."""
    tensors = {tensor: tensor.meta.get("val") for tensor in (node, *node.all_input_nodes)}
    return sum(count(tensor) * value.dtype.itemsize for tensor, value in tensors.items() if isinstance(value, torch.Tensor))


def _sum(parts: Iterable[Prediction]) -> Prediction:
    return sum(parts, Prediction())
