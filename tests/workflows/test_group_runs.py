"""Training on groups of whole episodes: the same wherever it runs, whole after a stop, honest about what is lost."""

import os
import signal

import numpy as np
import pytest
import stepped
from stepped import strike
from talking_runs import far

ITERATIONS = 4
ARGUMENTS = (
    "recipe=pointmass_grpo env.num_envs=8 env.dtype=float64 env.max_episode_steps=12 policy.dtype=float64 "
    "policy.hidden=[16,16] policy.normalize_observations=true algo.groups=5 algo.group_size=3 "
    f"algo.minibatch_size=40 algo.epochs=2 seed=1 faults.timeout_s=240 faults.hang_s=20 run.iterations={ITERATIONS}"
).split()
DROPS = ["algo.filter=resample", "algo.filter_low=0.0", "algo.kl_coef=0.01"]  # about half of the groups
ONE_OF_EACH = {"sim": "cpu:0", "policy,learner": "cpu:1"}
TWO_SIMS = {"sim": "cpu:0-1*2", "policy,learner": "cpu:2"}
FOUR_SIMS = {"sim,policy": "cpu:0-3*4", "learner": "cpu:0-2*3"}  # of 15 episodes every learner has 5
MANY_LEARNERS = {"sim,policy": "cpu:0", "learner": "cpu:0-3*4"}


class Run(stepped.Run):
    usual = ARGUMENTS

    def __init__(self, folder, placement, *arguments, **more):
        super().__init__(folder, *arguments, placement=placement, **more)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    with Run(tmp_path_factory.mktemp("reference"), ONE_OF_EACH, *DROPS) as run:
        return run.play(), run.weights(), run.folder / "saved" / "policy"


def test_the_reference_run_learns_drops_and_carries_over(reference):
    numbers = [row for _, row in reference[0]]
    assert min(row["train/grad_norm"] for row in numbers) > 0.01
    assert any(row["groups/dropped_out_of_bounds"] for row in numbers)
    assert any(row["groups/carried_episodes"] % 3 for row in numbers), "a group that is not complete"
    assert any(row["groups/rounds"] > 1 for row in numbers)
    assert any(row["train/staleness"] > 0 for row in numbers)
    assert max(row["train/logprob_gap"] for row in numbers) < 1e-12
    assert numbers[-1]["train/reference_kl"] > 0
    played = [episode.index for episodes, _ in reference[0] for episode in episodes]
    assert sorted(played) == list(range(len(played)))
    for episodes, row in reference[0]:
        assert row["env_steps"] == sum(episode.length for episode in episodes)
        assert row["groups/kept"] + row["groups/dropped_out_of_bounds"] >= row["groups/used"] - 3
        assert row["groups/used"] == 5


@pytest.mark.parametrize(
    ("placement", "stages"),
    [
        pytest.param(TWO_SIMS, 1, marks=pytest.mark.slow),
        (FOUR_SIMS, 2),
        pytest.param(MANY_LEARNERS, 2, marks=pytest.mark.slow),
    ],
    ids=["two_sims", "four_sims", "many_learners"],
)
def test_every_placement_gives_the_same_groups_and_weights(reference, tmp_path, placement, stages):
    with Run(tmp_path, placement, *DROPS, f"pipeline.stages={stages}") as run:
        rows = run.play()
        for (episodes, row), (others, other) in zip(rows, reference[0], strict=True):
            assert [(e.index, e.length) for e in episodes] == [(e.index, e.length) for e in others]
            names = [name for name in row if name.startswith(("groups/", "faults/"))]
            assert [row[name] for name in names] == [other[name] for name in names]
        assert far(run.weights(), reference[1]) < 1e-9


def test_more_learners_than_episodes_give_the_same_weights(tmp_path):
    few = ["algo.groups=2", "algo.group_size=2", "env.num_envs=4", "algo.filter_low=0.0"]
    found = []
    for name, placement in (("one", ONE_OF_EACH), ("four", MANY_LEARNERS)):
        with Run(tmp_path / name, placement, *few) as run:
            assert 1 in {row["groups/used"] for _, row in run.play()}
            found.append(run.weights())
    assert far(*found) < 1e-9


