"""Two numbers of a call, multiplied before there is a tensor: their product wraps as an integer of the dtype."""


def arguments():
    a1 = tensor((), 'int8', seed=149)
    return (a1,)


def program(p1):
    v7 = torch.sub(p1, 2, alpha=100)
    return (v7,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
