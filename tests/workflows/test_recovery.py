"""Workers that die in the middle of a run are replaced, and nothing is counted twice or lost silently."""

import json
import os
import signal
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import stepped
from stepped import strike

from embodied import train
from embodied.config.recipe import load
from embodied.core.errors import WorkerFailed
from embodied.run import launch
from embodied.run.run_folder import COUNTERS
from embodied.workflows.rl_loop import EmbodiedLoop

ITERATIONS = 3
ENVS, DECISIONS = 8, 16
ARGUMENTS = (
    "recipe=pointmass_ppo env.max_episode_steps=10 policy.dtype=float64 policy.hidden=[16,16] "
    "policy.normalize_observations=true algo.minibatch_size=32 algo.epochs=2 eval.episodes=6 faults.timeout_s=240 "
    f"faults.hang_s=20 env.num_envs={ENVS} algo.rollout_decisions={DECISIONS} run.iterations={ITERATIONS}"
).split()
ONE_SIM = {"sim": "cpu:0", "policy,learner": "cpu:0"}
TWO_SIMS = {"sim": "cpu:0-1*2", "policy": "cpu:2", "learner": "cpu:3"}
FOUR_SIMS = {"sim": "cpu:0-3*4", "policy,learner": "cpu:0"}
FAULTS = (Path(__file__).parents[1] / "support" / "faulty_env.py").read_text().splitlines()
LINE = 1 + FAULTS.index('        raise RuntimeError("the gripper fell off")')


class Run(stepped.Run):
    def __init__(self, folder, placement, *arguments, backend="local"):
        exact = [] if "env.task=reach" in arguments else ["env.dtype=float64"]
        super().__init__(folder, *ARGUMENTS, *exact, *arguments, placement=placement, backend=backend)

    @classmethod
    def shipped(cls, folder, recipe, backend, *arguments):
        """A recipe as it is, in the placement that the user gets who asks for none."""
        run = cls.__new__(cls)
        loaded = load([f"recipe={recipe}", f"cluster.backend={backend}", *arguments])
        run.config, run.plan = launch.planned(loaded.config)
        run.folder, run.kind, run.lines, run.start = folder, EmbodiedLoop, [], None
        return run

    def iterate(self, number):
        return self.loop.iterate(number, ITERATIONS)

    def begun(self):
        self.loop.rollouts.read_reports()
        return self.loop.collector.counter.begun

    def has_noted(self, begun, seconds=10):
        """Whether the ledger says so; notes may still be on their way when a call's result is here."""
        until = time.monotonic() + seconds
        while not (same := (self.begun() == begun).all()) and time.monotonic() < until:
            time.sleep(0.01)
        return bool(same)


def faulty(fault, place, folder, worker="sim-0", once=True, **more):
    plan = {"fault": fault, "place": place, "worker": worker, "dtype": "float64", **more}
    if once:
        plan["once"] = folder / "struck"
    text = ", ".join(f"{key}: {value}" for key, value in plan.items())
    return ["env.name=faulty_env:FaultyEnv", "env.task=reach", f"env.kwargs={{{text}}}"]


# A sim that dies while it simulates one half of its envs leaves the question of the other half behind.
MERGED = ("pipeline.stages=2", "pipeline.merge_rows=8", "pipeline.merge_wait_s=0.2")


