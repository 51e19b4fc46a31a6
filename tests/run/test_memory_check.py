import re

import pytest

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.run.memory_check import check_images, check_simulators, image_bytes, sim_bytes
from embodied.train import main as train

SEEN = ["recipe=pointmass_ppo", "policy.name=cnn", "env.cameras=[top, near]", "env.image_size=[32, 64]"]


def config():
    return load([*SEEN, "env.num_envs=10", "algo.rollout_decisions=100"]).config


def test_images_of_an_iteration_are_counted_in_bytes():
    assert image_bytes(config()) == 10 * 100 * 2 * 32 * 64 * 3
    assert image_bytes(load(["recipe=pointmass_ppo"]).config) == 0
    assert image_bytes(load(["recipe=libero_ppo", "env.cameras=[wrist]"]).config) == 8 * 32 * 128 * 128 * 3


def test_the_memory_of_images_of_whole_episodes_is_counted():
    asked = ["recipe=pointmass_grpo_openvla_oft_tiny", "algo.groups=10"]  # 24 steps in chunks of 4, one 64 x 64 image
    assert image_bytes(load(asked).config) == 10 * 4 * 6 * 64 * 64 * 3
    with pytest.raises(ConfigError, match=r"algo\.groups=10 \* algo\.group_size=4 episodes.*try algo\.groups=4$"):
        check_images(load(asked).config, 10_000_000)


def test_more_than_the_machine_can_hold_is_refused_with_what_fits():
    # 12.288 MB, held four times: 49 MB
    check_images(config(), 50_000_000)
    with pytest.raises(ConfigError, match=r"0\.0123 GB an iteration.*0\.0492 GB.*try algo\.rollout_decisions=40$"):
        check_images(config(), 40_000_000)


def test_simulators_that_load_large_scenes_are_counted_and_refused_where_they_cannot_fit():
    suite = (
        "recipe=libero_ppo env.task=libero_object env.num_envs=4 env.tasks_in_memory=3 algo.minibatch_size=128"
    ).split()
    seen = load([*suite, "env.cameras=[wrist]"]).config
    assert sim_bytes(seen, 2, learn=True) == pytest.approx(0.7e9 + 3 * 0.8e9)  # 2 rows play, 3 tasks stay
    assert sim_bytes(load(suite).config, 1, learn=True) == pytest.approx(0.7e9 + 4 * 0.3e9)  # 4 rows play 4 tasks
    assert sim_bytes(load(["recipe=pointmass_ppo"]).config, 1, learn=True) == 0
    check_simulators(seen, 2, 6_300_000_000)
    one = """1 sim worker(s), placement='{"sim,policy": "cpu:0", learner: "cpu:0"}'"""
    tried = f"3.1 GB each, 6.2 GB in all, and this machine has 6 GB; try env.tasks_in_memory=2, or {one}"
    with pytest.raises(ConfigError, match=re.escape(tried)):
        check_simulators(seen, 2, 6_000_000_000)
    with pytest.raises(ConfigError, match=r"try fewer env\.num_envs$"):
        check_simulators(seen, 2, 1_000_000_000)


def test_an_evaluation_counts_the_tasks_that_it_plays():
    suite = ["recipe=libero_ppo", "env.task=libero_object", "env.num_envs=4", "algo.minibatch_size=128"]
    two, many = (load([*suite, f"eval.episodes={count}"]).config for count in (2, 50))
    assert sim_bytes(two, 1, learn=False) == pytest.approx(0.7e9 + 2 * 0.3e9)
    assert sim_bytes(two, 2, learn=False) == pytest.approx(0.3e9 + 1 * 0.3e9)  # one episode each, nothing cached
    assert sim_bytes(many, 2, learn=False) == pytest.approx(0.7e9 + 5 * 0.3e9)
    assert sim_bytes(two, 2, learn=True) == pytest.approx(0.7e9 + 10 * 0.3e9)  # 4 rows play all tasks in turn


def test_a_sim_worker_owns_the_rows_of_one_or_two_tasks_where_tasks_divide_the_rows():
    """64 workers of all ten scenes would be 557 GB; eval.episodes names tasks as often as the rows do."""
    suite = ["recipe=libero_ppo_pi0", "env.task=libero_spatial", "algo.minibatch_size=64", "eval.episodes=100"]
    even, uneven = (load([*suite, f"env.num_envs={rows}", "env.tasks_in_memory=10"]).config for rows in (640, 512))
    assert sim_bytes(uneven, 64, learn=True) == pytest.approx(0.7e9 + 10 * 0.8e9)
    assert sim_bytes(even, 64, learn=True) == pytest.approx(0.7e9 + 2 * 0.8e9)
    check_simulators(even, 64, 150e9)
    with pytest.raises(ConfigError, match=r"try env\.num_envs=320, which 10 tasks divide, so that a worker plays few"):
        check_simulators(uneven, 64, 150e9)


def test_layers_too_wide_for_a_gpu_are_refused_with_the_arithmetic(capsys):
    # One input and one output make 20 billion weights at least: of 4 bytes each, and 12 more to train it.
    words = ["recipe=pointmass_ppo", "policy.hidden=[10000000000]", "learner.device=cuda", "cluster.machines=1xH100"]
    assert train([*words, "--dry-run"]) == 2
    assert re.search(r"weights of both 80 \+ learner 240 = 321 of 80 GB", capsys.readouterr().err)
