"""What counts as measured already, and the table of the seeds."""

import json

import pytest

from benchmarks.learning import pushcube, seeds
from benchmarks.learning.pushcube import report
from benchmarks.learning.seeds import read_done

IDENTITY = {"commit": "abc", "config": "123"}


def result(seed, once, train_s):
    measured = {"count": round(once * 200), "of": 200, "rate": once, "interval": [once - 0.01, min(once + 0.01, 1.0)]}
    return {
        "seed": seed,
        **IDENTITY,
        "env_steps": 96_000,
        "train_s": train_s,
        "success_once": measured,
        "success_at_end": measured,
    }


@pytest.fixture
def world(tmp_path, monkeypatch):
    """The benchmark without its runs: the list of measured seeds fills up."""
    measured = []
    monkeypatch.setattr(pushcube, "PLACE", tmp_path)
    monkeypatch.setattr(pushcube, "environment", dict)
    monkeypatch.setattr(seeds, "code_commit", lambda: IDENTITY["commit"])
    monkeypatch.setattr(pushcube, "config_hash", lambda config: IDENTITY["config"])
    monkeypatch.setattr(pushcube, "measure_seed", lambda seed, env: measured.append(seed) or result(seed, 0.98, 30.0))
    return measured


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["pushcube", *arguments])
    pushcube.main()


def test_resume_measures_only_what_is_missing_or_comes_from_other_code(world, monkeypatch, tmp_path):
    run(monkeypatch)
    assert world == [*range(201, 211)]
    (tmp_path / "seed-202.json").unlink()
    (tmp_path / "seed-204.json").write_text(json.dumps(result(204, 1.0, 1.0) | {"commit": "older"}))
    run(monkeypatch, "--resume")
    assert world[10:] == [202, 204]


def test_without_resume_everything_is_measured_again(world, monkeypatch):
    run(monkeypatch)
    run(monkeypatch)
    assert world == [*range(201, 211)] * 2


def test_another_recipe_is_not_done(tmp_path):
    path = tmp_path / "seed-0.json"
    assert read_done(path, IDENTITY) is None
    path.write_text(json.dumps(result(0, 1.0, 30.0)))
    assert read_done(path, IDENTITY)["train_s"] == 30.0
    assert read_done(path, IDENTITY | {"config": "other"}) is None


def test_the_table_counts_the_seeds_that_solve_the_task():
    done = [result(0, 0.99, 30.0), result(1, 0.90, 50.0), result(2, 0.95, 40.0)]
    table, verdict = report(done).split("\n\n")
    assert verdict == "2 of 3 seeds at 95% or more, mean 94.7%; median 40.0 s of training"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "2", "0"]  # the worst first
    assert rows[2][1:] == ["99.0% [98.0%, 100.0%]", "99.0% [98.0%, 100.0%]", "96,000", "30.0"]
