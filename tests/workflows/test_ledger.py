"""Which episodes were begun, ended and given up: arithmetic on their numbers."""

import numpy as np

from embodied.data import EpisodeResult
from embodied.workflows.ledger import Ledger


def result(index):
    return EpisodeResult(index, "reach", -1, 0, 5, 1.0, True, True)


def test_every_episode_is_open_ended_or_abandoned():
    ledger = Ledger(4)
    ledger.begin([0, 1, 2, 3])
    ledger.begin([6, 7])  # envs 2 and 3 begin their second
    ledger.finish([result(2), result(3)])
    assert ledger.begun.tolist() == [1, 1, 2, 2]
    assert ledger.abandon(range(2, 4)) == 2
    ledger.begin([10, 11])
    assert ledger.begun.tolist() == [1, 1, 3, 3]
    assert ledger.abandon(range(2, 4)) == 2 and ledger.abandon(range(0, 2)) == 2
    assert ledger.abandon(range(0, 4)) == 0


def test_episodes_that_ended_in_a_lost_slice_are_abandoned_too():
    ledger = Ledger(2)
    ledger.begin([0, 1, 2, 4])  # env 0 ended two of its three, and nobody heard of it
    assert ledger.abandon(range(0, 1)) == 3


def test_a_note_that_comes_twice_counts_once():
    ledger = Ledger(2)
    ledger.begin([0, 1, 3])
    ledger.begin([1])
    assert ledger.begun.tolist() == [1, 2]


def state(**more):
    return {"env_ids": np.array([0, 1]), "rows.started": np.array([3, 2]), "rows.length": np.array([4, 0]), **more}


def test_envs_whose_state_was_saved_go_on_with_their_open_episode():
    ledger = Ledger(2)
    ledger.restore(state(**{"env.position": np.zeros(2)}))
    assert ledger.begun.tolist() == [3, 2] and ledger.abandon(range(0, 2)) == 2


def test_envs_without_a_saved_state_begin_the_next_or_the_same_again():
    """Env 0 was 4 steps into its third episode, env 1 had not taken a step of its second."""
    ledger = Ledger(2)
    ledger.restore(state())
    assert ledger.begun.tolist() == [4, 2] and ledger.abandon(range(0, 2)) == 2
