"""Policy workers are added to a run and taken away while it goes on, and it learns what it would have learned."""

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from itertools import count

import pytest
from stepped import GRPO, PPO, Run
from talking_runs import ONE_OF_EACH, Talk, far, told

from embodied.run.run_folder import ANSWER, REQUEST, RunFolder
from embodied.runtime import HostPlan
from embodied.train import WorkerRequests

ONE = {"sim": "cpu:0-1*2", "policy": "cpu:2", "learner": "cpu:3"}


def added(run, name, *devices):
    """The worker is built, and joins in the next round."""
    newcomer = run.loop.rollouts.add_policy(HostPlan(name, ("policy",), devices=devices))
    run.cluster.wait_for_calls(*newcomer.calls)
    assert newcomer.is_built(), newcomer.failure()


def acted(run):
    """How many decisions each policy worker has served so far."""
    group = run.loop.rollouts.policies
    totals = [timings.get("act") for timings in group.timings().wait()]
    return {worker: total.count if total else 0 for worker, total in zip(group.workers, totals, strict=True)}


SLOW = pytest.mark.slow
HYBRID = {"sim": "cpu:0-1*2", "policy,learner": "cpu:2"}
COLLOCATED = {"sim,policy": "fake:0", "learner": "fake:1"}
KINDS = {
    "robots": (Run, [*PPO], HYBRID),
    "async": (Run, [*PPO, "pipeline.schedule=async"], ONE),
    "text": (Talk, [], COLLOCATED),
    "ppo": (Run, [*PPO], ONE),
    "grpo": (Run, [*GRPO], ONE),
}


@pytest.mark.parametrize(
    "kind", ["robots", "text", *(pytest.param(kind, marks=SLOW) for kind in ("async", "ppo", "grpo"))]
)
def test_a_worker_that_comes_is_killed_and_goes_changes_nothing(kind, tmp_path):
    make, recipe, placement = KINDS[kind]
    for name in ("alone", "changed"):
        (tmp_path / name).mkdir()
    with make(tmp_path / "alone", *recipe, placement=placement) as run:
        expected, weights = run.play(0, 4), run.weights()
    with make(tmp_path / "changed", *recipe, placement=placement, backend="local") as run:
        rows = run.play(0, 1)
        added(run, "policy-1", *["fake:1"] * (placement is COLLOCATED))  # in turns with the learner
        rows += run.play(1, 2)
        assert min(acted(run).values()) > 0 and len(acted(run)) == 2
        os.kill(run.pid("policy-1"), signal.SIGKILL)
        rows += run.play(2, 3)
        assert len(run.lines) == 1 and run.lines[0].startswith("policy-1 is started again")
        gone = run.pid("policy-1")
        run.loop.rollouts.is_leaving = True
        rows += run.play(3, 4)
        assert run.loop.rollouts.policies.workers == ("policy-0",) and len(run.lines) == 1
        assert not os.path.exists(f"/proc/{gone}")
        assert run.loop.device_sharing.coordinator.claims.keys().isdisjoint({"policy-1"})
        assert told(rows) == told(expected)
        assert far(run.weights(), weights) <= (1e-9 if kind == "text" else 0)


class LeavesInARound:
    """Takes the last policy worker away in the middle of the next round, once it has something to answer."""

    def __init__(self, run):
        self.run, self.rounds, self.acted = run, run.loop.rollouts.rounds, None

    def is_due(self):
        return self.acted is None and self.run.loop.rollouts.rounds > self.rounds

    def go_on(self):
        self.acted = acted(self.run)
        self.run.loop.rollouts.is_leaving = True


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=SLOW)])
@pytest.mark.parametrize("kind", ["robots", "text"])
def test_a_worker_that_leaves_in_a_round_hands_back_what_it_has(kind, backend, tmp_path):
    make = (lambda *more, **how: Run(*more, *PPO, **how)) if kind == "robots" else Talk
    one, two = (ONE_OF_EACH if kind == "text" else ONE), {"sim": "cpu:0-1*2", "policy": "cpu:1-2*2", "learner": "cpu:3"}
    seen = []
    for name, placement in (("alone", one), ("left", two)):
        (tmp_path / name).mkdir()
        with make(tmp_path / name, placement=placement, backend="inline" if name == "alone" else backend) as run:
            rows = run.play(0, 1)
            if name == "left":
                run.loop.rollouts.background.append(leaves := LeavesInARound(run))
            rows += run.play(1, 2)
            if name == "left":
                assert leaves.acted is not None and run.loop.rollouts.policies.workers == ("policy-0",)
                added(run, "policy-2")
            rows += run.play(2, 3)
            assert not run.lines
            if name == "left":
                assert run.loop.rollouts.policies.workers == ("policy-0", "policy-2") and min(acted(run).values()) > 0
            seen.append((told(rows), run.weights()))
    assert seen[0][0] == seen[1][0] and far(seen[1][1], seen[0][1]) < 1e-9


