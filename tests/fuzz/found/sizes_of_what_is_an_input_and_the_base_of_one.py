"""An input and a view of it: the graph has other symbols for the sizes of the first than what torch checks of it."""


def arguments(s0, s1, s2):
    a0 = tensor((s0, s1, s2), 'float32', seed=423, values='exact', grad=True)
    return (a0, a0[1:],)


def program(p0, p1):
    v0 = torch.arange(p1.shape[0], device=p1.device, dtype=torch.float32)[:, None]
    v1 = F.pad(p0, [1, 3, 2, 3], value=0)
    return (v0, v1.sum(0).softmax(-1),)


CALLS = [(3, 3, 1), (3, 5, 5)]
DYNAMIC = None
OPTIONS = {'executors': 'triton'}
