"""PyTorch's own tests for Inductor and AOTAutograd, run through dynafuse: ``make test-peer``, or ``python -m tests.peer --help``."""
