"""A number that is filled into float32 is rounded to it, whatever reads it."""


def arguments():
    a0 = tensor((2, 1), 'float64', seed=887)
    return (a0,)


def program(p1):
    v0 = p1 + torch.full((), 1 / 3, device=p1.device)
    v1 = p1 * torch.full((2, 1), 0.1, device=p1.device)
    return (v0, v1,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
