"""Captured gradient steps of policies that read instructions; log-probs of acting that are too far away."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_vla import TEXTS, build, noise, observe, shallow

from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.core.arrays import text_arrays
from embodied.core.types import BatchEnd, Trajectory, Unit
from embodied.learners import update
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.train_batch import build_batch
from embodied.learners.update import update_policy
from embodied.runtime.collective import Alone

ROWS = 6
PPO = PPOConfig(rollout_decisions=1, epochs=1, minibatch_size=4, lr=1e-3)
EXACT = {"dtype": "float64", "lora_rank": 2}
CASES = {
    "openvla": ({"name": "openvla"}, {"checkpoint_activations": True, "micro_batch_size": 2}),
    "oft": ({"name": "openvla_oft", "chunk": 2, "train": "language"}, {}),
    "pi0": ({"name": "pi0", "chunk": 2, "steps": 2, "exploration": "flow_noise"}, {"checkpoint_activations": True}),
    "smolvla": ({"name": "smolvla", "chunk": 2, "steps": 2}, {}),
}


def decisions(policy, texts=TEXTS, seed=0):
    """What the policy does in some rows, as a rollout of one decision each."""
    obs, chunk = observe(ROWS, texts=texts, seed=seed), policy.config.chunk if policy.config.name != "openvla" else 1
    acted = policy.act(obs, noise(policy, ROWS, seed=seed))
    none, ones = np.zeros((ROWS, chunk), bool), np.ones(ROWS, np.int64)
    rewards = np.random.default_rng(seed).normal(size=(ROWS, chunk))
    return Trajectory(
        ids=np.arange(ROWS), lengths=ones, obs=text_arrays(obs), actions=acted.actions, logprobs=acted.logprobs,
        values=acted.values, next_values=0.0 * acted.values, rewards=rewards, terminated=~none, truncated=none,
        mask=~none, versions=0 * ones, episodes=0 * ones, replay=acted.replay,
    )  # fmt: skip


def learner(options, algo=PPO, **learner_options):
    policy = shallow(build(**options))
    model = Model(policy, LearnerConfig(**learner_options))
    return model, PolicyOptimizer(policy, algo, Alone())


def learn(model, optimizer, played, iteration=0, algo=PPO):
    share = build_batch(played, Unit((), played.ids), 0, algo, Alone(), model)
    return update_policy(model, optimizer, algo, share, 0, BatchEnd(iteration, 4))


@pytest.mark.parametrize("case", ["openvla", pytest.param("oft", marks=pytest.mark.slow), "pi0", "smolvla"])
def test_captured_steps_of_policies_with_instructions_learn_the_same_as_other_steps(case, monkeypatch):
    """In two updates with prompts of two lengths. Images may stay on the host."""
    options, more = CASES[case]
    if case == "smolvla":
        monkeypatch.setattr(update, "KEPT_BYTES", 0)
    found = []
    for graphs in ("off", "on"):
        model, optimizer = learner(options | EXACT, graphs=graphs, **more)
        numbers = [learn(model, optimizer, decisions(model.policy, seed=seed), seed) for seed in range(2)]
        assert bool(model.graphed) == (graphs == "on")
        found.append(([p.detach().clone() for p in optimizer.params], numbers))
    (weights, numbers), (others, again) = found
    assert max(float((w - o).abs().max()) for w, o in zip(weights, others, strict=True)) < 1e-9
    assert all(row["train/grad_norm"] > 1e-3 for row in numbers)
    for one, other in zip(numbers, again, strict=True):
        assert one == pytest.approx(other, abs=1e-8)


def test_on_a_gpu_steps_of_large_policies_with_instructions_are_captured_by_default():
    model, _ = learner({"name": "openvla", **EXACT}, checkpoint_activations=True)
    played = decisions(model.policy)
    share = build_batch(played, Unit((), played.ids), 0, PPO, Alone(), model)
    assert update.why_not_graphs(model, PPO, share)  # on cores
    model.device = "cuda"
    assert not update.why_not_graphs(model, PPO, share)
    model.config = LearnerConfig(graphs="off")
    assert update.why_not_graphs(model, PPO, share) == "they are off"


def test_a_learner_computes_log_probs_again_once_those_of_acting_are_too_far_from_its_own(capsys):
    """As with merged adapters. Then its first ratios are 1, and the gap is still in the log."""
    model, optimizer = learner({"name": "openvla", "dtype": "float64"})
    limit, one_step = model.policy.gap_limits[0], PPO.model_copy(update={"minibatch_size": ROWS})

    def learn_from(gap):
        played = decisions(model.policy)
        numbers = learn(model, optimizer, replace(played, logprobs=played.logprobs + gap), algo=one_step)
        assert numbers["train/logprob_gap"] == pytest.approx(gap, rel=1e-6)
        return numbers["train/approx_kl"]

    assert learn_from(0.5 * limit) > 1e-9 and not model.rescores
    assert learn_from(3 * limit) > 1e-9 and model.rescores
    assert capsys.readouterr().out.count("from now on the learner computes them again") == 1
    assert learn_from(3 * limit) < 1e-12


def test_a_learner_whose_only_step_begins_early_computes_distant_log_probs_again():
    model, optimizer = learner({"name": "openvla", "dtype": "float64"})
    config = GRPOConfig(name="grpo", groups=2, group_size=ROWS // 2, filter="none", lr=1e-3)

    def learn_from(gap):
        steps = update.PolicySteps(model, optimizer, config)
        played = decisions(model.policy)
        played = replace(played, logprobs=played.logprobs + gap)
        unit = Unit((), played.ids, np.ones(ROWS), np.ones(ROWS))
        steps.add_all(build_batch(played, unit, 0, config, Alone(), model))
        numbers = steps.step_once(BatchEnd(0, 10))
        assert numbers["train/logprob_gap"] == pytest.approx(gap, rel=1e-6)
        return numbers["train/approx_kl"]

    assert learn_from(3 * model.policy.gap_limits[0]) > 1e-9 and model.rescores
    assert learn_from(3 * model.policy.gap_limits[0]) < 1e-12
