"""Named protocols: which there are, what they fix, and that the fixed episodes are those of the list."""

import pytest

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeList
from embodied.envs import env_class
from embodied.envs.capabilities import choose_protocol
from embodied.envs.config import ExternalEnvConfig
from embodied.envs.gym.config import GymConfig
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.pointmass.config import PointMassConfig


def chosen(config, name=None):
    return choose_protocol(env_class(config), config, name)


@pytest.mark.parametrize(
    ("config", "name", "fixes"),
    [
        (
            ManiSkillConfig(solver_iterations=4),
            "maniskill-v1",
            {"on_success": "continue", "on_failure": "continue", "solver_iterations": None},
        ),
        (PointMassConfig(name="pointmass"), "pointmass-v1", {"on_success": "truncate", "after_success": 0}),
        (GymConfig(name="gym:CartPole-v1"), "gym-v1", {"on_success": "terminate"}),
        (ExternalEnvConfig(name="gymnasium.envs.classic_control:CartPoleEnv"), "gym-v1", {"on_success": "terminate"}),
    ],
)
def test_every_env_has_a_protocol_of_its_own(config, name, fixes):
    pytest.importorskip("mani_skill")
    protocol = chosen(config)
    assert (protocol.name, protocol.options) == (name, fixes)
    assert protocol.rules
    applied = protocol.apply(config)
    assert applied.model_dump() == config.model_dump() | fixes


def test_another_protocol_is_taken_by_name():
    config = PointMassConfig(name="pointmass", on_success="continue")
    assert chosen(config, "as-trained-v1").apply(config) == config
    with pytest.raises(ConfigError, match=r"'pointmass-v2': pointmass reach has pointmass-v1, as-trained-v1"):
        chosen(config, "pointmass-v2")


def test_tasks_take_turns_and_their_episodes_do_not_depend_on_the_company():
    alone, three = EpisodeList(5, "eval", ("b",)), EpisodeList(5, "eval", ("a", "b", "c"))
    assert [spec.task for spec in three.first(4)] == ["a", "b", "c", "a"]
    assert [spec.index for spec in three.first(4)] == [0, 1, 2, 3]
    assert [spec.seed for spec in three.first(9) if spec.task == "b"] == [spec.seed for spec in alone.first(3)]


def test_stored_initial_states_are_taken_in_order():
    specs = EpisodeList(5, "eval", ("a", "b"), stored_states=2).first(6)
    assert [(spec.task, spec.init_state_id) for spec in specs] == [
        ("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 0), ("b", 0)
    ]  # fmt: skip
    assert {spec.init_state_id for spec in EpisodeList(5, "eval", ("a",)).first(3)} == {-1}
