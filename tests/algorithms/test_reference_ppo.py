"""Our pure functions, put together as a learner does, give the weights of the single-file reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from embodied.algorithms.advantages import gae, merge_moments, moments, normalize
from embodied.algorithms.config import PPOConfig
from embodied.algorithms.losses import LossItems, loss_sum
from embodied.core.rng import minibatches, permutation
from embodied.learners.train_batch import owned
from embodied.learners.update import skip_remaining_epochs

from .reference_ppo import reference_update

T, N, C, A, D = 6, 4, 3, 2, 5
BASE = {"rollout_decisions": T, "minibatch_size": 7, "epochs": 3, "lr": 1e-2}


class TinyPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(0.3 * torch.randn(D, C * A + 1, dtype=torch.float64, generator=draw))
        self.log_std = nn.Parameter(torch.full((A,), -0.3, dtype=torch.float64))

    def forward(self, obs):
        out = torch.tanh(obs) @ self.weight
        return out[:, :-1].view(-1, C, A), self.log_std, out[:, -1]

    def score(self, obs, actions):
        mean, log_std, value = self(obs)
        normal = torch.distributions.Normal(mean, log_std.exp().expand_as(mean))
        return normal.log_prob(actions), normal.entropy(), value


def rollout(policy, iteration):
    """Random observations and rewards, actions by the policy; some episodes end, some inside a chunk."""
    rng = np.random.default_rng(iteration)
    obs = rng.normal(size=(T + 1, N, D))
    with torch.no_grad():
        mean, log_std, value = policy(torch.from_numpy(obs).view(-1, D))
        actions = mean + log_std.exp() * torch.from_numpy(rng.normal(size=mean.shape))
        logprobs = policy.score(torch.from_numpy(obs).view(-1, D), actions)[0]
    terminated, truncated, mask = np.zeros((T, N, C), bool), np.zeros((T, N, C), bool), np.ones((T, N, C), bool)
    terminated[1, 0, 1] = truncated[3, 1, 2] = truncated[2, 2, 0] = True
    mask[1, 0, 2:] = mask[2, 2, 1:] = False
    shape = (T + 1, N, C, A)
    return {
        "obs": obs[:-1],
        "actions": actions.numpy().reshape(shape)[:-1],
        "logprobs": logprobs.numpy().reshape(shape)[:-1],
        "values": value.numpy().reshape(T + 1, N),
        "final_values": np.where(truncated.any(2), rng.normal(size=(T, N)), 0.0),
        "rewards": np.where(mask, rng.normal(size=(T, N, C)), 0.0),
        "terminated": terminated,
        "truncated": truncated,
        "mask": mask,
    }


def our_update(policy, optimizer, batch, config, permutations, ranks=((0, 3), (3, 4))):
    """What a learner of two ranks computes: blocks of envs, merged moments, summed gradients. Returns epochs run."""
    blocks = [{k: v[:, slice(*rank)] for k, v in batch.items()} for rank in ranks]
    outcome = []
    for block in blocks:
        data = {k: block[k] for k in ("rewards", "terminated", "truncated", "mask", "values", "final_values")}
        outcome.append(gae(**data, gamma=config.gamma, lam=config.gae_lambda, level=config.advantage_level))
    over = merge_moments([moments(advantages, np.ones_like(advantages)) for advantages, _ in outcome])
    shares = []
    for (first_env, _), block, (advantages, returns) in zip(ranks, blocks, outcome, strict=True):
        flat = lambda x: torch.from_numpy(x.swapaxes(0, 1).reshape(-1, *x.shape[2:]))  # noqa: E731
        advantages = normalize(advantages, over) if config.normalize_advantages else advantages
        weights = torch.ones(advantages.size, dtype=torch.float64)
        played = {name: block[name] for name in ("logprobs", "mask")} | {"values": block["values"][:-1]}
        known = {name: flat(part) for name, part in played.items()}
        known |= {"advantages": flat(advantages), "returns": flat(returns), "weights": weights}
        shares.append((first_env * T, flat(block["obs"]), flat(block["actions"]), LossItems(**known)))
    for epoch, order in enumerate(permutations):
        kl = 0.0
        for minibatch in minibatches(order, config.minibatch_size):
            optimizer.zero_grad()
            for first, obs, actions, items in shares:
                ids = torch.from_numpy(owned(minibatch, np.arange(first, first + len(items.weights))))
                if len(ids):
                    mine = LossItems(**{name: part[ids] for name, part in vars(items).items() if part is not None})
                    loss, stats = loss_sum(*policy.score(obs[ids], actions[ids]), mine, config)
                    (loss / len(minibatch)).backward()
                    kl += stats["approx_kl"].item()
            if config.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
        if skip_remaining_epochs(kl / len(order), config.target_kl):
            return epoch + 1
    return len(permutations)


def train(update, config, updates=5):
    policy = TinyPolicy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, eps=config.adam_eps)
    epochs = []
    for iteration in range(updates):
        orders = [permutation(0, iteration, epoch, T * N) for epoch in range(config.epochs)]
        epochs.append(update(policy, optimizer, rollout(policy, iteration), config, orders))
    return nn.utils.parameters_to_vector(policy.parameters()).detach(), epochs


OPTIONS = [
    {},
    {"logprob_level": "action"},
    {"logprob_level": "action_dim", "entropy_coef": 0.02},
    {"advantage_level": "step", "gamma": 0.9, "gae_lambda": 0.8},
    {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.2, "value_clip": 0.05, "huber_delta": 0.5},
    {"normalize_advantages": False, "max_grad_norm": None, "value_coef": 0.2},
    {"target_kl": 0.02, "epochs": 6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "defaults")
def test_five_updates_equal_the_reference(options):
    config = PPOConfig(**BASE | options)
    expected, expected_epochs = train(reference_update, config)
    found, epochs = train(our_update, config)
    assert epochs == expected_epochs
    assert (found - expected).abs().max() < 1e-9


def test_every_set_of_options_gives_other_weights():
    finals = [train(our_update, PPOConfig(**BASE | options))[0] for options in OPTIONS]
    assert all((a - b).abs().max() > 1e-4 for a, b in itertools.combinations(finals, 2))


def test_a_target_kl_runs_fewer_epochs():
    epochs = train(our_update, PPOConfig(**BASE | OPTIONS[-1]))[1]
    assert 1 <= min(epochs) < 6
