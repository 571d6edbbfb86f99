"""A bfloat16 that a kernel has not rounded yet, compared in float64: it is rounded by way of float32, which the interpreter needs."""


def arguments(s0):
    a0 = tensor((s0,), 'float64', seed=336)
    a1 = tensor((s0,), 'bfloat16', seed=652)
    return (a0, a1,)


def program(p0, p1):
    v0 = torch.ops.aten.hardsigmoid_backward.default(p1, p1)
    v1 = torch.ops.aten.leaky_relu_backward.default(p0, v0, 2, False)
    return (v1,)


CALLS = [(8,)]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
