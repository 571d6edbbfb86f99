"""Two of the results are one tensor in the graph, and one of these two has no gradient."""


def arguments():
    a0 = tensor((), 'float32', seed=140, grad=True)
    return (a0, a0,)


def program(p0, p1):
    v0 = torch.rsub(p1, 2, 0.5)
    v3 = v0.detach()
    v4 = v0.unsqueeze(0)
    return (v3, v4, p0,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
