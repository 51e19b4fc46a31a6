"""Training commands of the pages in docs/ run, and keys, modules and links they name exist."""

import re
import shlex
from pathlib import Path

import pytest

from embodied import train
from embodied.config.key_tree import leaves, root
from embodied.config.recipe import RunConfig, load

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
ALL = "\n".join(PAGES.values())
TRAIN = sorted(set(re.findall(r"^python -m embodied.train recipe=.*", ALL, re.M)))
SHORT = ["run.iterations=1", "eval.episodes=2", "eval.videos=0", "cluster.backend=inline"]
FEW_ENVS = ["env.num_envs=4", "env.max_episode_steps=8"]
FEW_DECISIONS = [*FEW_ENVS, "algo.rollout_decisions=8", "algo.minibatch_size=16"]
FEW_GROUPS = [*FEW_ENVS, "algo.groups=2", "algo.group_size=2", "algo.minibatch_size=8"]

LONGER = r" cluster\.| seeds=| run\.start_from|[ =]my_|=sums_|=smol_|=\./"


def case(command):
    return pytest.param(command, marks=[pytest.mark.slow] if re.search("libero|robosuite", command) else [])


@pytest.mark.parametrize(
    "command",
    [
        case(line)
        for line in TRAIN
        if not re.search(r" cluster\.| seeds=| run\.start_from|[ =]my_|=sums_|=smol_|=\./", line)
    ],
)
def test_a_documented_training_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[3:]
    code = train.main([*words, *SHORT, *small(words)])
    assert code == 0, capsys.readouterr()


def small(words):
    """A batch of a few decisions, but for what the command says of it."""
    batch = FEW_GROUPS if load(words).config.algo.whole_episodes else FEW_DECISIONS
    named = {word.partition("=")[0] for word in words}
    return [word for word in batch if word.partition("=")[0] not in named]


def test_the_keys_in_the_page_on_faults_are_all_there_are():
    named = set(re.findall(r"`(faults\.\w+)`", PAGES["faults.md"]))
    assert named == {key for key, _, _ in leaves(root(RunConfig)) if key.startswith("faults.")}


@pytest.mark.parametrize("module", sorted(set(re.findall(r"-m (benchmarks\.\w[.\w]*)", ALL)) - {"benchmarks.COMMAND"}))
def test_a_benchmark_that_is_named_is_there(module):
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_links_lead_somewhere():
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", ALL) if not link.startswith("https://")}
    assert not [link for link in links if not (ROOT / "docs" / link).is_file()]
