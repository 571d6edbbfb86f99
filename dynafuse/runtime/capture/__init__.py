"""Capture of graphs as CUDA graphs, so that a call of a graph is one call of the host: option ``capture``."""
