"""What a learner holds of demonstrations: images on disk, numbers in memory, and how learning rates change."""

import shutil
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from embodied.algorithms.config import SFTConfig
from embodied.core.errors import ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.datasets import DatasetEpisode
from embodied.learners.imitation import DemoImages, Demonstrations, next_keyframes, sft_factor

SPEC = EnvSpec(ActionSpec(2), state_dim=3, images={"a": (16, 16, 3), "b": (8, 4, 3)}, instruction=True)


def episode(number, length, size=SPEC):
    draw = np.random.default_rng(number)
    images = {name: draw.integers(0, 256, (length, *shape), np.uint8) for name, shape in size.images.items()}
    state = draw.normal(size=(length, 3)).astype(np.float32)
    obs = {"state": state, "images": images, "instruction": [f"task {number}"] * length}
    actions = draw.normal(size=(length, 2)).astype(np.float32)
    return DatasetEpisode(number, f"task {number}", True, obs, actions, {})


def test_items_are_those_of_the_episodes_whatever_is_asked_for(tmp_path):
    episodes = [episode(number, length) for number, length in enumerate((3, 1, 4))]
    demos = Demonstrations(SPEC, 3, first=10, total=30)
    assert [len(obs["state"]) for obs in demos.read(iter(episodes), 8, tmp_path)] == [3, 1, 4]
    assert len(demos) == 8 and not list(tmp_path.iterdir())  # the file has no name
    found = demos.batch(torch.tensor([7, 0, 3, 2, 4]))
    assert found["obs"]["instruction"] == ["task 2", "task 0", "task 1", "task 0", "task 2"]
    for row, (number, step) in enumerate([(2, 3), (0, 0), (1, 0), (0, 2), (2, 0)]):
        one = episodes[number]
        assert np.array_equal(found["obs"]["state"][row], one.obs["state"][step])
        assert all(np.array_equal(found["obs"]["images"][c][row], one.obs["images"][c][step]) for c in "ab")
        there = min(3, len(one) - step)
        assert found["mask"][row].tolist() == [True] * there + [False] * (3 - there)
        assert np.array_equal(found["actions"][row][:there], one.actions[step : step + there])
    demos.close()
    demos.close()


@pytest.mark.parametrize(
    ("gripper", "wanted"),
    [
        ([1, 1, -1, -1, 1], [2, 2, 4, 4, 4]),
        ([0.0, 0.1, 0.9, 1.0], [2, 2, 3, 3]),
        ([1, 1, 1], [2, 2, 2]),
        ([-1, 1], [1, 1]),
        ([1], [0]),
    ],
)
def test_keyframes_are_where_the_gripper_moves_and_the_end(gripper, wanted):
    actions = np.stack([np.arange(len(gripper)), gripper], axis=1).astype(np.float32)
    assert next_keyframes(actions).tolist() == wanted


def test_an_item_has_the_states_of_its_next_keyframe_and_of_the_episodes_end(tmp_path):
    episodes = [episode(number, length) for number, length in enumerate((3, 1, 4))]
    demos = Demonstrations(SPEC, 3, first=0, total=8)
    assert len(list(demos.read(iter(episodes), 8, tmp_path))) == 3
    found = demos.batch(torch.tensor([7, 0, 3, 5]))["keyframes"]
    for row, (number, step) in enumerate([(2, 3), (0, 0), (1, 0), (2, 1)]):
        state, ahead = episodes[number].obs["state"], next_keyframes(episodes[number].actions)[step]
        assert np.array_equal(found[row], state[[ahead, -1]])
    demos.close()


def test_memory_does_not_grow_with_the_pictures(tmp_path):
    spec = EnvSpec(ActionSpec(2), state_dim=3, images={"a": (64, 64, 3)}, instruction=True)
    demos = Demonstrations(spec, 8, 0, 1000)
    tracemalloc.start()
    for _ in demos.read((episode(number, 50, spec) for number in range(20)), 1000, tmp_path):
        pass
    demos.batch(torch.arange(100, 116))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    demos.close()
    assert peak < 6 * 50 * 64 * 64 * 3 < 0.5 * 1000 * 64 * 64 * 3  # a few episodes of twenty


@pytest.mark.parametrize("place", ["nowhere", "file"])
def test_a_cache_that_is_no_folder_is_refused(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"sft\.cache=.*{place} is not a folder"):
        DemoImages({"top": (4, 4, 3)}, 2, tmp_path / place)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    demos = Demonstrations(SPEC, 1, 0, 5000)
    with pytest.raises(ConfigError, match=r"5,000 env steps take 0\.00432 GB decoded, and .* has 0\.001 GB left"):
        next(demos.read(iter([]), 5000, tmp_path))


def test_learning_rates_of_schedules_equal_hand_computed_numbers():
    cosine = SFTConfig(lr=1.0, final_lr=0.1, lr_schedule="cosine", warmup_steps=1)
    found = [sft_factor(cosine, step, 5, 5) for step in range(5)]
    assert found == pytest.approx([0.5, 1.0, 0.868198, 0.55, 0.231802], abs=1e-6)
    linear = SFTConfig(lr_schedule="linear", warmup_steps=3)
    assert [sft_factor(linear, step, 2, 6) for step in range(6)] == pytest.approx(
        [1 / 4, 2 / 4, 0.5, 2 / 3, 1 / 3, 1 / 3]
    )
    assert sft_factor(SFTConfig(lr_schedule="constant"), 3, 2, 6) == 1.0
