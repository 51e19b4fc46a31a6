"""The learner against the single-file reference, and against itself with other numbers of ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from reference_ppo import reference_update
from tiny_language import answers, build, inputs_of

from embodied.algorithms.config import PPOConfig
from embodied.core.errors import Diverged, WrongShape
from embodied.core.rng import minibatches, permutation
from embodied.core.types import BatchEnd, env_blocks
from embodied.learners import learner_worker
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Adam, Model, PolicyOptimizer, lr_factor
from embodied.learners.train_batch import indices_of_owned
from embodied.learners.update import PolicySteps, update_policy
from embodied.runtime.collective import Alone

T, N, C, make, rollout, columns = toy.T, toy.N, toy.C, toy.make, toy.rollout, toy.columns


def ours(policy, optimizer, trajectory, config, iteration):
    model = policy if isinstance(policy, Model) else Model(policy, LearnerConfig())
    share = toy.batch_of(trajectory, config, model, optimizer.collective)
    return update_policy(model, optimizer, config, share, 0, BatchEnd(iteration, 10))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprob_level": "action", "entropy_coef": 0.01, "value_clip": 0.1},
        {"logprob_level": "action_dim", "dual_clip": 3.0, "huber_delta": 0.5, "normalize_advantages": False},
        {"advantage_level": "step", "clip_high": 0.28, "max_grad_norm": None, "target_kl": 0.002, "gamma": 0.9},
        {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.2, "value_clip": 0.05, "huber_delta": 0.5},
    ],
)
def test_five_updates_equal_the_single_file_reference(options):
    config = PPOConfig(
        **{"rollout_decisions": T, "epochs": 3, "minibatch_size": 7, "lr": 1e-2, "max_grad_norm": 0.3} | options
    )
    mine, theirs = make(), make()
    optimizer = PolicyOptimizer(mine, config, Alone())
    their_adam = torch.optim.Adam(theirs.parameters(), lr=config.lr, eps=config.adam_eps)

    def scored(obs):
        return theirs.actor(obs).view(-1, C, 3), theirs.log_std, theirs.critic(obs).squeeze(-1)

    for iteration in range(5):
        data = rollout(mine, seed=iteration)
        batch = toy.by_step(data)
        orders = [permutation(0, iteration, epoch, T * N) for epoch in range(config.epochs)]
        scored.parameters = theirs.parameters
        epochs = reference_update(scored, their_adam, batch, config, orders)
        numbers = ours(mine, optimizer, data, config, iteration)
        assert numbers["train/epochs"] == epochs
        assert numbers["train/logprob_gap"] < 1e-12
        assert numbers["train/grad_norm"] > 0
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0, msg=name)


def test_a_step_is_logged_without_the_steps_before_it():
    """While weights hardly move, three epochs of two steps each have the mean losses of a single step."""
    many = PPOConfig(rollout_decisions=T, epochs=3, minibatch_size=T * N // 2, lr=1e-30)
    one = many.model_copy(update={"epochs": 1, "minibatch_size": T * N})
    logged = []
    for config in (many, one):
        policy = make()
        logged.append(ours(policy, PolicyOptimizer(policy, config, Alone()), rollout(policy, 1), config, 0))
    for name in ("train/value_loss", "train/entropy"):
        assert logged[0][name] == pytest.approx(logged[1][name], rel=1e-9)


def in_episodes(data):
    """The same rollout, of which row r is of episodes 10r, 10r + 1, ... that have 1 + r decisions each."""
    numbers = [10 * row + np.arange(T) // (1 + row) for row in range(N)]
    return replace(data, episodes=np.concatenate(numbers))


def test_parts_of_episodes_weigh_alike_in_the_loss_of_a_rollout():
    """Rows of six decisions: six episodes, three, two, and one with a part of another; 24 decisions in 13 parts."""
    config, policy = PPOConfig(rollout_decisions=T, weighting="episode", normalize_advantages=False), make()
    data = in_episodes(rollout(policy, seed=1))
    share = toy.batch_of(data, config, policy)
    each = [1.0] * 6 + [1 / 2] * 6 + [1 / 3] * 6 + [1 / 4] * 4 + [1 / 2] * 2
    torch.testing.assert_close(share.weights, torch.tensor(each, dtype=torch.float64))
    assert (share.divisor(24), share.divisor(6), share.stats_divisor(24)) == (13, 13 / 4, 13)
    half = {"weights": share.weights / 2, "advantages": share.advantages * 2}  # of gains; values' errors count half
    scores = Model(policy, LearnerConfig()).score(share.inputs(torch.arange(24)))
    (_, whole), (_, part) = (b.loss_sum(scores, 1.0, config) for b in (share, replace(share, **half)))
    assert part["policy_loss"] == pytest.approx(float(whole["policy_loss"]), rel=1e-12)
    assert part["value_loss"] == pytest.approx(float(whole["value_loss"]) / 2, rel=1e-12)


@pytest.mark.parametrize("weighting", ["decision", "episode"])
def test_the_number_of_learner_ranks_does_not_change_the_weights(weighting):
    config = PPOConfig(
        rollout_decisions=T, epochs=2, minibatch_size=5, lr=1e-2, lr_schedule="linear", weighting=weighting
    )
    alone = make()
    optimizer = PolicyOptimizer(alone, config, Alone())
    data = in_episodes(rollout(alone, seed=1))
    for iteration in range(3):
        ours(alone, optimizer, data, config, iteration)

    policies = [make() for _ in range(3)]

    def work(rank, collective):
        own = PolicyOptimizer(policies[rank], config, collective)
        block = env_blocks(N, 3)[rank]
        part = columns(data, slice(block.start, block.stop))
        for iteration in range(3):
            ours(policies[rank], own, part, config, iteration)

    on_ranks(3, work)
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(policies[0].state_dict()[name], weight, atol=1e-12, rtol=0)
        assert all(torch.equal(policies[0].state_dict()[name], other.state_dict()[name]) for other in policies[1:])


def test_the_optimizer_comes_back_from_its_folder_and_takes_the_same_step(tmp_path):
    config = PPOConfig(rollout_decisions=T, epochs=1, minibatch_size=8, lr=1e-2)
    policy = make()
    optimizer = PolicyOptimizer(policy, config, Alone())
    ours(policy, optimizer, rollout(policy, 0), config, 0)
    optimizer.save(tmp_path)
    policy.save_pretrained(tmp_path)
    twin = make(seed=9)
    from embodied.policies.policy_folder import read_weights

    twin.load_weights(read_weights(tmp_path))
    restored = PolicyOptimizer(twin, config, Alone())
    restored.load(tmp_path)
    data = rollout(policy, 1)
    ours(policy, optimizer, data, config, 1)
    ours(twin, restored, data, config, 1)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), twin.parameters(), strict=True))


def test_a_linear_schedule_lowers_the_rate_and_value_lr_is_its_own():
    config = PPOConfig(rollout_decisions=T, epochs=1, minibatch_size=24, lr=1e-2, value_lr=0.0, lr_schedule="linear")
    policy = make()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    numbers = ours(policy, PolicyOptimizer(policy, config, Alone()), rollout(policy, 0), config, 5)
    assert numbers["train/lr"] == pytest.approx(5e-3)
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed and not any(name.startswith("critic") for name in changed)


@pytest.mark.parametrize("field", ["rewards", "logprobs"])
def test_numbers_that_are_not_finite_are_refused_before_they_become_weights(field):
    policy = make()
    data = rollout(policy, 1)
    numbers = getattr(data, field).copy()
    numbers[:, 1] = np.nan
    spoilt = replace(data, **{field: numbers})
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    config = PPOConfig(rollout_decisions=T, minibatch_size=T * N, epochs=1)
    with pytest.raises(Diverged, match=r"nan.*algo\.lr"):
        ours(policy, PolicyOptimizer(policy, config, Alone()), spoilt, config, 0)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_scores_that_would_broadcast_are_refused():
    policy, config = make(), PPOConfig(rollout_decisions=T, minibatch_size=T * N, epochs=1)
    whole = policy.forward

    def summed(inputs):
        scores = whole(inputs)
        return replace(scores, logprobs=scores.logprobs.sum(-1, keepdim=True))

    policy.forward = summed
    with pytest.raises(WrongShape, match="forward returned logprobs"):
        ours(policy, PolicyOptimizer(policy, config, Alone()), rollout(policy, 1), config, 0)


def test_a_gradient_that_is_not_finite_is_refused(monkeypatch):
    policy, config = make(), PPOConfig(rollout_decisions=T, minibatch_size=T * N, epochs=1)
    optimizer = PolicyOptimizer(policy, config, Alone())
    monkeypatch.setattr("embodied.learners.model.norm_of", lambda flat: flat.double().norm() / 0.0)
    with pytest.raises(Diverged, match=r"grad_norm is inf in iteration 3, epoch 1; try a lower algo\.lr"):
        ours(policy, optimizer, rollout(policy, 1), config, 2)


def test_weights_that_a_step_made_infinite_are_refused():
    policy, config = make(), PPOConfig(rollout_decisions=T, minibatch_size=T * N, epochs=1)
    config = config.model_copy(update={"lr": 1e308})  # more than a recipe may say
    with pytest.raises(Diverged, match="weights are NaN or infinite after iteration 1"):
        ours(policy, PolicyOptimizer(policy, config, Alone()), rollout(policy, 1), config, 0)


# Shuffling, minibatches, a rank's share, and schedules


def test_seed_iteration_and_epoch_each_give_another_order():
    orders = [tuple(permutation(*key, 50)) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len(set(orders)) == 4


def test_the_last_minibatch_may_be_smaller():
    assert [part.tolist() for part in minibatches(np.array([4, 0, 3, 1, 2]), 2)] == [[4, 0], [3, 1], [2]]


def test_a_rank_takes_the_units_that_it_has_in_minibatch_order():
    minibatch = np.array([7, 2, 5, 9, 4])
    assert indices_of_owned(minibatch, np.array([1, 4, 5, 7])).tolist() == [3, 2, 1]  # 7, 5 and 4 are at these places
    assert (
        indices_of_owned(minibatch, np.array([0, 1])).tolist()
        == indices_of_owned(minibatch, np.array([-1, -1])).tolist()
        == []
    )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 70))
def test_every_unit_is_processed_once_by_the_rank_that_has_it(ranks, size):
    mine = [np.flatnonzero(np.array(ranks) == rank) for rank in set(ranks)]
    order = permutation(0, 0, 0, len(ranks))
    seen = [unit for part in minibatches(order, size) for one in mine for unit in one[indices_of_owned(part, one)]]
    assert sorted(seen) == list(range(len(ranks)))


def test_learning_rates_warm_up_and_fall_to_their_floor_or_stay():
    assert [lr_factor("linear", progress) for progress in (0, 0.25, 1, 1.1)] == [1, 0.75, 0, 0]
    assert [lr_factor("constant", progress) for progress in (0, 0.25, 1)] == [1, 1, 1]
    assert [lr_factor("linear", progress, 0.2) for progress in (0, 0.5, 1)] == pytest.approx([1, 0.6, 0.2])
    assert [lr_factor("cosine", progress, 0.2) for progress in (0, 0.5, 1)] == pytest.approx([1, 0.6, 0.2])
    algo = PPOConfig(lr=1e-3, lr_schedule="cosine", final_lr=1e-4, warmup_iterations=2)
    # Cosine over four iterations: 0.1 + 0.45 * (1 + cos(pi / 4)) = 0.868
    every = [1 / 3, 2 / 3, 1, 0.868, 0.55, 0.232]
    for warmup, of_policy in ((0, every), (1, [0, *every[1:]])):
        steps = SimpleNamespace(config=algo.model_copy(update={"critic_warmup": warmup}))
        policy, value = zip(*(PolicySteps.lr_factors(steps, BatchEnd(iteration, 6)) for iteration in range(6)))
        assert value == pytest.approx(every, abs=1e-3) and policy == pytest.approx(of_policy, abs=1e-3)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_while_the_critic_warms_up_the_policy_stays_bit_for_bit(graphs):
    config = PPOConfig(rollout_decisions=T, epochs=2, minibatch_size=7, lr=1e-2, critic_warmup=2, weight_decay=0.1)
    policy = make()
    model, optimizer = Model(policy, LearnerConfig(graphs=graphs)), PolicyOptimizer(policy, config, Alone())
    for iteration in range(4):
        groups = {name: [p.detach().clone() for p in group] for name, group in policy.parameter_groups().items()}
        ours(model, optimizer, rollout(policy, seed=iteration), config, iteration)
        same = {name: all(map(torch.equal, before, policy.parameter_groups()[name])) for name, before in groups.items()}
        assert same == {"policy": iteration < 2, "value": False}


# What learners say of their speed: tokens a second, and the share of what their devices can compute


def test_trainer_tokens_and_mfu_count_what_passes_compute_per_second(monkeypatch):
    """A pass that teaches and one that does not, in two seconds. The prompt is computed once: 6 tokens, which see
    1, 2, 3, 4, 5 and 4 tokens; a backward pass costs two forward passes, and a product is two operations."""
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(learner_worker, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(learner_worker, "peak_rate", lambda device, dtype: 1e9)
    policy, inputs = build(), inputs_of(*answers([7, 8], [9], prompt=(5, 6, 7)))
    told = learner_worker.Throughput(Model(policy, LearnerConfig()))
    with told.measured():
        policy(inputs).logprobs.sum().backward()
        with torch.no_grad():
            policy(inputs)
    token, pair, _ = policy.pass_cost()
    operations = 2 * (3 + 1) * (6 * token + 2 * pair * (1 + 2 + 3 + 4 + 5 + 4))
    assert told.numbers(Alone()) == {"text/trainer_tokens_per_s": 3.0, "text/mfu": pytest.approx(operations / 2 / 1e9)}
    assert told.numbers(Alone()) == {}, "nothing was learned since"


# Our Adam is torch's, without what torch's class brings along


RUN = """
import sys
from embodied.train import main
given = ["recipe=pointmass_ppo", "cluster.backend=inline", "run.iterations=1", "eval.episodes=1", "eval.videos=0"]
code = main([*given, "run.dir=" + sys.argv[1]])
slow = {"torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp"}
raise SystemExit(code or " ".join(slow & sys.modules.keys()) or 0)
"""


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_our_adam_takes_the_steps_of_torchs_adamw(decay):
    generator = torch.Generator().manual_seed(3)
    shapes = [(7, 5), (5,), (3, 2, 2)]
    ours, theirs = ([torch.ones(shape) for shape in shapes] for _ in range(2))
    mine = Adam([ours[:2], ours[2:]], 1e-5, (0.9, 0.95), decay)
    groups = [{"params": theirs[:2]}, {"params": theirs[2:]}]
    torchs = torch.optim.AdamW(groups, eps=1e-5, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            b.grad = torch.randn(a.shape, generator=generator)
        for group, lr in zip(torchs.param_groups, (1e-2, 3e-3 / (step + 1)), strict=True):
            group["lr"] = lr
        mine.step([b.grad for b in theirs], [1e-2, 3e-3 / (step + 1)])
        torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert all(torch.equal(mine.state[a][key], torchs.state[b][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_the_norm_of_a_large_gradient_is_whole():
    """A float32 sum of 4 million squares is 0.02% short, its root 0.01%."""
    layer = torch.nn.Linear(2**11, 2**11, bias=False)
    layer.parameter_groups = lambda: {"policy": [layer.weight], "value": []}
    grad = torch.randn(2**11, 2**11, generator=torch.Generator().manual_seed(0)) * 1e-4
    layer.weight.grad = grad.clone()
    _, norm = PolicyOptimizer(layer, PPOConfig(), Alone()).exchange(torch.zeros(1))
    assert norm == pytest.approx(float(grad.double().norm()), rel=5e-5)


def test_a_learner_of_a_small_network_does_not_import_the_compiler(tmp_path):
    """It would take longer than the first iterations."""
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
