"""A size of an expression is 1 by a guard, and broadcasts."""


def arguments(s0, s1, s2):
    a0 = tensor((s0, s1, s2), 'float32', seed=773)
    return (a0,)


def program(p0):
    v3 = p0.diagonal(1, 0, 1)
    v6 = v3.flatten(0)
    v8 = v6 - v3
    return (v8,)


CALLS = [(1, 2, 2)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
