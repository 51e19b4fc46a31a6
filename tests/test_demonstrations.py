"""From a scripted expert to a policy that imitates it, by the commands, on the toy env."""

import json
import shlex
import shutil

import numpy as np
import pytest
import yaml

pytest.importorskip("pyarrow")

from written_datasets import SPEC, write_new, write_older

from embodied.algorithms.config import SFTConfig
from embodied.collect import main as collect
from embodied.core.errors import ConfigError
from embodied.core.yaml_text import read_yaml
from embodied.datasets import DatasetWriter, read_dataset
from embodied.evaluate import main as evaluate
from embodied.policies.openvla.config import OpenVLAConfig
from embodied.sft import main as sft
from embodied.sweep import main as sweep
from embodied.train import main as train
from embodied.workflows.demonstrations import check_actions

TOY = ["recipe=pointmass_ppo", "cluster.backend=inline", "env.num_envs=8"]
POLICY = ["policy.hidden=[32]", "policy.normalize_observations=true"]
LEARN = [*TOY, *POLICY, "eval.episodes=40", "eval.videos=0", "sft.minibatch_size=16", "sft.lr=3e-3"]


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    out = tmp_path_factory.mktemp("demos") / "toy"
    assert collect([*TOY, f"out={out}", "collect.episodes=40"]) == 0
    return out


@pytest.fixture(scope="module")
def cloned(demos, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert sft([*LEARN, f"sft.data={demos}", f"run.dir={runs}", "sft.epochs=20", "run.save_every=15"]) == 0
    (run,) = runs.glob("sft-pointmass_ppo-*")
    return run


def overall(folder):
    (path,) = folder.glob("eval/*/results.json")
    return json.loads(path.read_text())["overall"]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["recipe=sums_grpo"], "env.name=sums is a text env, and only robots have demonstrations so far"),
        (["recipe=gym_ppo"], "there is no expert for env.name=gym:CartPole-v1; an env of yours may have one"),
        (["recipe=pointmass_ppo", "collect.expert=planner"], "planner is ManiSkill's motion planner and does not play"),
        (["recipe=pointmass_ppo", f"out={__file__}/x"], "is not a folder; name another place"),
    ],
)
def test_an_impossible_collection_is_refused_before_anything_is_printed(words, told, tmp_path, capsys):
    out = [] if words[-1].startswith("out=") else [f"out={tmp_path / 'demos'}"]
    assert collect([*words, *out]) == 2
    said = capsys.readouterr()
    assert said.out == "" and told in said.err


def test_an_experts_successes_become_demonstrations(demos):
    dataset = read_dataset(demos)
    source = json.loads((demos / "meta/source.json").read_text())
    assert source["by"] == "expert" and source["env"]["name"] == "pointmass"
    assert len(dataset) == source["played"]["success_once"]["count"] >= 36
    for episode in list(dataset)[:3]:
        position, velocity = np.split(episode.obs["state"][:, :4], 2, axis=1)
        assert (np.abs(episode.actions) <= 1).all()
        assert np.allclose(velocity[1:], 0.7 * velocity[:-1] + 0.03 * episode.actions[:-1], atol=1e-6)
        assert np.allclose(position[1:], position[:-1] + velocity[1:], atol=1e-6), "what was seen before each action"
        assert episode.done.tolist() == [False] * (len(episode) - 1) + [True]


def test_collecting_demonstrations_calls_no_policy_worker(tmp_path, monkeypatch):
    monkeypatch.setattr("embodied.policies.policy_worker.PolicyWorker.serve", None)  # to call it would fail
    assert collect([*TOY, f"out={tmp_path / 'demos'}", "collect.episodes=2"]) == 0


def test_noise_disturbs_what_is_played_and_not_what_is_recorded(tmp_path):
    assert collect([*TOY, f"out={tmp_path / 'noisy'}", "collect.episodes=8", "collect.noise=0.2"]) == 0
    added = []
    for episode in read_dataset(tmp_path / "noisy"):
        velocity = episode.obs["state"][:, 2:4]
        played = (velocity[1:] - 0.7 * velocity[:-1]) / 0.03
        free = np.abs(played) < 0.99  # of the env's limits
        added.append((played - episode.actions[:-1])[free])
    assert 0.1 < np.std(np.concatenate(added)) < 0.25
    discrete = ["recipe=gym_ppo", "checkpoint=random", "cluster.backend=inline", f"out={tmp_path / 'none'}"]
    assert collect([*discrete, "collect.noise=0.1"]) == 2


