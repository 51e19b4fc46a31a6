"""Which rank has which sequences changes no result."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import on_ranks

sys.path.insert(0, str(Path(__file__).parent))
from dealt_ranks import CASES, deals, differences, trained

from embodied.learners.worker import LearnerWorker
from embodied.runtime.collective import Alone


@pytest.mark.parametrize("case", CASES)
def test_any_deal_makes_the_update_of_one_rank_that_has_everything(case):
    start = CASES[case][0]().state_dict()
    alone, numbers = trained(case, deals(case, 1, 1)[0], 0, Alone())
    assert max(float((alone[name] - start[name]).abs().max()) for name in start) > 1e-3 < numbers["train/grad_norm"]
    for ranks in deals(case, 3, 3):
        found = on_ranks(3, lambda rank, each, ranks=ranks: differences(case, ranks, rank, each))
        assert max(map(max, found)) < 1e-10, ranks


def test_observations_are_merged_in_the_order_of_sequences_whichever_ranks_have_them():
    moments = np.random.default_rng(0).normal(size=(6, 3))

    def merged(rank, collective, deal):
        learner = object.__new__(LearnerWorker)
        found = []
        learner.policy, learner.collective = SimpleNamespace(merge_observation_moments=found.append), collective
        learner.observed = [(np.array([one]), moments[one : one + 1]) for one in deal[rank]]
        learner._merge_observed()
        return found[0]

    for deal in ([[4, 1], [0, 5], [3, 2]], [[], [5, 4, 3], [2, 1, 0]]):
        for rows in on_ranks(3, lambda rank, each, deal=deal: merged(rank, each, deal)):
            np.testing.assert_array_equal(rows, moments)


@pytest.mark.slow
def test_any_deal_makes_the_same_update_in_processes_that_meet_over_gloo(tmp_path):
    program = [sys.executable, str(Path(__file__).parent / "dealt_ranks.py"), str(tmp_path / "meet")]
    started = [subprocess.Popen([*program, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    for process in started:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        found = json.loads(output.splitlines()[-1])
        assert len(found) == 3 * len(CASES) and max(map(max, found)) < 1e-10
