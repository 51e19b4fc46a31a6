"""Learning from conversations: tokens are items, conversations are dealt, and only what the policy said counts."""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.algorithms.config import GRPOConfig
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
from speaking_policy import MAX_TOKENS, Speaking, pack_groups, talks

GROUPS, SIZE = 5, 3
EPISODES = GROUPS * SIZE
BASE = {"groups": GROUPS, "group_size": SIZE, "epochs": 1, "minibatch_size": None, "lr": 1e-2, "adam_eps": 0.1}
BASE |= {"max_grad_norm": None, "name": "grpo"}
SCORES = np.random.default_rng(7).normal(size=EPISODES)
ADVANTAGES = np.random.default_rng(8).normal(size=EPISODES)


def algo(**options):
    return GRPOConfig(**BASE | options)


def share_of(policy, data, config, ranks=1, rank=0, collective=None, reference=None, **options):
    """What one of so many ranks learns from: whole groups of the conversations."""
    block = env_blocks(len(data.ids) // SIZE, ranks)[rank]
    mine = data.ids[block.start * SIZE : block.stop * SIZE] if len(block) else data.ids[:1]
    unit, frozen = unit_of(mine, is_padding=not block), reference and Model(reference, LearnerConfig())
    model = Model(policy, LearnerConfig(**options))
    return build_batch(choose(data, mine), unit, 0, config, collective or Alone(), model, frozen)


def unit_of(ids, *sources, **about):
    return Unit(sources, ids, ADVANTAGES[ids], SCORES[ids], **about)


def added(policy, config, share, units=None, divisor=1.0):
    """The steps after adding the gradient of these units, or all, of a batch."""
    steps = GradientSteps(Model(policy, LearnerConfig(pack_tokens=20)), None, config)
    steps.add(share, torch.arange(EPISODES) if units is None else units, divisor)
    return steps


def trained(data, config, ranks=1, reference=None, seed=0, **options):
    """Weights and numbers of every rank after an update with these conversations."""
    room, found = InProcessRendezvous(ranks, 30.0), {}

    def work(rank):
        collective = Threads(room, rank) if ranks > 1 else Alone()
        policy = Speaking()
        model = Model(policy, LearnerConfig(**options))
        share = share_of(policy, data, config, ranks, rank, collective, reference, **options)
        numbers = update_policy(
            model, PolicyOptimizer(policy, config, collective), config, share, seed, BatchEnd(0, 10)
        )
        found[rank] = policy.state_dict(), numbers

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(ranks)]


def far(ours, theirs):
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def answers(data):
    """Items of every conversation, and which of them were sampled."""
    ends = np.cumsum(data.lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, data.lengths, strict=True)]


def by_hand(policy, data, config, reference=None):
    """The loss, token by token: what each costs, and what all of it is divided by."""
    total, count, kl = 0.0, 0.0, 0.0
    for number, rows in enumerate(answers(data)):
        mask = torch.from_numpy(data.mask[rows, 0])
        if config.truncated == "mask" and data.truncated[rows].any():
            continue
        tokens = torch.from_numpy(data.actions[rows, 0, 0]).long()
        logprobs, entropy = (part[mask] for part in policy.scored(tokens))
        old = torch.from_numpy(data.logprobs[rows, 0, 0])[mask]
        ratio, advantage = (logprobs - old).exp(), ADVANTAGES[number]
        if config.logprob_level == "episode":
            ratio = (logprobs - old).mean().exp().expand(len(old))
        if config.clip == "two_sided":
            bounds = 1 - config.clip_low, 1 + config.clip_high
            gain = torch.minimum(ratio * advantage, ratio.clamp(*bounds) * advantage)
            if config.dual_clip is not None and advantage < 0:
                gain = gain.maximum(torch.tensor(config.dual_clip * advantage, dtype=gain.dtype))
        elif config.clip == "aipo":
            gain = ratio.clamp(max=config.ratio_cap) * advantage
        else:
            gain = ratio.detach().clamp(max=config.ratio_cap) * logprobs * advantage
        cost = -gain - config.entropy_coef * entropy
        if reference is not None:
            there = reference.scored(tokens)[0][mask].detach()
            d, plain = logprobs - there, (logprobs - old).exp()
            cost = (
                cost + config.kl_coef * {"k1": plain * d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[config.kl_estimator]
            )
            kl += float(d.detach().sum())
        if config.weighting == "episode":
            total, count = total + cost.mean(), count + 1
        else:
            total, count = total + cost.sum(), count + len(old)
    return total / (len(data.ids) * MAX_TOKENS if config.weighting == "constant" else count)


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
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_gradient_is_that_of_the_loss_written_out_token_by_token(options):
    config, data = algo(**options), talks(Speaking(), GROUPS, SIZE, stale=0.2)
    reference = Speaking(seed=3) if config.kl_coef else None
    ours, theirs = Speaking(), Speaking()
    share = share_of(ours, data, config, reference=reference, pack_tokens=20)
    added(ours, config, share, divisor=share.divisor(EPISODES))
    by_hand(theirs, data, config, reference).backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-12, rtol=1e-9, msg=name)
    assert len(ours.seen) > 3 and max(float(p.grad.abs().max()) for p in ours.parameters()) > 1e-3


