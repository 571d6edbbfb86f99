"""Attention that a model writes out, as products around a softmax, becomes a call of torch's attention where that is faster.

``scores.py`` knows what calls do to scores; ``join.py`` looks for a softmax of such between two products, and has both
forms priced. What is added to scores becomes a bias in ``bias.py``; ``writing.py`` writes the calls.

Worked example: ``softmax(q @ k.mT / 8, -1) @ v`` becomes ``scaled_dot_product_attention(q, k, v, scale=1 / 8)``.
"""

from dynafuse.passes.attention.join import join_attention

__all__ = ["join_attention"]
