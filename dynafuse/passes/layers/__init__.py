"""Repeated layers: found in a Dynamo graph without a mark, traced and compiled once, called as often as they stand there.

``repeats`` finds where a sequence repeats itself, ``cuts`` where a graph may be cut and what that costs, ``pieces`` takes it
apart into functions that are compiled one by one.

Worked example: of a Llama with 32 layers, AOTAutograd sees what stands before the layers, one layer, and what comes after.
"""

from dynafuse.passes.layers.pieces import Piece, Pieces, take_apart

__all__ = ["Piece", "Pieces", "take_apart"]
