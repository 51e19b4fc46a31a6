"""Learner ranks that divide passes learn what one rank alone learns, and never wait for each other in a circle."""

from pathlib import Path

import pytest
from rank_processes import run_ranks

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_learners_that_divide_passes_end_with_the_weights_of_one(tmp_path, ranks):
    """With passes of several degrees in one step, references, sharded weights, values, groups as they come, mixtures of
    experts, and pictures in some of the prompts, in passes that ranks divide and in others."""
    rows = run_ranks(HERE / "divided_learners.py", tmp_path, ranks)
    assert len(rows) == (11 if ranks == 4 else 7) * ranks
    for way, apart, moved, degrees in rows:
        precision = {"experts": 1e-4, "pictures": 1e-7}.get(way.split()[0], 1e-10)  # float32: all, norms
        assert float(apart) < precision and float(moved) > 1e-4, way
        assert degrees == {"fixed": str(ranks), "values": "2", "pictures": str(ranks)}.get(way, degrees), way
    assert any(len(degrees) > 1 for way, *_, degrees in rows if way == "auto"), "several degrees in one step"


def test_ranks_finish_every_table_of_passes_and_refuse_tables_that_differ(tmp_path):
    rows = run_ranks(HERE / "divided_tables.py", tmp_path, 4)
    assert len(rows) == 4
    for _, tables, degrees, told in rows:
        assert int(tables) == 60 and degrees == "124"
        assert "before pass" in told and " / " in told, "nobody waits for ever"
    assert sum("their tables differ" in told for *_, told in rows) == 1
