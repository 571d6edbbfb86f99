"""A constant attention mask to which something writes through a view is not what it was made as."""


def arguments():
    a1 = tensor((2, 1), 'float32', seed=603)
    return (a1,)


def program(p1):
    v2 = torch.ones(p1.shape[-2], p1.shape[-2], device=p1.device, dtype=torch.bool).tril()
    v2[0].fill_(1)
    v3 = F.scaled_dot_product_attention(p1, p1 * 0.5, p1, attn_mask=v2)
    return (v3,)


CALLS = [()]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
