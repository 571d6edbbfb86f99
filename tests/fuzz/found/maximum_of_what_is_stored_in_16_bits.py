"""A gradient compares a maximum of 16-bit floats with what it was taken of, where another kernel has stored a part of that."""


def arguments(s0, s1, s2, n0):
    a0 = tensor((), 'float32', seed=141, grad=True)
    a1 = tensor((s0, s1, s2), 'float16', seed=994, grad=True)
    return (n0, a0, a1,)


def program(n0, p1, p2):
    v0 = F.silu(p2)
    v1 = 2 * n0 - 1 - p2
    v2, v3 = v1[..., :v1.shape[-1] // 2 * 2].tensor_split(2, -1)
    v4 = F.silu(v2) * v3
    v5 = torch.ops.aten.max.default(v4)
    v6 = torch.logical_xor(v4, v3)
    v7 = v3[:v3.shape[0] // 2 * 2, :v3.shape[1] // 2 * 2]
    v8 = v7.roll((-1, -1), (0, 1))
    v9 = v8.unflatten(1, (-1, 2)).unflatten(0, (-1, 2)).transpose(1, 2)
    v10 = v9.flatten(2, 3).flatten(0, 1)
    v11 = v10 - v10.mean(1, keepdim=True)
    v12 = v11.reshape(v9.shape).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return (v0, v5, v6, v12,)


CALLS = [(5, 5, 2, 5), (5, 5, 2, -1), (4, 1, 3, -1)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
RETAIN = True
