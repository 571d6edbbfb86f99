"""Repeated layers: found in a Dynamo graph without marks, traced and compiled once, called as often as they occur.

``repeats`` finds where a sequence repeats itself, ``cuts`` where a graph may be cut and at what cost, ``price`` predicts
what a layer costs as a function of its own, and ``pieces`` splits the graph into functions that are compiled one by one.

Worked example: of a Llama with 32 layers, AOTAutograd traces what precedes the layers, one layer, and what follows them.
"""

from dynafuse.passes.layers.pieces import Piece, Pieces, take_apart

__all__ = ["Piece", "Pieces", "take_apart"]