@pytest.mark.chaos
@pytest.mark.parametrize("options", [(), ("pipeline.granularity=3",), MERGED], ids=["whole", "in_pieces", "merged"])
def test_the_slice_of_a_dead_sim_is_played_again_where_it_is_half_the_batch(tmp_path, options):
    with Run(tmp_path, TWO_SIMS, *options, *faulty("sigkill", "rollout", tmp_path, worker="sim-1")) as run:
        finished, numbers = run.iterate(0)
        assert numbers["env_steps"] == ENVS * DECISIONS
        assert (numbers["faults/restarts"], numbers["faults/lost_decisions"]) == (1, 0)
        (line,) = run.lines
        assert line.startswith(
            "sim-1 is started again (restart 1, at most 5 in 1800 s): its process was killed by SIGKILL"
        )
        assert "sim-1.log" in line and "; 4 episodes, open or ended unreported, were abandoned: new ones begin" in line
        assert run.loop.rollouts.take_abandoned() == 4
        more, numbers = run.iterate(1)
        assert (numbers["faults/restarts"], numbers["faults/lost_decisions"]) == (0, 0)
        played = [episode.index for episode in finished + more]
        assert len(set(played)) == len(played), "no episode is played twice"
        lost = set(range(4, 8))
        open_now = {env + ENVS * (run.begun()[env] - 1) for env in range(ENVS)}
        listed = {env + ENVS * k for env in range(ENVS) for k in range(run.begun()[env])}
        assert set(played) | lost | open_now == listed, "and none is skipped silently"


def test_an_error_that_the_first_restart_does_not_mend_ends_the_run(tmp_path):
    with Run(tmp_path, TWO_SIMS, *faulty("exception", "first_step", tmp_path, once=False)) as run:
        with pytest.raises(
            WorkerFailed, match=rf"the gripper fell off \(faulty_env.py:{LINE} .* not tried a third time"
        ):
            run.iterate(0)
        assert len(run.lines) == 1, "the budget is five"


def test_a_repeated_error_of_a_policy_beside_its_sims_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(os.path.dirname(os.path.dirname(__file__)), "support"))
    fault = "policy.kwargs={fault: exception, place: first_step, worker: policy-0}"
    with Run.shipped(tmp_path, "pointmass_ppo", "local", "policy.name=faulty_policy:FaultyPolicy", fault) as run:
        with pytest.raises(WorkerFailed, match=r"the gripper fell off .* not tried a third time"):
            run.iterate(0)
        assert len(run.lines) == 1


@pytest.mark.chaos
def test_the_slice_of_a_dead_sim_is_left_out_and_counted_where_it_is_less_than_half_the_batch(tmp_path):
    with Run(tmp_path, FOUR_SIMS, *faulty("exception", "rollout", tmp_path, worker="sim-2")) as run:
        _, numbers = run.iterate(0)
        assert numbers["env_steps"] == 6 * DECISIONS
        assert (numbers["faults/restarts"], numbers["faults/lost_decisions"]) == (1, 2 * DECISIONS)
        assert "play failed: RuntimeError: the gripper fell off (faulty_env.py:" in run.lines[0]
        _, numbers = run.iterate(1)
        assert numbers["env_steps"] == ENVS * DECISIONS
        assert numbers["faults/lost_decisions"] == 0


@pytest.mark.parametrize("options", [(), pytest.param(MERGED[1:], marks=pytest.mark.slow)], ids=["alone", "merged"])
def test_a_policy_that_dies_in_a_rollout_changes_nothing(tmp_path, options):
    """Sims ask its successor again, and it has the same weights."""
    with Run(tmp_path / "whole", TWO_SIMS, backend="inline") as run:
        whole = [run.iterate(number) for number in range(2)], run.weights()
    with Run(tmp_path / "broken", TWO_SIMS, *options) as run:
        killed = run.pid("policy-0")
        strike(run, "round", "policy-0")
        broken = [run.iterate(number) for number in range(2)], run.weights()
        assert len(run.lines) == 1 and "policy-0 is started again" in run.lines[0]
        assert run.pid("policy-0") != killed
    for (episodes, numbers), (others, other_numbers) in zip(whole[0], broken[0]):
        assert [(e.index, e.length) for e in episodes] == [(e.index, e.length) for e in others]
        assert numbers["env_steps"] == other_numbers["env_steps"] and other_numbers["faults/lost_decisions"] == 0
    assert all(np.allclose(whole[1][name], broken[1][name], rtol=0, atol=1e-12) for name in whole[1])


