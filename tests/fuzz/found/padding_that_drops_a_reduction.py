"""A reduction of which a padding leaves nothing is needed beside it, too."""


def arguments():
    a0 = tensor((2, 1, 1), 'float32', seed=399)
    return (a0,)


def program(p0):
    v0 = torch.ops.aten.std.correction(p0, [-3], correction=0, keepdim=True)
    v4 = F.pad(v0, [-1, 1], value=0)
    v9 = torch.abs(v0)
    return (v4, v9,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
