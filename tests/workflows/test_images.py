"""Images on their way through the loop: seen by the sims, sent once to each who looks, learnt from as bytes."""

import json

import numpy as np
import pytest
import torch
from stepped import Run

from embodied.learners import learner_worker as learner

ITERATIONS, ENVS, DECISIONS = 2, 6, 8
ARGUMENTS = [
    "recipe=pointmass_ppo",
    "policy={name: cnn, channels: [4, 4], kernels: [4, 3], strides: [2, 1], features: 8, hidden: [16]}",
    "algo.minibatch_size=24",
    "algo.epochs=2",
    f"env.num_envs={ENVS}",
    f"algo.rollout_decisions={DECISIONS}",
    f"run.iterations={ITERATIONS}",
    "run.env_steps=null",
    "env.max_episode_steps=7",
]
TOGETHER = {"sim,policy": "cpu:0", "learner": "cpu:1"}
APART = {"sim": "cpu:0", "policy": "cpu:1", "learner": "cpu:2"}


def trained(folder, placement, backend, *options):
    """The policy after a few iterations, and the numbers of the last."""
    with Run(folder, *ARGUMENTS, *options, placement=placement, backend=backend) as run:
        numbers = run.train()[-1]
        return run.weights(), numbers


def env(kind, **kwargs):
    return [f"env.name=watched_env:{kind}", f"env.kwargs={json.dumps(kwargs)}"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    config = "env={cameras: [near, top], image_size: 16, state: proprio}"
    return trained(tmp_path_factory.mktemp("reference"), TOGETHER, "inline", config)


def test_the_cnn_learns_from_pictures_and_its_trunks_move(reference, tmp_path):
    weights, numbers = reference
    start, _ = trained(tmp_path, TOGETHER, "inline", *env("ImageEnv"), "algo.lr=0")
    for camera in ("near", "top"):
        name = f"trunks.{camera}.0.weight"
        assert np.abs(weights[name] - start[name]).max() > 1e-4
    assert numbers["train/grad_norm"] > 1e-3 and numbers["train/logprob_gap"] < 1e-4


@pytest.mark.slow
def test_between_processes_every_picture_is_sent_once_to_each_reader(reference, tmp_path):
    notes = tmp_path / "notes"
    weights, _ = trained(tmp_path, APART, "local", *env("CountedEnv", notes=str(notes)))
    for name, array in reference[0].items():
        np.testing.assert_allclose(weights[name], array, atol=1e-6)
    asked, learnt = count(notes)
    # The policy sees each env at each decision and once more at the end of a rollout, and last frames of episodes that
    # were cut off: those of 7 steps in 16, two for each env, if none succeeds.
    once = ENVS * ITERATIONS * (DECISIONS + 1)
    assert once <= asked[0] <= once + 2 * ENVS + 6
    assert learnt[0] == ITERATIONS * ENVS * DECISIONS
    for pictures, num_bytes in (asked, learnt):
        assert num_bytes == pictures * 2 * 16 * 16 * 3  # bytes, not floats, of two cameras


def test_with_policy_and_sim_in_one_process_pictures_are_only_sent_to_the_learner(tmp_path):
    notes = tmp_path / "notes"
    trained(tmp_path, TOGETHER, "local", *env("CountedEnv", notes=str(notes)))
    asked, learnt = count(notes)
    assert asked == (0, 0) and learnt[0] == ITERATIONS * ENVS * DECISIONS


def count(notes):
    """(pictures, bytes) sent to the policy and to the learner."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    kinds = ("ActRequest", "Trajectory")
    return [tuple(sum(line[i] for line in lines if line[0] == kind) for i in (2, 3)) for kind in kinds]


def test_the_learner_keeps_pixels_as_bytes_until_it_looks(tmp_path, monkeypatch):
    seen = []

    def watched(trajectory, *rest):
        share = build(trajectory, *rest)
        seen.append((trajectory.obs["images"]["near"].dtype, share.obs["images"]["near"].dtype))
        return share

    build = learner.build_batch
    monkeypatch.setattr(learner, "build_batch", watched)
    trained(tmp_path, TOGETHER, "inline", *env("ImageEnv"))
    assert seen == [(np.uint8, torch.uint8)] * ITERATIONS


def test_tensors_of_a_simulator_stay_tensors_and_teach_the_same_as_arrays(reference, tmp_path, monkeypatch):
    seen = []

    def watched(trajectory, *rest):
        seen.append([type(part) for part in (trajectory.obs["state"], trajectory.actions, trajectory.logprobs)])
        return build(trajectory, *rest)

    build = learner.build_batch
    monkeypatch.setattr(learner, "build_batch", watched)
    weights, _ = trained(tmp_path, TOGETHER, "inline", *env("TensorEnv"))
    assert seen == [[torch.Tensor] * 3] * ITERATIONS
    for name, array in reference[0].items():
        np.testing.assert_array_equal(weights[name], array)
