"""A part that is known to be empty, of a size that is not a number."""


def arguments(s1):
    a1 = tensor((s1,), 'float32', seed=518)
    return (a1,)


def program(p3):
    v0 = p3[2::2]
    v2 = v0[1:5]
    v4 = torch.tile(v2, (1,))
    return (v4,)


CALLS = [(3,)]
DYNAMIC = True
OPTIONS = {'executors': 'triton'}