def test_a_policy_that_imitates_solves_the_task(cloned):
    assert overall(cloned)["success_once"]["rate"] >= 0.7
    losses = [row["train/loss"] for row in metrics(cloned)]
    assert len(losses) == 20 and losses[-1] < losses[0]


def test_the_clone_is_evaluated_and_trained_further_like_any_policy(cloned, tmp_path):
    told = [f"checkpoint={cloned}", "eval.episodes=40", "eval.videos=0", "cluster.backend=inline"]
    assert evaluate(told) == 0
    again = json.loads(next(cloned.glob("eval/*-evaluate/results.json")).read_text())
    first = json.loads((cloned / "eval/v000020/results.json").read_text())
    assert again["overall"] == first["overall"]
    rl = [*TOY, *POLICY, f"run.dir={tmp_path}", f"run.start_from={cloned}", "run.iterations=1", "algo.lr=0"]
    assert train([*rl, "eval.episodes=40", "eval.videos=0"]) == 0
    (run,) = tmp_path.glob("pointmass*")
    assert overall(run)["success_once"]["rate"] >= 0.7


def test_rl_that_keeps_imitating_takes_the_demonstrations_of_its_start(demos, cloned, tmp_path, capsys):
    told = [*TOY, *POLICY, f"run.dir={tmp_path}", "algo.imitation.weight=0.2", "run.iterations=1", "eval.episodes=2"]
    assert train(told) == 2 and "there is no run.start_from that imitated some" in capsys.readouterr().err
    told += [f"run.start_from={cloned}", "eval.videos=0"]
    assert train([*told, "--dry-run"]) == train(told) == 0
    assert capsys.readouterr().out.count(f"imitates    {demos}, weight 0.2\n") == 2
    (run,) = tmp_path.glob("pointmass*")
    assert metrics(run)[0]["train/imitation_weight"] == 0.2
    assert yaml.safe_load((run / "config.yaml").read_text())["algo"]["imitation"]["data"] == str(demos)
    assert train([f"resume={run}", "run.iterations=2"]) == 0 and len(metrics(run)) == 2
    assert train([*told[:-2], f"run.start_from={run}"]) == 2
    assert "imitated no demonstrations; set algo.imitation.data=FOLDER" in capsys.readouterr().err


def test_an_imitation_run_that_was_stopped_and_resumed_equals_one_that_was_not(cloned, tmp_path):
    run = shutil.copytree(cloned, tmp_path / cloned.name)
    for folder in (run / "checkpoints/v000020", run / "eval"):
        shutil.rmtree(folder)
    assert train([f"resume={run}"]) == 2, "another command's run"
    assert sft([f"resume={run}"]) == 0
    model = "checkpoints/v000020/policy/model.safetensors"
    assert (run / model).read_bytes() == (cloned / model).read_bytes()
    assert len(metrics(run)) == 20


def test_however_many_learners_share_the_episodes_the_steps_are_the_same(demos, cloned, tmp_path):
    placement = 'placement={"sim,policy": "cpu:0", "learner": "cpu:0"}'
    assert sft([*LEARN, f"sft.data={demos}", f"run.dir={tmp_path}", "sft.epochs=1", placement]) == 0
    (run,) = tmp_path.glob("sft-*")
    assert metrics(run)[0]["train/loss"] == pytest.approx(metrics(cloned)[0]["train/loss"], abs=1e-4)


def test_imitation_leaves_a_fixed_deviation_as_it_is(demos, tmp_path):
    import safetensors.numpy

    told = [*LEARN, f"sft.data={demos}", f"run.dir={tmp_path}", "sft.epochs=1", "sft.learn_deviation=false"]
    assert sft([*told, "policy.initial_log_std=-1.25"]) == 0
    (model,) = tmp_path.glob("*/checkpoints/v000001/policy/model.safetensors")
    assert (safetensors.numpy.load_file(model)["log_std"] == -1.25).all()