@pytest.mark.chaos
@pytest.mark.parametrize("worker", ["sim-0", "policy-0"])
def test_a_worker_that_dies_between_rollouts_is_replaced_without_loss(tmp_path, worker):
    with Run(tmp_path, TWO_SIMS) as run:
        run.iterate(0)
        os.kill(run.pid(worker), signal.SIGKILL)
        state = run.loop.collector.save()
        assert state["env_ids"].tolist() == list(range(ENVS)) and run.has_noted(state["rows.started"])
        _, numbers = run.iterate(1)
        assert numbers["env_steps"] == ENVS * DECISIONS and numbers["faults/lost_decisions"] == 0
        assert len(run.lines) == 1


UPDATES = {"four hosts": "placement={'sim,policy': 'fake:0-3', learner: 'fake:4'}", "default": "placement=auto"}
UPDATES |= {"policy apart": "placement={sim: 'fake:0-1', policy: 'fake:2', learner: 'fake:3'}"}


QUICK = {("pointmass_grpo", "policy apart")}  # the rest where there is time
AT_WORK = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in product(("pointmass_ppo", "pointmass_grpo"), UPDATES)
]
MOMENTS = ("update", "publish", "load")
PPO = ["recipe=pointmass_ppo", "algo.rollout_decisions=16", "algo.minibatch_size=32", "run.env_steps=null"]
GRPO = ["recipe=pointmass_grpo", "algo.groups=5", "algo.group_size=3", "algo.minibatch_size=null", "algo.epochs=1"]
SMALL = ["env.num_envs=8", "env.max_episode_steps=12", "run.iterations=6"]


@pytest.mark.parametrize(("recipe", "placement"), AT_WORK)
def test_a_host_that_dies_while_learners_update_or_publish_is_replaced(tmp_path, recipe, placement):
    sizes = PPO[1:] if recipe == "pointmass_ppo" else GRPO[1:]
    with Run.shipped(tmp_path, recipe, "local", UPDATES[placement], *SMALL, *sizes) as run:
        run.iterate(0)
        for restart, moment in enumerate(MOMENTS, 1):
            strike(run, moment, "policy-0")
            _, numbers = run.iterate(restart)
            assert numbers["faults/restarts"] == 1 and len(run.lines) == restart, (moment, run.lines)
            assert f"is started again (restart {restart}" in run.lines[-1]
        _, numbers = run.iterate(len(MOMENTS) + 1)
        assert numbers["faults/restarts"] == 0 and run.loop.version == len(MOMENTS) + 2
        for handle in (run.loop.weight_sync.loads[rank] for rank in range(len(run.loop.workers.policies))):
            assert handle.wait() == [run.loop.version]


@pytest.mark.as_users_do
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_successor_that_dies_or_hangs_while_it_builds_is_another_restart(tmp_path, number, backend):
    patience = "faults.hang_s=8" if number == signal.SIGSTOP else "faults.hang_s=120"
    with Run.shipped(tmp_path, "pointmass_ppo", backend, patience, *SMALL, *PPO[1:]) as run:
        run.iterate(0)
        replace_host, again = run.cluster.replace, []

        def replace_and_strike(host):
            handles = replace_host(host)
            if not again:
                again.append(host)
                until = time.monotonic() + 60
                hosts = run.cluster._backend
                while (hosts.pulse(host).ago_s == float("inf") or "starting" in hosts.describe_host(host)) and (
                    time.monotonic() < until
                ):
                    time.sleep(0.01)
                os.kill(run.pid(f"sim-{host[-1]}"), number)
            return handles

        run.cluster.replace = replace_and_strike
        strike(run, "update", "sim-0")
        run.iterate(1)
        run.iterate(2)
        assert [line.split("(")[1].split(",")[0] for line in run.lines] == ["restart 1", "restart 2"]


