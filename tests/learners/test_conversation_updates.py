"""Learning from conversations: tokens are items, conversations are dealt, only what the policy said counts. With values
(PPO), advantages go from token to token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import on_ranks
from speaking_policy import MAX_TOKENS, Judging, Speaking, talks

from embodied.algorithms.advantages import token_gae
from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.core.types import BatchEnd, Unit, choose, env_blocks
from embodied.learners.config import LearnerConfig
from embodied.learners.learner_worker import LearnerWorker
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.train_batch import build_batch
from embodied.learners.update import PolicySteps, update_policy
from embodied.profiling.role_probe import Items
from embodied.runtime import Timers
from embodied.runtime.collective import Alone

GROUPS, SIZE = 5, 3
EPISODES = GROUPS * SIZE
BASE = {"groups": GROUPS, "group_size": SIZE, "epochs": 1, "minibatch_size": None, "lr": 1e-2, "adam_eps": 0.1}
BASE |= {"max_grad_norm": None}
SCORES = np.random.default_rng(7).normal(size=EPISODES)
ADVANTAGES = np.random.default_rng(8).normal(size=EPISODES)


def algo(**options):
    ppo = options.get("name") == "ppo"
    return PPOConfig(**BASE | PPO | options) if ppo else GRPOConfig(**BASE | {"name": "grpo"} | options)


def speaker(config, seed=0):
    return (Judging if config.name == "ppo" else Speaking)(seed)


def data_of(config, stale=0.2):
    """Conversations and their scores; for values, with a reward for each of two turns, and some lower scores."""
    if config.name != "ppo":
        return talks(Speaking(), GROUPS, SIZE, stale=stale), SCORES
    data, draw = talks(Judging(), GROUPS, SIZE, stale=stale), np.random.default_rng(5)
    sampled, last = data.mask[:, 0], np.cumsum(data.lengths) - 1
    ends = np.flatnonzero(sampled & ~np.append(sampled[1:], False) | np.isin(np.arange(len(sampled)), last))
    data.rewards[ends, 0] = draw.normal(size=len(ends))
    earned = np.add.reduceat(data.rewards[:, 0], np.cumsum(data.lengths) - data.lengths)
    return data, earned - np.where(np.arange(EPISODES) % 4 == 0, 0.7, 0.0)


def unit_of(ids, *sources, config, scores=SCORES, **about):
    return Unit(sources, ids, None if config.name == "ppo" else ADVANTAGES[ids], scores[ids], **about)


def share_of(policy, data, config, scores=SCORES, ranks=1, rank=0, collective=None, reference=None, **options):
    """What one of so many ranks learns from: whole groups of the conversations, with this policy's values."""
    block = env_blocks(len(data.ids) // SIZE, ranks)[rank]
    mine = data.ids[block.start * SIZE : block.stop * SIZE] if len(block) else data.ids[:1]
    unit = unit_of(mine, config=config, scores=scores, is_padding=not block)
    frozen = reference and Model(reference, LearnerConfig())
    model = Model(policy, LearnerConfig(**options))
    return build_batch(choose(data, mine), unit, 0, config, collective or Alone(), model, frozen)


def added(policy, config, share, units=None, divisor=1.0):
    """The steps after adding the gradient of these units, or all, of a batch."""
    steps = PolicySteps(Model(policy, LearnerConfig(pack_tokens=20)), None, config)
    steps.add(share, torch.arange(EPISODES) if units is None else units, divisor)
    return steps


def trained(data, config, ranks=1, reference=None, scores=SCORES, **options):
    """Weights and numbers of every rank after an update with these conversations."""

    def work(rank, collective):
        policy = speaker(config)
        share = share_of(policy, data, config, scores, ranks, rank, collective, reference, **options)
        model, optimizer = Model(policy, LearnerConfig(**options)), PolicyOptimizer(policy, config, collective)
        return policy.state_dict(), update_policy(model, optimizer, config, share, 0, BatchEnd(0, 10))

    return on_ranks(ranks, work)


def far(ours, theirs):
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def answers(data):
    """Items of every conversation."""
    ends = np.cumsum(data.lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, data.lengths, strict=True)]


