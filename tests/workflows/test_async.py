"""pipeline.schedule=async: rollout n is played with version max(0, n - level) while the learners are at work."""

import json
import os
import signal
import time

import numpy as np
import pytest
from stepped import GRPO, ITERATIONS, PPO, TWO_LEARNERS, TWO_SIMS, Run

from embodied.config.recipe import load
from embodied.run.memory_check import copies
from embodied.train import follow
from embodied.workflows.rl_loop import EmbodiedLoop


class OneAfterTheOther(EmbodiedLoop):
    """The same batches and updates, but a batch is whole before the update begins that should go on meanwhile, and
    policies have every version before the next update."""

    def iterate(self, iteration, total):
        found = super().iterate(iteration, total)
        self.act_with_newest()
        return found


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("level", [1, 3])
def test_the_weights_that_collect_are_exactly_so_many_versions_behind(level, tmp_path):
    with Run(tmp_path, *PPO, "pipeline.schedule=async", f"pipeline.async_level={level}") as run:
        found = [numbers["train/staleness"] for numbers in run.train()]
        assert found == [min(n, level) for n in range(ITERATIONS)]
        assert not run.loop.ahead  # nothing was played for nobody


@pytest.mark.parametrize("recipe", [PPO, pytest.param(GRPO, marks=pytest.mark.slow)], ids=["ppo", "grpo"])
def test_an_update_with_a_rollout_beside_it_is_the_same_update(recipe, tmp_path):
    asked = [*recipe, "pipeline.schedule=async", "pipeline.async_level=2"]
    weights = []
    for kind, backend, placement in (
        (EmbodiedLoop, "local", TWO_SIMS),
        (OneAfterTheOther, "inline", TWO_SIMS),
        (EmbodiedLoop, "inline", TWO_LEARNERS),
    ):
        (folder := tmp_path / str(len(weights))).mkdir()
        with Run(folder, *asked, kind=kind, backend=backend, placement=placement) as run:
            assert all(run.loop.iterate(number, 4)[1]["train/grad_norm"] > 1e-3 for number in range(4))
            weights.append(run.weights())
    first, beside, two = weights
    assert same(first, beside)
    assert all(np.allclose(first[name], two[name], rtol=1e-9, atol=1e-12) for name in first)


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("recipe", "victim"),
    [pytest.param(PPO, "sim-0", id="ppo"), pytest.param(GRPO, "policy-0", id="grpo", marks=pytest.mark.slow)],
)
def test_staleness_stays_exact_where_a_worker_is_killed(recipe, victim, backend, tmp_path):
    with Run(tmp_path, *recipe, "pipeline.schedule=async", "pipeline.async_level=2", backend=backend) as run:
        staleness = []
        for number in range(ITERATIONS):
            if number == 2:
                os.kill(run.pid(victim), signal.SIGKILL)
            staleness.append(run.loop.iterate(number, ITERATIONS)[1]["train/staleness"])
        assert staleness == [0, 1, 2, 2, 2, 2]
        assert len(run.lines) == 1 and victim in run.lines[0]


def announced_versions(run, victim=None):
    """Notes every version that is on its way to policies: (version, the one that acts, workers that it goes to). The
    victim is killed when the second is."""
    announce, noted = run.loop.weight_sync.announce, []

    def announcing(publication, send):
        announce(publication, send)
        noted.append((publication.version, run.loop.weight_sync.version, run.loop.weight_sync.fetching))
        if victim and len(noted) == 2:
            os.kill(run.pid(victim), signal.SIGKILL)

    run.loop.weight_sync.announce = announcing
    return noted


@pytest.mark.parametrize(
    ("level", "victim"),
    [(2, "policy-0"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "policy-0"), (2, None)))],
)
def test_a_version_in_buckets_travels_beside_a_rollout(level, victim, tmp_path):
    """As to another machine; a policy worker that dies while a version is on its way to it gets that one later."""
    weights = []
    for route in ("snapshot", "buckets"):
        (folder := tmp_path / route).mkdir()
        level_option = f"pipeline.async_level={level}"
        with Run(
            folder, *PPO, "pipeline.schedule=async", level_option, backend="local" if route == "buckets" else "inline"
        ) as run:
            run.loop.weight_sync.routes = [route]
            run.loop.publish(1)
            strikes = victim if route == "buckets" else None
            noted = announced_versions(run, strikes)
            assert [numbers["train/staleness"] for numbers in run.train()] == [min(n, level) for n in range(ITERATIONS)]
            assert [new - acting for new, acting, _ in noted] == [1] * len(noted)
            assert sum(fetching == {0} for *_, fetching in noted) >= len(noted) - bool(strikes)
            assert len(run.lines) == bool(strikes)
            weights.append(run.weights())
    assert same(*weights)


