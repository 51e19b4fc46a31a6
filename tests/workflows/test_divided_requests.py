"""Where policy workers are more than sims, requests are divided among them, and learning does not depend on that."""

import numpy as np
import pytest
from stepped import GRPO, PPO, Run, strike

MERGED = "pipeline.merge_rows=64"
ONE = {"sim": "fake:0", "policy": "fake:1", "learner": "fake:2"}
MANY = {"sim": "fake:0", "policy": "fake:1-3", "learner": "fake:4"}
STAGES = "pipeline.stages=2"


def close(one, other):
    return all(np.allclose(one[name], other[name], rtol=1e-9, atol=1e-12) for name in other)


def acted(run):
    """How often each policy worker has acted."""
    totals = [timings.get("act") for timings in run.loop.rollouts.policies.timings().wait()]
    return [total.count if total else 0 for total in totals]


@pytest.mark.parametrize("recipe", [[*PPO, STAGES], [*GRPO]], ids=["ppo", "grpo"])
def test_one_sim_feeds_all_policies_and_learns_what_it_would_with_one(recipe, tmp_path):
    found = []
    for placement in (ONE, MANY):
        (folder := tmp_path / str(len(found))).mkdir()
        with Run(folder, *recipe, MERGED, placement=placement) as run:
            run.play(0, 3)
            found.append(run.weights())
            counts = acted(run)
    assert len(counts) == 3 and min(counts) > 0
    assert close(*found)


def test_policies_that_die_with_a_part_of_a_request_change_nothing(tmp_path):
    victims = "policy-0", "policy-2"
    (alone := tmp_path / "alone").mkdir()
    with Run(alone, *PPO, MERGED, placement=MANY) as run:
        run.play(0, 4)
        expected = run.weights()
    (broken := tmp_path / "broken").mkdir()
    with Run(broken, *PPO, MERGED, placement=MANY, backend="local") as run:
        rows = []
        for number in range(4):
            if number == 2:
                for victim in victims:
                    strike(run, "rollout", victim)
            rows.append(run.loop.iterate(number, 6)[1])
        assert sum(row["faults/restarts"] for row in rows) == len(victims)
        assert not any(row["faults/lost_decisions"] for row in rows)
        assert close(run.weights(), expected)
