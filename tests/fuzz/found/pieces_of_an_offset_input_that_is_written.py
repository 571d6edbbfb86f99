"""A result is a view of an input that begins within its memory, and that is written afterwards."""


def arguments(s1):
    a0 = tensor((1, s1), 'float32', seed=440, layout='offset')
    return (a0,)


def program(p0):
    v1 = p0.split([1, p0.shape[1] - 1], 1)
    p0[:, :4] *= 2
    return v1


CALLS = [(4,), (6,)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
