"""Rollouts that stay on the device of the simulator and the policy, with tensors on the CPU in the device's place."""

import numpy as np
import pytest
import torch
from counted_transfers import READS, Transfers
from stepped import Run

from embodied.envs.sim_worker import SimWorker
from embodied.policies.policy_worker import PolicyWorker
from embodied.runtime.device_graphs import CapturedGraphs

pytestmark = pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
TOGETHER = {"sim,policy": "cpu:0", "learner": "cpu:1"}
SMALL = ["env.backend=cpu_batched", "env.num_envs=4", "algo.minibatch_size=40", "algo.epochs=2"]
SMALL += ["env.max_episode_steps=20", "algo.rollout_decisions=20"]
SHORT = ["run.iterations=2", "run.env_steps=null"]


@pytest.fixture
def noise_of_tensors(monkeypatch):
    build = PolicyWorker.build

    def on_device(self, spec):
        build(self, spec)
        self.noise_device, self.captured_graphs = torch.device("cpu"), CapturedGraphs("cpu")

    monkeypatch.setattr(PolicyWorker, "build", on_device)


def trained(folder, recipe, options):
    """What sims and policies moved in the second rollout, and the weights and numbers after it."""
    moved: list[Transfers] = []

    def counted(method):
        def call(*args, **options):
            with Transfers() as transfers:
                moved.append(transfers)
                return method(*args, **options)

        return call

    run = Run(folder, f"recipe={recipe}", *SHORT, *options, placement=TOGETHER)
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((SimWorker, "play"), (PolicyWorker, "serve")):
            patch.setattr(kind, name, counted(getattr(kind, name)))
        with run:
            results, numbers = run.play()[-1]
            weights = run.weights()
    numbers = {name: number for name, number in numbers.items() if not name.startswith(("time/", "memory/"))}
    resets = moved[2].of_resets + moved[3].of_resets
    return (moved[2].lines + moved[3].lines, resets), weights, numbers, results


def test_the_gpu_recipe_moves_nothing_in_a_step_and_learns_what_it_learns_on_the_host(
    tmp_path, monkeypatch, noise_of_tensors
):
    pytest.importorskip("mani_skill")
    from embodied.envs.maniskill.env import ManiSkillEnv

    _, *on_cpu = trained(tmp_path / "host", "maniskill_ppo_gpu", SMALL)
    monkeypatch.setattr(ManiSkillEnv, "gives_tensors", True)
    (moved, resets), *on_device = trained(tmp_path / "device", "maniskill_ppo_gpu", SMALL)
    assert sum(moved.values()) <= 5, moved  # of 20 decisions
    assert 0 < sum(resets.values()) <= 5, resets  # of all rows at once
    assert on_device[1:] == on_cpu[1:] and len(on_device[2]) == 4
    for name, array in on_cpu[0].items():
        np.testing.assert_array_equal(on_device[0][name], array)


POINTS = ["env={name: 'watched_env:TensorEnv', num_envs: 4, max_episode_steps: 7}", "algo.rollout_decisions=20"]
CNN = ["policy={name: cnn, channels: [4, 4], kernels: [4, 3], strides: [2, 1], features: 8, hidden: [16]}"]


def test_where_success_ends_episodes_a_step_reads_their_flags_in_one_copy(tmp_path, noise_of_tensors):
    (moved, _), *_ = trained(tmp_path, "pointmass_ppo", [*POINTS, *CNN, "algo.minibatch_size=80"])
    reads = [count for line, count in moved.items() if line.startswith("cpu") and "vector_env.py" in line]
    assert max(reads) == 20, moved


def test_staggered_rows_learn_on_the_device_what_they_learn_on_the_host_and_a_step_reads_its_results_at_most(
    tmp_path, noise_of_tensors
):
    """Episodes end in different steps, so the next ones begin on some of the rows."""
    points = "env={name: 'watched_env:%s', num_envs: 4, max_episode_steps: 7, on_success: continue}"
    options = [*CNN, POINTS[1], "algo.minibatch_size=80", "env.kwargs={stagger: true}"]
    _, *on_cpu = trained(tmp_path / "host", "pointmass_ppo", [points % "ImageEnv", *options])
    (moved, _), *on_device = trained(tmp_path / "device", "pointmass_ppo", [points % "TensorEnv", *options])
    reads = {line: count for line, count in moved.items() if line.partition(" ")[0] in READS}
    assert 8 <= sum(reads.values()) <= 20 + 3, reads  # of 20 decisions, in most of which an episode ends
    assert on_device[1] == on_cpu[1]
    for result, other in zip(on_device[2], on_cpu[2], strict=True):
        assert result._replace(task="ImageEnv") == other
    for name, array in on_cpu[0].items():
        np.testing.assert_array_equal(on_device[0][name], array)
