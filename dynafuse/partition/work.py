"""The work of a region's kernel, as the cost model sees it: bytes, arithmetic, programs, class.

Worked example: ``x.sum(0)`` of ``bfloat16[8192, 1024]`` moves 16.8 MB, computes 8.4 million times, and is ``split``: a
kernel of 2,048 programs of 4,096 points, and one that combines what they leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeAlias

from torch.fx import Node

from dynafuse.cost.model import Work, streaming
from dynafuse.partition import legality
from dynafuse.partition.axes import Axis, AxisDims, leaves
from dynafuse.partition.iteration_space import Read, Spaces
from dynafuse.partition.kernel_class import (
    LONG_BESIDE_COLUMNS,
    PROCESSORS,
    REGISTER,
    SECTOR,
    RowsBeside,
    columns_of_program,
    combine_parts,
    combines_in_last_program,
    counted,
    goes_by_rows,
    reduction_class,
    rows_beside_columns,
)
from dynafuse.partition.legality import Member, Shape, product
from dynafuse.partition.places import Operand

Share: TypeAlias = Callable[[Operand], float]
"""How often an operand counts for each element of what reads it."""

POINTWISE_POINTS = 32  # points of a pointwise program: all of its loads are under way at once
LOAD_FLOPS = 8.0  # what could be computed while an element is loaded again: 0.2 ps for averages of 3 × 3 elements on an H200
TIMES_ACROSS = 16.0  # how many times as long they take torch where channels are neighbours: averages of 3 × 3 50 µs, not 6
TIMES_TURNED = 4.0  # the same where our windows read what they transpose: 0.7 ps, which convolutions took for a weight's
TIMES_IN_ROWS = 4.0  # how many times as long loads of windows take where rows are reduced: few lanes hold many elements
TIMES_BESIDE_COLUMNS = 28.0  # the same where columns are reduced as well: 1.7 ms for the gradient of 7 × 7, not 0.24
SPLIT_POINTS = 4096  # points of a program of a split reduction
SPLIT_COLUMNS = 128  # neighbouring columns that such a program takes
STATES_TIMES = 0.05  # how many times longer memory takes beside long rows for each further byte of a column's states
AGAIN_TIMES = 1.3  # how many times as long where rows are read again: both measured for norms over 5,120 to 20,480 elements
AGAIN_IN_COLUMNS = 0.6  # of what few programs of columns read that takes as long again, from a cache in part: 0.1 to 1.0
ALONG_IN_COLUMNS = 5.0  # how many times as long few of them take for what lies along columns: 4 and 8 for two batch norms
STORED_ALONG_COLUMNS = 4.0  # the same of many programs that store it: 80 µs for 29 MB and a third as much
NEAR = 32 << 20  # bytes of rows under way up to which they are in the second-level cache when they are read again
MOST_AGAIN = 4 * PROCESSORS  # rows up to which that takes time: norms of images in one kernel 1.2 to 1.8 of that in two
LONGEST_NEAR = 512  # elements of a column up to which one tile has all, which is near then
READ_TIMES = 1.6  # how many times as long reading takes at least, whether rows are stored or not: few loads are under way
LEAST_BALANCED = 8 * PROCESSORS  # rows from which on programs that have more to compute than others hold nobody up
COMPUTED: Share = attrgetter("computed")
BY_LONGEST: Share = attrgetter("computed_by_longest")
LOADED: Share = attrgetter("loaded")
LOADED_TOGETHER: Share = attrgetter("loaded_together")


@dataclass(frozen=True)
class Asked:
    """A region whose work is asked for: its iteration space and members, what it reads and stores, all that it computes.

    Everything is in an order that is the same in every process: of equal tensors the first one decides. ``times`` tells of
    nodes how often the code computes them, at different offsets, where that is more than once.
    """

    shape: Shape
    members: Sequence[Member]
    reads: Sequence[Read]
    sources: Collection[Node]
    outputs: Sequence[Node]
    closure: Sequence[Node]
    times: Mapping[Node, int]


def work_of(spaces: Spaces, asked: Asked) -> Work:
    """Predict the work of one kernel."""
    atomics = sum(spaces.point_count(member.node) for member in asked.members if spaces.adds(member.node))
    work = _without_atomics(spaces, asked)
    return replace(work, atomics=atomics) if atomics else work


def _without_atomics(spaces: Spaces, asked: Asked) -> Work:
    shape, count = asked.shape, len(asked.outputs)
    points = _points(spaces, asked)
    rows = _rows(spaces, asked, points)
    evaluations = _evaluations(spaces, asked, points, rows)
    loaded = LOADED_TOGETHER if shape.kind == "pointwise" else LOADED
    loading = _evaluations(spaces, asked, points, rows, loaded) if _is_loaded_otherwise(spaces, asked) else evaluations
    moved, flops = _moved(spaces, asked, evaluations), _flops(spaces, asked, evaluations, loading, points)
    if shape.reduced and rows < LEAST_BALANCED and _has_parts(spaces, asked):
        evaluations = _evaluations(spaces, asked, points, rows, BY_LONGEST)
        flops = _flops(spaces, asked, evaluations, evaluations, points)
    tensors = (spaces.tensor(n) for n in (*asked.sources, *asked.outputs))
    largest = max(tensors, key=lambda t: (t.bytes, t.dtype.itemsize), default=None)
    width, length = largest.dtype.itemsize if largest else 2, max(points // rows, 1)
    if shape.kind == "pointwise":
        return Work(moved, flops, max(points // POINTWISE_POINTS, 1), "pointwise", 1, width, 0, count)
    if shape.kind == "rowcol":
        moved = _moved_beside_columns(spaces, asked, moved, points)
        return Work(moved, flops, rows, "rowcol", 2, width, length, count)
    along, across = counted(*_contiguous_bytes(spaces, asked), points)
    splittable = _splits(spaces, asked)
    kernel_class = reduction_class(rows, length, along=along, across=across, splittable=splittable,
                                   is_static=_is_static(shape.reduced), flops=_flops_per_element(spaces, asked))
    programs = _programs(kernel_class, rows, points, width)
    is_again, by_rows = not splittable and not any(m.scanned for m in asked.members), goes_by_rows(along, across)
    is_walked_twice = is_again and kernel_class == "column" and length > LONGEST_NEAR
    if is_again:
        moved += _bytes_again(spaces, asked, kernel_class, programs, rows, length)
    if is_walked_twice:  # what is reduced is computed in both passes
        flops *= 2
    beside = 0
    if kernel_class == "row":
        beside = _bytes_beside(rows, across, width)
    elif kernel_class == "split" and not by_rows:
        beside = round((STORED_ALONG_COLUMNS - 1) * _contiguous_bytes(spaces, replace(asked, reads=()))[0])
    elif is_walked_twice and programs <= PROCESSORS:
        beside = round((ALONG_IN_COLUMNS - 1) * along)
    launches = _launches_of_split(rows, points, by_rows) if kernel_class == "split" else 1
    return Work(moved, flops, programs, kernel_class, launches, width, length, count, beside=beside)


def _bytes_again(spaces: Spaces, asked: Asked, kernel_class: str, programs: int, rows: int, length: int) -> int:
    """Count the bytes that are moved in the time in which rows or columns are read again, for what needs their results.

    Rows are still in the cache as long as all those under way have room there. Many programs hide that they have not.
    """
    of_row = length * sum(_read_along(spaces, asked.shape, asked.sources))
    if kernel_class == "column":
        return round(AGAIN_IN_COLUMNS * rows * of_row) if programs <= PROCESSORS and length > LONGEST_NEAR else 0
    is_far = rows <= MOST_AGAIN and min(rows, PROCESSORS) * of_row > NEAR
    return rows * of_row if kernel_class == "row" and is_far else 0


def _bytes_beside(rows: int, across: float, itemsize: int) -> int:
    """Count the bytes that are moved beside those that are asked for, where fewer rows than fill a sector are in a program.

    What is contiguous across the rows is moved in whole sectors, if only to the second-level cache.
    """
    in_sector = min(max(rows // PROCESSORS, 1), SECTOR // min(itemsize, SECTOR))
    return int(across) * (SECTOR // (itemsize * in_sector) - 1)


def _flops_per_element(spaces: Spaces, asked: Asked) -> float:
    """Count the arithmetic of an element that every op is computed for once, as the schedule of the kernel counts it."""
    known = (spaces.facts[node] for node in asked.closure)
    return sum(facts.row.flops_in(facts.call) for facts in known if facts.row)


def _launches_of_split(rows: int, points: int, by_rows: bool) -> int:
    """Count the kernels of a reduction whose rows are split over programs: one if the last of these combine the results."""
    rows_of_program = 1 if by_rows else SPLIT_COLUMNS
    splits = points // SPLIT_POINTS // -(-rows // rows_of_program)
    return 1 if combines_in_last_program(points, rows_of_program, max(splits, 2), states=1, warps=4) else 2


def rows_held(spaces: Spaces, shape: Shape, members: Sequence[Member], sources: Collection[Node]) -> RowsBeside | None:
    """Return how a row + column kernel takes its rows beside states of columns; None if these leave no room for them.

    What is computed from 16-bit floats takes four bytes each. Registers beyond the row's end, up to the next power of two,
    are constants, which the compiler drops.

    Args:
        spaces: The iteration spaces of the graph's nodes.
        shape: The region's iteration space.
        members: Its members.
        sources: What it reads; of these, tensors with fewer elements than it has points are not held.
    """
    read = _read_along(spaces, shape, sources)
    of_rows = [m.node for m in members if m.reduced and m.reduced != shape.columns]
    return rows_beside_columns(
        shape.length, read=sum(read), held=sum(max(REGISTER, size) for size in read), states=_states(spaces, shape, members),
        in_parts=not any(m.scanned for m in members) and combine_parts(spaces.facts[node].row for node in of_rows))


def _read_along(spaces: Spaces, shape: Shape, sources: Collection[Node]) -> list[int]:
    """Return the bytes of an element of each tensor that has one for each point."""
    points = product(shape.axes)
    return [t.dtype.itemsize for t in map(spaces.tensor, sources) if t.hint >= points]


def _states(spaces: Spaces, shape: Shape, members: Sequence[Member]) -> int:
    """Count the bytes of what a row + column kernel keeps of a column; of scans it holds the results of a row."""
    with_states = (m.node for m in members if m.scanned or m.reduced == shape.columns)
    return sum(max(REGISTER, spaces.tensor(node).dtype.itemsize) for node in with_states)


def _moved_beside_columns(spaces: Spaces, asked: Asked, moved: int, points: int) -> int:
    """Count the bytes that memory moves in the time that rows take beside states of columns.

    Of long rows a processor has one or two at a time, and the states leave few registers for loads under way.
    """
    shape = asked.shape
    if shape.length <= LONG_BESIDE_COLUMNS:
        return moved
    held = rows_held(spaces, shape, asked.members, asked.sources)
    if held is None:
        return moved
    times = 1 + STATES_TIMES * max(_states(spaces, shape, asked.members) - REGISTER, 0)
    times *= AGAIN_TIMES if held is RowsBeside.AGAIN else 1.0
    return round(times * max(moved, READ_TIMES * points * sum(_read_along(spaces, shape, asked.sources))))


def torch_work(spaces: Spaces, node: Node) -> Work:
    """Predict the work of torch's kernel for a node that could be fused; of a reduction in the class that ours would have.

    It takes two launches where it splits rows: the first clears the counters by which its programs wait for each other. A
    scan of a single row it splits as well, as ours never does.
    """
    tensors = [spaces.tensor(n) for n in {node: None, **dict.fromkeys(node.all_input_nodes)} if spaces.facts[n].tensor]
    points = spaces.tensor(node.all_input_nodes[0] if spaces.takes_rows(node) else node).hint
    moved, flops = sum(t.bytes for t in tensors), _flops_in_torch(spaces, node, points)
    if not spaces.takes_rows(node):
        return streaming(moved, flops)
    axes, reduced = _leaves(spaces.dims[node]), _leaves(spaces.reduced_axes(node))
    length = product(reduced)
    rows = product(axes) // max(length, 1)
    dims = zip(spaces.dims[node], spaces.tensor(node.all_input_nodes[0]).stride, strict=True)
    contiguous = any(stride == 1 and dim and leaves(dim)[-1] in reduced for dim, stride in dims)
    splittable = rows == 1 or not spaces.is_scan(node)
    kernel_class = reduction_class(rows, length, along=contiguous, across=not contiguous, splittable=splittable)
    itemsize = max(tensors, key=lambda t: t.bytes).dtype.itemsize
    programs, launches = _programs(kernel_class, rows, rows * length, itemsize), 2 if kernel_class == "split" else 1
    return Work(moved, flops, programs, kernel_class, launches, length=length)


# Sizes: by the example inputs, where some are dynamic -----------------------------------------------------------------


def _points(spaces: Spaces, asked: Asked) -> int:
    """Count the points of the iteration space."""
    if _is_static(asked.shape.axes):
        return product(asked.shape.axes)
    operands = (m.node.all_input_nodes[0] if m.reduced else m.node for m in asked.members)
    return max((spaces.tensor(operand).hint for operand in operands), default=1)


def _rows(spaces: Spaces, asked: Asked, points: int) -> int:
    """Count the rows that are reduced, each by itself; as many as points where nothing is."""
    reduced = asked.shape.reduced
    if _is_static(asked.shape.axes):
        return max(asked.shape.rows if reduced else points, 1)
    rows = (spaces.row_count(m.node) for m in asked.members if reduced and m.reduced == reduced)
    return max(1, next(rows, points))


def _leaves(dims: AxisDims) -> list[Axis]:
    return leaves(axis for dim in dims for axis in dim)


def _is_static(axes: Collection[Axis]) -> bool:
    return all(isinstance(axis.size, int) for axis in axes)


def _programs(kernel_class: str, rows: int, points: int, itemsize: int) -> int:
    """Count the programs of a kernel that reduces rows."""
    if kernel_class == "column":
        return -(-rows // columns_of_program(rows, itemsize))
    return max({"row": rows, "split": points // SPLIT_POINTS}[kernel_class], 1)


# What is moved and computed -------------------------------------------------------------------------------------------


def _moved(spaces: Spaces, asked: Asked, evaluations: Mapping[Node, float]) -> int:
    """Count bytes: of each source its parts, together no more than it has; the outputs.

    Of one that is only picked from no more counts than is loaded. What is computed where it is read, and picked from, loads
    no more of its own sources: ``log_softmax(x)[label]`` an element of ``x`` per row.
    """
    loaded: dict[Node, dict[Hashable, int]] = {source: {} for source in asked.sources}  # by what tells the part
    for read in asked.reads:
        if read.source in loaded:
            tensor, parts = spaces.tensor(read.source), loaded[read.source]
            share = min(1.0, evaluations.get(read.reader, read.points) / max(read.points, 1)) if read.reader else 1.0
            picked = min(tensor.bytes, math.ceil(share * read.elements) * tensor.dtype.itemsize)
            is_whole = read.dims is not None and share == 1.0
            part = read.elements_at or read.view or read.reader
            parts[part] = max(parts.get(part, 0), tensor.bytes if is_whole else picked)
    read_once = sum(min(spaces.tensor(source).bytes, sum(parts.values())) for source, parts in loaded.items())
    return read_once + sum(_written(spaces, n) for n in asked.outputs)


def _written(spaces: Spaces, node: Node) -> int:
    """Return the bytes of an output: of what is scattered into, no more than there are values."""
    tensor = spaces.tensor(node)
    if not spaces.is_scatter(node):
        return tensor.bytes
    return min(tensor.bytes, spaces.point_count(node) * tensor.dtype.itemsize)


def _flops(spaces: Spaces, asked: Asked, evaluations: Mapping[Node, float], loading: Mapping[Node, float], points: int
           ) -> float:
    """Count arithmetic, of all wherever it is computed, and loads again from a cache, of all wherever it is needed.

    Those are loads beyond one per point, and what is spread beyond one per element of it; what is transposed where windows
    read it counts several times. Lanes of pointwise kernels share what their windows have in common.
    """
    computed, spread = 0.0, _spread(spaces, asked)
    is_pointwise = asked.shape.kind == "pointwise"
    slower = TIMES_BESIDE_COLUMNS if asked.shape.kind == "rowcol" else TIMES_IN_ROWS
    loads: dict[tuple[Node | None, Node], float] = {}  # of an argument, by a node, or by all that pick from it
    for node, times in evaluations.items():
        computed += spaces.flops[node] * times
        for argument, operand in spaces.operands[node].items():
            if argument not in evaluations:
                reader = None if operand.is_picked else node
                each = operand.in_window if is_pointwise else operand.reach * (slower if operand.reach > 1 else 1.0)
                loads[reader, argument] = loads.get((reader, argument), 0.0) + loading[node] * each
    again = (count - _first_loads(spaces, argument, spread.get(reader, points), points)
             for (reader, argument), count in loads.items())
    turned = sum(times for node, times in loading.items() if times > points and spaces.annotated.turns(node))
    return computed + LOAD_FLOPS * (sum(max(count, 0.0) for count in again) + (TIMES_TURNED - 1) * turned)


def _first_loads(spaces: Spaces, argument: Node, elements: int, points: int) -> int:
    """Count the loads from memory of what a node of so many elements reads; what has fewer is not loaded with each."""
    tensor = spaces.facts[argument].tensor
    return min(points, elements) if tensor is not None and tensor.hint >= elements else points


def _spread(spaces: Spaces, asked: Asked) -> Mapping[Node | None, int]:
    """Return what is computed for each of several elements that repeat it, with how many elements there are of it."""
    members, spread = {member.node for member in asked.members}, dict[Node | None, int]()
    for node in reversed(asked.closure):
        own, elements = spaces.spread.get(node, {}), spread.get(node, 0)
        for argument in spaces.operands[node] if own or elements else ():
            count = own.get(argument, elements)
            if count and argument not in members:
                spread[argument] = max(spread.get(argument, 0), count)
    return spread


def _flops_in_torch(spaces: Spaces, node: Node, points: int) -> float:
    """Count the arithmetic of torch's kernel for a node, and the loads that go beyond one per point."""
    again = sum(max(operand.reach - 1, 0) * (1.0 if _is_innermost(spaces, argument) else TIMES_ACROSS)
                for argument, operand in spaces.operands[node].items())
    return points * (spaces.flops[node] + LOAD_FLOPS * again)


