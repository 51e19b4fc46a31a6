"""`python -m embodied.benchmark` measures every mode next to what it said before, and tells what does not fit."""

import pytest

from embodied import benchmark
from embodied.benchmark import describe, paired_ratio
from embodied.config.recipe import load
from embodied.learners.model import learning_rates
from embodied.placement import make_plan
from embodied.placement.dataflow import traced_edges
from embodied.placement.grammar import EMBODIED
from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.profile import Cost, Curve, Profile, constant
from embodied.placement.topology import DeviceClass, read_topology
from embodied.profiling import timed_run
from embodied.profiling.role_probe import ProbeWorker, standalone_worker
from embodied.profiling.stored_profiles import cost_key, dataflow_of, timed_recipe
from embodied.profiling.timed_run import Round, TimedRun
from embodied.run import launch
from embodied.runtime.device_memory import num_bytes

SMALL = ("recipe=pointmass_ppo", "env.num_envs=4", "algo.rollout_decisions=8", "algo.minibatch_size=16")


def rounds(*seconds, steps=100):
    busy = {"sim": 0.5, "policy": 0.1, "learner": 0.2}
    return [Round(s, s / 2, s / 4, s / 8, 0.0, 0.0, s / 2 + 0.001, steps, busy) for s in seconds]


def result(**measured):
    expected = {mode: {"seconds": 1.0 + i, "env_steps_per_s": 100, "in_words": mode} for i, mode in enumerate(measured)}
    found = benchmark.Result("reach", 4, {"cpu": 2}, 1, expected, {"disaggregated": "needs 3 devices"})
    found.rounds = {mode: rounds(*seconds) for mode, seconds in measured.items()}
    found.idle = dict.fromkeys(measured, 0.25)
    found.peak_bytes = dict.fromkeys(measured, 10**8)
    return found


def test_schedules_are_compared_with_the_fastest_mode_and_not_with_what_auto_takes():
    found = result(collocated=[2.0] * 7, hybrid=[4.0] * 7, **{"async": [1.0] * 7})
    found.expected = {name: found.expected[name] for name in ("async", "collocated", "hybrid")}  # the fastest first
    found.expected["async"]["schedule"] = "async"
    *_, auto, overlapped = describe(found)
    assert auto.startswith("the order of modes is the predicted one; placement=auto takes collocated, the fastest")
    assert overlapped.startswith("pipeline.schedule=async: 2.00 times as fast as collocated (95% interval 2.00")


def test_a_row_of_a_schedule_is_run_under_it(tmp_path):
    config = load([*SMALL, "pipeline.schedule=async", "pipeline.async_level=2"]).config
    costs = {name: {"cpu": Cost(constant(1))} for name in ("sim", "policy", "learner")}
    planned = benchmark.plan(Profile(dataflow_of(timed_recipe(config)), costs), read_topology("2xCPU"))
    for name, asked in {"collocated": "sync", "async": "async"}.items():
        choice = planned.modes.get(name) or planned.schedules[name]
        expected = planned.forecast(choice)
        changed, plan = benchmark.runnable(config, expected, planned.topology, EMBODIED)
        assert changed.pipeline.schedule == asked
        assert plan.has_own_devices("learner") == (asked == "async")
        assert expected["seconds"] == choice.price.seconds


def test_paired_rounds_cancel_a_slow_minute():
    low, middle, high = paired_ratio(rounds(1, 10, 2), rounds(2, 20, 4))
    assert low == middle == high == 2


def test_tasks_and_numbers_of_envs_multiply():
    options, rest = launch.own_options(benchmark.Options, ["recipe=pointmass_ppo", "num_envs=[8,16]", "modes=all"])
    commas, _ = launch.own_options(benchmark.Options, ["num_envs=8,16", "modes=collocated,hybrid"])
    assert commas.num_envs == options.num_envs and commas.modes == ("collocated", "hybrid")
    assert options.modes == (*benchmark.MODES, benchmark.OTHER)
    assert [config.env.num_envs for _, config in benchmark.variants(options, rest)] == [8, 16]


def test_amounts_of_work_do_not_change_the_costs_but_the_policy_does():
    same = [arg for arg in SMALL if "num_envs" not in arg]
    changes = ("env.num_envs=4", "env.num_envs=8", "policy.hidden=[8]")
    one, two, other = (load([*same, change]).config for change in changes)
    assert cost_key(one) == cost_key(two) != cost_key(other)
    plain, decayed, compared = (
        load(["recipe=pointmass_ppo", *more]).config for more in ([], ["algo.weight_decay=0.1"], ["algo.kl_coef=0.1"])
    )
    assert cost_key(plain) == cost_key(decayed) != cost_key(compared)
    assert dataflow_of(one)["learner"].calls == 4 * 2  # 4 epochs of 8 x 4 items in minibatches of 16
    assert dataflow_of(two)["sim"].items == 8