def test_without_data_the_expert_demonstrates_first(tmp_path, capsys):
    told = [*LEARN, f"run.dir={tmp_path}", "collect.episodes=6", "sft.epochs=1"]
    assert sft([*told, "--dry-run"]) == 0
    assert "none yet: 6 episodes of the expert" in capsys.readouterr().out and not list(tmp_path.glob("*"))
    assert sft(told) == sft(told) == 0
    (demos,) = tmp_path.glob("sft-pointmass_ppo-demonstrations-*")
    assert f"{demos}, collected before" in capsys.readouterr().out
    assert len(read_dataset(demos)) <= 6
    runs = sorted(tmp_path.glob("sft-pointmass_ppo-2*"))
    assert [read_yaml((run / "config.yaml").read_text())["sft"]["data"] for run in runs] == [str(demos)] * 2
    assert sft([*told, "collect.noise=0.1"]) == 0
    assert len(list(tmp_path.glob("*-demonstrations-*"))) == 2
    (demos / "meta/source.json").unlink()
    assert sft(told) == 2
    assert f"remove {demos}, and the same command collects" in capsys.readouterr().err
    assert sft([f"resume={runs[0]}", "collect.episodes=9"]) == 2
    assert sft(["recipe=sums_sft", "collect.episodes=9", f"run.dir={tmp_path}"]) == 2
    assert capsys.readouterr().err.count("collect.episodes has no effect") == 2


