"""The commands of docs/sharing.md, on runs of a few seconds."""

import re
import shlex
from pathlib import Path

import pytest

from embodied import share, train
from embodied.sharing.runs import read_shared_runs

PAGE = (Path(__file__).parents[1] / "docs" / "sharing.md").read_text()
COMMANDS = [shlex.split(line)[3:] for line in re.findall(r"^python -m embodied\.share .*", PAGE, re.M)]
DRY, (PLANNED,), (WHOLE,), (RESUMED,), (JOINING,) = (
    [words for words in COMMANDS if "--dry-run" in words],
    [words for words in COMMANDS if "--plan" in words],
    [words for words in COMMANDS if not {*words} & {"--dry-run", "--plan"} and "=" not in words[0]],
    [words for words in COMMANDS if words[0].startswith("resume=")],
    [words for words in COMMANDS if words[0].startswith("join=")],
)
SHORT = ["run.iterations=2", "eval.episodes=2", "eval.videos=0", "run.start_from=null", "run.env_steps=null"]


@pytest.mark.parametrize("words", DRY, ids=" ".join)
def test_a_dry_run_says_who_owns_what_and_starts_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert share.main(words) == 0
    assert "pointmass_ppo-2 owns" in capsys.readouterr().out and not Path("runs").exists()


def test_a_plan_needs_profiles_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert share.main(PLANNED) == 2 and not Path("runs").exists()
    assert "python -m embodied.profiling recipe=pointmass_ppo" in capsys.readouterr().err


def test_seeds_that_share_devices_are_many_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (words,) = re.findall(r"^python -m embodied\.train (.*)", PAGE, re.M)
    assert train.main(shlex.split(words)) == 0
    assert "at once, each on devices that they lend to each other" in capsys.readouterr().out


@pytest.mark.slow
def test_the_documented_runs_finish_side_by_side_and_are_not_begun_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert share.main([*SHORT, *WHOLE]) == 0, capsys.readouterr()
    (folder,) = (path.parent for path in Path("runs").glob("share-*/share.json"))
    shared = read_shared_runs(folder)
    assert [(run.name, run.ended) for run in shared.runs] == [(name, "finished") for name in WHOLE]
    before = (folder / "share.json").read_bytes()
    assert share.main([word.replace("runs/share-DATE", str(folder)) for word in RESUMED]) == 0
    assert "2 of 2 runs finished" in capsys.readouterr().out
    assert [run.folder for run in read_shared_runs(folder).runs] == [run.folder for run in shared.runs], before
    late = [word.replace("runs/share-DATE", str(folder)) for word in JOINING]
    assert share.main(late) == 1 and "no command is running them" in capsys.readouterr().err
