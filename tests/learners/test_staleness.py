"""Updates with decisions of older weights: what is logged of them, and the options against them, on any ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import toy
from ranks import on_ranks

from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.core.types import BatchEnd, env_blocks
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.train_batch import episodes_within
from embodied.learners.update import update_policy
from embodied.runtime.collective import Alone

T, N = toy.T, toy.N
BASE = {"rollout_decisions": T, "epochs": 3, "minibatch_size": 7, "lr": 1e-2}
EVERYTHING = {"decoupled": True, "importance_cap": 1.05, "episode_mask": "product", "episode_mask_low": 0.5}


def stale_rollout(seed=1, version=0):
    """What other weights than those of `toy.make()` have played: two episodes in every row."""
    data = toy.rollout(older(), seed)
    episodes = np.tile(np.repeat([0, 1], T // 2), N) + np.repeat(np.arange(0, 2 * N, 2), T)
    return replace(data, episodes=episodes, versions=np.full(T * N, version))


def older():
    policy = toy.make()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.actor.parameters():
            p += 0.05 * torch.randn(p.shape, generator=draw, dtype=p.dtype)
    return policy


def trained(data, config, version=1, ranks=1, part_of=None, **options):
    """Weights and numbers of every rank after an update with this data."""

    def work(rank, collective):
        block = env_blocks(N, ranks)[rank]
        mine, scored = (part_of or slices)(data, block)
        policy = toy.make()
        model, optimizer = Model(policy, LearnerConfig(**options)), PolicyOptimizer(policy, config, collective)
        share = toy.batch_of(mine, config, policy, collective, version, **scored)
        return policy.state_dict(), update_policy(model, optimizer, config, share, 0, BatchEnd(0, 10))

    return on_ranks(ranks, work)


def slices(data, block):
    return toy.columns(data, slice(block.start, block.stop)), {}


def groups(data, block):
    """The rows as whole episodes with returns 0, 1, 0, 1."""
    mine, _ = slices(replace(data, values=None, next_values=None), block)
    scores = mine.ids % 2.0
    return mine, {"scores": scores, "advantages": 2 * scores - 1}


def far(ours, theirs):
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def log_ratios(data, now=None):
    """[N, T, C, 3], log-probs under the weights that an update starts from less those at act time."""
    with torch.no_grad():
        inputs = {"obs": {"state": torch.from_numpy(data.obs["state"])}, "actions": torch.from_numpy(data.actions)}
        apart = (now or toy.make())(inputs).logprobs.numpy() - data.logprobs
    return (apart * data.mask[:, :, None]).reshape(N, T, toy.C, 3)


@pytest.mark.parametrize("options", [{}, {"logprob_level": "action", "clip_high": 0.28}, {"minibatch_size": None}])
def test_decoupled_ppo_is_ppo_where_nothing_is_stale(options):
    data = toy.rollout(toy.make(), seed=1)
    (plain, numbers), (split, others) = (
        trained(data, PPOConfig(**BASE | options, decoupled=decoupled), version=0)[0] for decoupled in (False, True)
    )
    assert far(split, plain) < 1e-12 and far(plain, toy.make().state_dict()) > 1e-3
    assert others.pop("train/importance_weight") == pytest.approx(1.0, abs=1e-12)
    assert others == pytest.approx(numbers, abs=1e-9)


def test_with_stale_decisions_decoupling_capping_and_masking_give_different_weights():
    data, options = stale_rollout(), [{}, {"decoupled": True}, {"decoupled": True, "importance_cap": 1.05}, EVERYTHING]
    options += [{"clip": "aipo", "ratio_cap": 1.05}, {"clip": "tis", "ratio_cap": 1.05}]
    weights = [trained(data, PPOConfig(**BASE | each))[0][0] for each in options]
    assert min(far(a, b) for i, a in enumerate(weights) for b in weights[:i]) > 1e-5


def test_the_first_decoupled_step_pushes_with_the_truncated_weight():
    """One step with all items: minus the policy loss is the mean of min(proximal / acted, cap) * A, nothing clipped."""
    data, config = stale_rollout(), PPOConfig(**BASE | {"epochs": 1, "minibatch_size": None}, decoupled=True)
    config = config.model_copy(update={"importance_cap": 1.1})
    _, numbers = trained(data, config)[0]
    weights = np.minimum(np.exp(log_ratios(data).sum((2, 3))), 1.1).ravel()
    advantages = toy.batch_of(data, config, toy.make()).advantages.numpy()
    assert numbers["train/policy_loss"] == pytest.approx(-(weights * advantages).mean(), rel=1e-9)
    assert numbers["train/importance_weight"] == pytest.approx(weights.mean(), rel=1e-9)
    assert (weights == 1.1).any() and numbers["train/clip_fraction"] == 0


@pytest.mark.parametrize("kind", ["mean", "product"])
def test_masked_episodes_teach_the_policy_nothing_and_are_counted(kind):
    data = stale_rollout()
    apart = log_ratios(data).reshape(N, 2, T // 2, toy.C, 3).sum((3, 4))  # [N, 2 episodes, decisions]
    logs = apart.sum(2) if kind == "product" else apart.mean(2)
    bound = float(np.exp(np.sort(logs.ravel())[2:4].mean()))  # three of the eight are below
    assert 0 < bound < 1
    config = PPOConfig(**BASE, episode_mask=kind, episode_mask_low=bound)
    found, numbers = trained(data, config)[0]
    assert numbers["train/masked_fraction"] == 3 / 8
    spoilt = data.logprobs.copy().reshape(N, 2, T // 2, toy.C, 3)
    spoilt[np.log(bound) > logs] += 5.0  # however far they are away
    again, _ = trained(replace(data, logprobs=spoilt.reshape(data.logprobs.shape)), config)[0]
    assert far(again, found) == 0


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_on_weights_and_numbers_of_stale_data(options, ranks):
    data, config = stale_rollout(), PPOConfig(**BASE | options)
    data.versions[:T] = 1  # the first row is current, and rank 0's alone
    (weights, numbers), *_ = trained(data, config)
    assert numbers["train/staleness"] == 0.75 and numbers["train/staleness_max"] == 1
    assert (numbers["train/staleness_0"], numbers["train/staleness_1"]) == (0.25, 0.75)
    own = "train/explained_variance"  # a rank's own
    for found, others in trained(data, config, ranks=ranks):
        assert far(found, weights) < 1e-12
        assert {**others, own: 0} == pytest.approx({**numbers, own: 0}, rel=1e-9, abs=1e-12)


def test_the_mismatch_is_that_of_the_first_step_before_it():
    data, everything = stale_rollout(), PPOConfig(**BASE | {"minibatch_size": None})
    _, numbers = trained(data, everything)[0]
    apart = log_ratios(data)
    k3 = (np.exp(apart) - 1 - apart).sum((2, 3))
    assert numbers["train/mismatch_k3"] == pytest.approx(k3.mean(), rel=1e-9)
    assert numbers["train/mismatch_k3_max"] == pytest.approx(k3.max(), rel=1e-9)
    _, current = trained(toy.rollout(toy.make(), seed=1), everything, version=0)[0]
    assert current["train/mismatch_k3"] < 1e-12 < k3.mean()


def test_the_mismatch_of_episodes_that_count_alike_is_weighted():
    """Rows of 6 and 2 decisions weigh 4/6 and 4/2 a decision: mean length 4."""
    data = stale_rollout()
    keep = np.r_[:T, T : T + 2]
    cut = {name: getattr(data, name)[keep] for name in "actions logprobs rewards terminated truncated mask".split()}
    short = replace(
        data,
        ids=np.arange(2),
        lengths=np.array([T, 2]),
        obs={"state": data.obs["state"][keep]},
        versions=np.zeros(8, np.int64),
        episodes=np.repeat([0, 1], [T, 2]),
        values=None,
        next_values=None,
        **cut,
    )
    config = GRPOConfig(name="grpo", weighting="episode", epochs=1, minibatch_size=None)
    policy, scored = toy.make(), {"scores": np.array([0.0, 1.0]), "advantages": np.array([-1.0, 1.0])}
    model, optimizer = Model(policy, LearnerConfig()), PolicyOptimizer(policy, config, Alone())
    share = toy.batch_of(short, config, model, version=1, **scored)
    numbers = update_policy(model, optimizer, config, share, 0, BatchEnd(0, 10))
    apart = log_ratios(data).reshape(N * T, -1)[keep]
    k3 = (np.exp(apart) - 1 - apart).sum(1)
    wanted = (k3[:T].sum() * 4 / 6 + k3[T:].sum() * 4 / 2) / 8
    assert numbers["train/mismatch_k3"] == pytest.approx(wanted, rel=1e-9)


def test_the_log_prob_gap_is_only_logged_for_decisions_of_current_weights():
    data, config = stale_rollout(), PPOConfig(**BASE | {"minibatch_size": None})
    for ranks in (1, 2):
        assert not any("train/logprob_gap" in numbers for _, numbers in trained(data, config, ranks=ranks))
    data.versions[-1] = 1  # of the last rank
    gap = np.abs(log_ratios(data)[-1, -1]).max()
    for ranks in (1, 2):
        found = [numbers["train/logprob_gap"] for _, numbers in trained(data, config, ranks=ranks)]
        assert found == pytest.approx([gap] * ranks, rel=1e-9)


def test_groups_are_masked_and_decoupled_like_rollouts():
    data = stale_rollout()
    config = GRPOConfig(name="grpo", epochs=2, minibatch_size=None, lr=1e-2, decoupled=True)
    _, numbers = trained(data, config, part_of=groups)[0]
    weights = np.exp(log_ratios(data).sum((2, 3)))
    assert numbers["train/importance_weight"] == pytest.approx(weights.mean(), rel=1e-9)
    masks = {"decoupled": False, "episode_mask": "mean", "episode_mask_low": 0.999999}
    _, numbers = trained(data, GRPOConfig(**config.model_dump() | masks), part_of=groups)[0]
    means = np.log(weights).reshape(N, 2, -1).mean(2)
    assert numbers["train/masked_fraction"] == (means < np.log(0.999999)).mean() > 0


def test_a_rank_without_a_part_counts_no_decision_and_as_many_passes_as_others():
    data = stale_rollout()
    data.versions[:T] = 1
    config = GRPOConfig(name="grpo", minibatch_size=None, **EVERYTHING)
    farthest = int(log_ratios(data).sum((2, 3)).reshape(N, 2, -1).sum(2).min(1).argmin())  # a row that is masked

    def work(rank, collective):
        whole = replace(data, values=None, next_values=None)
        mine = toy.columns(whole, slice(farthest, farthest + 1)) if rank else whole
        scored = {"scores": mine.ids % 2.0, "advantages": mine.ids % 2 * 2.0 - 1, "is_padding": bool(rank)}
        policy = toy.make()
        share = toy.batch_of(mine, config, policy, collective, 1, **scored)
        passes, model = [], Model(policy, LearnerConfig(micro_batch_size=5), tick=lambda: passes.append(rank))
        model.most_passes = lambda passes: 7
        corrected = share.corrected(model, config)
        model.most_passes = lambda passes: 0
        assert len(passes) == 7 and len(corrected.proximal) == len(share)
        optimizer = PolicyOptimizer(policy, config, collective)
        return update_policy(model, optimizer, config, share, 0, BatchEnd(0, 10))

    found = on_ranks(2, work)
    assert found[0] == found[1] and found[0]["train/staleness"] == 0.75
    _, alone = trained(data, config, part_of=groups)[0]
    assert found[0]["train/masked_fraction"] == alone["train/masked_fraction"] > 0


def test_decisions_of_a_sequence_belong_together_while_the_episode_is_the_same():
    data = replace(stale_rollout(), ids=np.arange(2), lengths=np.array([3, 2]), episodes=np.array([7, 7, 9, 9, 9]))
    assert episodes_within(data).tolist() == [0, 0, 1, 2, 2]
