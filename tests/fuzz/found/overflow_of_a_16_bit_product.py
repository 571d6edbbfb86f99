"""Eager overflows in between; what is held in float32 does not."""


def arguments():
    a1 = tensor((5, 4), 'float16', seed=131, grad=True)
    return (a1,)


def program(p1):
    v2 = torch.reciprocal(p1)
    return (v2,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton', 'fallback_random': True}
