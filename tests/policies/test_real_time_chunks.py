"""Flow policies that make a chunk which continues the one before."""

import numpy as np
import pytest
import torch
from served_robot import served
from tiny_vla import ROBOT, build, noise, observe

from embodied.policies.config import RemoteConfig
from embodied.policies.remote.client import OpenEpisodes


def towards(actions, weights):
    return {"previous": {"actions": actions.astype(np.float32), "weights": weights.astype(np.float32)}}


def test_a_chunk_is_pulled_to_the_actions_before_as_the_published_rule_says():
    policy = build("smolvla", chunk=8, steps=3, dtype="float64")
    obs, given = observe(2), noise(policy, 2)
    plain = policy.act(obs, given, temperature=0.0).actions
    before, weights = plain[:, :4] + 0.5, np.array([[1, 1, 0.5, 0], [0, 0, 0, 0]])
    found = policy.act(obs | towards(before, weights), given, temperature=0.0).actions
    assert found[1] == pytest.approx(plain[1], abs=1e-6)  # a row without weights is as ever
    assert np.abs(found[0, :2] - before[0, :2]).mean() < np.abs(plain[0, :2] - before[0, :2]).mean()

    # The same by another way: time runs from 0 (noise) to 1, and the gradient is that of half the squared error.
    wanted = torch.zeros(2, 8, 8, dtype=torch.float64)
    wanted[:, :4, :3] = policy.action_scale.to_unit(torch.tensor(before.astype(np.float32)))
    share = torch.zeros(2, 8, 1, dtype=torch.float64)
    share[:, :4, 0] = torch.tensor(weights)
    x = torch.tensor(given[:, :64]).view(2, 8, 8)
    with torch.no_grad():
        seen = policy.read(obs)
    for step in range(3):
        tau = step / 3
        x.requires_grad_()
        flow = -policy.denoise(seen, x, torch.full((2,), 1 - tau, dtype=torch.float64))[1]
        final = x + (1 - tau) * flow
        (downhill,) = torch.autograd.grad(-(share * (wanted - final) ** 2).sum() / 2, x)
        spread = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        strength = min(5.0, (1 - tau) / (tau * spread)) if tau else 5.0
        x = (x + (flow + strength * downhill) / 3).detach()
    slow = policy.action_scale.from_unit(x[..., :3]).numpy()
    assert found == pytest.approx(slow, abs=5e-5)


def test_a_server_continues_chunks_as_its_policy_does():
    policy = build("smolvla", chunk=8, steps=2)
    obs = observe(1)
    with served(policy) as (address, _):
        episodes = OpenEpisodes(RemoteConfig(url=address, chunk_length=8), ROBOT)
        episodes.end("sim", set())
        for episode in range(2):
            episodes.begin("sim", episode, "go")
        first, other = (episodes.of("sim", episode) for episode in range(2))
        plain = episodes.act([first], obs)
        pulled = episodes.act([other], obs | towards(plain[:, :4] + 0.5, np.ones((1, 4))))
        episodes.close()
    assert plain.shape == pulled.shape == (1, 8, 3)
    assert np.abs(pulled - plain)[0, :4].mean() > 0.05
