"""A run that begins with another run's policy."""

import json
import signal

import pytest
from safetensors.numpy import load_file

from embodied.collect import main as collect
from embodied.config.recipe import commands_of_recipe, load
from embodied.config.recipe_files import recipe_names
from embodied.core.errors import ConfigError, Diverged
from embodied.core.types import ActionSpec, EnvSpec
from embodied.core.yaml_text import read_yaml
from embodied.policies import make_policy
from embodied.policies.openvla.config import OpenVLAConfig
from embodied.policies.pi0.config import Pi0Config
from embodied.run.policy_source import check_continues, find_start, first_run
from embodied.sweep import load_all, read_order, shared_start
from embodied.train import iterate
from embodied.train import main as train

TINY = (
    "recipe=pointmass_ppo cluster.backend=inline env.num_envs=4 policy.hidden=[8] "
    "policy.normalize_observations=true algo.rollout_decisions=8 algo.minibatch_size=32 run.iterations=1 "
    "eval.episodes=2 eval.videos=0"
).split()


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a run, whose policy later runs begin with."""
    folder = tmp_path_factory.mktemp("first")
    assert train([*TINY, f"run.dir={folder}"]) == 0
    return next(folder.glob("pointmass*"))


def weights(run):
    return load_file(run / "checkpoints/v000001/policy/model.safetensors")


def test_a_run_that_learns_nothing_ends_with_the_weights_it_began_with(first, tmp_path):
    assert train([*TINY, f"run.dir={tmp_path}", f"run.start_from={first}", "algo.lr=0", "seed=9"]) == 0
    (run,) = tmp_path.glob("pointmass*")
    before, after = weights(first), weights(run)
    assert before["normalizer.count"] > 0
    assert all((before[name] == after[name]).all() for name in before), "the normaliser's statistics among them"
    assert json.loads((run / "run.json").read_text())["started_from"]["sha256"]


def test_a_run_that_began_from_a_folder_goes_on_and_is_begun_from(tmp_path):
    spec = EnvSpec(ActionSpec(2), images={"top": (64, 64, 3)}, instruction=True)
    run, folder, saved = tmp_path / "run", tmp_path / "published", tmp_path / "saved"
    make_policy(OpenVLAConfig(name="openvla"), spec, 0).save_published(folder)
    loaded = load(["recipe=pointmass_ppo_openvla_tiny", f"policy.pretrained={folder}", "policy.statistics=own"])
    make_policy(loaded.config.policy, spec, 0).save_pretrained(saved)
    run.mkdir()
    (run / "config.yaml").write_text(loaded.yaml)
    check_continues(run, saved, loaded.config)
    other = loaded.config.policy.model_copy(update={"pretrained": "elsewhere"})
    with pytest.raises(ConfigError, match=rf"policy\.pretrained={folder} there, elsewhere here"):
        check_continues(run, saved, loaded.config.model_copy(update={"policy": other}))
    assert find_start(saved, loaded.config.policy).folder == saved
    with pytest.raises(ConfigError, match=rf"policy\.pretrained={saved} there, null here"):
        find_start(saved, loaded.config.policy.model_copy(update={"pretrained": None}))


def test_a_run_goes_on_with_its_own_task(tmp_path):
    (tmp_path / "config.yaml").write_text("env: {name: maniskill, task: PushCube-v1}")
    check_continues(tmp_path, None, load(["recipe=maniskill_ppo"]).config)
    (tmp_path / "config.yaml").write_text(load(["recipe=maniskill_ppo"]).yaml)
    check_continues(tmp_path, None, load(["recipe=maniskill_ppo", "env.after_success=5"]).config)
    with pytest.raises(ConfigError, match=r"env\.task=PushCube-v1 there, PickCube-v1 here; leave these keys out"):
        check_continues(tmp_path, None, load(["recipe=maniskill_ppo", "env.task=PickCube-v1"]).config)


def test_options_of_how_a_policy_learns_may_differ_from_those_of_its_start(tmp_path):
    spec = EnvSpec(ActionSpec(3), state_dim=4, images={"top": (16, 16, 3)}, instruction=True)
    there = Pi0Config(name="pi0")
    make_policy(there, spec, 0).save_pretrained(tmp_path)
    here = there.model_copy(update={"train": "expert", "detach_value": True, "noise_level": 0.3, "compile": True})
    assert find_start(tmp_path, here).config == there
    with pytest.raises(ConfigError, match=r"policy.steps=4 there, 2 here"):
        find_start(tmp_path, here.model_copy(update={"steps": 2}))


# Recipes that make a start

SMALL = """
env: {num_envs: 4}
policy: {hidden: [8], normalize_observations: true}
eval: {episodes: 2, videos: 0}
cluster: {backend: inline}
"""
LEARN = "algo: {rollout_decisions: 8, minibatch_size: 32}\nrun: {iterations: 1%s}\n"


@pytest.fixture
def recipes(tmp_path):
    """The folder of two recipes, of which `second` starts from `first`; runs go into its folder `runs`."""
    (tmp_path / "first.yaml").write_text("extends: pointmass_ppo" + SMALL + LEARN % "")
    (tmp_path / "second.yaml").write_text("extends: pointmass_ppo" + SMALL + LEARN % ", start_from: first.yaml")
    return tmp_path


def second(recipes, *more):
    return train([f"recipe={recipes / 'second.yaml'}", f"run.dir={recipes / 'runs'}", *more])


def runs(recipes, name):
    return sorted(recipes.glob(f"runs/{name}-*"))


def about(run):
    return json.loads((run / "run.json").read_text())


@pytest.mark.parametrize("way", ["ppo", "dagger"])
def test_a_recipe_that_makes_the_start_is_trained_first(way, recipes, capsys):
    if way == "dagger":
        learn = (LEARN % "").replace("algo: {", "algo: {name: dagger, steps: 5, ")
        (recipes / "first.yaml").write_text("extends: pointmass_ppo" + SMALL + learn)
    assert second(recipes, "seed=5", "algo.lr=0", "env.num_envs=8") == 0
    (made,), (run,) = runs(recipes, "first"), runs(recipes, "second")
    output = capsys.readouterr().out
    assert f"no finished run of recipe {recipes / 'first.yaml'} with this policy" in output
    assert "python -m embodied.train recipe=" in output and f"{made}, just made" in output
    assert about(made)["state"] == about(run)["state"] == "finished"
    before, after = weights(made), weights(run)
    assert all((before[name] == after[name]).all() for name in before if not name.startswith("normalizer"))
    config = read_yaml((made / "config.yaml").read_text())
    assert (config["seed"], config["env"]["num_envs"], config["run"]["dir"]) == (5, 8, str(recipes / "runs"))
    assert config["algo"]["name"] == way
    assert config["algo"]["lr"] > 0 and config["run"]["start_from"] is None, "what is the second run's own"
    assert read_yaml((run / "config.yaml").read_text())["run"]["start_from"] == str(made)


def test_a_finished_run_of_the_recipe_is_taken(recipes, capsys):
    assert second(recipes) == second(recipes, "algo.lr=1e-4") == 0
    (made,) = runs(recipes, "first")
    assert [about(run)["started_from"]["folder"] for run in runs(recipes, "second")] == [
        str(made / "checkpoints/v000001/policy")
    ] * 2
    assert f"start       {made}, a run of recipe" in capsys.readouterr().out

    def printed_by(*words):
        assert second(recipes, *words, "--dry-run") == 0
        return capsys.readouterr().out

    taken = f"start       {made}, a run of recipe"
    assert taken in printed_by()
    for other in ("policy.hidden=[9]", "seed=1", "env.size=2"):
        assert taken not in printed_by(other), "a run of another policy, of another seed, or in another env"
    (recipes / "first.yaml").write_text("extends: pointmass_ppo" + SMALL + LEARN.replace("1%s", "2"))
    assert "had another run.iterations (to start from it all the same: run.start_from=" in printed_by()
    (recipes / "first.yaml").write_text("extends: pointmass_ppo" + SMALL + LEARN % "")
    (made / "run.json").write_text(json.dumps(about(made) | {"state": "stopped"}))
    assert taken not in printed_by()


def test_a_recipe_of_ours_is_named_and_a_folder_of_its_name_wins(first, recipes, monkeypatch):
    given = ["run.start_from=pointmass_ppo", f"run.dir={first.parent}", "run.name=named"]
    as_said = load(["recipe=pointmass_ppo"]).config.model_dump(mode="json")
    made = read_yaml((first / "config.yaml").read_text())
    made |= {
        "algo": as_said["algo"],
        "run": made["run"] | {"iterations": None, "env_steps": as_said["run"]["env_steps"]},
    }
    (first / "config.yaml").write_text(json.dumps(made))  # JSON is YAML
    assert train([f"recipe={recipes / 'second.yaml'}", *given]) == 0
    (run,) = first.parent.glob("named-*")
    assert read_yaml((run / "config.yaml").read_text())["run"]["start_from"] == str(first)
    monkeypatch.chdir(recipes)
    (recipes / "pointmass_ppo").symlink_to(first)
    assert load([f"recipe={recipes / 'second.yaml'}", *given]).config.run.start_from == recipes / "pointmass_ppo"


def test_the_first_run_gets_no_options_that_only_apply_to_the_second_run():
    loaded = load(["recipe=sums_grpo", "eval.interleave=true", "run.eval_every=50", "eval.episodes=8"])
    assert first_run(loaded).arguments == ("recipe=sums_sft", "eval.episodes=8")


def test_settings_share_a_start_and_seeds_have_their_own(recipes):
    def start(*words):
        order = read_order([f"recipe={recipes / 'second.yaml'}", f"run.dir={recipes / 'runs'}", *words], True)
        return shared_start(order, load_all(order))

    several = ("algo.lr=1e-4,1e-3", "seeds=5")
    assert start(*several) == str(recipes / "first.yaml") and start("seeds=5-7") == ""
    assert second(recipes, "seed=5") == 0
    assert start(*several) == "", "it is there"
    assert start("policy.hidden=[8],[9]", "seeds=5") != "", "not that of the second setting"
    assert start("algo.lr=1e-4,1e-3", "seeds=5-6") != ""


def test_a_dry_run_says_what_would_be_trained_first(recipes, capsys):
    assert second(recipes, "--dry-run") == 0
    output = capsys.readouterr().out
    assert "no finished run of recipe" in output and output.count("task        pointmass") == 2
    assert not (recipes / "runs").exists()


def test_a_run_goes_on_without_the_folder_that_it_started_from(recipes, capsys):
    assert second(recipes) == 0
    (run,), (made,) = runs(recipes, "second"), runs(recipes, "first")
    began, away = about(run)["started_from"], made.rename(recipes / "away")
    for more in (["recipe=" + str(recipes / "second.yaml")], []):
        iterations = len((run / "metrics.jsonl").read_text().splitlines()) + 1
        assert train([*more, f"resume={run}", f"run.iterations={iterations}"]) == 0
    assert second(recipes, "resume=auto", "run.iterations=4") == 0
    last = load_file(run / "checkpoints/v000004/policy/model.safetensors")
    assert last["normalizer.count"] == weights(away)["normalizer.count"], "the start's statistics stay"
    assert about(run)["started_from"] == began and not runs(recipes, "first")
    assert read_yaml((run / "config.yaml").read_text())["run"]["start_from"] == str(made)
    capsys.readouterr()
    compared = [f"resume={run}", "run.iterations=5", "algo.kl_coef=0.1"]
    assert train(compared) == 2
    assert f"{made}, which is gone, and algo.kl_coef=0.1 compares the policy with it" in capsys.readouterr().err
    assert train([*compared, f"run.start_from={away}"]) == 0
    (run / "checkpoints").rename(recipes / "checkpoints")
    away.rename(recipes / "gone")
    assert train([f"resume={run}"]) == 2
    assert "which is gone, and nothing of the run was saved yet" in capsys.readouterr().err


def test_a_start_that_is_stopped_or_fails_ends_the_command(recipes, capsys, monkeypatch):
    def stopped(*args):
        signal.raise_signal(signal.SIGTERM)
        return iterate(*args)

    monkeypatch.setattr("embodied.train.iterate", stopped)
    assert second(recipes) == 128 + signal.SIGTERM
    (made,) = runs(recipes, "first")
    assert f"resume={made}, then the same command again" in capsys.readouterr().out
    assert about(made)["state"] == "stopped" and not runs(recipes, "second")

    def failing(*args):
        raise Diverged("loss is nan")

    monkeypatch.setattr("embodied.train.iterate", failing)
    assert second(recipes) == Diverged.exit_code
    assert "error: loss is nan" in capsys.readouterr().err and not runs(recipes, "second")


def test_mistakes_in_a_start_are_found_before_anything_is_trained(recipes, capsys):
    assert second(recipes, "run.start_from=pointmas_ppo") == 2
    assert second(recipes, "run.start_from=first.yaml") == 2
    (recipes / "first.yaml").write_text("extends: second.yaml")
    assert second(recipes) == 2
    (recipes / "first.yaml").write_text("extends: pointmass_ppo\nalgo: {lrr: 1}")
    assert second(recipes) == 2
    (recipes / "first.yaml").write_text("extends: pointmass_ppo\npolicy: {hidden: [7]}")
    assert second(recipes) == 2
    found = capsys.readouterr().err
    assert "there is no such folder (of a run, a checkpoint or a policy), and no recipe of this name" in found
    assert "did you mean 'pointmass_ppo'?" in found and "start from each other in a circle: " in found
    assert f"run.start_from={recipes / 'first.yaml'}: algo.lrr" in found
    assert "policy.hidden=[7] there, [8] here" in found
    assert not (recipes / "runs").exists()


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_which_command_it_is_for(name):
    assert commands_of_recipe(name) == ["sft" if "_sft" in name and "_from_sft" not in name else "train"]


def test_a_recipe_of_imitation_is_trained_with_that_command(recipes):
    pytest.importorskip("pyarrow")
    demos = recipes / "demos"
    assert collect(["recipe=pointmass_ppo", "cluster.backend=inline", f"out={demos}", "collect.episodes=4"]) == 0
    imitates = "extends: pointmass_ppo" + SMALL + f"sft: {{data: {demos}, epochs: 1, minibatch_size: 16}}"
    (recipes / "first.yaml").write_text(imitates)
    assert second(recipes) == 0
    (made,), (run,) = runs(recipes, "sft-first"), runs(recipes, "second")
    assert about(made)["command"] == "sft" and about(run)["started_from"]["folder"].startswith(str(made))
