"""Where language recipes run, and what they cost there."""

import pytest
from tiny_language import publish

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.placement import roles_of
from embodied.placement.dataflow import traced_edges
from embodied.placement.profile import Cost, Curve, Profile, constant, write_profile
from embodied.placement.topology import read_topology
from embodied.profiling.conversation_probe import ConversationProbe
from embodied.profiling.measure import lengths_of, probe_hosts, share_of_step, sites_of
from embodied.profiling.role_probe import standalone_worker
from embodied.profiling.stored_profiles import cost_key, dataflow_of, device_counts, periodic_is_the_same, profile_path
from embodied.profiling.timed_run import through_the_driver
from embodied.run import launch
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

SMALL = ("recipe=sums_grpo", "run.start_from=null", "env.num_envs=8", "algo.groups=4", "algo.group_size=4")


def recipe(*more):
    mine = {word.partition("=")[0] for word in more}
    return load([*(word for word in SMALL if word.partition("=")[0] not in mine), *more]).config


@pytest.mark.parametrize(
    ("cluster", "sims", "others"),
    [
        ("2xCPU", ["sim+policy"] * 2, ["learner"] * 2),
        ("1xGPU", ["sim"] * 4, ["policy+learner"]),
        ("8xGPU", ["sim"] * 32, ["policy+learner"] * 8),
        ("4x8xGPU", ["sim"] * 128, ["policy+learner"] * 32),
    ],
)
def test_without_a_profile_engines_and_learners_take_gpus_and_a_few_sims_cores(cluster, sims, others):
    config = load(["recipe=sums_grpo", "run.start_from=null", f"cluster.machines={cluster}"]).config
    _, plan = launch.planned(config, dry=True)
    assert sorted("+".join(host.roles) for host in plan.hosts) == sorted(sims + others)
    on_gpus = {role for host in plan.hosts if host.device for role in host.roles}
    assert on_gpus == ({"policy", "learner"} if "GPU" in cluster else set())


def test_engines_on_two_gpus_each_are_measured_and_placed_by_a_profile(tmp_path):
    more = ("policy.engine=vllm", "policy.tensor_parallel=2", "cluster.machines=8xGPU", f"run.dir={tmp_path}")
    config = recipe(*more)
    machines = read_topology("8xGPU")
    _, site = sites_of(config, machines)
    hosts = probe_hosts(site, machines, False)
    assert [host.devices for host in hosts] == [(f"gpu:{n}", f"gpu:{n + 1}") for n in (0, 2, 4, 6)]
    costs = {"sim": {"cpu": Cost(constant(0.01))}} | {
        name: {"gpu": Cost(Curve((1, 8), (1.0, 2.0)))} for name in ("policy", "learner")
    }
    made = {"key": cost_key(config), "devices": device_counts(machines), "date": "2026-11-29T07:00:00"}
    write_profile(Profile(dataflow_of(config), costs, made=made), profile_path(config, made))
    _, plan = launch.planned(config, dry=True)
    assert "the fastest by the profile measured here" in plan.reason
    policies = [host for host in plan.hosts if "policy" in host.roles]
    assert len(policies) == 4 and all(host.roles == ("policy",) and len(host.devices) == 2 for host in policies)
    assert plan.count("learner") == 8


def test_a_conversation_is_an_item_for_all_roles():
    found = dataflow_of(recipe())
    sim, policy, learner = found["sim"], found["policy"], found["learner"]
    assert (sim.calls, sim.items) == (policy.calls, policy.items) == (2, 8)  # 16 conversations, 8 at a time
    assert policy.merges == 256  # as many as an engine continues at a time
    assert (learner.calls, learner.items) == (1, 16)
    assert (found.groups, found.group_size) == (4, 4)
    steps = dataflow_of(recipe("algo.minibatch_size=8"))["learner"]
    assert (steps.calls, steps.items) == (2, 8)


def test_ppo_on_conversations_counts_them_as_groups_do():
    more = ("policy.value_head=true", "env.num_envs=8", "algo.groups=16", "algo.minibatch_size=null")
    sync, whole = (
        load(["recipe=sums_ppo", *more, f"algo.normalize_advantages={way}"]).config for way in ("true", "false")
    )
    found = dataflow_of(sync)
    assert (found["sim"].calls, found["sim"].items) == (found["policy"].calls, found["policy"].items) == (2, 8)
    assert (found["learner"].calls, found["learner"].items) == (1, 16)
    assert not found.groups, "advantages are normalised over the batch: nothing could begin earlier"
    assert (dataflow_of(whole).groups, dataflow_of(whole).group_size) == (16, 1)
    assert periodic_is_the_same(whole) and not periodic_is_the_same(load(["recipe=pointmass_ppo"]).config)