def test_sims_that_die_after_their_batch_was_collected_take_nothing_along(tmp_path):
    asked, found = [*GRPO, "algo.filter=none", "pipeline.schedule=async", "pipeline.async_level=2"], []
    for killed in (False, True):
        (folder := tmp_path / str(killed)).mkdir()
        with Run(folder, *asked, backend="local" if killed else "inline") as run:
            rows = []
            for number in range(ITERATIONS):
                rows.append(run.loop.iterate(number, ITERATIONS)[1])
                if killed and number == 2:
                    assert run.loop.ahead  # the next update's batch is here
                    for sim in ("sim-0", "sim-1"):
                        os.kill(run.pid(sim), signal.SIGKILL)
                    until = time.monotonic() + 60
                    while run.loop.rollouts.restarts < 2 and time.monotonic() < until:  # between two rollouts
                        run.loop.rollouts.wait_and_replace()
                        time.sleep(0.01)
            assert not any(row["faults/lost_episodes"] for row in rows)
            assert run.loop.rollouts.restarts == 2 * killed
            found.append(run.weights())
    assert same(*found)


def test_a_rollout_begins_before_the_update_beside_it_has_ended(tmp_path):
    events = []

    class Watched(EmbodiedLoop):
        def collect(self):
            events.append("collect")
            return super().collect()

        def learner_results(self, handle):
            events.append(f"wait for {handle.what}")
            return super().learner_results(handle)

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            update = self.collector.update
            self.collector.update = lambda *about: events.append("update") or update(*about)

    with Run(tmp_path, *PPO, "pipeline.schedule=async", kind=Watched) as run:
        run.loop.iterate(0, ITERATIONS)
    assert events[1:] == ["collect", "update", "collect", "wait for learner.learn"]


def test_batches_collected_ahead_are_dropped_and_counted_on_resuming(tmp_path, capsys, monkeypatch):
    place = "placement={'sim,policy': 'cpu:0', learner: 'cpu:1'}"
    asked = [*PPO, place, "pipeline.schedule=async", "pipeline.async_level=2", "cluster.backend=inline"]
    asked += ["eval.episodes=2", "eval.videos=0", "run.save_every=1", f"run.dir={tmp_path}", "run.keep=null"]

    iterate = EmbodiedLoop.iterate

    def stopped(self, iteration, total):
        if iteration == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(self, iteration, total)

    monkeypatch.setattr(EmbodiedLoop, "iterate", stopped)
    follow(load(asked), EmbodiedLoop)
    monkeypatch.undo()
    (folder,) = tmp_path.iterdir()
    assert follow(load([f"resume={folder}"]), EmbodiedLoop) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    assert [line["train/staleness"] for line in lines] == [0, 1, 2, 2, 0, 1]
    assert "1 batch that was collected ahead was dropped" in capsys.readouterr().out
    state = json.loads((folder / "checkpoints" / f"v{ITERATIONS:06d}" / "state.json").read_text())
    assert state["dropped_batches"] == 1


def test_batches_without_a_group_count_when_it_is_their_turn_to_be_learned_from(tmp_path):
    hopeless = ["pipeline.schedule=async", "pipeline.async_level=3", "algo.filter_low=1e6", "algo.max_empty=2"]
    with Run(tmp_path, *GRPO, *hopeless) as run:
        run.loop.iterate(0, ITERATIONS)
        assert not run.loop.exhausted and run.loop.collector.save()["groups.empty"] == 1
        run.loop.iterate(1, ITERATIONS)
        assert "nothing to learn from in the last 2 iterations" in run.loop.exhausted
        assert "its groups were 5 out_of_bounds" in run.loop.exhausted


def test_batches_that_wait_count_in_the_memory_check():
    config = load([*PPO, "pipeline.schedule=async", "pipeline.async_level=3"]).config
    assert copies(config) == copies(load(PPO).config) + 3
