"""Attention that a model writes out, as products around a softmax, becomes a call of torch's attention where that is faster.

``scores.py`` knows what calls do to scores; ``join.py`` looks for a softmax of such between two products, and has both
forms priced. What comes out is attention as any model calls it: masks of it are looked at after that (``passes/masks``).
"""

from dynafuse.passes.attention.join import join_attention

__all__ = ["join_attention"]
