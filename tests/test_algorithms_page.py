"""Every command of docs/algorithms.md is one that `train` takes, and its tables say what the code does."""

import re
from pathlib import Path

from idle_collector import idle_collector

from embodied.algorithms.config import PRESETS, GRPOConfig
from embodied.config.recipe import load
from embodied.envs.common_config import REWARDS
from embodied.workflows.group_collector import GroupedEpisodes

PAGE = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text()


def test_every_command_is_accepted():
    commands = re.findall(r"^python -m embodied.train (.*)", PAGE, re.M)
    assert len(commands) >= 5
    for command in commands:
        config = load(command.split()).config
        assert config.algo.name in {"ppo", *PRESETS}


def test_the_table_of_relatives_is_that_of_the_presets():
    for name, preset in PRESETS.items():
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*\| `([^`]*)` \|$", PAGE, re.M)
        told = dict(word.split("=") for word in row.split())
        config = GRPOConfig(name=name)
        assert {key: str(getattr(config, key)) for key in told} == told
        assert preset.keys() <= told.keys()


def test_every_reward_and_every_number_of_groups_is_named():
    assert all(f"| `{reward}` |" in PAGE for reward in REWARDS)
    config = load(["recipe=pointmass_grpo"]).config
    numbers = idle_collector(config, ("reach",)).metrics(GroupedEpisodes(1, 0))
    assert all(f"`{name}`" in PAGE for name in numbers if name.startswith(("groups/", "faults/")))
