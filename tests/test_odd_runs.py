"""Run folders that were damaged or oddly named: the commands say what is wrong, or do what was asked."""

import importlib
import json
import shlex
import shutil

import pytest

QUICK = ["run.iterations=1", "eval.episodes=1", "eval.videos=0", "cluster.backend=inline", "env.num_envs=4"]
SMALL = ["policy.hidden=[8]", "algo.rollout_decisions=8", "algo.minibatch_size=16"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run, to be copied."""
    folder = tmp_path_factory.mktemp("made")
    run("train", "recipe=pointmass_ppo", f"run.dir={folder}", *QUICK, *SMALL)
    (path,) = folder.iterdir()
    return path


def run(command, *args):
    return importlib.import_module(f"embodied.{command}").main(list(args))


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / made.name)


@pytest.mark.parametrize("text", ["[]", "{}", "", "null", '{"state": 3}'])
@pytest.mark.parametrize("command", ["report", "train"])
def test_a_broken_run_json_is_no_traceback(copy, capsys, text, command):
    (copy / "run.json").write_text(text)
    told = [str(copy)] if command == "report" else [f"resume={copy}", "run.iterations=2"]
    code = run(command, *told)
    output = "".join(capsys.readouterr())
    assert "Traceback" not in output
    assert code in (0, 1, 2) and (code == 0 or "run.json" in output), output


@pytest.mark.parametrize("text", ["{}", "[]", "", '{"iteration": "x"}'])
def test_a_broken_state_is_named(copy, capsys, text):
    (copy / "checkpoints" / "v000001" / "state.json").write_text(text)
    assert run("train", f"resume={copy}", "run.iterations=2") in (1, 2)
    output = "".join(capsys.readouterr())
    assert "v000001" in output and "Traceback" not in output


@pytest.mark.parametrize("name", ["a*b", "[x]", "two words", "it's", "-dash"])
def test_any_name_can_be_resumed_and_evaluated_by_the_commands_that_are_printed(tmp_path, capsys, name):
    told = ["recipe=pointmass_ppo", f"run.dir={tmp_path}", f"run.name={json.dumps(name)}", *QUICK, *SMALL]
    assert run("train", *told) == 0
    output = capsys.readouterr().out
    printed = [shlex.split(line.split(None, 1)[1]) for line in output.splitlines() if "  python -m embodied." in line]
    (evaluate, resume) = (words for words in printed if words[2] in ("embodied.evaluate", "embodied.train"))
    assert run("evaluate", *evaluate[3:-1], "eval.episodes=1") == 0
    assert run("train", *resume[3:], "run.iterations=2") == 0
    assert run("train", *told[:3], *QUICK[1:], *SMALL, "resume=auto", "run.iterations=3") == 0
    assert "resumed from" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 1
