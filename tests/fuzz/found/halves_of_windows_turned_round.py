def arguments(s0, s1, s2):
    a0 = tensor((s0, s1, s2), 'float32', seed=666)
    return (a0,)


def program(p2):
    v0 = torch.ops.aten.unfold_copy.default(p2.reshape(-1).reshape((2, 3, 4)), 1, 2, 2)
    v1 = torch.cat(v0.chunk(2, 0)[::-1], 0)
    return (v1,)


CALLS = [(2, 3, 4)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
