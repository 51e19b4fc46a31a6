import pytest

from embodied.config import load
from embodied.errors import ConfigError
from embodied.footprint import check_pictures, picture_bytes

SEEN = ["recipe=pointmass_ppo", "policy.name=cnn", "env.cameras=[top, near]", "env.image_size=[32, 64]"]


def config():
    return load([*SEEN, "env.num_envs=10", "algo.rollout_decisions=100"]).config


def test_pictures_of_an_iteration_are_counted_in_bytes():
    assert picture_bytes(config()) == 10 * 100 * 2 * 32 * 64 * 3
    assert picture_bytes(load(["recipe=pointmass_ppo"]).config) == 0
    assert picture_bytes(load(["recipe=libero_ppo", "env.cameras=[wrist]"]).config) == 8 * 32 * 128 * 128 * 3


def test_more_than_the_machine_can_hold_is_refused_with_what_fits():
    # 12.288 MB, held four times: 49 MB
    check_pictures(config(), 50_000_000)
    with pytest.raises(ConfigError, match=r"0\.0123 GB an iteration.*0\.0492 GB.*try algo\.rollout_decisions=40$"):
        check_pictures(config(), 40_000_000)
