"""A tiny policy and random rollouts for tests of the learner; also imported by the processes that they start."""

from __future__ import annotations

import numpy as np

from embodied.core.types import ActionSpec, EnvSpec, Trajectory, Unit, choose
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model
from embodied.learners.train_batch import build_batch
from embodied.policies import make_policy
from embodied.policies.config import MLPConfig
from embodied.runtime.collective import Alone

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
    finals = np.where(truncated.any(axis=2), r.normal(size=(T, N)), values[1:])
    return Trajectory(
        ids=np.arange(N),
        lengths=np.full(N, T),
        obs={"state": by_row(states)},
        actions=by_row(np.stack([o.actions for o in outs])),
        logprobs=by_row(np.stack([o.logprobs for o in outs])),
        values=by_row(values[:-1]),
        next_values=by_row(finals),
        rewards=by_row(r.normal(size=(T, N, C)) * mask),
        terminated=by_row(terminated),
        truncated=by_row(truncated),
        mask=by_row(mask),
        versions=np.zeros(T * N, np.int64),
        episodes=np.zeros(T * N, np.int64),
    )


def by_row(array):
    """[T, N, ...] -> [N * T, ...], row after row."""
    return array.swapaxes(0, 1).reshape(-1, *array.shape[2:])


def by_step(data: Trajectory) -> dict:
    """The arrays [T, N, ...] of a whole rollout, with the values [T + 1, N] of all that was seen."""
    fields = "actions logprobs values next_values rewards terminated truncated mask".split()
    arrays = {name: getattr(data, name) for name in fields} | {"obs": data.obs["state"]}
    stacked = {name: array.reshape(len(data.ids), T, *array.shape[1:]).swapaxes(0, 1) for name, array in arrays.items()}
    finals = stacked.pop("next_values")
    return stacked | {"values": np.concatenate([stacked["values"], finals[-1:]]), "final_values": finals}


def columns(data: Trajectory, cut: slice) -> Trajectory:
    return choose(data, data.ids[cut])


def batch_of(data: Trajectory, config, policy, collective=None, version=0, reference=None, **scored):
    """The batch of a rank that has these sequences; `policy`, or its model, learns."""
    model = policy if isinstance(policy, Model) else Model(policy, LearnerConfig())
    unit = Unit((), data.ids, **scored)
    return build_batch(data, unit, version, config, collective or Alone(), model, reference)