@pytest.mark.chaos
def test_an_evaluation_goes_on_where_a_dead_worker_left_it(tmp_path):
    with Run(tmp_path / "whole", TWO_SIMS, "eval.num_envs=4", "eval.videos=0", backend="inline") as run:
        whole = run.loop.evaluator.evaluate(tmp_path / "videos")
    with Run(tmp_path, TWO_SIMS, "eval.num_envs=4", "eval.videos=0", *faulty("sigkill", "evaluation", tmp_path)) as run:
        assert run.loop.evaluator.evaluate(tmp_path / "videos") == whole
        assert len(run.lines) == 1


@pytest.mark.chaos
def test_an_episode_that_kills_twice_is_an_error_and_costs_no_other(tmp_path):
    with Run(tmp_path, ONE_SIM, "eval.num_envs=4", "eval.videos=0", backend="inline") as run:
        whole = run.loop.evaluator.evaluate(tmp_path / "videos")
    poisoned = run.loop.evaluator.episodes[2].seed
    env = faulty("os_exit", "evaluation", tmp_path, once=False, seed=poisoned)
    with Run(tmp_path, ONE_SIM, "eval.num_envs=4", "eval.videos=0", *env) as run:
        results = run.loop.evaluator.evaluate(tmp_path / "videos")
        assert len(run.lines) == 2
    assert [result.index for result in results] == list(range(6))
    assert results[2].success_once is None and "exited with code 0 during sim.play" in results[2].error
    assert results[:2] + results[3:] == whole[:2] + whole[3:]


ENDED = {
    "sync": (*PPO, "faults.max_restarts=1"),
    "async": (*PPO, "pipeline.schedule=async"),
    "periodic": (*GRPO, "pipeline.schedule=periodic"),
}


@pytest.mark.parametrize(
    "schedule", ["async", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sync", "periodic"))]
)
def test_a_run_saves_what_it_has_learned_before_a_simulator_that_fails_in_every_life_ends_it(
    tmp_path, monkeypatch, capsys, schedule
):
    monkeypatch.chdir(tmp_path)
    fault = "{fault: sigkill, place: rollout, worker: sim-0, after: 40"
    env = ["env.name=faulty_env:FaultyEnv", "env.task=reach", f"env.kwargs={fault}, until: {tmp_path / 'healed'}}}"]
    short = [*SMALL, "eval.episodes=2", "run.name=ended"]
    patience = [] if schedule == "sync" else ["faults.max_restarts=0"]
    assert train.main([*ENDED[schedule], *env, *short, *patience]) == 1
    told = capsys.readouterr()
    (run,) = (tmp_path / "runs").iterdir()
    rows = read_metrics(run)
    (saved,) = (run / "checkpoints").glob("v*")
    state = json.loads((saved / "state.json").read_text())
    learned = rows[-1]["iteration"] + (schedule == "async")  # whose update was in progress
    assert saved.name == f"v{learned:06d}" and (state["iteration"], state["version"]) == (learned, learned)
    assert f"saved       runs/{run.name}/checkpoints/{saved.name}, what was learned until " in told.out
    assert f"continue from the last checkpoint: python -m embodied.train resume=runs/{run.name}" in told.err
    assert state["env_steps"] >= rows[-1]["env_steps"] > 0
    (tmp_path / "healed").touch()
    assert train.main([f"resume=runs/{run.name}"]) == 0
    assert [row["iteration"] for row in read_metrics(run)][: len(rows)] == [row["iteration"] for row in rows]
    assert read_metrics(run)[-1]["iteration"] == 6


def test_an_update_that_has_lost_its_data_leaves_the_weights_before_it_to_be_saved(tmp_path):
    with Run(tmp_path, TWO_SIMS) as run:
        run.iterate(0)
        batch, state = run.loop.collect(), dict.fromkeys(COUNTERS, 0) | {"iteration": 1, "version": 1}
        run.loop.collector.abandon()
        run.loop.updating = batch, run.loop.collector.begin_learning(batch.number)
        assert run.loop.save_what_is_learned(tmp_path / "checkpoints", state).name == "v000001"
        assert (state["iteration"], state["version"]) == (1, 1)


def read_metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
