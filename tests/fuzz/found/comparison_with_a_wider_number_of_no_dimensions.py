"""What has no dimensions is compared in the dtype of what has some."""


def arguments():
    a0 = tensor((1,), 'float32', seed=792)
    i1 = literal(0, 'int64')
    return (a0, i1)


def program(p0, p1):
    v0 = p0.to(torch.bfloat16)
    v1 = torch.ops.aten.index_select.default(p0.reshape(()), 0, p1)
    return (torch.ne(v0, v1),)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
