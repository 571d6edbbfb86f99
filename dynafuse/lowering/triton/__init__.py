"""The Triton executor: a region becomes kernels written in Triton."""
