"""Two views of what is not returned, once replayed, are views of something of its sizes again: the next graph asks for those."""


def arguments(s0):
    a2 = tensor((s0,), 'float16', seed=266, values='exact')
    return (a2,)


def program(p3):
    v0 = torch.cat([p3, p3[: p3.shape[0] // 2]], 0)
    v2 = v0.roll(-3, 0).squeeze(-1)
    v4 = v2.flatten(0).unfold(0, 1, 1)
    v5 = torch.ops.aten._logcumsumexp.default(p3, -1)
    v8 = v2.to(torch.float32).chunk(2, 0)[0]
    v11, v12 = v8[..., :v8.shape[-1] // 2 * 2].chunk(2, -1)
    return (v4, v5, F.silu(v11) * v12)


CALLS = [(3,)]
DYNAMIC = True
OPTIONS = {'executors': 'triton', 'capture': 'always'}
