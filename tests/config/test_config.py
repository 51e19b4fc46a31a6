"""Recipes and arguments become one validated configuration, or a list of every mistake."""

import json
import os
import shutil
import time

import pytest

from embodied.config.recipe import load
from embodied.config.recipe_files import recipe_names
from embodied.core.errors import ConfigError
from embodied.run import launch

BASE = ["recipe=pointmass_ppo"]


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe file and returns its argument."""

    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return f"recipe={path}"

    return write


def mistakes(*argv, entry="train"):
    with pytest.raises(ConfigError) as caught:
        load(list(argv), entry)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_survives_being_written_and_read_again(name, tmp_path):
    loaded = load([f"recipe={name}"])
    (tmp_path / "config.yaml").write_text(loaded.yaml)
    again = load([f"recipe={tmp_path}/config.yaml"])
    absolute = loaded.config.model_copy(update={"run": again.config.run})
    assert again.config == absolute
    assert again.name == loaded.name == name
    assert again.config.run.dir == loaded.config.run.dir.absolute()


def test_a_later_source_wins_and_every_value_knows_where_it_came_from(recipe):
    recipe(
        "run: {iterations: 2}\nenv: {name: pointmass, num_envs: 4}\nalgo: {epochs: 2, minibatch_size: 8}", "base.yaml"
    )
    loaded = load([recipe("extends: ./base.yaml\nalgo: {epochs: 3}"), "algo.lr=1e-4"])
    assert (loaded.config.algo.epochs, loaded.config.env.num_envs, loaded.config.algo.lr) == (3, 4, 1e-4)
    assert loaded.sources["algo.lr"] == "command line"
    assert loaded.sources["algo.epochs"].endswith("mine.yaml")
    assert loaded.sources["env.num_envs"].endswith("base.yaml")
    assert "algo.gamma" not in loaded.sources


def test_lists_maps_and_words_are_yaml():
    config = load(
        [*BASE, "policy.hidden=[8, 4]", "run.name=off", 'placement={"sim,policy": "cpu:0*1", learner: cpu:0}']
    ).config
    assert config.policy.hidden == (8, 4)
    assert config.run.name == "off"
    assert config.placement == {"sim,policy": "cpu:0*1", "learner": "cpu:0"}


def test_naming_another_env_drops_the_old_env_s_keys_and_keeps_the_shared_ones():
    loaded = load(["recipe=maniskill_ppo", "env.name=pointmass", "env.size=2"])
    assert loaded.config.env.task == "reach"
    assert loaded.config.env.num_envs == load(["recipe=maniskill_ppo"]).config.env.num_envs
    assert "env.control_mode" not in loaded.sources


def test_a_key_of_the_dropped_env_on_the_command_line_is_still_a_mistake():
    told = mistakes("recipe=maniskill_ppo", "env.name=pointmass", "env.control_mode=x")
    assert told == (
        "env.control_mode is a key of env.name=maniskill or env.name=robosuite, but env.name is pointmass "
        "(from command line)"
    )


def test_free_keywords_belong_to_the_class_that_is_named(recipe):
    text = "run: {iterations: 1}\nenv: {name: 'gym:A-v0', kwargs: {x: 1, y: 2}, num_envs: 8}"
    assert load([recipe(text), "env.kwargs.x=3"]).config.env.kwargs == {"x": 3, "y": 2}
    assert load([recipe(text), "env.kwargs={z: 1}"]).config.env.kwargs == {"z": 1}
    assert load([recipe(text), "env.name=gym:B-v0"]).config.env.kwargs == {}


def test_one_length_of_a_run_replaces_the_other():
    config = load([*BASE, "run.iterations=3"]).config
    assert (config.run.iterations, config.run.env_steps) == (3, None)


def test_all_mistakes_are_listed_at_once_with_key_reason_and_source(recipe):
    told = mistakes(
        recipe("run: {iterations: 1}\nenv: {name: pointmass, num_envs: 0}\nalgo: {epohcs: 3}"),
        "algo.lr=fast",
        "policy.activation=tahn",
        "seed",
    ).splitlines()
    assert told[0] == "5 mistakes:"
    assert any("'seed' is not a setting" in line for line in told)
    assert any("env.num_envs=0: should be greater than 0 (from /" in line and "mine.yaml)" in line for line in told)
    assert any("algo.epohcs: unknown key, did you mean 'algo.epochs'? (from /" in line for line in told)
    assert any(
        "algo.lr='fast': should be a valid number, unable to parse string as a number (from comm" in line
        for line in told
    )
    assert any("policy.activation='tahn': unknown, did you mean 'tanh'?" in line for line in told)


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("+algo.lr=1", "write algo.lr=1"),
        ("~algo.lr", "write algo.lr=null"),
        ("--algo.lr=1", "write algo.lr=1"),
        ("--cgf", "unknown option, did you mean '--cfg'?"),
        ("--config", "write recipe=VALUE"),
        ("maniskill_ppo", "write recipe=maniskill_ppo"),
        ("algo.lr=", "write algo.lr=null"),
        ("=3", "is not a key"),
        ("env=maniskill", "did you mean env.name=maniskill?"),
        ("env=null", "env is a section"),
        ("algo=3", "algo is a section; set its keys: algo.name"),
        ("lr=1e-3", "did you mean 'algo.lr'?"),
        ("env.cameras=[topp]", "env.cameras.0='topp': unknown, did you mean 'top'?"),
        ("enviroment.num_envs=3", "did you mean 'env.num_envs'?"),
        ("algo.lr=.nan", "algo.lr=nan: should be a finite number"),
        ("algo.epochs=2.5", "algo.epochs=2.5: should be a valid integer"),
        ("run.name=7", "write run.name='\"7\"'"),
        ("run.name={x}", "should be text, which is quoted twice: run.name='\"...\"'"),
        ("run.name=../x", "a name without /"),
        ("env.num_envs=10000000", "less than or equal to 1048576"),
        ("policy.hidden=64", "write policy.hidden='[64]'"),
        ("policy.hidden=64,64", "write policy.hidden='[64,64]'"),
        ('run.name="a\\nb"', "holds the character '\\n'"),
        ("run.dir=~nouser/runs", "there is no user nouser"),
        ("run.dir=s3://bucket/runs", "is an address, which cannot be a path"),
        ("run.dir=" + "é" * 130, "has 260 bytes; a file's name has at most 255"),
        ("run.dir=5", "run.dir=5: should be a path"),
        ("a" + ".a" * 5000 + "=1", "a.a: unknown key"),
        ("env.discrete=maybe", "env.discrete='maybe': should be a valid boolean"),
        ("policy.hidden=[1", "the value is not YAML"),
        ("env.kwargs={a:b,c:1}", "a space is missing after a colon; write {a: b, ...}"),
        ("run.steps=100", "did you mean 'run.env_steps'?"),
        ("config=x.yaml", "did you mean 'recipe'?"),
        ("my.yaml", "write recipe=my.yaml"),
        ("runs/X", "write resume=runs/X"),
        ("env.name=CartPole-v1", "did you mean env.name=gym:CartPole-v1, of Gymnasium, or env.name=maniskill env.task"),
        ("env.name=pontmass", "did you mean 'pointmass'?"),
        ("env.name=reasoning_gym:", "env.name=reasoning_gym: names no env: write env.name=reasoning_gym:<task>;"),
        ("placement=hybird", "did you mean placement=hybrid?"),
        ("placement.sim=cpu:0", "'policy' has no place"),
        ("cluster.backend=ray2", "known: auto"),
        ("eval.seed=-1", "greater than or equal to 0"),
    ],
)
def test_one_mistake_has_one_answer(argument, answer):
    told = mistakes(*BASE, argument)
    assert answer in told
    assert "\n" not in told


def test_the_same_key_twice_is_a_mistake_wherever_it_happens(recipe):
    assert "algo.lr is given twice" in mistakes(*BASE, "algo.lr=1", "algo.lr=2")
    assert "algo.lr is set twice" in mistakes(*BASE, "algo={lr: 1}", "algo.lr=2")
    assert "env.kwargs.a is set twice" in mistakes(*BASE, "env.name=a:B", "env.kwargs={}", "env.kwargs.a=2")
    assert "given twice" in mistakes(*BASE, *BASE)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "should be a mapping of sections, such as env: {name: pointmass}, not null"),
        ("- a\n- b", "not [a, b]"),
        ("just words", "not just words"),
        ("a: [1", "line 1"),
        ("env: &x {name: pointmass}\npolicy: *x", "line 2: aliases (*name) are not read; use extends"),
        ("extends: maniskill_pop", "did you mean 'maniskill_ppo'?"),
        ("extends: ./nowhere.yaml", "there is no file"),
        ("extends: ./d.yaml", "mine.yaml: extends=/"),
        ("extends: ./loop.yaml", "loop"),
        ("extends: ~nouser/x.yaml", "there is no user nouser"),
        ('extends: "./a\\0.yaml"', "holds the character"),
        ("extends: [a, b]", "is not the name or path of one recipe"),
        ("extends: ./mine.yaml", "extend each other in a circle"),
        ("recipe: pointmass_ppo", "`extends`"),
        ("1: 2", "1: unknown key"),
    ],
)
def test_a_broken_recipe_file_says_what_is_wrong_with_it(recipe, tmp_path, text, answer):
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "d.yaml").mkdir()
    told = mistakes(recipe(text))
    assert answer in told


def test_of_many_mistakes_the_first_are_shown_and_all_are_counted(recipe):
    keys = "".join(f"env.key{number}: 1\n" for number in range(2000))
    began = time.process_time()
    told = mistakes(recipe(f"extends: pointmass_ppo\n{keys}")).splitlines()
    assert time.process_time() - began < 10, "each takes 20 ms where all of them are explained"
    assert told[0] == "2000 mistakes:" and "env.key0: unknown key" in told[1]
    assert told[-1].strip() == "and 1980 more" and len(told) == 22


def test_a_missing_recipe_is_named_with_what_there_is(tmp_path, monkeypatch):
    near, unlike = mistakes("recipe=pointmass_pop"), mistakes("recipe=zzz")
    assert near.startswith("recipe=pointmass_pop: no such recipe, did you mean 'pointmass_ppo'?")
    assert unlike.startswith("recipe=zzz: no such recipe; python -m embodied.list recipes")
    assert mistakes("recipe=./").startswith("recipe=. cannot be read: Is a directory")
    assert "which recipe? recipe=NAME, or recipe=path/to/my.yaml; python -m embodied.list recipes" in mistakes()
    assert max(map(len, (near, unlike, mistakes()))) < 200, "a list of all would bury the hint"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("seed: 1")
    assert "mine.yaml'?" in mistakes("recipe=./mien.yaml")
    assert "there is no file" in mistakes("recipe=../../recipes/x/pointmass_ppo.yaml")


def test_an_empty_section_in_a_file_sets_nothing(recipe):
    assert load([recipe("extends: pointmass_ppo\nalgo:\npolicy:")]).config.policy.name == "mlp"


def test_relative_paths_belong_to_the_file_that_states_them(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    mine = recipe("extends: pointmass_ppo\nrun: {dir: results}", "sub/mine.yaml")
    assert load([mine]).config.run.dir == tmp_path / "sub" / "results"
    assert load([mine, "run.dir=here"]).config.run.dir == tmp_path.parent / "here"
    assert load([mine, "resume=auto"]).config.resume == "auto"
    assert load([recipe("extends: sub/mine.yaml", "other.yaml")]).config.run.dir == tmp_path / "sub" / "results"


@pytest.mark.parametrize("name", ["maniskill_ppo", "libero_ppo", "robosuite_ppo", "pointmass_ppo", "sums_grpo"])
def test_a_list_of_one_task_is_that_task(name, recipe):
    told = [f"recipe={name}", "run.start_from=null"]
    config = load(told).config
    task = config.env.task
    assert load([*told, f"env.task=[{task}]"]).config == config, "what the recipe sets for its task stays, too"
    assert load([recipe(f"extends: {name}\nenv: {{task: [{task}]}}"), "run.start_from=null"]).config.env == config.env


def test_an_evaluation_plays_the_benchmark_s_physics_unless_its_command_names_another(recipe):
    asked = [recipe("extends: libero_ppo\nenv: {backend: warp, python: auto}"), "checkpoint=random"]
    usual, warp = load(asked, "evaluate"), load([*asked, "env.backend=warp"], "evaluate")
    assert (usual.config.env.backend, usual.config.env.python) == ("mujoco", None)
    assert (warp.config.env.backend, warp.config.env.python) == ("warp", "auto")
    assert load(asked[:1]).config.env.backend == "warp"


@pytest.fixture
def run_folder(tmp_path):
    run = tmp_path / "pointmass_ppo-20250101-120000"
    (run / "checkpoints" / "v000003" / "policy").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"state": "finished"}))
    (run / "config.yaml").write_text(load([*BASE, "env.num_envs=4", "run.dir=elsewhere"]).yaml)
    return run


def test_a_run_is_resumed_with_its_own_recipe(run_folder):
    loaded = load([f"resume={run_folder}", "run.iterations=9"])
    assert (loaded.config.env.num_envs, loaded.config.run.iterations, loaded.name) == (4, 9, "pointmass_ppo")
    assert loaded.config.resume == run_folder
    assert "resume: null" in loaded.yaml
    assert "there is no config.yaml" in mistakes("resume=nowhere")
    assert "which recipe?" in mistakes("resume=auto")


def test_resume_auto_finds_the_run_by_the_name_and_the_folder_that_the_recipe_gives(run_folder, recipe):
    mine = recipe(f"extends: pointmass_ppo\nrun: {{dir: {run_folder.parent}, name: pointmass_ppo}}")
    assert load([mine, "resume=auto"]).config.resume == run_folder
    assert load([mine, "resume=auto", "run.name=other"]).config.resume == "auto"
    assert load([mine, "resume=auto", "run.dir=elsewhere"]).config.resume == "auto"


def test_resume_auto_takes_the_newest_run_of_this_name_alone_and_says_which(run_folder, capsys):
    asked = [*BASE, f"run.dir={run_folder.parent}", "resume=auto"]
    unsaved, other = (
        run_folder.with_name(f"pointmass_ppo-{name}") for name in ("20250101-130000", "2-20250102-120000")
    )
    broken = run_folder.with_name("pointmass_ppo-20250103-120000-2")
    for folder in (unsaved, other, broken):
        shutil.copytree(run_folder, folder)
    shutil.rmtree(unsaved / "checkpoints")
    (broken / "run.json").unlink()
    for hour, folder in enumerate((run_folder, unsaved, other)):
        os.utime(folder / "run.json", (3600 * hour, 3600 * hour))
    assert load(asked).config.resume == unsaved
    assert capsys.readouterr().out == (
        f"resume=auto {broken} cannot be resumed: run.json is missing\n"
        f"resume=auto goes on with {unsaved} from its start: it has saved nothing yet\n"
    )
    assert load([*asked, "run.name=pointmass_ppo-2"]).config.resume == other
    assert load([*asked, "run.name=new"]).config.resume == "auto"
    assert capsys.readouterr().out.endswith(f"{run_folder.parent} has no run called new, so a new one begins\n")


@pytest.mark.parametrize("below", ["", "checkpoints/v000003", "checkpoints/v000003/policy"])
def test_evaluation_takes_the_recipe_of_the_run_the_checkpoint_belongs_to(run_folder, below):
    loaded = load([f"checkpoint={run_folder / below}", "eval.episodes=200", "env.num_envs=1"], "evaluate")
    assert (loaded.config.env.num_envs, loaded.config.eval.episodes) == (1, 200)
    assert loaded.checkpoints == (str(run_folder / below),)


def test_evaluation_refuses_what_has_no_effect_in_it(run_folder):
    assert "algo.lr has no effect in evaluate" in mistakes(f"checkpoint={run_folder}", "algo.lr=1", entry="evaluate")
    assert "which policy?" in mistakes(*BASE[:0], entry="evaluate")
    assert mistakes(entry="check").startswith("which env? env.name=NAME, env.task=TASK or recipe=NAME; ")
    assert mistakes("runs/X", entry="evaluate") == "'runs/X' is not a setting; write checkpoint=runs/X"
    assert "so name the env: env.name=maniskill" in mistakes("checkpoint=random", entry="evaluate")
    assert load(["checkpoint=random", *BASE], "evaluate").checkpoints == ("random",)
    assert "checkpoint: unknown key" in mistakes(*BASE, "checkpoint=x")


def test_cfg_is_the_recipe_with_sources_and_loads_again(capsys, tmp_path):
    argv = [*BASE, "algo.lr=1e-5", 'placement={"sim,policy": cpu:0, learner: cpu:0}', "run.name='1e-4'"]
    assert load([*argv, "--cfg"]) is None
    text = capsys.readouterr().out
    assert "lr: 1.0e-05" in text
    assert "# command line" in text
    assert "# recipes/pointmass_ppo.yaml" in text
    (tmp_path / "again.yaml").write_text(text)
    again, first = load([f"recipe={tmp_path}/again.yaml"]).config, load(argv).config
    assert again.algo == first.algo
    assert again.placement == first.placement
    assert again.run.name == "1e-4"


def test_settings_that_another_variant_does_not_have_are_named(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: pointmass_ppo\npolicy: {name: 'my_nets:Big', kwargs: {width: 64}}\n")
    loaded = load([f"recipe={recipe}", "policy.name=mlp"])
    assert loaded.left_out == (
        "left out, since the recipe sets it for policy.name=my_nets:Big: policy.kwargs={width: 64}",
    )
    assert " ".join(" ".join(launch.notes(loaded)).split()) == f"note {loaded.left_out[0]}"
    assert not load([f"recipe={recipe}"]).left_out and not load(["recipe=pointmass_grpo"]).left_out
    assert not load(["checkpoint=random", f"recipe={recipe}", "policy.name=mlp"], entry="evaluate").left_out
