"""The backend on CPU tensors as a user without a GPU meets it: Triton does not interpret, Inductor compiles C++."""

from __future__ import annotations

import pytest

from dynafuse.lowering.inductor import availability
from tests.support.processes import environment, python

SCRIPT = '''
import torch
from torch import nn
from dynafuse import backend
from tests.support import differential


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.5)


torch.manual_seed(0)
model = nn.Sequential(Block(), Block())
x = torch.randn(4, 16, 32)
graphs = differential.check(lambda x: model(x).softmax(-1), x.requires_grad_(), fallback_random=True, precise=False)
executors = {region.executor for graph in graphs for region in graph.plan.regions}
assert executors == {"inductor"}, executors


def checkpointed(a):
    drop = lambda t: nn.functional.dropout(t.exp().log(), 0.5)
    return torch.utils.checkpoint.checkpoint(drop, a, use_reentrant=False) * 1


a = torch.rand(9, 130).add(0.1).requires_grad_()
out = torch.compile(checkpointed, backend=backend.dynafuse)(a)
(gradient,) = torch.autograd.grad(out, a, torch.ones_like(out))
torch.testing.assert_close(gradient, (out != 0) * 2.0)
'''


@pytest.mark.skipif(not availability.find("cpu").available, reason=str(availability.find("cpu")))
def test_inductor_runs_the_regions_of_cpu_tensors() -> None:
    python("-c", SCRIPT, env=environment(interpreted=False), timeout=300)
