"""Several dimensions of an input are selected, and what is left is written to."""


def arguments():
    a0 = tensor((4, 5), 'float32', seed=269)
    a1 = tensor((4, 5, 3), 'float32', seed=270)
    return (a0, a1,)


def program(p0, p1):
    v0 = p0.select(-1, 4).select(0, -4)
    v0.sub_(-1)
    v1 = p1.select(0, 2).select(1, 1)
    v1.mul_(3)
    return (v0, v1)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
