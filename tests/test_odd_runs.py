"""Run folders that were damaged or oddly named: the commands say what is wrong, or do what was asked."""

import importlib
import json
import shlex
import shutil

import numpy as np
import pytest

from embodied.run.run_folder import digest

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


def sign(checkpoint):
    """The manifest of what is there now: checksums tell of damage, not of what somebody has written."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {name: digest(checkpoint / name) for name in manifest["files"]}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def holds(content):
    return lambda file: file.write_text(content)


def says(*path, value):
    """JSON with this value at this place, or without what is there."""

    def change(file):
        content = place = json.loads(file.read_text())
        for key in path[:-1]:
            place = place[key]
        if value is None:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        file.write_text(json.dumps(content))

    return change


def arrays(**changes):
    """An archive with these arrays in place of its own; None: without one; a function: made from what is there."""

    def change(file):
        with np.load(file) as content:
            kept = dict(content)
        for name, array in changes.items():
            for key in [key for key in kept if key.startswith(name)] or [name]:
                kept[key] = array
        np.savez(file, **{name: array for name, array in kept.items() if array is not None})

    return change


STATE, MANIFEST, SIMS, POLICY = "state.json", "manifest.json", "sims.npz", "policy/config.json"
ACTION, IMAGES = ("env_spec", "action"), ("env_spec", "images")
ODD = {  # what is odd: the file of a checkpoint, its change, the command that reads it, words of its answer
    "a state that is too deep": (STATE, holds("[" * 100_000), "train", STATE),
    "episodes in words": (STATE, says("recent_episodes", value=["a"]), "train", STATE),
    "another version": (MANIFEST, says("version", value=7), "evaluate", "manifest.json says that it is version"),
    "other rows": (SIMS, arrays(env_ids=np.arange(7)), "train", "v000001"),
    "an odd simulator": (SIMS, arrays(**{"env.": np.zeros((4, 99))}), "train", "v000001"),
    "no archive": (SIMS, holds("PK\x03\x04" + "x" * 40), "train", "sims.npz cannot be read"),
    "a policy that is a list": (POLICY, holds("[]"), "evaluate", "config.json"),
    "four colours": (POLICY, says(*IMAGES, value={"top": [8, 8, 4]}), "evaluate", "config.json"),
    "another state": (POLICY, says("env_spec", "state_dim", value=99), "evaluate", "another env"),
    "other actions": (POLICY, says(*ACTION, value={"dim": 2, "num_choices": 4}), "train", "another env"),
    "a list of a run": ("../../run.json", holds("[]"), "train", "run.json"),
}


@pytest.mark.parametrize("what", ODD)
def test_a_checkpoint_that_says_something_odd_is_named_and_not_used(copy, capfd, what):
    file, change, command, words = ODD[what]
    checkpoint = copy / "checkpoints" / "v000001"
    change(checkpoint / file)
    if file != MANIFEST:
        sign(checkpoint)
    asked = [f"resume={copy}", "run.iterations=2"] if command == "train" else [f"checkpoint={copy}", "eval.episodes=1"]
    code, said = run(command, *asked), capfd.readouterr().err
    assert code in (1, 2) and "Traceback" not in said and words in said, said


@pytest.mark.parametrize(("kept", "missing"), [((), "1 to 4"), ((2, 3), "1, 4")])
def test_a_resumed_run_says_which_rows_of_its_metrics_are_lost(copy, capsys, kept, missing):
    assert run("train", f"resume={copy}", "run.iterations=4") == 0
    metrics = copy / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[number - 1] for number in kept))
    if not kept:
        metrics.unlink()
    assert "are missing" not in capsys.readouterr().out
    assert run("train", f"resume={copy}", "run.iterations=5") == 0
    assert f"rows {missing} of metrics.jsonl are missing" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["two *", "-dash"])
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
