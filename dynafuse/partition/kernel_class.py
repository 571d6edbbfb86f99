"""Which kernel reduces rows: decided here once, for the prices of regions and for the schedules of kernels.

Sizes that are only known at run time count as ``UNKNOWN_SIZE`` elements in both.

Worked example: the sum of ``x[64, 1024]`` over its last dimension is a ``row``, one program or less for each. That of
``x[64, 65536]`` is ``split``: 64 programs would leave half of the device idle. The sum of ``x[8192, 1024]`` over its
first dimension is ``split`` as well, that of ``x[512, 1024]`` a ``column``: in ``bfloat16``, 64 programs of 16.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from dynafuse.fx import UNKNOWN_SIZE
from dynafuse.ir import Size
from dynafuse.ops import Row
from dynafuse.ops.symbols import with_symbols_at

PROCESSORS = 132  # programs that fill a device of today; only a granularity, not a limit
COLUMN_PROGRAMS = 256  # columns per program's share of the device: a program of 64 has few loads in flight
SPLIT_ABOVE = 4096  # elements above which splitting a row over programs pays for a second kernel when rows are few
SPLIT_COLUMNS_FROM = 2048  # the same for columns, of which a program takes several
SPLIT_HEAVY_COLUMNS_FROM = 512  # the same where much is computed for an element: few programs compute longer than they load
HEAVY = 30.0  # operations per element, as the op table counts them, from which on that is so: an error function has 28
SECTOR = 32  # bytes that memory moves at least
LANES = 32  # of a warp
SMALL_SPLIT = 1 << 21  # points of a kernel up to which its last programs combine what all have left
COMBINED_IN_LANE = 64  # partial states in a lane of such a program, at most
MOST_COLUMNS = 64  # of a program while there are few, so that all processors have some
LEAST_COUNTED = 1 / 16  # bytes of a point from which on it matters how they lie in memory
MIXED = 0.12  # share of the bytes from which on accesses across the others count
MIXED_BESIDE_COLUMNS = 0.25  # the same where columns are reduced as well: rows that are taken together leave less room
LONGEST_AHEAD = 8192  # elements of a row up to which the next rows are loaded ahead
LONGEST_TOGETHER = 2048  # the same of rows up to which a program has registers for as many as fill sectors across them
FEW_ROWS = 4 * PROCESSORS  # rows up to which programs that take neighbours are too few, however long the rows are
REGISTER = 4  # bytes
LONG_BESIDE_COLUMNS = 4096  # elements of a row up to which two programs of few warps have room for it and states of columns
LONGEST_SHARED = 16384  # elements of a row up to which the next ones have room in shared memory
MANY_STATES = 2 * REGISTER  # bytes of a column's states from which on rows from there would leave too few registers
MOST_HELD = 208 << 10  # bytes of a processor's 256 KiB of registers that rows and states of columns may take, for the rest
MOST_WITH_NEXT = 240 << 10  # the same where rows are computed part by part, so that little else is held
MOST_LOADED = 200 << 10  # the same where rows are read again, which is too slow beside more states than those
OF_PARTS = frozenset({"sum", "mean", "max", "min", "var", "std"})  # reductions of rows that combine parts of these
LONGEST_BESIDE = 256  # elements of a row up to which a program holds enough to fill sectors across; twice if most lie along


def estimate(size: Size) -> int:
    """Return a size, with ``UNKNOWN_SIZE`` for each of its symbols, but at least 1."""
    return size if isinstance(size, int) else max(1, with_symbols_at(size, UNKNOWN_SIZE))


def is_mixed(along: float, across: float, share: float = MIXED) -> bool:
    """Return whether bytes that are contiguous along rows count, and those that are contiguous across them, too.

    Args:
        along, across: How many there are of each.
        share: Of the more the less are, where they begin to count.
    """
    return min(along, across) > share * max(along, across)


def counted(along: float, across: float, points: int) -> tuple[float, float]:
    """Return the bytes that count as contiguous along rows, and across them.

    Where there are few beside the points, as of all pairs of two vectors, they are in the cache wherever they lie: lanes
    walk rows then, so that a program needs no neighbouring ones.

    Args:
        along, across: Bytes that are contiguous along rows, and across them.
        points: How many points a kernel walks.
    """
    return (along, across) if along + across > points * LEAST_COUNTED else (along + across, 0.0)


def goes_by_rows(along: float, across: float) -> bool:
    """Return whether a program may take a single row: nothing much is contiguous across rows.

    Args:
        along, across: Bytes that are contiguous along rows, and across them.
    """
    return along >= across and not is_mixed(along, across)


def reduction_class(rows: int, length: int, *, along: float, across: float, splittable: bool, is_static: bool = True,
                    flops: float = 0.0) -> str:
    """Return the class of a reduction in one direction: ``row``, ``column`` or ``split``.

    Args:
        rows: How many independent results there are.
        length: Elements that each is reduced from.
        along: Bytes that are contiguous along the reduced axes, each tensor's once.
        across: Bytes that are contiguous along the others.
        splittable: Whether several programs may share a row: nothing needs a complete one before the end.
        is_static: Whether the length is known.
        flops: Operations per element, as the op table counts them.
    """
    by_rows = goes_by_rows(along, across)
    programs = rows if by_rows else rows // COLUMN_PROGRAMS
    long_column = SPLIT_HEAVY_COLUMNS_FROM if flops >= HEAVY else SPLIT_COLUMNS_FROM
    is_long = length > SPLIT_ABOVE if by_rows else length >= long_column
    if is_long and splittable and programs < 2 * PROCESSORS:
        return "split"
    # Few programs that take neighbouring rows would be slower than many that do not. Short rows fit beside one another.
    longest = LONGEST_AHEAD if along >= across else LONGEST_TOGETHER
    are_few = rows < 32 * PROCESSORS and (length <= longest or (rows <= FEW_ROWS and along >= across))
    are_short = length <= (2 * LONGEST_BESIDE if along >= 2 * across else LONGEST_BESIDE)
    are_held = is_mixed(along, across) and is_static and (are_few or are_short)
    return "row" if by_rows or are_held else "column"


def walks_whole_rows(kernel_class: str, programs: int, length: int) -> bool:
    """Return whether each of few programs takes a whole row, which several would share if nothing needed a complete one.

    Args:
        kernel_class: Of the kernel.
        programs: How many it has.
        length: Elements of a row.
    """
    return kernel_class == "row" and length > SPLIT_ABOVE and programs < 2 * PROCESSORS


def combine_parts(reductions: Iterable[Row | None]) -> bool:
    """Return whether rows may be computed part by part, given the rows of the op table of what reduces them."""
    return all(row is not None and row.reduction in OF_PARTS for row in reductions)


class RowsBeside(StrEnum):
    """How a program that keeps states of columns takes its rows, of which it computes one at a time.

    ``SHARED``: the next ones are copied to shared memory; those of the moment are held as what is computed with.
    ``NEXT``: the next ones are loaded into registers, and held as they were loaded until it is their turn.
    ``AGAIN``: as before, and those of the moment are read again, from the cache, once they have been reduced.
    """

    SHARED = "shared"
    NEXT = "next"
    AGAIN = "again"


def rows_beside_columns(length: int, *, read: int, held: int, states: int, in_parts: bool) -> RowsBeside | None:
    """Return how a program takes rows while it keeps states of columns; None if these leave no room for them.

    Args:
        length: Elements of a row.
        read: Bytes per element of what is read along rows, as it lies in memory.
        held: The same as what is computed with.
        states: Bytes of the states of a column.
        in_parts: Whether rows may be computed part by part.
    """
    is_long, many = length > LONG_BESIDE_COLUMNS, states >= MANY_STATES
    if in_parts and is_long and many and length * (states + held + read) <= MOST_WITH_NEXT:
        return RowsBeside.NEXT
    if length * (states + held) <= MOST_HELD and not (in_parts and is_long and (many or length > LONGEST_SHARED)):
        return RowsBeside.SHARED
    is_again = in_parts and is_long and states <= MANY_STATES and length * (states + read) <= MOST_LOADED
    return RowsBeside.AGAIN if is_again else None


def columns_of_program(columns: int, itemsize: int) -> int:
    """Return how many neighbouring columns a program reduces where there are few: enough programs, but whole sectors.

    Args:
        columns: How many there are.
        itemsize: Bytes of an element of the largest tensor.
    """
    fewest = SECTOR // min(itemsize, SECTOR)
    return min(max((1 << (columns // PROCESSORS).bit_length()) // 2, fewest), MOST_COLUMNS)


def combines_in_last_program(points: int, rows: int, splits: int, states: int, warps: int) -> bool:
    """Return whether the last of the programs that share rows combines what all have left, instead of a second kernel.

    That saves up to a microsecond, but each program waits for its counter: kernels of more work were measured to lose.

    Args:
        points: The points of the kernel's iteration space.
        rows: How many rows a program takes.
        splits: How many programs share them.
        states: What each leaves of a row.
        warps: Warps of a program.
    """
    held = rows * (1 << (splits - 1).bit_length()) * states
    return points <= SMALL_SPLIT and held <= COMBINED_IN_LANE * LANES * warps
