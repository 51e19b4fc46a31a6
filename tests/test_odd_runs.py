"""Run folders that were damaged or oddly named: the commands say what is wrong, or do what was asked."""

import importlib
import json
import shlex
import shutil
from itertools import product

import numpy as np
import pytest

from embodied.run.checkpoints import COUNTERS, digest

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


@pytest.mark.parametrize("text", ["[]", "", '{"state": 3}'])
@pytest.mark.parametrize("command", ["report", "train"])
def test_a_broken_run_json_is_no_traceback(copy, capsys, text, command):
    (copy / "run.json").write_text(text)
    told = [str(copy)] if command == "report" else [f"resume={copy}", "run.iterations=2"]
    code = run(command, *told)
    output = "".join(capsys.readouterr())
    assert "Traceback" not in output
    assert code in (0, 1, 2) and (code == 0 or "run.json" in output), output


def sign(checkpoint):
    """The manifest of what is there now: checksums tell of damage, not of what somebody has written."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {name: digest(checkpoint / name) for name in manifest["files"]}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def told_of(file, capfd, code):
    said = capfd.readouterr().err
    assert code in (1, 2) and "Traceback" not in said and file in said, said
    return said


@pytest.mark.parametrize(
    "text",
    ["[]", "[" * 100_000, '{"iteration": "x"}', f'{{"{next(iter(COUNTERS))}": -1}}', '{"recent_episodes": ["a"]}'],
)
def test_a_run_with_an_odd_state_is_not_resumed(copy, capfd, text):
    checkpoint = copy / "checkpoints" / "v000001"
    sound = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(sound | json.loads(text)) if text[0] == "{" else text)
    sign(checkpoint)
    told_of("state.json", capfd, run("train", f"resume={copy}", "run.iterations=2"))


@pytest.mark.parametrize("version", [None, "1", 7])
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_checkpoint_that_does_not_say_of_which_version_it_is_is_not_used(copy, capfd, command, version):
    manifest = copy / "checkpoints" / "v000001" / "manifest.json"
    content = json.loads(manifest.read_text()) | {"version": version}
    manifest.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    words = {"train": [f"resume={copy}", "run.iterations=2"], "evaluate": [f"checkpoint={copy}", "eval.episodes=1"]}
    told_of("manifest.json says that it is version", capfd, run(command, *words[command]))


def another(**changes):
    return lambda arrays: {name: array for name, array in (arrays | changes).items() if array is not None}


SIMS = {
    "other rows": another(env_ids=np.arange(7)),
    "no episodes": another(**{"rows.episode": None}),
    "a number": another(**{"rows.length": np.array(3)}),
    "an odd simulator": lambda arrays: {
        name: np.zeros((4, 99)) if name[:4] == "env." else a for name, a in arrays.items()
    },
}


@pytest.mark.parametrize("kind", SIMS)
def test_a_run_with_odd_env_rows_is_not_resumed(copy, capfd, kind):
    checkpoint = copy / "checkpoints" / "v000001"
    with np.load(checkpoint / "sims.npz") as content:
        arrays = dict(content)
    np.savez(checkpoint / "sims.npz", **SIMS[kind](arrays))
    sign(checkpoint)
    assert "v000001" in told_of("", capfd, run("train", f"resume={copy}", "run.iterations=2"))


@pytest.mark.parametrize("content", [b"PK\x03\x04" + b"x" * 40, None])
def test_a_run_whose_env_rows_are_no_archive_is_not_resumed(copy, capfd, content):
    file = copy / "checkpoints" / "v000001" / "sims.npz"
    file.write_bytes(file.read_bytes()[:-30] if content is None else content)
    sign(file.parent)
    told_of("sims.npz cannot be read", capfd, run("train", f"resume={copy}", "run.iterations=2"))


@pytest.mark.parametrize(("kept", "missing"), [((), "1 to 4"), ((1, 4), "2 to 3"), ((2, 3), "1, 4")])
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


def set_at(path, value):
    def change(content):
        *parents, last = path
        place = content
        for key in parents:
            place = place[key]
        place[last] = value
        return content

    return change


CONFIGS = {
    "a list": lambda _: "[]",
    "no such policy": set_at(["policy", "name"], "nets"),
    "hidden nested": set_at(["policy", "hidden"], {"a": {"b": [1]}}),
    "no action": set_at(["env_spec", "action"], None),
    "image of four colours": set_at(["env_spec", "images"], {"top": [8, 8, 4]}),
}
OTHER_ENVS = {
    "another state": set_at(["env_spec", "state_dim"], 99),
    "other actions": set_at(["env_spec", "action"], {"dim": 2, "num_choices": 4}),
}


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        *((kind, "evaluate") for kind in CONFIGS),
        *product(OTHER_ENVS, ["train", "evaluate"]),
    ],
)
def test_an_odd_policy_description_in_a_checkpoint_is_named(copy, capfd, kind, command):
    checkpoint = copy / "checkpoints" / "v000001"
    file = checkpoint / "policy" / "config.json"
    odd = (CONFIGS | OTHER_ENVS)[kind](json.loads(file.read_text()))
    file.write_text(odd if isinstance(odd, str) else json.dumps(odd))
    sign(checkpoint)
    words = {"train": [f"resume={copy}", "run.iterations=2"], "evaluate": [f"checkpoint={copy}", "eval.episodes=1"]}
    told_of("another env" if kind in OTHER_ENVS else "config.json", capfd, run(command, *words[command]))


@pytest.mark.parametrize("name", ["a*b", "two words", "-dash"])
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