def estimated(policy, reference, data, scores, config):
    """By conversation: its items, which of them count, and their advantages; of values also returns and values, each
    the sum that defines it."""
    found = []
    for number, rows in enumerate(answers(data)):
        at = np.flatnonzero(data.mask[rows, 0])
        if config.truncated == "mask" and data.truncated[rows].any():
            at = at[:0]
        if config.name != "ppo":
            found.append((rows, at, np.full(len(at), ADVANTAGES[number]), None, None))
            continue
        tokens = torch.from_numpy(data.actions[rows, 0, 0]).long()
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
    if config.name != "ppo" or not config.normalize_advantages:
        return found
    every = np.concatenate([advantages for _, _, advantages, _, _ in found])
    mean, spread = every.mean(), every.std() + 1e-8
    return [(rows, at, (adv - mean) / spread, returns, values) for rows, at, adv, returns, values in found]


def value_error(now, before, target, config):
    """What a predicted value costs, by its distance from the return."""

    def error(guess):
        apart, bound = (guess - target).abs(), config.huber_delta
        if bound is None:
            return apart**2 / 2
        return torch.where(apart <= bound, apart**2 / 2, bound * (apart - bound / 2))

    if config.value_clip is None:
        return error(now)
    return error(now).maximum(error(before + (now - before).clamp(-config.value_clip, config.value_clip)))


def by_hand(policy, data, config, reference=None, scores=SCORES):
    """The loss, token by token: what each costs, and what all of it is divided by. Values are judged by the weights
    that an update starts from."""
    total, count = 0.0, 0.0
    for rows, at, advantages, returns, values in estimated(speaker(config), reference, data, scores, config):
        if not len(at):
            continue
        tokens, mask, gains = (
            torch.from_numpy(data.actions[rows, 0, 0]).long(),
            torch.from_numpy(at),
            torch.tensor(advantages),
        )
        logprobs, entropy = (part[mask] for part in policy.scored(tokens))
        old = torch.from_numpy(data.logprobs[rows, 0, 0])[mask]
        ratio = (logprobs - old).exp()
        if config.logprob_level == "episode":
            ratio = (logprobs - old).mean().exp().expand(len(old))
        if config.clip == "two_sided":
            gain = torch.minimum(ratio * gains, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * gains)
            if config.dual_clip is not None:
                gain = torch.where(gains < 0, gain.maximum(config.dual_clip * gains), gain)
        elif config.clip == "aipo":
            gain = ratio.clamp(max=config.ratio_cap) * gains
        else:
            gain = ratio.detach().clamp(max=config.ratio_cap) * logprobs * gains
        cost = -gain - config.entropy_coef * entropy
        if config.name == "ppo":
            worth = (policy.valued(tokens)[mask], torch.from_numpy(values), torch.from_numpy(returns))
            cost = cost + config.value_coef * value_error(*worth, config)
        if reference is not None and config.kl_in == "loss":
            d, plain = logprobs - reference.scored(tokens)[0][mask].detach(), (logprobs - old).exp()
            kl = {"k1": plain * d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[config.kl_estimator]
            cost = cost + config.kl_coef * kl
        if config.weighting == "episode":
            total, count = total + cost.mean(), count + 1
        else:
            total, count = total + cost.sum(), count + len(at)
    return total / (len(data.ids) * MAX_TOKENS if config.weighting == "constant" else count)


PPO = {"name": "ppo", "gamma": 0.9, "gae_lambda": 0.8}
OPTIONS = [
    {},
    {"weighting": "episode", "entropy_coef": 0.02},
    {"weighting": "constant", "entropy_coef": 0.02},
    {"logprob_level": "episode", "weighting": "episode", "clip_low": 0.03, "clip_high": 0.04},
    {"logprob_level": "episode", "clip": "aipo", "ratio_cap": 1.05},
    {"name": "dapo", "truncated": "mask"},
    {"truncated": "mask", "weighting": "episode"},
    {"name": "rloo", "clip": "aipo", "ratio_cap": 1.2},
    {"clip": "tis", "ratio_cap": 1.2},
    {"dual_clip": 1.3},
    {"kl_coef": 0.3, "kl_estimator": "k1"},
    {"kl_coef": 0.3, "kl_estimator": "k2", "weighting": "episode"},
    {"kl_coef": 0.3, "logprob_level": "episode"},
    PPO,
    PPO | {"normalize_advantages": False, "gamma": 1.0, "gae_lambda": 1.0},
    PPO | {"weighting": "episode", "entropy_coef": 0.02},
    PPO | {"weighting": "constant", "value_coef": 2.0},
    PPO | {"value_clip": 0.3},
    PPO | {"value_clip": 0.3, "huber_delta": 0.2, "truncated": "mask"},
    PPO | {"logprob_level": "episode", "clip_low": 0.03, "clip_high": 0.04},
    PPO | {"clip": "aipo", "ratio_cap": 1.2},
    PPO | {"dual_clip": 1.3},
    PPO | {"kl_coef": 0.3},
    PPO | {"kl_coef": 0.3, "kl_in": "reward"},
]


def case(options):
    config = algo(**options)
    return config, *data_of(config), speaker(config, seed=3) if config.kl_coef else None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_gradient_is_that_of_the_loss_written_out_token_by_token(options):
    config, data, scores, reference = case(options)
    share = share_of(speaker(config), data, config, scores, reference=reference, pack_tokens=20)
    moved = int(config.name == "ppo")  # after some steps, in which values have moved
    ours, theirs = speaker(config, moved), speaker(config, moved)
    added(ours, config, share, divisor=share.divisor(EPISODES))
    loss = by_hand(theirs, data, config, reference, scores)
    loss.backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-12, rtol=1e-9, msg=name)
    assert len(ours.seen) > 3 and max(float(p.grad.abs().max()) for p in ours.parameters()) > 1e-3
    if config.clip != "tis":  # whose value is no loss
        found, _ = share.loss_sum(
            Model(theirs, LearnerConfig()).score(share.inputs(torch.arange(len(share)))), 1.0, config
        )
        assert found.item() / share.divisor(EPISODES) == pytest.approx(loss.item(), rel=1e-12)


