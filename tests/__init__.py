"""Tests, in the folders of what they test; what they share is in ``tests.support``."""
