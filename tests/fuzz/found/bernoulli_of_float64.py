"""Eager draws it in float64."""


def arguments():
    a1 = tensor((2,), 'float64', seed=598)
    return (a1,)


def program(p1):
    v3 = torch.bernoulli(torch.full_like(p1, 0.3))
    return (v3,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton', 'fallback_random': True}
