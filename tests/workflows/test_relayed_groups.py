"""Groups of robots' episodes and of conversations pass through a role of the program before learners have them."""

import os
import signal
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from relays import Unchanged
from stepped import GRPO, ONE_STEP, Run
from talking_runs import TALK, far

from embodied.core.errors import WorkerFailed
from embodied.policies.policy_folder import read_weights
from embodied.run.run_folder import COUNTERS
from embodied.workflows import Role
from embodied.workflows.relay import RelayWorker
from embodied.workflows.rl_loop import EmbodiedLoop

CARRIES = ["algo.filter=resample", "algo.filter_low=0.0", "algo.surplus=carry", "algo.groups=3", "algo.max_rounds=9"]
ROBOTS = [*(one for one in GRPO if "minibatch" not in one), *ONE_STEP]
PLACES = {"sim": "fake:0-1", "policy": "fake:2", "learner": "fake:3-4", "judge": "fake:5-6"}
SLOW = pytest.mark.slow
STRAIGHT = {role: devices for role, devices in PLACES.items() if role != "judge"}


class DiesOnce(Unchanged):
    """The first worker dies in the middle of the second batch."""

    batches = 0

    def add(self, parts):
        self.batches += not self.count
        if self.rank == 0 and self.batches == 2 and self.count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().add(parts)


class Shifted(RelayWorker):
    """Adds a number of each episode's own to its last reward, through which all groups differ."""

    def relay(self, parts):
        return [replace(part, rewards=part.rewards + self.bonus(part)) for part in parts], {}

    def bonus(self, part):
        bonus = np.zeros_like(part.rewards)
        ends = np.cumsum(part.lengths) - 1
        bonus[ends, part.mask[ends].sum(axis=1) - 1] = part.ids % 7
        return bonus


def judged(*workers, **how):
    class JudgedLoop(EmbodiedLoop):
        roles = (*EmbodiedLoop.roles, *(Role(name, f"{__name__}:{cls}", relays=True, **how) for name, cls in workers))

    return JudgedLoop


ONE_JUDGE = judged(("judge", "Unchanged"))
STREAMING = judged(("judge", "Unchanged"), streams=True)
COLUMNS = judged(("judge", "Unchanged"), streams=True, keeps_rewards=True)