def test_the_divergence_in_the_reward_is_the_same_wherever_it_runs(tmp_path):
    told = ["algo.name=reinforce++", "algo.kl_coef=0.5", "algo.lr=0.01"]
    found, kl = [], []
    for name, placement in (("one", ONE_OF_EACH), ("four", MANY_LEARNERS)):
        with Run(tmp_path / name, placement, *told) as run:
            assert run.config.algo.kl_in == "reward"
            kl.append([row["train/reference_kl"] for _, row in run.play(0, 2)])
            found.append(run.weights())
    assert far(*found) < 1e-9
    assert kl[0] == pytest.approx(kl[1]) and kl[0][0] == pytest.approx(0, abs=1e-9) and kl[0][1] > 1e-3
    with Run(tmp_path / "free", ONE_OF_EACH, *told, "algo.kl_in=loss") as run:
        run.play(0, 2)
        assert far(run.weights(), found[0]) > 1e-4


def test_a_resumed_run_on_groups_equals_one_that_was_not_stopped(reference, tmp_path):
    with Run(tmp_path / "first", TWO_SIMS, *DROPS) as run:
        run.play(0, 2)
        run.loop.save_learners(tmp_path / "saved")
        state = run.loop.collector.save()
    np.savez(tmp_path / "sims.npz", **state)
    with np.load(tmp_path / "sims.npz") as content, Run(tmp_path / "second", TWO_SIMS, *DROPS) as run:
        assert run.loop.restore(tmp_path / "saved", dict(content), 2) == 0
        run.play(2)
        again = run.weights()
    assert far(again, reference[1]) < 1e-9


def test_a_checkpoint_without_the_episodes_of_a_dead_sim_is_resumed(tmp_path):
    with Run(tmp_path / "first", ONE_OF_EACH, *DROPS) as run:
        carried = run.play(0, 2)[-1][1]["groups/carried_episodes"]
        run.loop.rollouts.sims.forget_all_but(()).wait()  # a successor has none of them
        run.loop.save_learners(tmp_path / "saved")
        state = run.loop.collector.save()
    with Run(tmp_path / "second", ONE_OF_EACH, *DROPS) as run:
        assert run.loop.restore(tmp_path / "saved", state, 2) == carried > 0
        _, numbers = run.iterate(2)
        assert numbers["groups/used"] == 5 and numbers["faults/lost_episodes"] == 0


def test_a_policy_to_start_from_is_the_reference_and_keeps_its_statistics(reference, tmp_path):
    _, begin, folder = reference
    with Run(tmp_path, ONE_OF_EACH, *DROPS, "algo.lr=0", start=folder) as run:
        rows = [row for _, row in run.play(0, 2)]
        assert far(run.weights(), begin) == 0
    assert all(abs(row["train/reference_kl"]) < 1e-12 and row["train/grad_norm"] > 0 for row in rows)


FOUR_HOSTS = {"sim": "cpu:0-3*4", "policy,learner": "cpu:0"}


@pytest.mark.parametrize(
    ("placement", "rounds", "used"),
    [pytest.param(TWO_SIMS, 2, 4, marks=pytest.mark.chaos), (FOUR_HOSTS, 1, 3)],
    ids=["half", "less"],
)
def test_groups_of_a_dead_sim_are_dropped_and_counted_and_played_again_where_half_is_missing(
    tmp_path, placement, rounds, used
):
    """Groups of one sim worker each; two sims have 2 of 4 groups each, of four sims every one has 1."""
    options = ["algo.groups=4", "algo.group_size=2", "algo.filter=none"]
    with Run(tmp_path, placement, *options, backend="local") as run:
        strike(run, "round", "sim-1")
        (episodes, numbers), (_, after) = run.play(0, 2)
        assert numbers["faults/restarts"] == 1 and len(run.lines) == 1
        assert numbers["groups/rounds"] == rounds and numbers["groups/used"] == used
        lost = set(range(8)) - {episode.index for episode in episodes}
        assert numbers["faults/lost_episodes"] == len(lost) > 0
        assert numbers["groups/dropped_incomplete"] == len({index // 2 for index in lost})
        assert numbers["train/grad_norm"] > 0
        assert after["groups/used"] == 4 and after["faults/lost_episodes"] == 0
        assert not run.loop.collector.pool.held


def test_the_successor_of_a_sim_that_died_before_the_round_plays_its_episodes(tmp_path):
    with Run(tmp_path, TWO_SIMS, "algo.filter=none", backend="local") as run:
        rollouts, acting = run.loop.rollouts, run.loop.rollouts._acting

        def acting_after_a_death():
            os.kill(run.pid("sim-1"), signal.SIGKILL)
            rollouts._acting = acting
            rollouts.ask(rollouts.sims.get_stored)
            return acting()

        rollouts._acting = acting_after_a_death
        episodes, numbers = run.iterate(0)
        assert numbers["faults/restarts"] == 1 and numbers["faults/lost_episodes"] == 0
        assert numbers["groups/used"] == 5 and [episode.index for episode in episodes] == list(range(15))
