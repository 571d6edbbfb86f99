"""A remainder has the sign of its divisor."""


def arguments(n0):
    a0 = tensor((), 'float32', seed=577)
    return (n0, a0,)


def program(n0, p1):
    v12 = p1.clamp(max=n0 % -3)
    return (v12,)


CALLS = [(1,)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
