"""PPO on conversations: advantages from values, token by token, whoever has them and however they are packed."""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.algorithms.advantages import token_gae
from embodied.algorithms.config import PPOConfig
from embodied.core.types import BatchEnd, Unit, choose, env_blocks
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.train_batch import build_batch
from embodied.learners.update import GradientSteps, update_policy
from embodied.learners.worker import LearnerWorker
from embodied.profiling.role_probe import Items
from embodied.runtime import Timers
from embodied.runtime.collective import Alone, Threads
from embodied.runtime.rendezvous import InProcessRendezvous

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from speaking_policy import MAX_TOKENS, Judging, talks

GROUPS, SIZE = 5, 3
EPISODES = GROUPS * SIZE
BASE = {"groups": GROUPS, "group_size": SIZE, "epochs": 1, "minibatch_size": None, "lr": 1e-2, "adam_eps": 0.1}
BASE |= {"max_grad_norm": None, "name": "ppo", "gamma": 0.9, "gae_lambda": 0.8}


def algo(**options):
    return PPOConfig(**BASE | options)


def scored_talks(stale=0.2):
    """Conversations of two turns with a reward for each; -> these, and their scores, of which some are lower."""
    data, draw = talks(Judging(), GROUPS, SIZE, stale=stale), np.random.default_rng(5)
    sampled = data.mask[:, 0]
    ends = np.flatnonzero(sampled & ~np.append(sampled[1:], False) | np.isin(np.arange(len(sampled)), lasts(data)))
    data.rewards[ends, 0] = draw.normal(size=len(ends))
    earned = np.add.reduceat(data.rewards[:, 0], np.cumsum(data.lengths) - data.lengths)
    return data, earned - np.where(np.arange(EPISODES) % 4 == 0, 0.7, 0.0)


def lasts(data):
    return np.cumsum(data.lengths) - 1


def share_of(policy, data, scores, config, ranks=1, rank=0, collective=None, reference=None, **options):
    """What one of so many ranks learns from, with this policy's values."""
    block = env_blocks(GROUPS, ranks)[rank]
    mine = data.ids[block.start * SIZE : block.stop * SIZE] if len(block) else data.ids[:1]
    unit, frozen = Unit((), mine, None, scores[mine], not block), reference and Model(reference, LearnerConfig())
    model = Model(policy, LearnerConfig(**options))
    return build_batch(choose(data, mine), unit, 0, config, collective or Alone(), model, frozen)


def trained(data, scores, config, ranks=1, reference=None, **options):
    """Weights and numbers of every rank after an update with these conversations."""
    room, found = InProcessRendezvous(ranks, 30.0), {}

    def work(rank):
        collective = Threads(room, rank) if ranks > 1 else Alone()
        policy = Judging()
        share = share_of(policy, data, scores, config, ranks, rank, collective, reference, **options)
        model, optimizer = Model(policy, LearnerConfig(**options)), PolicyOptimizer(policy, config, collective)
        found[rank] = policy.state_dict(), update_policy(model, optimizer, config, share, 0, BatchEnd(0, 10))

    together(work, ranks)
    return [found[rank] for rank in range(ranks)]


def together(work, ranks):
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def far(ours, theirs):
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def estimated(policy, reference, data, scores, config):
    """By conversation: its sampled tokens, their advantages and returns, each the sum that defines it, and values."""
    found = []
    for number, end in enumerate(lasts(data) + 1):
        rows = np.arange(end - data.lengths[number], end)
        tokens = torch.from_numpy(data.actions[rows, 0, 0]).long()
        at = np.flatnonzero(data.mask[rows, 0])
        if config.truncated == "mask" and data.truncated[rows].any():
            at = at[:0]
        values = policy.valued(tokens).detach().numpy()[at]
        rewards = data.rewards[rows[at], 0].copy()
        if len(at):
            rewards[-1] += scores[number] - rewards.sum()
        if reference is not None and config.kl_in == "reward":
            away = data.logprobs[rows, 0, 0] - reference.scored(tokens)[0].detach().numpy()
            rewards -= config.kl_coef * away[at]
        deltas = rewards + config.gamma * np.append(values[1:], 0.0)[: len(at)] - values
        fade = config.gamma * config.gae_lambda
        advantages = np.array([sum(fade ** (j - i) * deltas[j] for j in range(i, len(at))) for i in range(len(at))])
        found.append((rows, at, advantages, advantages + values, values))
    every = np.concatenate([advantages for _, _, advantages, _, _ in found])
    mean, spread = (every.mean(), every.std() + 1e-8) if config.normalize_advantages else (0.0, 1.0)
    return [(rows, at, (adv - mean) / spread, returns, values) for rows, at, adv, returns, values in found]


