"""Planning bound a size."""


def arguments(s0, s1):
    a0 = tensor((s0, s1), 'float32', seed=151)
    i2 = tensor((1,), 'int64', seed=361, values='index')
    return (a0, i2,)


def program(p1, p3):
    v1 = p1.expand(2, -1, -1)
    v2 = v1[:, :, :5:3]
    v7 = v2[:, (p3 % 4)]
    return (v7,)


CALLS = [(2, 4)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
