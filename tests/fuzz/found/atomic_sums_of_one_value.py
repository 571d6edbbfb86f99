"""The gradient of a copied sum is one value, which is added at many places."""


def arguments():
    a0 = tensor((1, 3, 3), 'float32', seed=776, grad=True)
    i1 = tensor((6,), 'int64', seed=840, values='index')
    return (a0, i1,)


def program(p0, p1):
    v0 = p0[:, :, (p1 % 3)]
    v4 = torch.ops.aten.sum.default(v0)
    v0.copy_(v4)
    return (v0,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