def by_hand(policy, judge, data, scores, config, reference=None):
    """The loss, token by token; `judge` are the weights that the update starts from."""
    total, count = 0.0, 0
    for rows, at, advantages, returns, values in estimated(judge, reference, data, scores, config):
        if not len(at):
            continue
        tokens, mask = torch.from_numpy(data.actions[rows, 0, 0]).long(), torch.from_numpy(at)
        logprobs, entropy = (part[mask] for part in policy.scored(tokens))
        old = torch.from_numpy(data.logprobs[rows, 0, 0])[mask]
        gains = torch.from_numpy(advantages)
        ratio = (logprobs - old).exp()
        if config.logprob_level == "episode":
            ratio = (logprobs - old).mean().exp().expand(len(old))
        if config.clip == "two_sided":
            bounds = 1 - config.clip_low, 1 + config.clip_high
            gain = torch.minimum(ratio * gains, ratio.clamp(*bounds) * gains)
            if config.dual_clip is not None:
                gain = torch.where(gains < 0, gain.maximum(config.dual_clip * gains), gain)
        else:
            gain = ratio.clamp(max=config.ratio_cap) * gains
        target, before, now = torch.from_numpy(returns), torch.from_numpy(values), policy.valued(tokens)[mask]

        def error(guess, target=target):
            apart = (guess - target).abs()
            if config.huber_delta is None:
                return apart**2 / 2
            bound = config.huber_delta
            return torch.where(apart <= bound, apart**2 / 2, bound * (apart - bound / 2))

        worth = error(now)
        if config.value_clip is not None:
            worth = worth.maximum(error(before + (now - before).clamp(-config.value_clip, config.value_clip)))
        cost = -gain + config.value_coef * worth - config.entropy_coef * entropy
        if reference is not None and config.kl_in == "loss":
            d = logprobs - reference.scored(tokens)[0][mask].detach()
            cost = cost + config.kl_coef * ((-d).exp() - 1 + d)
        if config.weighting == "episode":
            total, count = total + cost.mean(), count + 1
        else:
            total, count = total + cost.sum(), count + len(at)
    return total / (EPISODES * MAX_TOKENS if config.weighting == "constant" else count)


