"""On a GPU ptxas lost what is added to pairs of positions in 8 bits."""


def arguments(s0, s1, s2, s3):
    a1 = tensor((s0, s1, s2, s3), 'uint8', seed=63, values='positive')
    i3 = tensor((1,), 'int64', seed=321, values='index')
    i4 = tensor((6,), 'int64', seed=284, values='index')
    return (a1, i3, i4,)


def program(p2, p4, p5):
    v0 = F.pixel_shuffle(p2[:, :1].expand(-1, 4, -1, -1), 2)
    v1 = torch.eye(v0.shape[-1], device=v0.device)
    v2 = v1.repeat_interleave(2, 0)
    v4 = torch.round(v2, decimals=2)
    v5 = v2[..., :v2.shape[-1] // 2 * 2]
    v6 = torch.arange(v5.shape[-2], device=v5.device)[:, None] * 0.5 ** torch.arange(v5.shape[-1] // 2, device=v5.device)
    v7 = torch.cat((-v5[..., v5.shape[-1] // 2:], v5[..., :v5.shape[-1] // 2]), -1)
    v8 = v5 * torch.cat((v6, v6), -1).cos().to(v5.dtype) + v7 * torch.cat((v6, v6), -1).sin().to(v5.dtype)
    v9 = torch.lt(v7, 0.5)
    v10 = torch.asin(v8)
    v11 = F.embedding((p5 % v10.shape[0]), v10)
    v12 = torch.ones(v8.shape[-2], v8.shape[-1], device=v8.device, dtype=torch.bool).tril()
    v13 = F.softmax(v8.masked_fill(~v12, torch.finfo(v8.dtype).min), -1, dtype=torch.float32)
    return (v4, v9, v11, v13,)


CALLS = [(2, 4, 2, 3)]
DYNAMIC = False
OPTIONS = {'executors': 'triton'}
