"""A tiled tensor beside its mirror, of a size that is not known: offsets are valued where a remainder would be negative."""


def arguments(s0):
    a0 = tensor((s0,), 'float32', seed=355, layout='channels_last')
    return (a0,)


def program(p2):
    v0 = F.pad(p2[None], [2, 1], mode='reflect')
    v1 = torch.tile(v0, (2,))
    v2 = torch.cat([v1 * 2, v1], 1)
    v3 = torch.cat([v2, v2.flip(0), v0, v2.flip(0)], 1)
    v4 = v3.roll(-3, 0)
    v5 = torch.copysign(v2, v2)
    v6 = v3 - v3
    v6.repeat(1, 2)
    return (v4, v5,)


CALLS = [(4,)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
