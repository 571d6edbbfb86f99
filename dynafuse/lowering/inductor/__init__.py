"""The lowering to Inductor: C++ for CPU tensors, Triton of its own for those on a GPU."""