class Storm:
    """Adds policy workers, takes them away and kills them at drawn moments of rounds."""

    def __init__(self, run, seed, most):
        self.run, self.rng, self.most = run, random.Random(seed), most
        self.rollouts, self.names, self.done = run.loop.rollouts, iter(range(10, 999)), Counter()
        self.next_at, self.seen = 0.0, {"policy-0"}

    def is_over(self):
        return len(self.seen) > 2 and min(self.done[what] for what in ("leave", "kill")) > 1

    def is_due(self):
        return time.monotonic() >= self.next_at

    def go_on(self):
        self.next_at = time.monotonic() + self.rng.uniform(0, 2)
        for newcomer in [newcomer for newcomer in self.rollouts.newcomers if newcomer.failure()]:
            self.rollouts.drop(newcomer)
        workers, coming, leaving = self.rollouts.policies.workers, self.rollouts.newcomers, self.rollouts.is_leaving
        self.seen |= {*workers}
        what = self.rng.choice(["add", "add", "leave", "kill"])
        if what == "add" and len(workers) + len(coming) < self.most and not leaving:
            self.rollouts.add_policy(HostPlan(f"policy-{next(self.names)}", ("policy",)))
        elif what == "leave" and len(workers) > 1 and not leaving:
            self.rollouts.is_leaving = True
        elif what == "kill":
            with suppress(ProcessLookupError, ValueError):  # it is dead, or starting
                os.kill(
                    self.run.pid(self.rng.choice([*workers * 3, *(one.plan.name for one in coming)])), signal.SIGKILL
                )
        else:
            return
        self.done[what] += 1


@pytest.mark.chaos
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=SLOW)])
@pytest.mark.parametrize("kind", ["robots", "async", "text"])
@pytest.mark.parametrize("seed", range(2))
def test_workers_that_join_leave_and_die_at_random_change_no_result(kind, seed, backend, tmp_path):
    make, recipe, _ = KINDS[kind]
    recipe = [word for word in recipe if not word.startswith("run.iterations")]
    recipe += ["faults.max_restarts=1000", "run.iterations=1000"] + ["pipeline.stages=2"] * (kind != "text")
    for name in ("alone", "storm"):
        (tmp_path / name).mkdir()
    rows = []
    with make(tmp_path / "storm", *recipe, placement=ONE, backend=backend) as run:
        run.loop.rollouts.background.append(storm := Storm(run, seed, 3 if kind == "text" else 4))
        while not storm.is_over() and len(rows) < 1000:
            rows += run.play(len(rows), len(rows) + 1)
        assert storm.is_over(), storm.done
        weights = run.weights()
    with make(tmp_path / "alone", *recipe, placement=ONE) as run:
        assert told(run.play(0, len(rows))) == told(rows)
        assert far(run.weights(), weights) <= (1e-9 if kind == "text" else 0)


@pytest.mark.parametrize("fault", ["exception", pytest.param("sigkill", marks=SLOW)])
def test_a_worker_that_cannot_be_built_costs_the_run_nothing_and_the_next_one_can(fault, tmp_path):
    planted = f"policy.kwargs={{fault: {fault}, place: constructor, worker: policy-1}}"
    recipe = [*(word for word in PPO if not word.startswith("policy.")), "pipeline.stages=2"]
    with Run(
        tmp_path, *recipe, "policy.name=faulty_policy:FaultyPolicy", planted, placement=ONE, backend="local"
    ) as run:
        folder = RunFolder.create(tmp_path / "runs", "broken", "")
        changes = WorkerRequests(run.config, run.plan, ["learner"], folder)
        changes.begin(run.loop, run.lines.append)

        def asked(change, devices=""):
            wish = {"id": str(change), "change": change, "devices": devices}
            (folder.path / REQUEST).write_text(json.dumps(wish))
            for number in count():
                run.iterate(number % 6)
                with suppress(FileNotFoundError):
                    if (answer := json.loads((folder.path / ANSWER).read_text()))["id"] == str(change):
                        return answer

        answer = asked(1, "cpu:0")
        assert answer["code"] == 1 and answer["said"].startswith("policy-1 could not be built: ")
        assert ("the gripper fell off" if fault == "exception" else "SIGKILL") in answer["said"]
        assert answer["said"].endswith(": 1 policy worker") and folder.info()["processes"].keys() == {"driver"}
        assert asked(2, "cpu:0,cpu:0")["code"] == 0
        run.iterate(0)
        assert sorted(run.loop.rollouts.policies.workers) == ["policy-0", "policy-2", "policy-3"]
        assert asked(-2)["code"] == 0 and run.loop.rollouts.policies.workers == ("policy-0",)
        assert len(folder.info()["placement"]["hosts"]) == len(run.plan.hosts) and len(run.lines) == 3
        folder.finish("finished")
