"""What acts, values, scores, imitates and updates on a GPU leaves nothing on the CPU: on one that is there, and on one
that is not (`fake_cuda.py`)."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fake_cuda import WHERE, Card
from tiny_vla import noise, observe, shallow

from embodied.algorithms.config import PPOConfig
from embodied.core import arrays
from embodied.core.arrays import map_obs, text_arrays
from embodied.core.types import ActionSpec, BatchEnd, EnvSpec, Trajectory, Unit
from embodied.datasets.reader import DatasetEpisode
from embodied.learners.config import LearnerConfig
from embodied.learners.imitation import Demonstrations, ImitationLearner
from embodied.learners.model import Model, Pass, PolicyOptimizer
from embodied.learners.train_batch import build_batch, frozen_features
from embodied.learners.update import GradientSteps, update_policy
from embodied.policies import make_policy
from embodied.policies.config import CNNConfig, MLPConfig
from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from embodied.policies.pi0.config import Pi0Config
from embodied.runtime.collective import Alone

pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available")


class RealCard(nullcontext):
    def take(self, module):
        return module.to(WHERE)


@pytest.fixture(params=[WHERE, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "WHERE", request.param)


on_both = pytest.mark.usefixtures("device")


ROWS, DECISIONS, SIDE = 2, 2, 64
SPEC = EnvSpec(ActionSpec(3), state_dim=4, images={"top": (SIDE, SIDE, 3)}, instruction=True)
STATE = EnvSpec(ActionSpec(3), state_dim=4)
FAMILIES = {
    "mlp": (MLPConfig(hidden=(8,), normalize_observations=True), STATE),
    "choice": (MLPConfig(hidden=(8,)), EnvSpec(ActionSpec(1, 4), state_dim=4)),
    "cnn": (CNNConfig(name="cnn", hidden=(8,)), EnvSpec(ActionSpec(3), state_dim=4, images=SPEC.images)),
    "openvla": (OpenVLAConfig(name="openvla", temperature=1.6), SPEC),
    "lora": (OpenVLAConfig(name="openvla", lora_rank=2, lora_targets="reference"), SPEC),
    "oft": (OpenVLAOFTConfig(name="openvla_oft", chunk=2, train="language"), SPEC),
    "oft_l1_film": (OpenVLAOFTConfig(name="openvla_oft", chunk=2, head="l1", film=True, proprio=True), SPEC),
    "pi0": (Pi0Config(name="pi0", train="expert", chunk=2, steps=2), SPEC),
    "flow_noise": (Pi0Config(name="pi0", exploration="flow_noise", chunk=2, steps=2), SPEC),
    "pi05": (Pi0Config(name="pi05", chunk=2, steps=2), SPEC),
}
IMITATED = {name: FAMILIES[name] for name in ("mlp", "cnn", "oft_l1_film", "pi05")} | {
    "words": (OpenVLAConfig(name="openvla", sft_loss="vocabulary"), SPEC),
    "chunks_of_words": (OpenVLAOFTConfig(name="openvla_oft", chunk=2, sft_loss="vocabulary"), SPEC),
    "augmented": (Pi0Config(name="pi0", augment=True), SPEC),
    "openvla": FAMILIES["openvla"],
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def on_the_card(family, truth=True):
    card, seed = (RealCard(), 0) if WHERE == "cuda" else (Card(truth), None)  # where numbers are none, nothing is drawn
    return card, card.take(shallow(make_policy(*(FAMILIES | IMITATED)[family], seed).eval()))


def seen(spec):
    obs = observe(ROWS, spec)
    return obs if spec.instruction else {key: part for key, part in obs.items() if key != "instruction"}


def on_card(obs):
    """The observation of a simulator on the same GPU."""
    return map_obs(lambda part: part if isinstance(part, list) else torch.as_tensor(part).to(WHERE), obs)


def rollout(policy):
    """DECISIONS decisions, as a learner gets them."""
    output = policy.act(seen(policy.spec), noise(policy, ROWS))
    many = lambda array: np.repeat(arrays.host(array), DECISIONS, axis=0)  # noqa: E731
    count, chunk = DECISIONS * ROWS, output.actions.shape[1]
    flags = np.zeros((count, chunk), bool)
    return Trajectory(
        ids=np.arange(ROWS),
        lengths=np.full(ROWS, DECISIONS),
        obs=map_obs(many, text_arrays(seen(policy.spec))),
        actions=many(output.actions),
        logprobs=many(output.logprobs),
        values=np.zeros(count, np.float32),
        next_values=np.zeros(count, np.float32),
        rewards=np.ones((count, chunk), np.float32),
        terminated=flags,
        truncated=flags,
        mask=~flags,
        versions=np.zeros(count, np.int64),
        episodes=np.zeros(count, np.int64),
        replay={name: many(array) for name, array in output.replay.items()},
    )


def model_of(policy):
    return Model(policy, LearnerConfig())


def step_there(params, grads, averages, squares, *_, **options):
    """torch's own fused Adam has no kernel for `meta`."""
    assert params and all(t.device.type == WHERE for part in (params, grads, averages, squares) for t in part)


