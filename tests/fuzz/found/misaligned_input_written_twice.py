"""What a kernel writes into a misaligned input after an eager op has, is written to the input, not to an aligned copy alone."""


def arguments():
    a2 = tensor((3,), 'float32', seed=737, layout='offset')
    i4 = tensor((1,), 'int64', seed=435, values='index')
    return (a2, i4,)


def program(p2, p4):
    p2[p2 < 0] = -1
    p2[(p4 % 33)] = 2
    return (p2,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