def _is_innermost(spaces: Spaces, node: Node) -> bool:
    """Return whether neighbours along a tensor's last dimension are neighbours in memory."""
    tensor = spaces.facts[node].tensor
    return tensor is None or not tensor.stride or tensor.stride[-1] == 1


def _evaluations(spaces: Spaces, asked: Asked, points: int, rows: int, share_of: Share = COMPUTED) -> Mapping[Node, float]:
    """Return how often each node is computed: what runs along the axes at all points, any other node wherever it is read.

    What is only computed for a part of something counts for that part (``COMPUTED``), or as often as if it were all
    (``BY_LONGEST``): so often it is for the programs that have that part, for which a kernel of few programs waits. What all
    lanes compute though some need it counts for all, or for those alone (``LOADED``): lanes that need nothing load nothing.
    What lanes load once for several points counts so (``LOADED_TOGETHER``), though they compute it for each.

    What is known per row is computed once for each, what only becomes a part of something, there. What is picked from counts
    for each reader that picks; what is read at several offsets in other ways, for each offset, but no more often than it is
    read: at two of three offsets a rotation reads a half of each row. A single element is computed once.
    """
    closure = frozenset(asked.closure)
    along = {member.node: float(rows if _is_per_row(member, asked.shape) else points) for member in asked.members
             if not _is_part(spaces, member, closure)}
    evaluations = dict.fromkeys(asked.closure, 0.0) | along
    once, picked = dict(evaluations), dict.fromkeys(asked.closure, 0.0)  # for the reader that asks most; for those that pick
    together = dict(picked)  # for all readers
    for node in reversed(asked.closure):
        at_offsets = min(once[node] * asked.times.get(node, 1), max(once[node], together[node]))
        evaluations[node] = min(max(evaluations[node], at_offsets), 1.0 if _is_single(spaces, node) else math.inf)
        for argument, operand in spaces.operands[node].items():
            if argument in evaluations:
                share = share_of(operand)
                once[argument] = max(once[argument], once[node] * share)
                reads = evaluations[node] * share
                together[argument] += reads * max(operand.reach, 1)
                if operand.is_picked:  # elsewhere than any other reader
                    reads = picked[argument] = picked[argument] + reads
                evaluations[argument] = max(evaluations[argument], reads)
    return evaluations


