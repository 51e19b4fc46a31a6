"""PPO that is kept near a reference, the policy that the run began with: in the loss, or off the rewards."""

import json

import numpy as np
import pytest
import torch
import toy

from embodied.algorithms.advantages import gae
from embodied.algorithms.config import PPOConfig
from embodied.algorithms.losses import loss_terms
from embodied.core.types import BatchEnd
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.update import update_policy
from embodied.runtime.collective import Alone
from embodied.train import main

PLAIN = PPOConfig(rollout_decisions=toy.T, epochs=2, minibatch_size=9, lr=1e-2, normalize_advantages=False)


def config(**options):
    return PPOConfig(**PLAIN.model_dump() | options)


def model(policy):
    return Model(policy, LearnerConfig())


def share_of(actor, algo, reference, seed=0, rows=None, collective=None):
    data = toy.rollout(actor, seed)
    data = data if rows is None else toy.columns(data, rows)
    return data, toy.batch_of(data, algo, toy.make(), collective, reference=reference)


def test_rewards_are_lowered_by_the_divergence_from_the_reference():
    actor, other = toy.make(), toy.make(seed=1)
    data, share = share_of(actor, config(kl_coef=0.5, kl_in="reward"), model(other))
    steps = toy.by_step(data)
    rewards, away = np.array(steps["rewards"]), np.zeros((toy.T, toy.N))
    for t in range(toy.T):
        obs, mask = {"state": torch.from_numpy(steps["obs"][t])}, steps["mask"][t][:, :, None]
        there = other({"obs": obs, "actions": torch.from_numpy(steps["actions"][t])}).logprobs.detach().numpy()
        away[t] = ((steps["logprobs"][t] - there) * mask).sum((1, 2))
    rewards[:, :, 0] -= 0.5 * away
    fields = (rewards, *(steps[name] for name in ("terminated", "truncated", "mask", "values", "final_values")))
    wanted, returns = gae(*fields, PLAIN.gamma, PLAIN.gae_lambda)
    np.testing.assert_allclose(share.advantages, wanted.T.ravel(), atol=1e-12)
    np.testing.assert_allclose(share.returns, returns.T.ravel(), atol=1e-12)
    assert share.metrics["train/reference_kl"] == pytest.approx(away.mean())
    assert abs(away).min() > 0 and data.rewards is not rewards


def test_a_run_begins_at_its_reference_and_the_coefficient_keeps_it_there():
    apart = {}
    for coef in (0.0, 0.1, 10.0):
        actor, policy = toy.make(), toy.make()
        algo, reference = config(kl_coef=coef), model(policy.reference()) if coef else None
        ours = model(policy)
        optimizer = PolicyOptimizer(policy, algo, Alone())
        first = None
        for iteration in range(4):
            _, share = share_of(actor, algo, reference, iteration)
            numbers = update_policy(ours, optimizer, algo, share, 0, BatchEnd(iteration, 4))
            first = first or numbers
        assert ("train/reference_kl" in first) == bool(coef)
        with torch.no_grad():
            inputs = share.inputs(torch.arange(share.num_items))
            apart[coef] = float((policy(inputs).logprobs - toy.make()(inputs).logprobs).abs().mean())
    assert apart[10.0] < 0.8 * apart[0.0] and apart[0.1] < apart[0.0]


def test_without_a_coefficient_a_reference_does_not_change_the_update():
    actor = toy.make()
    _, plain = share_of(actor, PLAIN, None)
    _, compared = share_of(actor, config(kl_coef=1e-9), model(toy.make(seed=1)))
    assert torch.equal(plain.advantages, compared.advantages) and plain.reference is None is not compared.reference
    assert (*loss_terms(PLAIN), "reference_kl") == loss_terms(config(kl_coef=1e-9))


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_command_says_how_far_it_is_from_the_reference(tmp_path, kl_in):
    more = ["run.iterations=2", "run.env_steps=null", "env.num_envs=4", "algo.rollout_decisions=8", "eval.episodes=1"]
    more += ["algo.minibatch_size=16", "cluster.backend=inline", f"run.dir={tmp_path}", "placement=collocated"]
    assert main(["recipe=pointmass_ppo", "algo.kl_coef=0.1", f"algo.kl_in={kl_in}", *more]) == 0
    (path,) = tmp_path.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kl = [row["train/reference_kl"] for row in rows if "train/reference_kl" in row]
    assert len(kl) == 2 and kl[1] != 0


@pytest.mark.parametrize(("kl_in", "shard"), [("loss", False), ("loss", True), ("reward", False)])
def test_two_learners_near_a_reference_take_the_steps_of_one(tmp_path, kl_in, shard):
    told = ["run.iterations=2", "run.env_steps=null", "env.num_envs=4", "algo.rollout_decisions=8", "eval.episodes=1"]
    told += ["algo.minibatch_size=16", "policy.dtype=float64", "policy.hidden=[8]"]
    found = []
    for learners in (1, 2):
        place = f'placement={{"sim,policy": "cpu:0", learner: "cpu:0-{learners - 1}*{learners}"}}'
        apart = (
            ["learner.shard=true", "cluster.backend=local"] if shard and learners == 2 else ["cluster.backend=inline"]
        )
        more = ["algo.kl_coef=0.1", f"algo.kl_in={kl_in}", place, f"run.dir={tmp_path / str(learners)}", *apart]
        assert main(["recipe=pointmass_ppo", *told, *more]) == 0
        (path,) = (tmp_path / str(learners)).glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        names = "train/reference_kl", "train/grad_norm"
        found.append([[row[name] for name in names] for row in rows if names[0] in row])
    assert found[0] and np.allclose(found[0], found[1], rtol=1e-9, atol=1e-12)
