"""A policy that leaves: its program acts as it does, plays the same episodes, and is only data."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from tiny_language import publish

from embodied import evaluate, export, load_policy, push, train
from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.run_policy import Policy
from embodied.policies.torch_session import TorchSession
from embodied.records.results import read_results

INLINE = ["cluster.backend=inline", 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}']
TINY = ["run.iterations=1", "env.num_envs=4", "algo.rollout_decisions=8", "algo.minibatch_size=32", "eval.episodes=2"]
NEEDS_ONNX = pytest.mark.skipif(not find_spec("onnxruntime"), reason="the extra onnx is missing")
ROBOT = ["recipe=pointmass_ppo_pi0_tiny", "policy.steps=2", "algo.minibatch_size=8", "env.num_envs=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs: a state policy's, a flow policy's."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for name, words in (("mlp", ["recipe=pointmass_ppo", *TINY]), ("pi0", [*TINY, *ROBOT])):
        asked = {word.partition("=")[0]: word for word in [*words, *INLINE, "policy.normalize_observations=true"]}
        if name == "pi0":
            del asked["policy.normalize_observations"]
        assert train.main([*asked.values(), "eval.videos=0", f"run.dir={folder / name}"]) == 0
        made[name] = next((folder / name).glob("point*"))
    return made


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    """Exports a run once in a format; returns the folder."""
    made = {}

    def of(name, kind="torch"):
        if (name, kind) not in made:
            made[name, kind] = tmp_path_factory.mktemp(name) / kind
            assert export.main([f"checkpoint={runs[name]}", f"out={made[name, kind]}", f"format={kind}"]) == 0
        return made[name, kind]

    return of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mlp", "torch"),
        pytest.param("mlp", "onnx", marks=NEEDS_ONNX),
        ("pi0", "torch"),
        pytest.param("pi0", "onnx", marks=[NEEDS_ONNX, pytest.mark.slow]),
    ],
)
def test_an_exported_policy_plays_the_episodes_of_its_checkpoint(name, kind, runs, exported, tmp_path):
    folder = exported(name, kind)
    played = []
    for policy in (runs[name], folder):
        words = [f"checkpoint={policy}", f"recipe={runs[name] / 'config.yaml'}", "eval.episodes=3", "eval.videos=1"]
        assert evaluate.main([*words, "cluster.backend=inline", f"run.dir={tmp_path}"]) == 0
    for results in (runs[name] / "eval/v000001-evaluate", folder.parent / f"eval/{folder.name}"):
        played.append(read_results(results))
        assert list((results / "videos").glob("*.mp4"))
    (_, before), (found, after) = played
    assert [(each.seed, each.length, each.success_once) for each in before] == [
        (each.seed, each.length, each.success_once) for each in after
    ]
    np.testing.assert_allclose(*([each.total_reward for each in some] for some in (before, after)), atol=1e-4)
    origin = found["policy"]["exported_from"]
    weights = json.loads((runs[name] / "checkpoints/v000001/manifest.json").read_text())["files"]
    assert origin["sha256"] == weights["policy/model.safetensors"] and origin["version"] == 1


def test_the_card_of_a_program_names_the_run_it_comes_from_and_its_success(runs, exported, tmp_path):
    program = shutil.copytree(exported("mlp"), tmp_path / "program")  # never evaluated here
    folder = push.push(str(program), "ada/reach", push.Options(out=str(tmp_path / "card")))
    card = (folder / "README.md").read_text()
    for words in (
        "An exported mlp policy for pointmass reach.",
        f"Checkpoint {runs['mlp'].name}-v000001",
        "By ppo, seed 0",
    ):
        assert words in card
    assert "(0/2)" in card and "The checkpoint played these episodes, before the export." in card
    assert (folder / "recipe.yaml").is_file()
    for file in (folder / "origin.json", folder / "config.json"):
        assert str(runs["mlp"].parent) not in file.read_text() and '"host"' not in file.read_text()
    (program / "checksums.json").unlink(missing_ok=True)
    for odd in ("{}", '{"recipe": 3}', (folder / "origin.json").read_text().replace('"algo"', '"way"')):
        (program / "origin.json").write_text(odd)
        with pytest.raises(CheckpointError, match=r"origin\.json is not what embodied\.export or push wrote"):
            push.push(str(program), "ada/reach", push.Options(out=str(tmp_path / "card")))


def test_the_runner_needs_nothing_of_ours(exported):
    folder = exported("pi0")
    size = json.loads((folder / "config.json").read_text())["env_spec"]["images"]["top"]
    program = f"""