def learn(policy, played):
    """One PPO update, with frozen parts looked at once."""
    config = PPOConfig(rollout_decisions=DECISIONS, epochs=1, minibatch_size=ROWS * DECISIONS, max_grad_norm=0.5)
    model = model_of(policy)
    optimizer = PolicyOptimizer(policy, config, Alone())
    share = build_batch(played, Unit((), played.ids), 0, config, Alone(), model)
    share = replace(share, replay=share.replay | frozen_features(model, share, ROWS))
    with nullcontext() if WHERE == "cuda" else patch("torch._fused_adamw_", step_there):
        return update_policy(model, optimizer, config, share, 0, BatchEnd(0, 10))


def imitate(policy):
    learner = ImitationLearner.__new__(ImitationLearner)
    learner.policy, learner.model = policy, model_of(policy)
    learner.device, learner.seed, learner.config = WHERE, 0, LearnerConfig()
    learner.demos = Demonstrations(policy.spec, policy.horizon, 0, ROWS)
    actions = np.zeros((ROWS, policy.spec.action.dim), np.float32)
    obs = {"instruction": ["push the red cube"] * ROWS} | seen(policy.spec)
    episode = DatasetEpisode(0, "push the red cube", None, obs, actions, {})
    list(learner.demos.read([episode], ROWS, None))
    try:
        steps = GradientSteps(learner.model, None, learner._losses)
        steps.add_passes([Pass(torch.arange(ROWS))], partial(learner.loss_of, 0, 1.0), 1.0)
        return steps.sums
    finally:
        learner.demos.close()


WAYS = {
    "act": lambda policy, _: policy.act(seen(policy.spec), noise(policy, ROWS)),
    "value": lambda policy, _: policy.value(seen(policy.spec)),
    "update": learn,
    "imitate": lambda policy, _: imitate(policy),
}


@on_both
@each_family
def test_acting_and_values_stay_on_the_gpu(family):
    card, policy = on_the_card(family, truth=False)  # the normaliser has counted something
    with card:
        obs = on_card(seen(policy.spec))  # others come in the update
        output, values = policy.act(obs, noise(policy, ROWS)), policy.value(obs)
    assert len(output.actions) == len(output.logprobs) == len(values) == ROWS
    assert isinstance(values, np.ndarray) or values.device.type == output.actions.device.type == WHERE


@on_both
@each_family
def test_scoring_and_an_update_stay_on_the_gpu(family):
    card, policy = on_the_card(family)
    with card:
        assert learn(policy, rollout(policy))["train/epochs"] == 1


@on_both
@pytest.mark.parametrize("family", IMITATED)
def test_imitation_stays_on_the_gpu(family):
    card, policy = on_the_card(family)
    with card:
        imitate(policy)
    assert {p.grad.device.type for p in policy.parameters() if p.grad is not None} == {WHERE}


def stays(array, device):
    """What `tensor_of` would be, had somebody forgotten the device."""
    return torch.as_tensor(array)


@pytest.mark.parametrize("family", ["mlp", "cnn", "openvla", "oft_l1_film", "pi05"])
def test_a_tensor_left_on_the_cpu_is_found(family, monkeypatch):
    """So that the tests above can fail."""
    card, policy = on_the_card(family)
    with card:
        played = rollout(policy)
    for name, module in list(sys.modules.items()):
        if name.startswith("embodied.policies") and getattr(module, "tensor_of", None) is arrays.tensor_of:
            monkeypatch.setattr(module, "tensor_of", stays)
    for way in WAYS.values():
        with card, pytest.raises((RuntimeError, TypeError), match="device"):
            way(policy, played)
