"""Keys of regions and the store of compiled kernels."""
