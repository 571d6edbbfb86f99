"""Lowerings: a region becomes the code of one executor."""