SUMMED_OVER_RANKS = [  # each has a sum, a mean or a bound of its own
    {},
    {"weighting": "episode", "entropy_coef": 0.02},
    {"weighting": "constant", "entropy_coef": 0.02},
    {"logprob_level": "episode", "clip": "aipo", "ratio_cap": 1.05},
    {"truncated": "mask", "weighting": "episode"},
    {"kl_coef": 0.3, "kl_estimator": "k2", "weighting": "episode"},
    PPO,
    PPO | {"weighting": "episode", "entropy_coef": 0.02},
    PPO | {"value_clip": 0.3, "huber_delta": 0.2, "truncated": "mask"},
    PPO | {"kl_coef": 0.3, "kl_in": "reward"},
    {"name": "reinforce++", "kl_coef": 0.2},
    {"decoupled": True, "importance_cap": 1.05},
    {"decoupled": True, "logprob_level": "episode"},
    {"episode_mask": "mean", "episode_mask_low": 0.98, "truncated": "mask"},
    {"episode_mask": "product", "episode_mask_high": 1.1, "logprob_level": "episode"},
    PPO | {"decoupled": True, "importance_cap": 1.05},
]


@pytest.mark.parametrize("options", SUMMED_OVER_RANKS, ids=str)
def test_the_update_does_not_depend_on_packs_or_the_number_of_ranks(options):
    config, data, scores, reference = case(options | {"epochs": 2, "minibatch_size": 2 * SIZE})
    (weights, numbers), *_ = trained(data, config, reference=reference, scores=scores)
    assert far(weights, speaker(config).state_dict()) > 1e-3
    for ranks, tokens in ((1, 1), (7, 15)):  # of 7 ranks two have no group
        for found, others in trained(data, config, ranks, reference, scores, pack_tokens=tokens):
            assert far(found, weights) < 1e-10
            assert others == pytest.approx(numbers, rel=1e-8, abs=1e-11)