EVERYTHING = [
    *OPTIONS,
    {"name": "reinforce++", "kl_coef": 0.2},
    {"decoupled": True, "importance_cap": 1.05},
    {"decoupled": True, "logprob_level": "episode"},
    {"episode_mask": "mean", "episode_mask_low": 0.98, "truncated": "mask"},
    {"episode_mask": "product", "episode_mask_high": 1.1, "logprob_level": "episode"},
]


@pytest.mark.parametrize("options", EVERYTHING, ids=str)
def test_packs_and_ranks_change_nothing(options):
    config = algo(**options | {"epochs": 2, "minibatch_size": 2 * SIZE})
    data = talks(Speaking(), GROUPS, SIZE, stale=0.2)
    reference = Speaking(seed=3) if config.kl_coef else None
    (weights, numbers), *_ = trained(data, config, reference=reference)
    assert far(weights, Speaking().state_dict()) > 1e-3
    for ranks, tokens in ((1, 1), (1, 30), (2, 4096), (3, 15), (7, 15)):  # of 7 ranks two have no group
        for found, others in trained(data, config, ranks, reference, pack_tokens=tokens):
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


def test_what_the_env_said_counts_for_nothing():
    data, config = talks(Speaking(), GROUPS, SIZE, stale=0.1), algo(decoupled=True)
    (weights, numbers), *_ = trained(data, config)
    said = ~data.mask[:, 0]
    data.logprobs[said], data.versions[said] = -50.0, 77
    (again, others), *_ = trained(data, config)
    assert far(again, weights) == 0 and others == numbers


