"""A number that the host knows alone is compared with."""


def arguments(n0):
    a1 = tensor((), 'int64', seed=751)
    return (n0, a1,)


def program(n0, p3):
    v1 = (p3 < min(n0, 2))
    return (v1,)


CALLS = [(2,)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
