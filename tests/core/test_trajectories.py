"""Trajectories are divided and joined without losing, doubling or mixing up a decision."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from embodied.core.types import (
    Trajectory,
    Unit,
    choose,
    deal_by_task,
    env_blocks,
    in_sequences,
    join,
    join_units,
    rows_of_sims,
)

LENGTHS = st.dictionaries(st.integers(0, 30), st.integers(1, 4), min_size=1, max_size=6)


def trajectory(lengths):
    """Sequences of these lengths by id; every number of a decision is 100 times its sequence plus its place."""
    ids = sorted(lengths)
    marks = np.array([100 * number + step for number in ids for step in range(lengths[number])])
    column = marks[:, None].astype(float)
    flags = np.zeros(column.shape, bool)
    return Trajectory(
        *(np.array(ids), np.array([lengths[number] for number in ids]), {"state": column}, column[:, None]),
        *(column[:, None], column, flags, flags, ~flags, marks, marks),
        values=marks.astype(float),
        replay={"noise": column},
    )


def marks(played):
    """The marks of each sequence, which all of its arrays must agree on."""
    columns = [played.obs["state"][:, 0], played.actions[:, 0, 0], played.rewards[:, 0], played.values, played.versions]
    assert all(np.array_equal(column, played.episodes) for column in (*columns, played.replay["noise"][:, 0]))
    cuts = np.cumsum(played.lengths)[:-1]
    return {number: part.tolist() for number, part in zip(played.ids.tolist(), np.split(played.episodes, cuts))}


@given(LENGTHS, st.randoms(use_true_random=False))
def test_parts_of_a_trajectory_in_any_order_join_to_the_whole(lengths, random):
    whole, ids = trajectory(lengths), sorted(lengths)
    random.shuffle(ids)
    cut = random.randint(1, len(ids))
    parts = [choose(whole, sorted(part)) for part in (ids[:cut], ids[cut:]) if part]
    joined = join(parts)
    assert marks(joined) == marks(whole) and joined.ids.tolist() == sorted(ids)
    assert marks(choose(whole, ids)) == {number: marks(whole)[number] for number in ids}


@given(LENGTHS)
def test_decisions_in_order_of_time_are_sorted_by_their_sequences(lengths):
    steps = max(lengths.values())
    going_on = [np.array([number for number in sorted(lengths) if step < lengths[number]]) for step in range(steps)]
    decisions = [(ids, {"state": 100.0 * ids[:, None] + step}) for step, ids in enumerate(going_on)]
    ids, counts, arrays = in_sequences(decisions)
    assert not decisions and ids.tolist() == sorted(lengths)
    assert counts.tolist() == [lengths[number] for number in sorted(lengths)]
    assert np.array_equal(arrays["state"], trajectory(lengths).obs["state"])


def test_units_are_joined_with_what_belongs_to_their_sequences():
    units = [Unit(("b",), np.array([4, 7]), np.array([0.4, 0.7])), Unit(("a",), np.array([2]), np.array([0.2]))]
    joined = join_units(units)
    assert (joined.ids.tolist(), joined.advantages.tolist()) == ([2, 4, 7], [0.2, 0.4, 0.7])
    assert joined.sources == ("b", "a") and joined.scores is None


@given(st.integers(1, 40), st.integers(1, 8))
def test_ranks_own_consecutive_rows_of_nearly_equal_number(num_envs, ranks):
    blocks = env_blocks(num_envs, ranks)
    assert [row for block in blocks for row in block] == list(range(num_envs))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_sims_get_rows_of_as_few_tasks_as_possible():
    assert [rows.tolist() for rows in rows_of_sims(6, 2, 3)] == [[0, 3, 1], [4, 2, 5]]
    assert [rows.tolist() for rows in rows_of_sims(6, 2, 4)] == [[0, 1, 2], [3, 4, 5]]  # tasks do not divide the rows


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.integers(1, 5))
def test_every_episode_is_dealt_to_one_sim_and_a_sim_keeps_its_tasks(tasks, num_sims):
    dealt = deal_by_task(tasks, num_sims)
    assert sorted(at for part in dealt for at in part) == list(range(len(tasks)))
    often = deal_by_task(tasks * num_sims * 3, num_sims)
    assert max(len({(tasks * num_sims * 3)[at] for at in part}) for part in often) <= -(-3 // num_sims) + 1