def test_extra_seconds_of_a_real_run_are_added_to_the_right_costs():
    dataflow = dataflow_of(load([*SMALL]).config)
    costs = {"sim": constant(0.1), "policy": constant(0.1), "learner": Curve((8, 16), (0.1, 0.2))}
    profile = Profile(dataflow, {name: {"cpu": Cost(curve)} for name, curve in costs.items()})
    pricer = Pricer(dataflow, profile, [DeviceClass("cpu", "cpu", 2, 1e12)])
    layout = Layout(((Zone(("sim", "policy"), "cpu", 2),), (Zone(("learner",), "cpu", 2),)))
    update_s = 8 * 0.15 + 0.03  # of it 8 times 0.05 s between learners, and 0.03 s once
    phases = {"rollout_s": 8 * 0.27, "update_s": update_s, "publish_s": 0.02}
    others = {"sync_s": 0.4, "barrier_s": 0.16, "first_backward_s": None, "env_steps": 32, "busy": {}}
    seen = Round(sum(phases.values()) + 0.01, **phases, **others)
    taken = timed_run.with_turns(profile, pricer, layout, seen)
    sim = taken.costs["sim"]["cpu"]
    assert (sim.seconds.at(1), sim.exchange_s.at(2), sim.exchange_s.at(1)) == pytest.approx((0.15, 0.02, 0))
    learner = taken.costs["learner"]["cpu"]
    assert (learner.exchange_s.at(2), learner.fixed_s) == pytest.approx((0.05, 0.03))
    again = Pricer(taken.dataflow, taken, [DeviceClass("cpu", "cpu", 2, 1e12)])
    assert again.price(layout).seconds == pytest.approx(seen.rollout_s + seen.update_s + seen.publish_s + seen.rest_s)


GROUPED = ("recipe=pointmass_grpo", "env.num_envs=4", "algo.groups=2", "algo.group_size=4", "env.max_episode_steps=8")


@pytest.mark.parametrize("arguments", [SMALL, GROUPED])
def test_the_graph_is_what_went_through_the_channels_of_a_real_iteration(tmp_path, arguments):
    config = timed_recipe(load([*arguments, "cluster.backend=inline"]).config)
    plan = make_plan({"sim": "cpu:0", "policy": "cpu:0", "learner": "cpu:0"}, (0,), config.env.num_envs)
    with TimedRun(config, plan, tmp_path) as run:
        run.iterate()
        assert traced_edges(run.flows()) == dataflow_of(config).edges


@pytest.mark.parametrize("arguments", [SMALL, GROUPED])
def test_parts_are_measured_again_and_again_with_the_same_envs(arguments):
    probes = standalone_worker(ProbeWorker, load([*arguments]).config, tick=lambda: None)
    for repeat in (1, 2):
        samples = probes.rollout(2, 4, 1)
        assert len(samples.seconds["sim"]) == len(samples.seconds["policy"]) == repeat
        assert len(probes.parts[2].kept.get().mask) <= 2 * 4
    assert samples.horizon == 8
    assert min(probes.update(2, 4, 1)["step"]) > 0
    moves = probes.moves(2)
    assert moves["learner"].bytes == 4 * moves["policy"].bytes > 0  # weights, gradients and Adam's two averages


@pytest.mark.parametrize("arguments", [SMALL, GROUPED])
def test_sims_are_measured_without_a_policy_and_networks_with_few_rows_many_times_over(arguments):
    config = load([*arguments]).config
    sims = standalone_worker(ProbeWorker, config, parts=("sim",), tick=lambda: None)
    assert {*sims.rollout(4, 4, 1).seconds} == {"sim"}
    assert sims.parts[4].policy is None
    networks = standalone_worker(ProbeWorker, config, parts=("policy", "learner"), tick=lambda: None)
    asked = []
    act = networks._make_part(4).policy.policy.act
    networks._make_part(4).policy.policy.act = lambda obs, *more: asked.append(len(obs["state"])) or act(obs, *more)
    samples = networks.rollout(12, 4, 1)
    assert "sim" not in samples.seconds and samples.seconds["policy"] and not samples.reset_s
    assert {*networks.parts} == {4} and {*asked} == {12}  # a sim of four rows, asking like three
    assert len(networks.parts[4].kept.get().mask) == 12 * 4
    assert min(networks.update(12, 24, 1)["step"]) > 0


