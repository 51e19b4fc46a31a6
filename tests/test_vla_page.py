"""docs/vla.md: a small VLA from demonstrations to RL, its commands one after the other on a few episodes."""

import re
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("mani_skill")

from embodied.collect import main as collect
from embodied.evaluate import main as evaluate
from embodied.sft import main as sft
from embodied.train import main as train

PAGE = (Path(__file__).parents[1] / "docs" / "vla.md").read_text()
COMMANDS = re.findall(r"^python -m embodied\.(\w+) (.*push.*)", PAGE, re.M)
MAINS = {"collect": collect, "sft": sft, "train": train, "evaluate": evaluate}
SHORT = {
    "collect": ["collect.episodes=2", "env.num_envs=2"],
    "sft": ["sft.epochs=1", "eval.episodes=2", "eval.videos=0", "env.num_envs=2"],
    "train": [
        "run.iterations=1",
        "algo.groups=1",
        "algo.filter=none",
        "env.num_envs=8",
        "eval.episodes=2",
        "eval.videos=0",
    ],
    "evaluate": ["env.num_envs=2"],
}
FEWER = {"eval.episodes=200": "eval.episodes=2", "eval.videos=4": "eval.videos=1"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["openvla_oft", "pi0"])
def test_a_small_vla_goes_from_demonstrations_to_rl(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [name for name, _ in COMMANDS] == ["collect", "sft", "train", "evaluate"]
    for name, told in COMMANDS:
        words = [FEWER.get(word, word) for word in told.replace("openvla_oft", family).split()]
        for word in [word for word in words if word.endswith("-DATE")]:
            (made,) = Path("runs").glob(word.partition("runs/")[2].removesuffix("DATE") + "*")
            words[words.index(word)] = f"{word.partition('=')[0]}={made}"
        assert MAINS[name]([*words, "cluster.backend=inline", *SHORT[name]]) == 0
    assert list(Path("runs").glob("**/*.mp4"))
