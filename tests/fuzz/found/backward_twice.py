"""A backward that is retained runs twice."""


def arguments():
    a1 = tensor((), 'float32', seed=486, grad=True)
    a2 = tensor((), 'float32', seed=208)
    return (a1, a2,)


def program(p1, p2):
    v1 = torch.copysign(p1, p2)
    return (v1,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
RETAIN = True
