"""What `embodied.share --plan` predicts from profiles, against hand-computed times."""

import shlex

import pytest

from embodied import share
from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.placement import roles_of
from embodied.placement.profile import Cost, Curve, Profile, constant, write_profile
from embodied.profiling.stored_profiles import cost_key, dataflow_of, device_counts, profile_path
from embodied.run import launch
from embodied.run.devices import machines
from embodied.share import predict, run_cost
from embodied.sharing.page import record_of
from embodied.sweep import run_several
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

TWO = "devices=cpu:0-1"
ROBOT = "recipe=pointmass_ppo env.num_envs=8 algo.rollout_decisions=16 run.env_steps=null run.iterations=3".split()
ROBOT += ["algo.minibatch_size=32", "algo.epochs=2"]
TALKER = ["recipe=sums_grpo", "run.start_from=null", "policy.preset=tiny_gpt2", "algo.groups=4", "algo.group_size=4"]
TALKER += ["env.num_envs=8", "run.iterations=40"]


def measured(folder, words, **costs):
    """The words, with a stored profile of these costs on this machine."""
    words = [*words, f"run.dir={folder}"]
    config, _ = launch.planned(load(words).config)  # what the recipe leaves open is decided, as by embodied.profiling
    roles = roles_of(roles_of_run(EmbodiedLoop, config))
    made = {"key": cost_key(config, roles), "devices": device_counts(machines(config))}
    dataflow = dataflow_of(config, roles=roles)
    write_profile(
        Profile(dataflow, {name: {"cpu": Cost(cost)} for name, cost in costs.items()}, made=made),
        profile_path(config, made, roles),
    )
    return words


def test_ends_and_makespan_are_predicted_for_every_rule(tmp_path, capsys):
    robot = measured(tmp_path, ROBOT, sim=constant(0.01), policy=constant(0.02), learner=constant(0.1))
    # An iteration: 16 decisions of 0.01 + 0.02 s, then 2 epochs of 4 minibatches of 0.1 s. Two cores bring nothing.
    alone = 3 * (16 * 0.03 + 8 * 0.1)
    # A call for 8 rows takes 4 s, for 4 rows 2 s: a rollout of two calls takes 8 s on a core and 4 s on both, an update
    # 1 s. The robots' core is free from their end on.
    talker = measured(tmp_path, TALKER, sim=constant(0.0), policy=Curve((0, 8), (0.0, 4.0)), learner=constant(1.0))
    shared = share.new_runs(share.read_order([TWO, *robot, *talker]))
    ends = {
        rule: {r.name: r.ended_s for r in record_of(lines).runs.values()} for rule, lines in predict(shared).items()
    }
    assert ends["split"]["pointmass_ppo"] == ends["lend"]["pointmass_ppo"] == pytest.approx(alone)
    assert ends["serial"]["pointmass_ppo"] == pytest.approx(alone)
    assert ends["split"]["sums_grpo"] == pytest.approx(40 * (8 + 1))
    assert ends["lend"]["sums_grpo"] == pytest.approx(alone + (40 - alone / (8 + 1)) * (4 + 1))
    assert ends["serial"]["sums_grpo"] == pytest.approx(alone + 40 * (4 + 1))
    assert share.main([TWO, *robot, *talker, "--plan"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[-4:]] == ["serial", "split", "remaining", "lend"]
    assert f"{alone:.4g} s" in said and not [*tmp_path.glob("share-*")]


def test_roles_that_a_recipe_adds_work_between_rollout_and_update(tmp_path):
    words = "recipe=sums_ppo_critic run.start_from=null algo.groups=16 algo.minibatch_size=4 env.num_envs=8".split()
    parts = {"sim": constant(0.0), "policy": constant(5.0), "learner": constant(1.0), "critic": constant(3.0)}
    config = load(measured(tmp_path, words, **parts)).config
    cost = run_cost(config, words, own=1, runs=1)
    assert (cost.rollout_s(1), cost.update_s(1)) == (2 * 5, 3 + 4 * 1)


def test_a_run_without_a_profile_is_refused_with_the_command_that_measures_it(tmp_path, capsys):
    (tmp_path / "taxi.yaml").write_text("extends: pointmass_ppo\n")
    words = [f"recipe={tmp_path / 'taxi.yaml'}", *ROBOT[1:], f"run.dir={tmp_path}"]
    assert share.main([*words, "--plan"]) == 2
    told = f"it has not been measured here; measure it (a minute): python -m embodied.profiling {shlex.join(words)}"
    assert told in capsys.readouterr().err
    config = load(words).config
    made = {"key": cost_key(config), "devices": device_counts(machines(config))}
    costs = {name: {"gpu": Cost(constant(1.0))} for name in ("sim", "policy", "learner")}
    write_profile(Profile(dataflow_of(config), costs, made=made), profile_path(config, made))
    with pytest.raises(
        ConfigError, match=r"was measured on other devices; .* python -m embodied\.profiling recipe=.*taxi"
    ):
        run_cost(config, words, own=1, runs=2)


def test_seeds_share_devices_only_where_their_placement_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_loop.py").write_text("from embodied import EmbodiedLoop\n\n\nclass Loop(EmbodiedLoop):\n    pass\n")
    for words in ("program=my_loop:Loop", "placement={'sim,policy': 'cpu:0', learner: 'cpu:0'}"):
        with pytest.raises(ConfigError, match=r"at_once=shared (is for|places) .* leave"):
            run_several([*ROBOT, f"run.dir={tmp_path}", "seeds=0-1", "at_once=shared", words])
