"""docs/bridge.md: its tasks, their limits and its variants are those that exist."""

import re
from pathlib import Path

import pytest
from bridge_files import needs

from embodied import train
from embodied.envs.config import ManiSkillConfig
from embodied.envs.maniskill.bridge.bridge_tasks import PLATES, TWINS
from embodied.envs.maniskill.bridge.plate_variants import variants

PAGE = (Path(__file__).parents[1] / "docs" / "bridge.md").read_text()


def test_the_page_names_every_task_with_its_states():
    rows = re.findall(r"^\| `(\w+-v1)` \|.*\| (\d+) \| (\d+) \|$", PAGE, re.M)
    assert {task: int(states) for task, _, states in rows} == TWINS


def test_the_page_names_every_variant():
    named = set(re.findall(r"`(\w+-v[13])`", PAGE))
    named |= {f"{name}05-v1" for name in re.findall(r"`(\w+)03-v1`, `05`", PAGE)}
    assert variants("all").keys() <= named


def test_a_named_evaluation_plays_tasks_that_are_there():
    pytest.importorskip("mani_skill")
    from embodied.envs.maniskill.tasks import registered

    names = re.search(r"env.task=\[(.*)\]", PAGE).group(1).split(",")
    assert all(name.startswith(PLATES) and name in registered() for name in names)
    assert ManiSkillConfig(task=tuple(names)).task == tuple(names)


@pytest.mark.slow
@needs("PutOnPlateInScene25Main-v3")
@pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
def test_the_recipe_of_pi0_takes_the_task_that_its_page_names(capsys):
    page = (Path(__file__).parents[1] / "docs" / "pi0.md").read_text()
    keys = re.search(r"`(env\.task=PutOnPlate[^`]*)`", page).group(1).split()
    asked = ["recipe=maniskill_ppo_pi0", *keys, "cluster.machines=8xGPU", "--dry-run"]
    assert train.main(asked) == 0, capsys.readouterr().err