def _is_single(spaces: Spaces, node: Node) -> bool:
    """Return whether a node is a single element of what no rows are reduced for: a program computes it once."""
    facts = spaces.facts[node]
    is_reduced = facts.row is None or facts.row.kind.needs_rows
    return not is_reduced and facts.tensor is not None and facts.tensor.hint == 1


def _has_parts(spaces: Spaces, asked: Asked) -> bool:
    """Return whether something is computed for a part of what reads it."""
    return any(operand.computed < 1 for node in asked.closure for operand in spaces.operands[node].values())


def _is_loaded_otherwise(spaces: Spaces, asked: Asked) -> bool:
    """Return whether something is not loaded as often as it is computed: some lanes need it, or several points share it."""
    operands = (operand for node in asked.closure for operand in spaces.operands[node].values())
    return any(operand.is_mixed or operand.shared is not None for operand in operands)


def _is_part(spaces: Spaces, member: Member, closure: Collection[Node]) -> bool:
    """Return whether a member is computed for nothing but parts of what reads it, such as the pieces of a ``cat``."""
    shares = [operand.computed for reader in member.node.users if reader in closure
              if (operand := spaces.operands[reader].get(member.node)) is not None]
    return bool(shares) and max(shares) < 1 and not (member.stored or member.reduced)