def test_statistics_are_means_over_sampled_tokens():
    data, policy = talks(Speaking(), GROUPS, SIZE, stale=0.2), Speaking()
    data.versions[:] = np.where(data.mask[:, 0], np.arange(len(data.mask)) % 2 - 1, -9)
    apart, entropy = [], []
    for rows in answers(data):
        logprobs, found = policy.scored(torch.from_numpy(data.actions[rows, 0, 0]).long())
        apart.append(logprobs.detach().numpy() - data.logprobs[rows, 0, 0])
        entropy.append(found.detach().numpy())
    mask = data.mask[:, 0]
    apart, entropy, ages = np.concatenate(apart)[mask], np.concatenate(entropy)[mask], -data.versions[mask]
    k3 = np.exp(apart) - 1 - apart
    for weighting in ("decision", "constant"):
        _, numbers = trained(data, algo(weighting=weighting))[0]
        wanted = {
            "entropy": entropy.mean(),
            "approx_kl": k3.mean(),
            "mismatch_k3": k3.mean(),
            "mismatch_k3_max": k3.max(),
        }
        wanted |= {"clip_fraction": (abs(np.exp(apart) - 1) > 0.2).mean(), "staleness": ages.mean()}
        wanted |= {"logprob_gap": abs(apart[ages == 0]).max(), "staleness_max": 1}
        assert {name: numbers[f"train/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-9)
        assert not any(name.endswith("_9") for name in numbers)


@pytest.mark.parametrize("options", [{"decoupled": True}, PPO], ids=str)
def test_tokens_of_the_env_have_no_effect_on_the_update(options):
    config = algo(**options)
    data, scores = data_of(config, stale=0.1)
    (weights, numbers), *_ = trained(data, config, scores=scores)
    said = ~data.mask[:, 0]
    data.logprobs[said], data.versions[said], data.rewards[said] = -50.0, 77, 3.0
    (again, others), *_ = trained(data, config, scores=scores)
    assert far(again, weights) == 0 and others == numbers


def test_minibatches_hold_whole_groups_and_add_up_to_the_batch():
    data, config = (
        talks(Speaking(), 6, SIZE, stale=0.1),
        algo(groups=6, lr=0.0, minibatch_size=2 * SIZE, weighting="episode"),
    )
    unit = Unit((), data.ids, np.random.default_rng(1).normal(size=18), np.zeros(18))
    share = build_batch(data, unit, 0, config, Alone(), Model(Speaking(), LearnerConfig()))
    whole, parts = Speaking(), Speaking()
    added(whole, config, share, torch.arange(18), share.divisor(18))
    order = share.order(0, 0, 0)
    assert sorted(order.tolist()) == list(range(18)) and order.tolist() != list(range(18))
    for minibatch in order.reshape(3, 6):
        assert (np.bincount(minibatch // SIZE)[np.unique(minibatch // SIZE)] == SIZE).all()
        added(parts, config, share, share.split_own_samples([minibatch])[0], share.divisor(6))
    for mine, other in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad / 3, other.grad, atol=1e-12, rtol=1e-9)


def test_a_pack_holds_whole_groups_and_says_which_share_a_prompt():
    policy, data = Speaking(), talks(Speaking(), GROUPS, SIZE)
    share = share_of(policy, data, algo(), pack_tokens=45)
    passes = share.passes(Model(policy, LearnerConfig(pack_tokens=45)), torch.arange(EPISODES))
    packs, together = [each.items for each in passes], []
    for pack in packs:
        inputs = share.inputs(pack)
        assert len(pack) == int(inputs["lengths"].sum()) <= 45
        together.append(inputs["groups"].tolist())
    assert sorted(group for groups in together for group in groups) == sorted(np.repeat(range(GROUPS), SIZE).tolist())
    assert len({group for groups in together for group in set(groups)}) == sum(len(set(groups)) for groups in together)
    alone = share_of(policy, data, algo(), pack_tokens=45, share_prompts=False).inputs(packs[0])
    assert len(set(alone["groups"].tolist())) == len(alone["lengths"])


def test_answers_that_were_all_cut_off_teach_nothing():
    data = talks(Speaking(), GROUPS, SIZE, stale=0.2)
    data.truncated[np.cumsum(data.lengths) - 1] = True
    for weighting in ("decision", "episode", "constant"):
        weights, numbers = trained(data, algo(truncated="mask", weighting=weighting))[0]
        assert far(weights, Speaking().state_dict()) == 0 and numbers["train/grad_norm"] == 0
    policy, config = Speaking(), algo(truncated="mask")
    share = share_of(policy, data, config)
    added(policy, config, share)
    assert not policy.seen, "what counts for nothing does not pass through the network"


def one_by_one(options):
    """These options, where every group can be learned from as it comes."""
    return options | {"normalize_advantages": False} if options.get("name") == "ppo" else options


@pytest.mark.parametrize("options", [one_by_one(each) for each in OPTIONS if each.get("kl_estimator") != "k1"], ids=str)
def test_groups_that_come_one_by_one_make_the_step_of_the_batch(options):
    config, data, scores, reference = case(options)
    assert not config.why_not_periodic()
    (wanted, numbers), *_ = trained(data, config, reference=reference, scores=scores)
    draw = np.random.default_rng(0)
    ranks = np.array_split(draw.permutation(GROUPS), [draw.integers(GROUPS)])

    def work(rank, collective):
        policy = speaker(config)
        model, frozen = Model(policy, LearnerConfig(pack_tokens=20)), reference and Model(reference, LearnerConfig())
        steps = PolicySteps(model, PolicyOptimizer(policy, config, collective), config)
        for group in ranks[rank]:
            ids = np.arange(group * SIZE, (group + 1) * SIZE)
            unit = unit_of(ids, config=config, scores=scores)
            steps.add_all(build_batch(choose(data, ids), unit, 0, config, Alone(), model, frozen))
        return policy.state_dict(), steps.step_once(BatchEnd(0, 10))

    of_batches = {"train/explained_variance"} | ({"train/reference_kl"} if config.kl_in == "reward" else set())
    numbers = {name: number for name, number in numbers.items() if name not in of_batches}
    for weights, others in on_ranks(2, work):
        assert far(weights, wanted) < 1e-10
        assert others == pytest.approx(numbers, rel=1e-8, abs=1e-11)


class SpeakingLearner(LearnerWorker):
    rank, world_size = 0, 1

    def new_policy(self, spec, start):
        return speaker(self.algo)


def learner(config):
    worker = SpeakingLearner(None, config, LearnerConfig(pack_tokens=30), 0, None)
    worker.timers = Timers()
    worker.build(speaker(config).spec, "0" * 16, snapshot=False)
    return worker


@pytest.mark.parametrize("options", [{"truncated": "mask"}, PPO | {"normalize_advantages": False}], ids=str)
def test_a_learner_worker_makes_the_same_step_of_a_batch_and_of_groups_as_they_come(options):
    config = algo(**options, kl_coef=0.1)
    data, scores = data_of(config, stale=0.1)
    half = [replace(choose(data, ids), source=f"sim-{i}#1") for i, ids in enumerate(np.split(data.ids, [6]))]

    def learned(learner):
        """All of a batch at once, in the way of schedule=sync."""
        unit = unit_of(data.ids, *(part.source for part in half), config=config, scores=scores)
        return learner.learn(Items([*half, unit, BatchEnd(0, 10)]), 0, 0)

    whole, one_by_one = learner(config), learner(config)
    numbers, items = learned(whole), []
    for group in (3, 1, 4, 0, 2):
        ids = np.arange(group * SIZE, (group + 1) * SIZE)
        source = f"sim-0#{group}"
        items += [choose(data, ids, source), unit_of(ids, source, config=config, scores=scores)]
    streamed = one_by_one.learn(Items([*items, BatchEnd(0, 10)]), 0, version=0, begins_early=True)
    assert far(one_by_one.policy.state_dict(), whole.policy.state_dict()) < 1e-10
    assert far(whole.policy.state_dict(), speaker(config).state_dict()) > 1e-3
    for name in ("train/entropy", "train/grad_norm", "train/mismatch_k3"):
        assert streamed[name] == pytest.approx(numbers[name], rel=1e-8) and numbers[name] > 0
    assert learned(learner(algo(**options, epochs=2)))["train/epochs"] == 2  # nothing is precomputed of conversations


def test_errors_of_log_probs_are_logged_and_conversations_above_a_bound_left_out():
    """Conversation 4 was written by another model: all of its log-probs are ln 3 too low."""
    data = talks(Speaking(), GROUPS, SIZE)
    rows = answers(data)[4]
    shifted = np.array(data.logprobs)
    shifted[rows] -= np.log(3.0)
    data = replace(data, logprobs=shifted)
    ((_, plain),) = trained(data, algo())
    assert plain["train/mismatch_sequence_max"] == pytest.approx(3.0, abs=1e-5)
    share = data.mask[rows].sum() / data.mask.sum()
    assert plain["train/mismatch_error"] == pytest.approx(1 + 2 * share, abs=1e-5)
    ((weights, masked),) = trained(data, algo(episode_mask="error", episode_mask_high=2.0))
    assert masked["train/masked_fraction"] == pytest.approx(share)
    ((unmasked, _),) = trained(data, algo(episode_mask="error", episode_mask_high=4.0))
    assert far(weights, unmasked) > 1e-6


def test_padding_passes_add_nothing_to_losses_and_gradients():
    config, data, policy = algo(kl_coef=0.1), talks(Speaking(), GROUPS, SIZE, stale=0.2), Speaking()
    share = share_of(policy, data, config, reference=Speaking(seed=3))
    steps = PolicySteps(model := Model(policy, LearnerConfig(shard=True)), None, config)
    model.most_passes, policy.set_requires_gradient_sync = lambda passes: 3, lambda last: None
    steps.add(share, torch.arange(0))
    assert len(policy.seen) == 3 and not steps.sums.any() and steps.largest.isneginf().all()
    assert not any(p.grad.any() for p in policy.parameters())


def test_advantages_go_from_one_sampled_token_to_the_next():
    """The example of `token_gae`, beside a conversation without a sampled token and one that begins with one's end."""
    sampled = np.array([0, 0, 1, 1, 0, 1, 0, 0, 0, 1], bool)
    rewards = np.array([0.0, 0, 0, 1, 0, 2, 9, 9, 0, 5])
    advantages, returns = token_gae(rewards, np.full(10, 4.0), sampled, np.array([6, 2, 2]), 0.5, 0.5)
    assert advantages.tolist() == [0, 0, -2.375, -1.5, 0, -2, 0, 0, 0, 1]
    assert returns.tolist() == [0, 0, 1.625, 2.5, 0, 2, 0, 0, 0, 5]


def test_values_are_asked_once_of_the_weights_that_the_update_starts_from():
    config = algo(**PPO, epochs=3, minibatch_size=SIZE, lr=0.1)
    (data, scores), policy = data_of(config), Judging()
    share = share_of(policy, data, config, scores)
    before, returns, model = share.values.clone(), share.returns.clone(), Model(policy, LearnerConfig())
    update_policy(model, PolicyOptimizer(policy, config, Alone()), config, share, 0, BatchEnd(0, 10))
    assert torch.equal(share.values, before) and torch.equal(share.returns, returns)
    assert float((share_of(policy, data, config, scores).values - before).abs().max()) > 0.01


def test_statistics_of_values_are_those_of_sampled_tokens_of_all_ranks():
    config = algo(**PPO)
    data, scores = data_of(config)
    parts = estimated(Judging(), None, data, scores, config)
    returns, values = (np.concatenate([part[which] for part in parts]) for which in (3, 4))
    for ranks in (1, 3):
        for _, numbers in trained(data, config, ranks, scores=scores):
            wanted = 1 - np.var(returns - values) / np.var(returns)
            assert numbers["train/explained_variance"] == pytest.approx(wanted, rel=1e-9)
            assert numbers["train/value_loss"] == pytest.approx(np.mean((returns - values) ** 2) / 2, rel=1e-9)
