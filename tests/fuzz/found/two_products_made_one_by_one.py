"""Two equal products, each returned: torch traces a product of one matrix as one of a batch, and decomposes it."""


def arguments(s1, s2):
    a0 = tensor((1, s1, s2), 'float32', seed=308, layout='offset')
    return (a0,)


def program(p1):
    v0 = torch.einsum('...ij,...kj->...ik', p1, p1)
    v3 = torch.einsum('...ij,...kj->...ik', p1, p1)
    return (v0, v3,)


CALLS = [(2, 4)]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
