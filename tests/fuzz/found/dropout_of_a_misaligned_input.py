"""On a GPU eager's dropout draws by the alignment of its operand, which a copy of the input does not have."""


def arguments(s0, s1, n0):
    a0 = tensor((s0, s1), 'float64', seed=86, layout='offset')
    a1 = tensor((s0, s1), 'float32', seed=762, layout='offset')
    i2 = tensor((2,), 'int64', seed=184, values='index')
    return (n0, a0, a1, i2,)


def program(n0, p1, p2, p3):
    v0 = p1[(p3 % 3)]
    v1 = p1.to(torch.float32).to(p1.dtype)
    v2 = torch.where(torch.arange(p2.shape[-1], device=p2.device) < 0, p2, p2)
    v4 = F.dropout(p2, 0.4)
    v5 = (v4 < max(n0, 0))
    v6 = v1.squeeze(0)
    v7 = v6[1:-1]
    v8 = torch.select_scatter(v7, v7.select(1, 0) + 1, 1, -1)
    v8.zero_()
    v9 = v8.to(torch.float64).to(v8.dtype)
    return (v0, v2, v5, v9, v0,)


CALLS = [(3, 8, 2), (3, 4, 0)]
DYNAMIC = None
OPTIONS = {'executors': 'triton', 'fallback_random': True}
RETAIN = True
