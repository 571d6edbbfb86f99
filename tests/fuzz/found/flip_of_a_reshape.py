"""A flipped reshape of another reshape."""


def arguments():
    a0 = tensor((4, 2, 3), 'float32', seed=807)
    return (a0,)


def program(p0):
    v8 = torch.ops.aten.flip.default(p0.reshape((2, 3, 4)), [0, -1])
    return (v8,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
