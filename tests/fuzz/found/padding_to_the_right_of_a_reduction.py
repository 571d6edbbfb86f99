"""The first element of a padded tensor is all of a reduction that its last reduction reads."""


def arguments(s0):
    a0 = tensor((s0,), 'float32', seed=333)
    return (a0,)


def program(p1):
    v1 = p1.max(-1).values
    v9 = v1.reshape(1, 1)
    v10 = torch.ops.aten.prod.dim_int(v9, 0, False)
    v11 = F.pad(v10, [1, 3], value=0)
    v13 = torch.ops.aten.all.dim(v11, -1, True)
    return (v13,)


CALLS = [(2,)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
