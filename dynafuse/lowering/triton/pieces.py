"""Tiles that begin anew where the pieces of a concatenation do, so that a program has a part of one piece alone.

It then branches to what that piece is made of (``control_flow.py``), and loads nothing under the mask of another one.

Worked example: of 216 and 216 channels beside one another, in tiles of 128, four programs begin at 0, 128, 216 and 344: the
last two at ``program * 128 - 40``, and they end at 432, those before at 216.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Points from ``begin`` to before ``end``, with the number of the first tile that has any of them."""

    begin: int
    end: int
    first: int

    def is_exact(self, block: int) -> bool:
        """Return whether tiles of so many points never reach beyond the end."""
        return (self.end - self.begin) % block == 0


def pieces_of(total: int, cuts: Sequence[int], block: int) -> list[Piece]:
    """Return the pieces of a dimension, each in tiles of its own.

    Args:
        total: How many points it has.
        cuts: The points at which pieces begin, but for the first.
        block: The points of a tile.
    """
    pieces, first = [], 0
    for begin, end in zip((0, *cuts), (*cuts, total), strict=True):
        pieces.append(Piece(begin, end, first))
        first += -(-(end - begin) // block)
    return pieces


def tile_count(total: int, cuts: Sequence[int], block: int) -> int:
    """Return how many tiles the pieces of a dimension take.

    Args:
        total, cuts, block: As for :func:`pieces_of`.
    """
    last = pieces_of(total, cuts, block)[-1]
    return last.first - (last.begin - last.end) // block


def is_begin(bound: int, cuts: Collection[int], count: int) -> bool:
    """Return whether tiles begin at a point of an axis, so that none has points on both sides.

    Args:
        bound: The point.
        cuts: Where tiles begin anew along the axis.
        count: Without such: as many points of it as a tile begins at a multiple of; 0 if that is not known.
    """
    return bound in cuts if cuts else count > 0 and bound % count == 0


def start_text(tile: str, program: str, pieces: Sequence[Piece], block: int) -> str:
    """Return the text of the first point of a tile.

    Args:
        tile: The tile dimension's name.
        program: The text of the program's number along it.
        pieces: Its pieces.
        block: The points of a tile.
    """
    beyond, before = "", 0  # points that tiles of the pieces before reach beyond the end of theirs
    for piece in pieces:
        after = piece.first * block - piece.begin
        if after != before:
            beyond, before = f"tl.where({program} >= {piece.first}, {after}, {beyond or 0})", after
    return f"{program} * {tile.upper()}BLOCK" + (f" - {beyond}" if beyond else "")


def end_text(tile: str, pieces: Sequence[Piece]) -> str:
    """Return the text of where the piece ends that a tile has a part of."""
    text = str(pieces[-1].end)
    for piece in reversed(pieces[:-1]):
        text = f"tl.where({tile}_first < {piece.end}, {piece.end}, {text})"
    return text