def test_a_profile_of_robots_knows_nothing_of_conversations():
    robots = load(["recipe=pointmass_ppo"]).config
    said = robots.model_dump(mode="json", include={"env", "policy", "algo", "learner"})
    assert {"groups", "weighting", "pools"} <= said["algo"].keys()  # which its key leaves out
    changed = robots.algo.model_copy(update={"weighting": "episode"})
    assert cost_key(robots) == cost_key(robots.model_copy(update={"algo": changed}))
    language = load(["recipe=sums_ppo"]).config
    plain = language.policy.model_copy(update={"value_head": False})
    assert cost_key(language) != cost_key(language.model_copy(update={"policy": plain}))


def test_profiles_of_different_scorers_have_different_keys():
    scorers = ("verifier=a:b", "reward_model=m", "judge=m", "judge=m roles.judge_tokens=2")
    configs = [load(["recipe=sums_grpo", *f"roles.{scorer}".split()]).config for scorer in scorers]
    assert len({cost_key(config, roles_of(["reward"])) for config in configs}) == len(scorers)


def test_gradient_steps_are_measured_on_whole_groups():
    assert share_of_step(recipe(), 8, 1) == 8
    assert share_of_step(recipe("algo.minibatch_size=8"), 4, 1) == 4
    assert share_of_step(recipe("env.num_envs=64", "algo.groups=16", "algo.minibatch_size=16"), 24, 1) == 4
    robots = load(["recipe=pointmass_ppo", "env.num_envs=8", "algo.minibatch_size=null"]).config
    assert share_of_step(robots, 4, 10) == 40


PPO = load(["recipe=sums_ppo", "env.num_envs=8", "algo.groups=16", "algo.lr=0", "algo.minibatch_size=null"]).config


@pytest.mark.parametrize("config", [recipe("algo.lr=0.0"), PPO], ids=["grpo", "ppo"])
def test_conversations_are_probed_and_learned_from(config):
    probe = standalone_worker(ConversationProbe, config)
    samples = probe.rollout(4, 1, 2)
    assert samples.horizon == 1 and len(samples.seconds["sim"]) == len(samples.seconds["policy"]) == 2
    lengths = lengths_of(config, samples.conversations, samples.pass_cost)
    assert lengths.item == samples.pass_cost[0] > lengths.pair > 0
    assert samples.seconds["sim"][0] > 0 and 0 < samples.seconds["policy"][0] <= samples.decision_s + 1
    learned = probe.update(4, 4, 1)
    assert learned["step"][0] > 0 and learned["item_bytes"][0] > 0 and learned["ahead"] == [0.0]
    assert {*probe.moves(4)} == {"policy", "learner"}


def test_sims_are_probed_without_an_engine_where_that_is_elsewhere():
    probe = standalone_worker(ConversationProbe, recipe("env.task=calc2"), parts=("sim",))
    samples = probe.rollout(4, 1, 1)
    assert {*samples.seconds} == {"sim"} and samples.seconds["sim"][0] > 0
    assert probe.parts[4].policy is None


def test_more_learners_than_key_value_heads_cannot_divide_passes(tmp_path):
    given = [*SMALL, "cluster.machines=4xGPU", f"policy.pretrained={publish(tmp_path / 'model', 'qwen3', tied=False)}"]
    with pytest.raises(ConfigError, match=r"the 2 key-value heads;.*learner\.sequence_degree=2"):
        launch.planned(load([*given, "learner.sequence_degree=4"]).config, dry=True)
    assert launch.planned(load([*given, "learner.sequence_degree=2"]).config, dry=True)


def test_prompts_that_go_by_way_of_the_driver_make_a_cycle_of_sims_and_engines():
    """Engines answer sims directly; what these ask goes to whichever has room, as the driver sees to."""
    seen = {("policy", "sim"): (1.0, 8.0), ("sim", "learner"): (9.0, 9.5), ("learner", "policy"): (12.0, 13.0)}
    flows = through_the_driver(seen, EmbodiedLoop.roles)
    assert flows == seen | {("sim", "policy"): (1.0, 8.0)}
    edges = {(edge.source, edge.target): edge.next_iteration for edge in traced_edges(flows)}
    now = [("policy", "sim"), ("sim", "policy"), ("sim", "learner")]
    assert edges == {**dict.fromkeys(now, False), ("learner", "policy"): True}
    assert through_the_driver(flows, EmbodiedLoop.roles) == flows


def test_the_traced_graph_places_a_judge_between_the_reward_role_and_the_learner():
    roles = roles_of_run(EmbodiedLoop, recipe("roles.judge=m"))
    seen = {("sim", "reward"): (1.0, 2.0), ("reward", "judge"): (2.0, 5.0), ("judge", "reward"): (2.5, 6.0)}
    edges = {
        (edge.source, edge.target)
        for edge in traced_edges(through_the_driver(seen | {("reward", "learner"): (6.0, 7.0)}, roles))
    }
    assert edges == {("sim", "reward"), ("reward", "judge"), ("judge", "learner"), ("reward", "learner")}
