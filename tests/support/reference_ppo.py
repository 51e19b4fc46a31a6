"""PPO in one file that shares no code with the toolkit: what the learner's updates are compared with, in float64.

Written for checking, not for speed: advantages in scalar loops, the loss item by item.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def reference_update(policy, optimizer, batch: dict[str, np.ndarray], config, permutations: list[np.ndarray]) -> int:
    """One PPO update of `policy` in place; returns the number of epochs that ran.

    policy(obs [B, ...]) returns means [B, C, A], log_std (broadcastable to them) and values [B]; optimizer is any
    torch.optim.Optimizer. `batch` holds obs, actions, logprobs, values, final_values, rewards, terminated, truncated
    and mask, shaped as in Trajectory. `config` is read by attribute. permutations: per epoch, item ids env * T + t.
    """
    horizon, num_envs = batch["final_values"].shape
    advantages, returns = advantages_and_returns(batch, config)
    if config.normalize_advantages:
        advantages = (advantages - np.mean(advantages)) / (np.std(advantages) + 1e-8)

    def items(field):  # [T, N, ...] -> [N * T, ...]
        return torch.as_tensor(np.stack([field[t, n] for n in range(num_envs) for t in range(horizon)]))

    obs, actions, old_logp, mask = (items(batch[name]) for name in ("obs", "actions", "logprobs", "mask"))
    old_value, advantage, target = items(batch["values"][:-1]), items(advantages), items(returns)
    for epoch, order in enumerate(permutations):
        kl = 0.0
        for start in range(0, len(order), config.minibatch_size):
            chosen = torch.as_tensor(order[start : start + config.minibatch_size])
            mean, log_std, value = policy(obs[chosen])
            log_std = log_std.expand_as(mean)
            z = (actions[chosen] - mean) / log_std.exp()
            logp = -0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)
            entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
            loss = torch.zeros((), dtype=mean.dtype)
            for i, item in enumerate(chosen.tolist()):
                steps = mask[item]
                new, old = logp[i][steps], old_logp[item][steps]
                loss = loss + policy_loss(to_level(new, config), to_level(old, config), advantage[item], config)
                loss = loss + config.value_coef * value_loss(value[i], old_value[item], target[item], config)
                loss = loss - config.entropy_coef * to_level(entropy[i][steps], config).mean()
                kl += float(((new - old).exp() - 1 - (new - old)).sum().detach())
            optimizer.zero_grad()
            (loss / len(chosen)).backward()
            if config.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
        if config.target_kl is not None and kl / len(order) > config.target_kl:
            return epoch + 1
    return len(permutations)


def advantages_and_returns(batch, config):
    horizon, num_envs = batch["final_values"].shape
    advantages = np.zeros((horizon, num_envs))
    for n in range(num_envs):
        later = 0.0
        for t in reversed(range(horizon)):
            steps = [c for c in range(batch["mask"].shape[2]) if batch["mask"][t, n, c]]
            per_step = config.advantage_level == "step"
            rewards = [batch["rewards"][t, n, c] for c in steps]
            reward = sum(r * config.gamma**i for i, r in enumerate(rewards)) if per_step else sum(rewards)
            power = len(steps) if per_step else 1
            ended, cut = batch["terminated"][t, n].any(), batch["truncated"][t, n].any()
            follow = 0.0 if ended else batch["final_values"][t, n] if cut else batch["values"][t + 1, n]
            later = 0.0 if ended or cut else later
            delta = reward + config.gamma**power * follow - batch["values"][t, n]
            later = advantages[t, n] = delta + (config.gamma * config.gae_lambda) ** power * later
    return advantages, advantages + batch["values"][:-1]


def to_level(numbers, config):
    """[steps, A] to one number per unit."""
    return {"action_dim": numbers.flatten(), "action": numbers.sum(1), "chunk": numbers.sum().reshape(1)}[
        config.logprob_level
    ]


def policy_loss(new, old, advantage, config):
    ratio = torch.exp(new - old)
    gain = torch.min(ratio * advantage, torch.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage)
    if config.dual_clip is not None and advantage < 0:
        gain = torch.max(gain, config.dual_clip * advantage)
    return -gain.mean()


def value_loss(value, old, target, config):
    def penalty(error):
        if config.huber_delta is None:
            return error**2 / 2
        return torch.nn.functional.huber_loss(error, torch.zeros_like(error), delta=config.huber_delta)

    if config.value_clip is None:
        return penalty(value - target)
    clipped = old + torch.clip(value - old, -config.value_clip, config.value_clip)
    return torch.max(penalty(value - target), penalty(clipped - target))
