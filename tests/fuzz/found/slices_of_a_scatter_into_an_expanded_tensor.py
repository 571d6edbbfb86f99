"""Torch up to 2.12 says of the scatter that its elements share memory."""


def arguments():
    a0 = tensor((2,), 'float32', seed=54, layout='expanded')
    return (a0,)


def program(p0):
    v0 = torch.slice_scatter(p0, p0[1:] * 2, 0, 1)
    v2 = torch.tensor_split(v0, 3, 0)
    return (v2,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
