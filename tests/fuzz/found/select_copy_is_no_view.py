"""A copy of a view is returned."""


def arguments():
    a0 = tensor((24,), 'float32', seed=985)
    return (a0,)


def program(p0):
    v10 = torch.ops.aten.select_copy.int(p0.reshape((2, 3, 4)), -1, 2)
    return (v10,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
