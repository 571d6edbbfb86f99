"""LLVM makes 1 of a bfloat16 that is -1 by one bit."""


def arguments():
    a0 = tensor((2, 55), 'bfloat16', seed=935)
    return (a0,)


def program(p0):
    v0 = torch.sign(p0)
    v1 = torch.where(p0 < 0, -1, 0).to(torch.bfloat16)
    return (v0, v1)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
