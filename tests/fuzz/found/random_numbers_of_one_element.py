"""The place of a single element is a literal."""


def arguments():
    a0 = tensor((), 'float32', seed=662)
    return (a0,)


def program(p0):
    v0 = torch.bernoulli(torch.full_like(p0, 0.3))
    v1 = torch.rand_like(p0)
    v2 = torch.randint_like(p0, 5)
    v3 = F.dropout(p0, 0.4)
    return (v0, v1, v2, v3)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
CHECK = 'reproducible'