def _is_per_row(member: Member, shape: Shape) -> bool:
    """Return whether a member is computed from what is known of a row, once for each."""
    return bool(shape.reduced) and not member.reduced and not member.out & shape.reduced


# How rows are reduced -------------------------------------------------------------------------------------------------


def _contiguous_bytes(spaces: Spaces, asked: Asked) -> tuple[int, int]:
    """Return the bytes that are contiguous along rows, and across them, as in schedules."""
    along = across = 0
    for node, dims in _accesses(spaces, asked):
        tensor = spaces.tensor(node)
        fastest = [leaves(dim)[-1] for dim, stride in zip(dims, tensor.stride, strict=True) if stride == 1 and dim]
        if fastest and fastest[0] in asked.shape.reduced:
            along += tensor.bytes
        elif fastest and fastest[0] in asked.shape.axes:
            across += tensor.bytes
    return along, across


def _accesses(spaces: Spaces, asked: Asked) -> Iterator[tuple[Node, AxisDims]]:
    """Yield the tensors, or views of them, that are written or read along whole axes, with these."""
    yield from ((node, spaces.out_dims(node)) for node in asked.outputs if not spaces.is_scatter(node))
    for read in asked.reads:
        if read.source in asked.sources and read.dims is not None:
            yield read.source, read.dims
        elif read.source in asked.sources and read.view is not None and read.view_dims is not None:
            yield read.view, read.view_dims


def _splits(spaces: Spaces, asked: Asked) -> bool:
    """Return whether rows can be split over programs: then nothing may need a row, or what is before it, before the end."""
    if any(m.scanned for m in asked.members):
        return False
    reductions = frozenset(m.node for m in asked.members if m.reduced)
    late = legality.after(spaces, asked.members, reductions)
    return not any(m.node in late and (m.reduced or m.out & asked.shape.reduced) for m in asked.members)
