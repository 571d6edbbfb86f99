"""The backward is one cat of more operands than Python lets functions call one another."""


def arguments():
    a0 = tensor((515,), 'float32', seed=29, grad=True)
    return (a0,)


def program(p0):
    v1 = p0.split(3, 0)
    return (v1,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
