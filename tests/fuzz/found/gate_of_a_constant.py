"""Both halves of what is gated are one number."""


def arguments():
    a0 = tensor((7, 8), 'float32', seed=116)
    return (a0,)


def program(p0):
    v0 = torch.cat([p0, p0, p0 * 2], 1)
    v0.zero_()
    v1 = torch.ops.aten.glu.default(v0.reshape((2, 2, 7, 6)), 0)
    return (v1,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
