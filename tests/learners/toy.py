"""A tiny policy and random rollouts for tests of the learner; also imported by the processes that they start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from embodied.core.types import ActionSpec, EnvSpec, Trajectory
from embodied.policies import make_policy
from embodied.policies.config import MLPConfig

ENV = EnvSpec(ActionSpec(3), state_dim=5)
T, N, C = 6, 4, 2


def make(seed=0, dtype="float64"):
    return make_policy(MLPConfig(hidden=(12, 12), chunk=C, dtype=dtype), ENV, seed)


def rollout(policy, seed) -> Trajectory:
    """Random data with episode ends of both kinds, some inside a chunk; log-probs and values are the policy's own."""
    r = np.random.default_rng(seed)
    terminated = r.random((T, N, C)) < 0.1
    truncated = (r.random((T, N, C)) < 0.1) & ~terminated
    mask = np.ones((T, N, C), bool)
    mask[:, :, 1] = ~(terminated | truncated)[:, :, 0]
    terminated &= mask
    truncated &= mask
    states = r.normal(size=(T, N, 5))
    outs = [policy.act({"state": s}, r.normal(size=(N, C * 3))) for s in states]
    values = np.stack([*(o.values for o in outs), policy.value({"state": r.normal(size=(N, 5))})])
    return Trajectory(
        env_ids=np.arange(N),
        obs={"state": states},
        actions=np.stack([o.actions for o in outs]),
        logprobs=np.stack([o.logprobs for o in outs]),
        values=values,
        final_values=np.where(truncated.any(axis=2), r.normal(size=(T, N)), 0.0),
        rewards=r.normal(size=(T, N, C)) * mask,
        terminated=terminated,
        truncated=truncated,
        mask=mask,
        versions=np.zeros((T, N), np.int64),
        episodes=np.zeros((T, N), np.int64),
    )


def columns(data: Trajectory, cut: slice) -> Trajectory:
    fields = "actions logprobs values final_values rewards terminated truncated mask versions episodes".split()
    cuts = {name: getattr(data, name)[:, cut] for name in fields}
    return replace(data, env_ids=data.env_ids[cut], obs={"state": data.obs["state"][:, cut]}, **cuts)
