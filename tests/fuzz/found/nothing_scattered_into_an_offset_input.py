"""A scatter of nothing is dropped; what it returns is a view of an input that begins elsewhere."""


def arguments():
    a0 = tensor((2, 1, 4), 'float32', seed=689, layout='offset')
    return (a0,)


def program(p0):
    v0 = torch.slice_scatter(p0, p0[:, 1:] * 2, 1, 1)
    v2 = torch.ops.aten.expand.default(v0.reshape((2, 1, 4)), [5, 2, 3, 4])
    return (v2,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
