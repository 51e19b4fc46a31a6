"""Policy workers are added to a run and taken away while it goes on, and it learns what it would have learned."""

import os
import signal

import numpy as np
import pytest
from stepped import GRPO, PPO, Run
from talking_runs import ONE_OF_EACH, Talk, far, told

from embodied.runtime import HostPlan

ONE = {"sim": "cpu:0-1*2", "policy": "cpu:2", "learner": "cpu:3"}
HYBRID = {"sim": "cpu:0-1*2", "policy,learner": "cpu:2"}


def added(run, name):
    """The worker is built, and joins in the next round."""
    newcomer = run.loop.rollouts.add_policy(HostPlan(name, ("policy",)))
    run.cluster.settle(*newcomer.calls)
    assert newcomer.is_built(), newcomer.failure()


def acted(run):
    """How many decisions each policy worker has served so far."""
    group = run.loop.rollouts.policies
    totals = [timings.get("act") for timings in group.timings().wait()]
    return {worker: total.count if total else 0 for worker, total in zip(group.workers, totals, strict=True)}


def close(one, other):
    return all(np.array_equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    ("recipe", "placement"),
    [(PPO, ONE), (PPO, HYBRID), (GRPO, ONE), ([*PPO, "pipeline.schedule=async"], ONE)],
    ids=["ppo", "beside a learner", "grpo", "async"],
)
def test_a_worker_that_comes_is_killed_and_goes_changes_nothing(recipe, placement, tmp_path):
    (alone := tmp_path / "alone").mkdir()
    with Run(alone, *recipe, placement=placement) as run:
        expected = [[(e.index, e.total_reward) for e in episodes] for episodes, _ in run.play()]
        weights = run.weights()
    (changed := tmp_path / "changed").mkdir()
    with Run(changed, *recipe, placement=placement, backend="local") as run:
        rows = run.play(0, 1)
        added(run, "policy-1")
        rows += run.play(1, 2)
        assert min(acted(run).values()) > 0 and len(acted(run)) == 2
        os.kill(run.pid("policy-1"), signal.SIGKILL)
        rows += run.play(2, 4)
        assert len(run.lines) == 1 and run.lines[0].startswith("policy-1 is started again")
        gone = run.pid("policy-1")
        run.loop.rollouts.is_leaving = True
        rows += run.play(4)
        assert run.loop.rollouts.policies.workers == ("policy-0",) and len(run.lines) == 1
        assert not os.path.exists(f"/proc/{gone}")
        assert [[(e.index, e.total_reward) for e in episodes] for episodes, _ in rows] == expected
        assert close(run.weights(), weights)


class LeavesInARound:
    """Takes the last policy worker away in the middle of the next round, once it has something to answer."""

    def __init__(self, run):
        self.run, self.rounds, self.acted = run, run.loop.rollouts.rounds, None

    def due(self):
        return self.acted is None and self.run.loop.rollouts.rounds > self.rounds

    def go_on(self):
        self.acted = acted(self.run)
        self.run.loop.rollouts.is_leaving = True


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["robots", "text"])
def test_a_worker_that_leaves_in_a_round_hands_back_what_it_has(kind, backend, tmp_path):
    make = (lambda *more, **how: Run(*more, *PPO, **how)) if kind == "robots" else Talk
    one, two = (ONE_OF_EACH if kind == "text" else ONE), {"sim": "cpu:0-1*2", "policy": "cpu:1-2*2", "learner": "cpu:3"}
    count, seen = 3, []
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
            rows += run.play(2, count)
            assert not run.lines
            if name == "left":
                assert run.loop.rollouts.policies.workers == ("policy-0", "policy-2") and min(acted(run).values()) > 0
            seen.append((told(rows), run.weights()))
    assert seen[0][0] == seen[1][0] and far(seen[1][1], seen[0][1]) < 1e-9
