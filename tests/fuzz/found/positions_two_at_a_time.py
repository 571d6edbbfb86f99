"""ptxas adds 0 to the halves of two positions at a time."""


def arguments():
    a0 = tensor((3, 3, 5, 5), 'float32', seed=644, values='positive', layout='strided', grad=True)
    a1 = tensor((3, 3, 5, 5), 'float64', seed=500, values='exact', layout='expanded', grad=True)
    return (a0, a1,)


def program(p0, p1):
    v0 = p1 * -0.5
    v1 = torch.empty_like(p0).fill_(1)
    v1[:] = p0[:] * 2
    v2 = v0.index_copy(1, torch.arange(v0.shape[1], device=v0.device)[1:], v0.index_select(1, torch.arange(v0.shape[1], device=v0.device)[1:]).flip(1))
    v3 = torch.ops.aten.upsample_bilinear2d_backward.default(v2.reshape(-1)[:168].reshape((2, 2, 7, 6)), [7, 6], [2, 2, 7, 2], False, 1.0, 3.3)
    v4 = v3 * v3
    v5 = torch.ops.aten.prod.default(v2)
    return (v5, v4)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
