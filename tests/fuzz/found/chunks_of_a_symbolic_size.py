"""Pieces of a dimension whose size is a symbol."""


def arguments():
    a0 = tensor((1, 3), 'float32', seed=765)
    return (a0,)


def program(p0):
    v8 = torch.cat(p0.chunk(2, 1), 1)
    return (v8,)


CALLS = [()]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
