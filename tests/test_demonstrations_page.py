"""What docs/demonstrations.md says runs, where it is short enough."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")


from embodied.collect import main as collect
from embodied.sft import main as sft
from embodied.train import main as train

PAGE = (Path(__file__).parents[1] / "docs" / "demonstrations.md").read_text()
COMMAND = re.compile(r"^python -m embodied\.(\w+) (.*)", re.M)
COMMANDS = COMMAND.findall(PAGE)
MAINS = {"collect": collect, "sft": sft, "train": train}
INLINE = ["cluster.backend=inline"]


def test_the_three_commands_of_the_toy_follow_on_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toy = [(name, told.split()) for name, told in COMMANDS if "pointmass" in told]
    assert [name for name, _ in toy] == ["collect", "sft", "train"]
    short = {"train": ["run.iterations=1", "eval.episodes=2"], "sft": ["eval.episodes=2"], "collect": []}
    for name, told in toy:
        done = [str(path) for path in Path("runs").glob("sft-*")]
        told = [word.replace("runs/sft-pointmass_ppo-DATE", done[0]) if done else word for word in told]
        told = [word for word in told if not word.startswith("sft.epochs")]
        more = ["sft.epochs=1", "eval.videos=0"] if name == "sft" else ["eval.videos=0"] if name == "train" else []
        assert MAINS[name]([*told, *INLINE, *short[name], *more]) == 0


@pytest.mark.slow
@pytest.mark.skipif("not __import__('importlib.util').util.find_spec('mani_skill')", reason="needs ManiSkill")
def test_the_planner_writes_demonstrations_of_the_recipes_env(tmp_path, monkeypatch, capsys):
    from embodied.datasets import read_dataset

    monkeypatch.chdir(tmp_path)
    (told,) = [told.split() for _, told in COMMANDS if "collect.expert=planner" in told]
    assert collect([*told, "collect.episodes=2", "collect.noise=0", "env.num_envs=2", *INLINE]) == 0
    assert "planner: success_once 100.0%" in capsys.readouterr().out
    source = json.loads(Path("demos/planned/meta/source.json").read_text())
    assert source["by"] == "planner" and source["env"]["control_mode"] == "pd_joint_delta_pos"
    for episode in read_dataset(Path("demos/planned")):
        assert (abs(episode.actions) <= 1).all() and len(episode) <= 50 and episode.done[-1]