def test_the_same_command_with_resume_auto_begins_and_goes_on(tmp_path, capsys):
    """Also where the recipe says how its runs are called and where they lie."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: pointmass_ppo\nrun: {name: named, dir: out}\ncollect: {episodes: 4}\n")
    told, noisy = [f"recipe={recipe}", *LEARN[1:]], "collect.noise=0.1"
    for epochs in (1, 2):
        assert sft([*told, noisy, "resume=auto", f"sft.epochs={epochs}"]) == 0
    (run,) = tmp_path.glob("out/named-2*")
    assert [row["iteration"] for row in metrics(run)] == [1, 2]
    (demos,) = tmp_path.glob("out/named-demonstrations-*")
    assert sft([*told, "collect.noise=0.2", "resume=auto"]) == 2
    assert f"collect.noise has no effect, since there is sft.data={demos}" in capsys.readouterr().err
    assert sft([*told, noisy, f"resume={run}", "sft.epochs=3"]) == 0
    assert len(metrics(run)) == 3 and len(list(tmp_path.glob("out/named-*"))) == 2


def test_a_run_whose_demonstrations_are_gone_says_how_to_get_them_again(tmp_path, capsys):
    told = [*LEARN, f"run.dir={tmp_path}", "collect.episodes=4"]
    assert sft([*told, "sft.epochs=1"]) == 0
    (run,), (demos,) = tmp_path.glob("sft-pointmass_ppo-2*"), tmp_path.glob("*-demonstrations-*")
    before = read_dataset(demos)[0].actions
    shutil.rmtree(demos)
    assert sft([f"resume={run}", "sft.epochs=2"]) == 2
    said = capsys.readouterr().err
    assert f"resume={run} learns from {demos}, which is gone" in said
    assert collect(shlex.split(said.partition("python -m embodied.collect ")[2])) == 0
    assert np.array_equal(read_dataset(demos)[0].actions, before)
    assert sft([f"resume={run}", "sft.epochs=2"]) == 0


def test_rl_starts_from_an_imitation_that_starts_from_nothing(tmp_path):
    (tmp_path / "imitate.yaml").write_text(
        "extends: pointmass_ppo\npolicy: {hidden: [8]}\ncollect: {episodes: 4}\nsft: {epochs: 1, minibatch_size: 16}\n"
    )
    told = ["recipe=pointmass_ppo", "policy.hidden=[8]", "run.iterations=1", "eval.episodes=2", "eval.videos=0"]
    told += [f"run.start_from={tmp_path / 'imitate.yaml'}", f"run.dir={tmp_path}", "cluster.backend=inline"]
    assert train([*told, "--dry-run"]) == train(told) == 0
    assert {path.name.partition("-2")[0] for path in tmp_path.glob("*-2*")} >= {"sft-imitate", "pointmass_ppo"}


def test_mistakes_are_reported_before_anything_starts(demos, tmp_path, capsys):
    assert collect([*TOY, f"out={demos}"]) == 2
    assert collect(TOY) == 2
    planner = ["collect.expert=planner", f"out={demos.parent / 'none'}"]
    assert collect([*TOY, *planner, "checkpoint=random"]) == 2
    assert collect([*TOY, *planner]) == 2
    assert sft(["recipe=gym_ppo", f"run.dir={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert "checkpoint=random plays, not collect.expert=planner" in told and "does not play env.name=pointmass" in told
    assert "out=demos/NAME" in told and "which demonstrations?" in told
    assert sft([*LEARN, f"run.dir={tmp_path}", f"sft.data={demos}", "sft.epochs=1", "sft.warmup_steps=5000"]) == 2
    assert "sft.warmup_steps=5000 is not less than the" in capsys.readouterr().err
    other = ["recipe=pointmass_ppo", "env.state=proprio", "cluster.backend=inline", f"run.dir={tmp_path}"]
    assert sft([*other, f"sft.data={demos}"]) == sft([*other, f"sft.data={demos}", "--dry-run"]) == 2
    assert capsys.readouterr().err.count("observation.state is [4] here, [6] there") == 2
    kept = [*other, f"algo.imitation.data={demos}"]
    assert train(kept) == 2 and "observation.state is [4] here, [6] there" in capsys.readouterr().err
    assert sft([*other, f"sft.data={demos}", "env.privileged=true"]) == 2
    assert "set env.privileged=false" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_true_and_false_are_no_actions_of_a_robot(tmp_path, capsys):
    state, action = {"dtype": "float32", "shape": (SPEC.state_dim,)}, {"dtype": "bool", "shape": (SPEC.action.dim,)}
    with DatasetWriter(tmp_path / "switch", fps=10, features={"observation.state": state, "action": action}) as writer:
        frame = {"observation.state": np.zeros(SPEC.state_dim, np.float32), "action": [True] * SPEC.action.dim}
        writer.add_episode([frame, frame], task="go", success=True)
    assert sft([*TOY, f"run.dir={tmp_path / 'runs'}", f"sft.data={tmp_path / 'switch'}"]) == 2
    assert "action is bool, and actions of this env are numbers from -1 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "choice"), [("float32", 1), ("int64", 3), ("int64", -1)])
def test_choices_that_an_env_does_not_have_are_refused_before_anything_starts(dtype, choice, tmp_path, capsys):
    state, action = {"dtype": "float32", "shape": (4,)}, {"dtype": dtype, "shape": (1,)}
    features = {"observation.state": state, "action": action}
    with DatasetWriter(tmp_path / "lamp", fps=10, features=features) as writer:
        frame = {"observation.state": np.zeros(4, np.float32), "action": [choice]}
        writer.add_episode([frame, frame], task="go", success=True)
    words = ["recipe=gym_ppo", f"run.dir={tmp_path}", f"sft.data={tmp_path / 'lamp'}", "cluster.backend=inline"]
    assert sft([*words, "--dry-run"]) == 2
    assert (
        f"is a choice from 0 to 1, int64 [1], and there it is {dtype} from {choice} to {choice}"
        in capsys.readouterr().err
    )


def test_actions_in_units_of_the_robot_are_refused_before_anything_starts(tmp_path, capsys):
    write_new(tmp_path / "radians", SPEC)
    figures = json.loads((tmp_path / "radians/meta/stats.json").read_text())
    figures["action"] |= {"min": [-1.0, -2.5], "max": [1.0, 0.5]}
    (tmp_path / "radians/meta/stats.json").write_text(json.dumps(figures))
    write_older(tmp_path / "radians", tmp_path / "older")  # without these figures
    words = [*TOY, f"run.dir={tmp_path / 'runs'}", f"sft.data={tmp_path / 'radians'}"]
    told = "action[1] is from -2.5 to 0.5, and actions are from -1 to 1"
    assert sft([*words, "--dry-run"]) == sft(words) == 2
    assert capsys.readouterr().err.count(told) == 2
    assert train([*TOY, f"run.dir={tmp_path / 'runs'}", f"algo.imitation.data={tmp_path / 'radians'}"]) == 2
    assert told in capsys.readouterr().err
    several = [*TOY, f"run.dir={tmp_path / 'runs'}", f"algo.imitation.data={tmp_path / 'radians'}", "algo.lr=1e-3,1e-4"]
    assert sweep([*several, "seeds=0-1"]) == 2
    assert capsys.readouterr().err.count(told) == 1 and not (tmp_path / "runs").exists()
    assert sft([*TOY, f"run.dir={tmp_path}", f"sft.data={tmp_path / 'older'}", "--dry-run"]) == 0
    options, dataset = SFTConfig(data=tmp_path / "radians"), read_dataset(tmp_path / "radians")
    dataset.stats["action"] |= {"min": [-9.0], "max": []}  # of no use: the actions themselves are read
    check_actions(options, dataset, SPEC, OpenVLAConfig(name="openvla"))
    dataset = read_dataset(tmp_path / "radians")
    scaled = OpenVLAConfig(name="openvla", pretrained="folder")
    check_actions(options, dataset, SPEC, scaled)
    with pytest.raises(ConfigError, match="action"):
        check_actions(options, dataset, SPEC, scaled.model_copy(update={"pretrained": None}))
