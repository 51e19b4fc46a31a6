"""Random numbers of many rows at once. Each test imports ManiSkill for itself, since every test worker collects this
file."""

import os

import numpy as np
import pytest
import torch
from needed import requires

from embodied.envs.maniskill.bridge import asset_folder, missing_bridge_assets
from embodied.envs.maniskill.config import ManiSkillConfig

requires("mani_skill")


def built(rows, **options):
    from embodied.envs.maniskill.env import ManiSkillEnv

    return ManiSkillEnv(ManiSkillConfig(backend="cpu_batched", **options), rows)


@pytest.mark.parametrize("are_many", [False, True])
def test_rows_draw_what_generators_of_their_own_draw_in_the_same_calls(are_many):
    """Two calls each; among many rows are some whose pairs of normal numbers are rejected more often than usual."""
    from embodied.envs.maniskill.cpu_batch import FEW_ROWS, EpisodeDraws, RowsOfNormals, RowsOfUniforms

    num_rows = 3 * FEW_ROWS if are_many else 3
    seeds = np.random.default_rng(0).integers(0, 2**31 - 1, num_rows)
    draws = EpisodeDraws(seeds)
    normals, uniforms = RowsOfNormals(draws), RowsOfUniforms(draws, torch.device("cpu"))
    ours = [normals.normal(0.5, 0.02, (num_rows, 9)), normals.normal(0.0, 1.0, (num_rows, 2, 3))]
    ours += [uniforms.rand((num_rows, 2)).numpy(), uniforms.rand(num_rows).numpy()]
    for row, seed in enumerate(seeds.tolist()):
        numpy, mersenne = np.random.RandomState(seed), torch.Generator().manual_seed(seed)
        theirs = [numpy.normal(0.5, 0.02, 9), numpy.normal(0.0, 1.0, (2, 3))]
        theirs += [torch.rand(2, generator=mersenne).numpy(), torch.rand((), generator=mersenne).numpy()]
        for all_rows, own in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(all_rows[row], own)


def test_whole_numbers_and_places_are_what_each_row_draws_alone():
    """Places are drawn until they are free: in some rows at once, in some after several trials."""
    from mani_skill.envs.utils.randomization.samplers import UniformPlacementSampler

    from embodied.envs.maniskill.cpu_batch import EpisodeDraws, RowsOfPlaces, RowsOfUniforms

    seeds = np.arange(40)
    rows = RowsOfUniforms(EpisodeDraws(seeds), torch.device("cpu"))
    chosen = rows.randint(3, 1000, size=(40,))
    kind = type("Places", (RowsOfPlaces,), {"rand": rows})
    places = kind([[-0.1, -0.2], [0.1, 0.2]], 40)
    ours = [places.sample(0.09, 100), places.sample(torch.tensor(0.09), 100), rows.rand((40, 3))]
    assert len(set(rows.num_drawn.tolist())) > 2
    for seed in seeds.tolist():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            assert torch.randint(3, 1000, size=(1,)) == chosen[seed]
            alone = UniformPlacementSampler([[-0.1, -0.2], [0.1, 0.2]], 1)
            theirs = [alone.sample(0.09, 100), alone.sample(torch.tensor(0.09), 100), torch.rand((1, 3))]
        for all_rows, own in zip(ours, theirs, strict=True):
            assert torch.equal(all_rows[seed], own[0])


def test_numbers_for_another_device_are_drawn_from_the_hosts_generator():
    from embodied.envs.maniskill import cpu_batch

    def drawn(device):
        with cpu_batch.own_draws(torch.device(device)) as seed, torch.device(device):
            seed(7)
            torch.rand(3), torch.randn((2, 2)), torch.randint(3, 9, (4,)), torch.randperm(5, device=device)
            torch.rand((2, 1), device=device)
            assert torch.rand(2).device.type == device
            return torch.default_generator.get_state()

    before = torch.default_generator.get_state()
    assert torch.equal(drawn("cpu"), drawn("meta"))
    assert torch.equal(before, torch.default_generator.get_state())


STACK, PLATE = "StackCube-v1", "PutOnPlateInScene25Single-v1"
SLOW = [pytest.param(task, marks=pytest.mark.slow) for task in ("PullCubeTool-v1", "PegInsertionSide-v1", PLATE)]


@pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
@pytest.mark.parametrize("task", [STACK, *SLOW])
def test_rows_that_begin_together_begin_as_each_does_alone(task):
    if task == PLATE and missing_bridge_assets(task, asset_folder(os.environ)):
        pytest.skip("needs the files of PutOnPlate-25")
    from embodied.envs.maniskill.cpu_batch import draws_together

    env = built(task=task, rows=24)
    assert draws_together(env.envs[0])
    env.close()


@pytest.mark.filterwarnings("ignore")
def test_a_task_whose_draws_depend_on_other_rows_begins_row_by_row(monkeypatch):
    from mani_skill.envs.tasks import PushCubeEnv

    whole = PushCubeEnv._initialize_episode

    def until_all_are_right(self, env_idx, options):
        while (torch.rand(len(env_idx)) < 0.2).any():
            pass
        whole(self, env_idx, options)

    monkeypatch.setattr(PushCubeEnv, "_initialize_episode", until_all_are_right)
    monkeypatch.setattr("embodied.envs.maniskill.cpu_batch.DRAWN_TOGETHER", ())
    env = built(rows=8)
    assert not env.envs[0].draws_together
    env.reset(seed=3)
    env.close()
