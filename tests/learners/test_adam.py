"""Our Adam is torch's, without what torch's class brings along."""

import subprocess
import sys

import pytest
import torch

from embodied.algorithms.config import PPOConfig
from embodied.learners.model import Adam, PolicyOptimizer
from embodied.runtime.collective import Alone

RUN = """
import sys
from embodied.train import main
given = ["recipe=pointmass_ppo", "cluster.backend=inline", "run.iterations=1", "eval.episodes=1", "eval.videos=0"]
code = main([*given, "run.dir=" + sys.argv[1]])
slow = {"torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp"}
raise SystemExit(code or " ".join(slow & sys.modules.keys()) or 0)
"""


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_its_steps_are_those_of_torch(decay):
    generator = torch.Generator().manual_seed(3)
    shapes = [(7, 5), (5,), (3, 2, 2)]
    ours, theirs = ([torch.ones(shape) for shape in shapes] for _ in range(2))
    mine = Adam([ours[:2], ours[2:]], 1e-5, (0.9, 0.95), decay)
    groups = [{"params": theirs[:2]}, {"params": theirs[2:]}]
    torchs = torch.optim.AdamW(groups, eps=1e-5, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator) if a.ndim > 1 or step % 2 else None
            b.grad = a.grad
        for group, lr in zip(torchs.param_groups, (1e-2, 3e-3 / (step + 1)), strict=True):
            group["lr"] = lr
        mine.step([1e-2, 3e-3 / (step + 1)])
        torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert all(torch.equal(mine.state[a][key], torchs.state[b][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_the_norm_of_a_large_gradient_is_whole():
    """A float32 sum of 16 million squares is 0.16% short, its root 0.08%."""
    layer = torch.nn.Linear(2**12, 2**12, bias=False)
    layer.parameter_groups = lambda: {"policy": [layer.weight], "value": []}
    grad = torch.randn(2**12, 2**12, generator=torch.Generator().manual_seed(0)) * 1e-4
    layer.weight.grad = grad.clone()
    _, norm = PolicyOptimizer(layer, PPOConfig(), Alone()).exchange(torch.zeros(1))
    assert norm == pytest.approx(float(grad.double().norm()), rel=5e-5)


def test_a_learner_of_a_small_network_does_not_import_the_compiler(tmp_path):
    """It would take longer than the first iterations."""
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
