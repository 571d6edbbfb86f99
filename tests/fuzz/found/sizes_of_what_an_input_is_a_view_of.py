"""An input that is a view: a graph is given what it is a view of, whose sizes torch cannot be asked to check."""


def arguments(s0, s1, s2):
    a0 = tensor((s0, 1, s2), 'float32', seed=375)
    a1 = tensor((s0, s1, s2), 'float32', seed=11)
    i2 = tensor((1,), 'int64', seed=835, values='index')
    return (a0, a0[1:], a1, i2,)


def program(p0, p1, p2, p3):
    v0 = p0.scatter(1, torch.zeros_like(p0, dtype=torch.int64)[:, :1], 3)
    v1 = torch.arange(p1.shape[0], device=p1.device, dtype=torch.float32)[:, None]
    v2 = (v1 < p1.shape[2])
    v3 = torch.randint_like(v1, 5)
    v4 = torch.nan_to_num(v3, None, None, None)
    v5 = p2[:, (p3 % 1)[:, None]]
    v6 = v5.index_add(3, (p3 % v5.shape[3]), v5.index_select(3, (p3 % v5.shape[3])))
    _v7 = ((torch.arange(3 * v6.shape[1] * 1, device=v6.device) * 5 % 7 - 3) / 4).to(v6.dtype).reshape(3, -1, 1, 1)
    _v8 = torch.zeros(3, device=v6.device, dtype=v6.dtype)
    _v9 = torch.ones(3, device=v6.device, dtype=v6.dtype)
    return (v0, v2, v4,)


CALLS = [(5, 2, 3), (5, 1, 5)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
