"""Two results of one graph share memory, and the next graph, of any size, writes to one of them."""


def arguments(s0):
    a0 = tensor((s0,), 'float32', seed=441)
    return (a0,)


def program(p0):
    v1 = p0.cos().flip(0)
    v2 = v1.transpose(0, 0)
    v2[v2 < 0] *= 2
    return (v1 + v2, v1)


CALLS = [(7,), (32,), (5,)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
