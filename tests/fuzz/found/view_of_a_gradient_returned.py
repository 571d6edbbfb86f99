"""A view of one of several gradients of a library is returned, and another one computed from it: not in its memory."""


def arguments():
    a0 = tensor((5, 2, 5), 'float32', seed=957, values='exact', grad=True)
    a1 = tensor((5, 2, 5), 'float32', seed=856, layout='channels_last', grad=True)
    return (a0, a1,)


def program(p0, p1):
    v0 = torch.addcmul(p0, p1, p1, value=1)
    v1 = v0[None, ...]
    v2 = torch.arange(2 * v1.shape[1] * 9, device=v1.device).to(v1.dtype).reshape(2, -1, 3, 3)
    v5 = F.conv2d(v1, v2, padding=1, stride=1)
    return (v5,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