OPTIONS = [
    {},
    {"normalize_advantages": False, "gamma": 1.0, "gae_lambda": 1.0},
    {"weighting": "episode", "entropy_coef": 0.02},
    {"weighting": "constant", "value_coef": 2.0},
    {"value_clip": 0.3},
    {"value_clip": 0.3, "huber_delta": 0.2, "truncated": "mask"},
    {"logprob_level": "episode", "clip_low": 0.03, "clip_high": 0.04},
    {"clip": "aipo", "ratio_cap": 1.2},
    {"dual_clip": 1.3},
    {"kl_coef": 0.3},
    {"kl_coef": 0.3, "kl_in": "reward"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_gradient_is_that_of_the_loss_written_out_token_by_token(options):
    config, (data, scores) = algo(**options), scored_talks()
    reference = Judging(seed=3) if config.kl_coef else None
    share = share_of(Judging(), data, scores, config, reference=reference, pack_tokens=20)
    ours, theirs = Judging(seed=1), Judging(seed=1)  # after some steps, in which values have moved
    steps = GradientSteps(Model(ours, LearnerConfig(pack_tokens=20)), None, config)
    steps.add(share, torch.arange(EPISODES), share.divisor(EPISODES))
    loss = by_hand(theirs, Judging(), data, scores, config, reference)
    loss.backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-12, rtol=1e-9, msg=name)
    whole = torch.arange(len(share))
    scores_now = Model(theirs, LearnerConfig()).score(share.inputs(whole))
    found, _ = share.loss_sum(scores_now, 1.0, config)
    assert found.item() / share.divisor(EPISODES) == pytest.approx(loss.item(), rel=1e-12)
    assert len(ours.seen) > 3 and min(float(p.grad.abs().max()) for p in ours.parameters()) > 1e-4


def counting_what_the_env_said(rewards, values, sampled, lengths, *levels):
    return token_gae(rewards, values, np.ones_like(sampled), lengths, *levels)


def of_conversations_that_are_one(rewards, values, sampled, lengths, *levels):
    return token_gae(rewards, values, sampled, np.array([lengths.sum()]), *levels)


def of_values_one_token_late(rewards, values, *about):
    return token_gae(rewards, np.append(values[1:], 0.0), *about)


@pytest.mark.parametrize(
    "fault",
    [counting_what_the_env_said, of_conversations_that_are_one, of_values_one_token_late],
    ids=lambda f: f.__name__,
)
def test_another_estimate_would_be_noticed(fault, monkeypatch):
    config, (data, scores) = algo(normalize_advantages=False), scored_talks()
    known = share_of(Judging(), data, scores, config).advantages
    monkeypatch.setattr("embodied.learners.train_batch.token_gae", fault)
    found = share_of(Judging(), data, scores, config).advantages
    assert float((found - known)[torch.from_numpy(data.mask[:, 0])].abs().max()) > 0.1


def test_advantages_go_from_one_sampled_token_to_the_next():
    """The example of `token_gae`, beside a conversation without a sampled token and one that begins with one's end."""
    sampled = np.array([0, 0, 1, 1, 0, 1, 0, 0, 0, 1], bool)
    rewards = np.array([0.0, 0, 0, 1, 0, 2, 9, 9, 0, 5])
    advantages, returns = token_gae(rewards, np.full(10, 4.0), sampled, np.array([6, 2, 2]), 0.5, 0.5)
    assert advantages.tolist() == [0, 0, -2.375, -1.5, 0, -2, 0, 0, 0, 1]
    assert returns.tolist() == [0, 0, 1.625, 2.5, 0, 2, 0, 0, 0, 5]


@pytest.mark.parametrize("options", [*OPTIONS, {"decoupled": True, "importance_cap": 1.05}], ids=str)
def test_packs_and_ranks_change_nothing(options):
    config = algo(**options | {"epochs": 2, "minibatch_size": 2 * SIZE})
    data, scores = scored_talks()
    reference = Judging(seed=3) if config.kl_coef else None
    (weights, numbers), *_ = trained(data, scores, config, reference=reference)
    assert far(weights, Judging().state_dict()) > 1e-3
    for ranks, tokens in ((1, 1), (2, 4096), (3, 15), (7, 15)):  # of 7 ranks two have no group
        for found, others in trained(data, scores, config, ranks, reference, pack_tokens=tokens):
            assert far(found, weights) < 1e-10
            assert others == pytest.approx(numbers, rel=1e-8, abs=1e-11)


def test_values_are_asked_once_of_the_weights_that_the_update_starts_from():
    config, (data, scores) = algo(epochs=3, minibatch_size=SIZE, lr=0.1), scored_talks()
    policy = Judging()
    share = share_of(policy, data, scores, config)
    before, returns = share.values.clone(), share.returns.clone()
    update_policy(
        Model(policy, LearnerConfig()), PolicyOptimizer(policy, config, Alone()), config, share, 0, BatchEnd(0, 10)
    )
    assert torch.equal(share.values, before) and torch.equal(share.returns, returns)
    now = share_of(policy, data, scores, config)
    assert float((now.values - before).abs().max()) > 0.01


def test_what_the_env_said_and_when_it_paid_count_as_they_should():
    data, scores = scored_talks()
    (weights, numbers), *_ = trained(data, scores, algo())
    said = ~data.mask[:, 0]
    data.logprobs[said], data.versions[said], data.rewards[said] = -50.0, 77, 3.0
    (again, others), *_ = trained(data, scores, algo())
    assert far(again, weights) == 0 and others == numbers
    data.rewards[:] = 0.0  # all of a score at the end of the last turn
    (late, _), *_ = trained(data, scores, algo())
    assert far(late, weights) > 1e-4


def test_statistics_are_those_of_sampled_tokens_of_all_ranks():
    (data, scores), config = scored_talks(), algo()
    parts = estimated(Judging(), None, data, scores, config)
    returns, values = (np.concatenate([part[which] for part in parts]) for which in (3, 4))
    for ranks in (1, 3):
        for _, numbers in trained(data, scores, config, ranks):
            wanted = 1 - np.var(returns - values) / np.var(returns)
            assert numbers["train/explained_variance"] == pytest.approx(wanted, rel=1e-9)
            assert numbers["train/value_loss"] == pytest.approx(np.mean((returns - values) ** 2) / 2, rel=1e-9)


PERIODIC = [each | {"normalize_advantages": False} for each in OPTIONS]


@pytest.mark.parametrize("options", PERIODIC, ids=str)
def test_groups_that_come_one_by_one_make_the_step_of_the_batch(options):
    config, (data, scores) = algo(**options), scored_talks()
    assert not config.why_not_periodic()
    reference = Judging(seed=3) if config.kl_coef else None
    (wanted, numbers), *_ = trained(data, scores, config, reference=reference)
    room, found = InProcessRendezvous(2, 30.0), {}
    ranks = [[3, 0], [4, 2, 1]]

    def work(rank):
        policy, collective = Judging(), Threads(room, rank)
        model, frozen = Model(policy, LearnerConfig(pack_tokens=20)), reference and Model(reference, LearnerConfig())
        steps = GradientSteps(model, PolicyOptimizer(policy, config, collective), config)
        for group in ranks[rank]:
            ids = np.arange(group * SIZE, (group + 1) * SIZE)
            unit = Unit((), ids, None, scores[ids])
            steps.add_all(build_batch(choose(data, ids), unit, 0, config, Alone(), model, frozen))
        found[rank] = policy.state_dict(), steps.step_once(BatchEnd(0, 10))

    together(work, 2)
    of_batches = {"train/explained_variance"} | ({"train/reference_kl"} if config.kl_in == "reward" else set())
    for weights, others in found.values():
        assert far(weights, wanted) < 1e-10
        assert others == pytest.approx({k: v for k, v in numbers.items() if k not in of_batches}, rel=1e-8, abs=1e-11)


class JudgingLearner(LearnerWorker):
    rank, world_size = 0, 1

    def new_policy(self, spec, start):
        return Judging()


def learner(config):
    worker = JudgingLearner(None, config, LearnerConfig(pack_tokens=30), 0, None)
    worker.timers = Timers()
    worker.build(Judging().spec, "0" * 16, snapshot=False)
    return worker


def test_a_learner_worker_makes_the_same_step_of_a_batch_and_of_groups_as_they_come():
    config, (data, scores) = algo(normalize_advantages=False, kl_coef=0.1), scored_talks(stale=0.1)
    whole, one_by_one = learner(config), learner(config)
    half = [replace(choose(data, ids), source=f"sim-{i}#1") for i, ids in enumerate(np.split(data.ids, [6]))]
    unit = Unit(tuple(part.source for part in half), data.ids, None, scores)
    numbers = whole.learn(Items([*half, unit, BatchEnd(0, 10)]), 0, 0)
    items = []
    for group in (3, 1, 4, 0, 2):
        ids = np.arange(group * SIZE, (group + 1) * SIZE)
        items += [choose(data, ids, f"sim-0#{group}"), Unit((f"sim-0#{group}",), ids, None, scores[ids])]
    streamed = one_by_one.learn(Items([*items, BatchEnd(0, 10)]), 0, version=0, one_by_one=True)
    assert far(one_by_one.policy.state_dict(), whole.policy.state_dict()) < 1e-10
    for name in ("train/value_loss", "train/grad_norm", "train/mismatch_k3", "train/entropy"):
        assert streamed[name] == pytest.approx(numbers[name], rel=1e-8) and numbers[name] > 0