def test_minibatches_hold_whole_groups_and_add_up_to_the_batch():
    data, config = talks(Speaking(), 6, SIZE, stale=0.1), algo(lr=0.0, minibatch_size=2 * SIZE, weighting="episode")
    config, policy = config.model_copy(update={"groups": 6}), Speaking()
    share = share_of_six(policy, data, config)
    whole, parts = Speaking(), Speaking()
    added(whole, config, share, torch.arange(18), share.divisor(18))
    order = share.order(0, 0, 0)
    assert sorted(order.tolist()) == list(range(18)) and order.tolist() != list(range(18))
    for minibatch in order.reshape(3, 6):
        assert (np.bincount(minibatch // SIZE)[np.unique(minibatch // SIZE)] == SIZE).all()
        added(parts, config, share, share.owned([minibatch])[0], share.divisor(6))
    for mine, other in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad / 3, other.grad, atol=1e-12, rtol=1e-9)


def share_of_six(policy, data, config):
    unit = Unit((), data.ids, np.random.default_rng(1).normal(size=18), np.zeros(18))
    return build_batch(data, unit, 0, config, Alone(), Model(policy, LearnerConfig()))


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


PERIODIC = [each for each in OPTIONS if each.get("kl_estimator") != "k1"]


@pytest.mark.parametrize("options", PERIODIC, ids=str)
@pytest.mark.parametrize("order", range(3))
def test_groups_that_come_one_by_one_make_the_step_of_the_batch(options, order):
    config, data = algo(**options), talks(Speaking(), GROUPS, SIZE, stale=0.2)
    reference = Speaking(seed=3) if config.kl_coef else None
    (wanted, numbers), *_ = trained(data, config, reference=reference)
    room, found = InProcessRendezvous(2, 30.0), {}
    draw = np.random.default_rng(order)
    ranks = np.array_split(draw.permutation(GROUPS), [draw.integers(GROUPS)])

    def work(rank):
        policy, collective = Speaking(), Threads(room, rank)
        model, frozen = Model(policy, LearnerConfig(pack_tokens=20)), reference and Model(reference, LearnerConfig())
        steps = GradientSteps(model, PolicyOptimizer(policy, config, collective), config)
        for group in ranks[rank]:
            ids = np.arange(group * SIZE, (group + 1) * SIZE)
            steps.add_all(build_batch(choose(data, ids), unit_of(ids), 0, config, Alone(), model, frozen))
        found[rank] = policy.state_dict(), steps.step_once(BatchEnd(0, 10))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for weights, others in found.values():
        assert far(weights, wanted) < 1e-10
        assert others == pytest.approx(numbers, rel=1e-8, abs=1e-11)


class SpeakingLearner(LearnerWorker):
    rank, world_size = 0, 1

    def new_policy(self, spec, start):
        return Speaking()


def learned(learner, data, parts):
    """All of a batch at once, in the way of schedule=sync."""
    unit = unit_of(data.ids, *(part.source for part in parts))
    return learner.learn(Items([*parts, unit, BatchEnd(0, 10)]), 0, 0)


def learner(config):
    worker = SpeakingLearner(None, config, LearnerConfig(pack_tokens=30), 0, None)
    worker.timers = Timers()
    worker.build(Speaking().spec, "0" * 16, snapshot=False)
    return worker


def test_a_learner_worker_makes_the_same_step_of_a_batch_and_of_groups_as_they_come():
    config, data = algo(kl_coef=0.1, truncated="mask"), talks(Speaking(), GROUPS, SIZE, stale=0.1)
    whole, one_by_one = learner(config), learner(config)
    half = [replace(choose(data, ids), source=f"sim-{i}#1") for i, ids in enumerate(np.split(data.ids, [6]))]
    numbers = learned(whole, data, half)
    items = []
    for group in (3, 1, 4, 0, 2):
        ids = np.arange(group * SIZE, (group + 1) * SIZE)
        items += [choose(data, ids, f"sim-0#{group}"), unit_of(ids, f"sim-0#{group}")]
    streamed = one_by_one.learn(Items([*items, BatchEnd(0, 10)]), 0, version=0, one_by_one=True)
    assert far(one_by_one.policy.state_dict(), whole.policy.state_dict()) < 1e-10
    assert far(whole.policy.state_dict(), Speaking().state_dict()) > 1e-3
    for name in ("train/entropy", "train/grad_norm", "train/mismatch_k3", "train/logprob_gap"):
        assert streamed[name] == pytest.approx(numbers[name], rel=1e-8) and numbers[name] > 0
    for epochs in (1, 2):  # nothing is precomputed of conversations
        again = learner(algo(epochs=epochs))
        assert learned(again, data, half)["train/epochs"] == epochs


def test_a_pack_has_no_more_tokens_than_it_may_but_for_one_long_conversation():
    lengths, groups = np.array([3, 3, 4, 2, 5, 5, 9, 1]), np.array([0, 0, 1, 1, 2, 2, 3, 3])
    assert pack_groups(lengths, groups, 8) == [[0, 1], [2, 3], [4], [5], [6], [7]]
    assert pack_groups(lengths, groups, 16) == [[0, 1, 2, 3], [4, 5], [6, 7]]


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


def test_passes_that_make_up_for_those_of_other_ranks_count_nothing():
    config, data, policy = algo(kl_coef=0.1), talks(Speaking(), GROUPS, SIZE, stale=0.2), Speaking()
    share = share_of(policy, data, config, reference=Speaking(seed=3))
    steps = GradientSteps(model := Model(policy, LearnerConfig(shard=True)), None, config)
    model.most_passes, policy.set_requires_gradient_sync = lambda passes: 3, lambda last: None
    steps.add(share, torch.arange(0))
    assert len(policy.seen) == 3 and not steps.sums.any() and steps.largest.isneginf().all()
    assert not any(p.grad.any() for p in policy.parameters())