def test_the_probed_memory_of_policy_and_sharded_learner_is_that_of_a_run():
    config = load([*SMALL]).config
    probes = standalone_worker(ProbeWorker, config, tick=lambda: None)
    probes.rollout(2, 4, 1)
    policy = probes.parts[2].policy
    policy.cache_bytes = 1000  # it acts in
    moves = probes.moves(2)
    assert moves["policy"].bytes == moves["policy"].weight_bytes + 1000 == policy.needs().num_bytes
    parameters = list(policy.policy.parameters())  # all of them trained, in float32
    weights, blocks = num_bytes(parameters), [num_bytes(block.parameters()) for block in policy.policy.blocks()]
    block = weights - sum(blocks) + max(blocks)  # a block and the rest
    for each_pass, gradient in (False, weights), (None, block):  # null: a plan may choose what needs less
        probes.config = config.with_values("learner", shard=True, reduce_each_pass=each_pass)
        split = probes.moves(2)["learner"]
        for ranks in (2, 4):
            # Its rows of the weights, of two moments and twice of the gradient; the gradient; a block's weights.
            needed = split.bytes - split.split_bytes * (1 - 1 / ranks)
            assert needed == pytest.approx(5 * weights / ranks + gradient + block, abs=10)


def test_an_iteration_of_whole_episodes_is_one_round_of_all_groups():
    config = load([*GROUPED, "algo.filter=resample", "algo.minibatch_size=16", "algo.epochs=3"]).config
    assert timed_recipe(config).algo.filter == "none"
    dataflow = dataflow_of(config, episode_decisions=6)
    assert dataflow["sim"].calls == 12  # two rounds of four episodes
    assert dataflow["learner"].calls == 3 * 3 and dataflow.env_steps == 8 * 6
    assert cost_key(config) == cost_key(timed_recipe(config))


def test_every_iteration_that_is_timed_does_the_same_work():
    for recipe in ("recipe=pointmass_ppo", "recipe=pointmass_grpo"):
        config = load([recipe, "algo.lr=0.1"]).config
        assert set(learning_rates(timed_recipe(config).algo).values()) == {0.0}
        assert cost_key(config) == cost_key(timed_recipe(config))


def test_whole_episodes_that_would_take_too_long_become_fewer_and_then_shorter():
    config = load([*GROUPED]).config.with_values("algo", groups=8)
    short, length = timed_run.fewer_episodes(config, 0.25, 8)
    assert (short.algo.groups, length) == (2, 8)
    short, length = timed_run.fewer_episodes(config, 0.0625, 8)  # half a group: four episodes of half the length
    assert (short.algo.groups, short.env.max_episode_steps, length) == (1, 4, 4)


def test_resets_that_only_shorter_episodes_need_are_no_cost_of_whole_ones():
    config = load([*GROUPED, "policy.hidden=[8]"]).config
    cost = Cost(constant(0.1))
    costs = {name: {"cpu": cost} for name in ("sim", "policy", "learner")}
    profile = Profile(dataflow_of(config), costs, made={"episode_decisions": 8})
    short = config.model_copy(update={"env": config.env.model_copy(update={"max_episode_steps": 2})})
    extra = timed_run.more_resets(short, profile, reset_s=0.8)
    assert extra == pytest.approx(0.8 / 2 - 0.8 / 8)  # a reset every two decisions instead of every eight
    assert timed_run.more_resets(config, profile, 0.8) == 0
    raised = timed_run.with_sim(profile, extra)
    assert raised.costs["sim"]["cpu"].seconds.at(4) == pytest.approx(0.4)
    assert timed_run.with_sim(raised, -extra).costs["sim"]["cpu"].seconds.at(4) == pytest.approx(0.1)


def test_real_runs_that_would_take_too_long_are_cut_short():
    config = load([*SMALL[:2], "algo.rollout_decisions=64", "algo.minibatch_size=64"]).config
    costs = {"sim": constant(0.5), "policy": constant(0.5), "learner": constant(0.0)}
    profile = Profile(dataflow_of(config), {name: {"cpu": Cost(curve)} for name, curve in costs.items()})
    pricer = Pricer(profile.dataflow, profile, [DeviceClass("cpu", "cpu", 1, 1e12)])
    layout = Layout(((Zone(("sim", "policy", "learner"), "cpu", 1),),))
    short, fitted = timed_run.shorten_iterations(config, profile, pricer.price(layout).seconds, timed_run.Clock(80.0))
    assert short.algo.rollout_decisions == 7  # 64 s are left for 8 iterations of 64 s
    assert short.algo.minibatch_size == 7 and short.algo.epochs == 1
    assert fitted.dataflow == dataflow_of(short)
    assert (
        timed_run.shorten_iterations(config, profile, pricer.price(layout).seconds, timed_run.Clock(1e4))[0] is config
    )
