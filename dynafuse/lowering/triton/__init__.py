"""Lowering to Triton."""
