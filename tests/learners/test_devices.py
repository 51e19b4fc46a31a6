"""What losses are made of lies where the learner computes. The meta device stands for a GPU: it mixes with no other."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from embodied.algorithms.config import GRPOConfig
from embodied.core.types import ActionSpec, EnvSpec, Trajectory, Unit
from embodied.datasets import DatasetEpisode
from embodied.learners.imitation import Demonstrations, ImitationLearner
from embodied.learners.model import Pass
from embodied.learners.train_batch import build_batch
from embodied.learners.update import GradientSteps, mismatch_of
from embodied.runtime.collective import Alone

PLAYED = Trajectory(
    ids=np.array([3, 5]),
    lengths=np.array([2, 1]),
    obs={"state": np.zeros((3, 2), np.float32)},
    actions=np.zeros((3, 1, 2), np.float32),
    logprobs=np.zeros((3, 1, 2), np.float32),
    rewards=np.ones((3, 1)),
    mask=np.ones((3, 1), bool),
    versions=np.zeros(3, np.int64),
    terminated=np.zeros((3, 1), bool),
    truncated=np.zeros((3, 1), bool),
    episodes=np.array([3, 3, 5]),
)
COMPARED = Unit((), PLAYED.ids, scores=np.array([1.0, 0.0]), advantages=np.array([1.0, -1.0]))


def scored_alike(scores):
    """A model with the same scores for everything."""
    config = SimpleNamespace(micro_batch_size=None)
    policy, about = SimpleNamespace(speaks=False), {"device": "meta", "dtype": torch.float32, "table": None}
    score, passes = (lambda inputs: scores), (lambda micro_batches, padding: [*map(Pass, micro_batches)])
    return SimpleNamespace(config=config, policy=policy, score=score, passes=passes, **about)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_groups_are_learned_from_on_the_learners_device(kl_coef):
    numbers = torch.zeros(3, 1, 2, device="meta", requires_grad=True)
    scores = SimpleNamespace(logprobs=numbers, entropy=numbers, values=None)
    model = scored_alike(scores)
    config = GRPOConfig(name="grpo", groups=1, group_size=2, kl_coef=kl_coef)
    share = build_batch(PLAYED, COMPARED, 0, config, Alone(), model, model if kl_coef else None)
    loss, stats = share.loss_sum(scores, 1.0, config)
    assert {loss.device.type, *(number.device.type for number in stats.values())} == {"meta"}
    assert share.current.device.type == "meta" and share.obs["state"].device.type == "cpu"


def test_stale_groups_are_corrected_on_the_learners_device():
    numbers = torch.zeros(3, 1, 2, device="meta", requires_grad=True)
    scores = SimpleNamespace(logprobs=numbers, entropy=numbers, values=None)
    model = scored_alike(scores)
    config = GRPOConfig(name="grpo", decoupled=True, episode_mask="mean", episode_mask_low=0.5)
    share = build_batch(PLAYED, COMPARED, 0, config, Alone(), model).corrected(model, config)
    loss, stats = share.loss_sum(scores, 1.0, config)
    found = (loss, *stats.values(), share.excluded, *mismatch_of(share, numbers.detach()))
    assert {number.device.type for number in found} == {"meta"}


def test_losses_of_imitation_are_summed_where_the_gradients_are():
    weight = torch.zeros(2, device="meta", requires_grad=True)
    learner = object.__new__(ImitationLearner)
    learner.device, learner._noise = "meta", lambda items, iteration: None
    learner.policy = SimpleNamespace(auxiliary_loss="keyframe_loss")
    learner.demos = Demonstrations(EnvSpec(ActionSpec(2)), 1, 0, 3)
    episode = DatasetEpisode(0, "go", None, {"instruction": ["go"] * 3}, np.zeros((3, 2), np.float32), {})
    assert list(learner.demos.read([episode], 3, None)) == [{}]
    learner.model = SimpleNamespace(
        dtype=torch.float32,
        device="meta",
        imitate=lambda inputs, noise: (inputs["actions"] * weight, weight.sum().expand(3)),
        backward=lambda loss, last: loss.backward(),
    )
    steps = GradientSteps(learner.model, None, learner._losses)
    steps.add_passes([Pass(torch.arange(3))], partial(learner.loss_of, 0, 1.0), 1.0)
    assert weight.grad.device.type == steps.sums.device.type == "meta" and steps.sums.shape == (2,)
