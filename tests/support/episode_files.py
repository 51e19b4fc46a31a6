"""The files episodes.csv of two evaluations that have to be equal."""

from pathlib import Path

import pytest

from embodied.records.results import read_episodes


def check_same_episodes(one: Path, other: Path, rel: float = 1e-9) -> None:
    """All fields of both folders' episodes are equal, and returns up to rounding: policies that are asked for another
    number of rows at once, or by another process, round otherwise. `rel` is for float64; float32 needs 1e-5."""
    ours, theirs = read_episodes(one), read_episodes(other)
    assert [episode._replace(total_reward=0.0) for episode in ours] == [e._replace(total_reward=0.0) for e in theirs]
    returns = [[episode.total_reward for episode in episodes] for episodes in (ours, theirs)]
    assert ours and returns[0] == pytest.approx(returns[1], rel=rel, abs=rel)