import sys
sys.path.insert(0, {str(folder)!r})
from run_policy import Policy
from torch_session import TorchSession
import numpy as np
policy = Policy(session=TorchSession(), seed=3)
(text,) = policy.program["prompts"]
observed = {{"images": {{"top": np.zeros((2, *{size}), np.uint8)}}, "instruction": [text] * 2}}
observed["state"] = np.zeros((2, {json.loads((folder / "config.json").read_text())["env_spec"]["state_dim"]}))
first, second = policy.act(observed), policy.act(observed)
assert (first != second).any(), "its noise is drawn"
assert (Policy(session=TorchSession(), seed=3).act(observed) == first).all()
assert not [name for name in sys.modules if name.startswith("embodied")]
print(first.shape)
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=280)
    assert done.stdout.startswith("(2, "), done.stderr


@NEEDS_ONNX
def test_the_onnx_runner_needs_onnxruntime_and_numpy_alone(runs, exported):
    folder, policy = exported("mlp", "onnx"), load_policy(runs["mlp"] / "checkpoints/v000001/policy")
    state = np.linspace(-1, 1, 2 * policy.spec.state_dim, dtype=np.float32).reshape(2, -1)
    program = f"""
import sys
begun = {{*sys.modules}}
sys.path.insert(0, {str(folder)!r})
import json, numpy as np, run_policy
print(json.dumps(run_policy.Policy().act({{"state": np.array({state.tolist()})}}).tolist()))
files = [getattr(sys.modules[name], "__file__", None) or "" for name in {{*sys.modules}} - begun]
print(sorted({{file.split("site-packages/")[1].split("/")[0] for file in files if "site-packages/" in file}}))
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=280)
    actions, packages = done.stdout.splitlines() or [done.stderr, ""]
    np.testing.assert_allclose(json.loads(actions), policy.act_on({"state": state}), atol=1e-5, rtol=1e-5)
    assert packages == "['numpy', 'onnxruntime']"


def test_an_exported_policy_plays_its_best_actions_only(exported, capsys):
    policy = load_policy(exported("mlp"))
    observed = {"state": np.zeros((1, policy.spec.state_dim), np.float32)}
    assert policy.act_on(observed).shape == (1, 1, policy.spec.action.dim)
    with pytest.raises(ConfigError, match="plays its best actions only; set temperature=0"):
        policy.act(observed, np.zeros((1, policy.noise_spec().width)), temperature=1.0)
    assert evaluate.main([f"checkpoint={exported('mlp')}", "env.name=pointmass", "eval.temperature=1"]) == 2
    assert "eval.temperature=1: torch plays its best actions only" in capsys.readouterr().err


def test_the_runner_names_the_part_of_an_observation_that_is_missing(exported):
    with pytest.raises(ValueError, match="state is missing; the program reads state"):
        Policy(exported("mlp"), TorchSession(exported("mlp"))).act({"states": np.zeros((1, 6))})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"calls": "aten.from_file.default", "arguments": ["/etc/passwd"]}, "'/etc/passwd' is no argument"),
        ({"calls": "aten.__class__.mro"}, "is no operation of a program"),
        ({"calls": "os.system"}, "is no operation of a program"),
    ],
)
def test_a_folder_brings_no_code(change, words, exported, tmp_path):
    for path in exported("mlp").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    graph = json.loads((tmp_path / "graph.json").read_text())
    graph["nodes"][0] |= {"named": {}, **change}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    observed = {"state": np.zeros((1, 6), np.float32)}
    with pytest.raises(ValueError, match=words):
        Policy(tmp_path, TorchSession(tmp_path)).act(observed)


def test_a_policy_that_cannot_be_exported_is_refused_with_a_way_out(runs, exported, tmp_path, capsys, monkeypatch):
    language, out = tmp_path / "language", f"out={tmp_path / 'new'}"
    publish(language, "llama", tied=True)
    state, flow, again = f"checkpoint={runs['mlp']}", f"checkpoint={runs['pi0']}", exported("mlp")
    recipe = f"recipe={runs['mlp'] / 'config.yaml'}"
    for words, told in (
        ([state], "set out=FOLDER"),
        ([state, f"out={tmp_path}"], "exists already"),
        ([state, out, "format=tflite"], "format='tflite': unknown; known: onnx, torch"),
        ([state, out, "instructions=go"], "instructions='go': should be a list"),
        ([state, out, "format=torch", "instructions=[go]"], "this mlp is told none; leave it out"),
        ([f"checkpoint=[{runs['mlp']},random]", out, "format=torch"], "one at a time"),
        (["checkpoint=random", recipe, out, "format=torch"], "checkpoint=random has no weights to export"),
        ([f"checkpoint={again}", recipe, out, "format=torch"], "was exported already"),
        ([f"checkpoint={language}", "env.name=sums", out, "format=torch"], "other programs load its folder"),
        ([flow, out, "format=onnx"], "format=onnx needs onnx"),
    ):
        if told.startswith("format=onnx needs"):
            monkeypatch.setattr("embodied.core.options.metadata.distributions", lambda name="": [])
        assert export.main(words) == 2, words
        assert told in " ".join(capsys.readouterr().err.split()), words
    assert not (tmp_path / "new").exists()