def played(folder, kind, *arguments, placement=PLACES, count=2):
    folder.mkdir()
    with Run(folder, *arguments, kind=kind, placement=placement) as run:
        rows = [run.loop.iterate(number, 6) for number in range(count)]
        return rows, run.weights()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Plays a run whose groups pass through no role, once for each choice of options."""
    known = {}

    def play(words, **how):
        if (key := str((words, how))) not in known:
            folder = tmp_path_factory.mktemp("straight") / "run"
            known[key] = played(folder, EmbodiedLoop, *words, placement=STRAIGHT, **how)
        return known[key]

    return play


WAYS = {"together": ONE_JUDGE, "one_by_one": STREAMING, "columns": COLUMNS}
SCHEDULES = ("sync", "periodic", "async")


def passes():
    """Robots and conversations with each way and each schedule once; the other cells are slow."""
    for (number, way), (turn, schedule), talks in product(enumerate(WAYS), enumerate(SCHEDULES), (False, True)):
        marks = [SLOW] if (number + turn + talks) % 3 else []
        words = "conversations" if talks else "robots"
        yield pytest.param(way, talks, schedule, marks=marks, id=f"{way}-{words}-{schedule}")


@pytest.mark.parametrize(("way", "talks", "schedule"), [*passes()])
def test_groups_that_pass_through_unchanged_are_learned_from_as_if_they_had_come_straight(
    way, talks, schedule, straight, tmp_path
):
    kind, words = WAYS[way], [*(TALK if talks else ROBOTS), f"pipeline.schedule={schedule}"]
    before, weights = straight(words)
    rows, passed = played(tmp_path / "passed", kind, *words)
    assert far(passed, weights) < (1e-9 if schedule == "periodic" else 1e-12)
    assert [row["groups/used"] for _, row in rows] == [row["groups/used"] for _, row in before]
    assert all(row["relay/parts_of_first"] in (2, 3) and row["train/grad_norm"] > 1e-4 for _, row in rows)


def test_groups_are_compared_and_filtered_by_the_rewards_of_the_last_role(tmp_path):
    words = [*TALK, "algo.filter=resample", "algo.filter_metric=return"]
    places = {**PLACES, "shift": "fake:7"}
    rows, weights = played(
        tmp_path / "both", judged(("judge", "Unchanged"), ("shift", "Shifted")), *words, placement=places
    )
    assert all(row["groups/dropped_equal"] == 0 and row["groups/rounds"] == 1 for _, row in rows)
    straight, before = played(tmp_path / "straight", EmbodiedLoop, *words, placement=STRAIGHT)
    assert sum(row["groups/dropped_equal"] for _, row in straight) > 0
    assert far(weights, before) > 1e-6


@pytest.mark.parametrize("schedule", ["sync", "periodic"])
def test_a_role_that_keeps_rewards_gets_the_groups_that_the_batch_uses_alone(schedule, tmp_path):
    words = [*(one for one in ROBOTS if "algo.groups=" not in one), *CARRIES, f"pipeline.schedule={schedule}"]
    words = [one.replace("carry", "discard") if schedule == "periodic" else one for one in words]
    _, weights = played(tmp_path / "straight", EmbodiedLoop, *words, placement=STRAIGHT, count=3)
    rows, passed = played(tmp_path / "passed", COLUMNS, *words, placement={**PLACES, "judge": "fake:5"}, count=3)
    assert far(passed, weights) < 1e-10
    assert all(row["relay/parts_of_first"] == row["groups/used"] == 3 for _, row in rows)
    assert sum(row["groups/dropped_out_of_bounds"] for _, row in rows) > 3


@pytest.mark.parametrize("kind", [ONE_JUDGE, pytest.param(STREAMING, marks=SLOW), COLUMNS], ids=WAYS)
def test_a_run_goes_on_with_the_groups_that_a_role_keeps_for_later_batches(kind, tmp_path):
    words = [*(one for one in ROBOTS if "algo.groups=" not in one), *CARRIES]
    rows, weights = played(tmp_path / "whole", kind, *words, count=3)
    assert rows[0][1]["groups/carried_episodes"] == 4  # a group, and the first episode of another
    folder = tmp_path / "cut"
    folder.mkdir()
    with Run(folder, *words, kind=kind, placement=PLACES) as run:
        run.loop.iterate(0, 6)
        checkpoint = run.loop.save(folder, {})
    with np.load(checkpoint / "sims.npz", allow_pickle=False) as arrays:
        state = dict(arrays)
    with Run(folder, *words, kind=kind, placement=PLACES) as run:
        run.loop.restore(checkpoint, state, 1)
        for number in range(1, 3):
            run.loop.iterate(number, 6)
        assert far(run.weights(), weights) == 0


@pytest.mark.parametrize("kind", [pytest.param(ONE_JUDGE, marks=SLOW), STREAMING], ids=["together", "one_by_one"])
def test_groups_of_a_sim_that_dies_on_their_way_to_a_role_are_left_out_and_counted(kind, tmp_path, monkeypatch):
    with Run(tmp_path, *ROBOTS, kind=kind, placement=PLACES, backend="local") as run:
        stores, send = run.loop.collector.stores, run.loop.collector.stores.send

        def struck(*args, **more):
            monkeypatch.undo()
            os.kill(run.pid("sim-0"), signal.SIGKILL)
            return send(*args, **more)

        monkeypatch.setattr(stores, "send", struck)
        _, row = run.loop.iterate(0, 6)
        _, after = run.loop.iterate(1, 6)
    assert row["faults/restarts"] == 1 and row["groups/dropped_incomplete"] > 0 and row["faults/lost_episodes"] > 0
    assert row["groups/used"] == 5 and row["groups/rounds"] == 2  # half or more was lost, so a second round replaces it
    assert after["groups/used"] == 5 and after["faults/lost_episodes"] == 0


def test_a_role_that_dies_with_groups_ends_the_run_and_a_resumed_run_learns_from_none_of_them(tmp_path):
    words = [*ROBOTS, "pipeline.schedule=periodic"]
    with Run(
        tmp_path, *words, kind=judged(("judge", "DiesOnce"), streams=True), placement=PLACES, backend="local"
    ) as run:
        first, _ = run.loop.iterate(0, 6)
        weights, begun = run.weights(), run.loop.collector.pool.dealt
        with pytest.raises(WorkerFailed, match=r"judge-0: its process was killed by .* during judge.add_groups"):
            run.loop.iterate(1, 6)
        state = dict.fromkeys(COUNTERS, 0) | {"iteration": 1, "version": 1}
        checkpoint = run.loop.save_what_is_learned(tmp_path / "checkpoints", state)
    assert checkpoint.name == "v000001" and far(read_weights(checkpoint / "policy"), weights) == 0
    with np.load(checkpoint / "sims.npz", allow_pickle=False) as arrays:
        arrays = dict(arrays)
    (tmp_path / "again").mkdir()
    with Run(tmp_path / "again", *words, kind=STREAMING, placement=PLACES) as run:
        run.loop.restore(checkpoint, arrays, 1)
        second, row = run.loop.iterate(1, 6)
    assert [episode.index for episode in first] == [*range(begun)]
    assert state["abandoned_episodes"] == 15 and row["groups/used"] == 5
    assert [episode.index for episode in second] == [*range(begun + 15, begun + 30)]
