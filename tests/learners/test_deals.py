"""Which rank has which sequences changes no result: of rollouts, of groups, and of conversations."""

from types import SimpleNamespace

import numpy as np
import pytest
import toy
from ranks import on_ranks
from speaking_policy import Judging, Speaking, talks

from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.core.types import BatchEnd, Unit, choose
from embodied.learners.config import LearnerConfig
from embodied.learners.learner_worker import LearnerWorker
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.train_batch import build_batch
from embodied.learners.update import update_policy
from embodied.runtime.collective import Alone

GROUPS, SIZE = 6, 2
COMMON = {"epochs": 2, "lr": 1e-2, "adam_eps": 0.1}
GROUPED = COMMON | {"groups": GROUPS, "group_size": SIZE, "minibatch_size": 2 * SIZE}
CASES = {
    "rollouts": (toy.make, PPOConfig(**COMMON, rollout_decisions=toy.T, minibatch_size=7, weighting="episode")),
    "episodes": (toy.make, GRPOConfig(**COMMON, name="grpo", minibatch_size=7, weighting="episode", kl_coef=0.1)),
    "conversations": (Speaking, GRPOConfig(**GROUPED, name="reinforce++", kl_coef=0.1)),
    "valued": (Judging, PPOConfig(**GROUPED, name="ppo", kl_coef=0.1, kl_in="reward")),
}


def data_of(case):
    """Sequences with a score and an advantage each."""
    draw, spoken = np.random.default_rng(3), case in ("conversations", "valued")
    data = talks(CASES[case][0](), GROUPS, SIZE, stale=0.2) if spoken else toy.rollout(toy.make(), 1)
    return data, *draw.normal(size=(2, len(data.ids)))


def trained(case, ranks, rank, collective):
    """Weights and numbers of a rank, given the rank of each sequence: groups may be cut."""
    make, config = CASES[case]
    data, scores, advantages = data_of(case)
    mine = data.ids[ranks == rank]
    padding, mine = not len(mine), mine if len(mine) else data.ids[:1]
    scored = {} if case == "rollouts" else {"scores": scores[mine]}
    scored |= {"advantages": advantages[mine]} if isinstance(config, GRPOConfig) else {}
    policy = make()
    reference = Model(make(seed=3), LearnerConfig()) if config.kl_coef else None
    model = Model(policy, LearnerConfig(pack_tokens=20, micro_batch_size=5))
    unit = Unit((), mine, **scored, is_padding=padding)
    batch = build_batch(choose(data, mine), unit, 0, config, collective, model, reference)
    numbers = update_policy(model, PolicyOptimizer(policy, config, collective), config, batch, 0, BatchEnd(0, 10))
    return policy.state_dict(), {**numbers, "train/explained_variance": 0.0}  # of robots: a rank's own


def deals(case, num_ranks, count):
    """Ranks of all sequences, dealt at random; none without anything where there are no copies to pad with."""
    sequences, draw = len(data_of(case)[0].ids), np.random.default_rng(len(case))
    found = [draw.integers(num_ranks, size=sequences) for _ in range(10 * count)]
    if case == "rollouts":
        found = [ranks for ranks in found if len({*ranks.tolist()}) == num_ranks]
    return found[:count]


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_the_same_however_units_are_dealt_to_ranks(case):
    start = CASES[case][0]().state_dict()
    alone, numbers = trained(case, deals(case, 1, 1)[0], 0, Alone())
    assert max(float((alone[name] - start[name]).abs().max()) for name in start) > 1e-3 < numbers["train/grad_norm"]
    for ranks in deals(case, 3, 3):
        for weights, others in on_ranks(3, lambda rank, each, ranks=ranks: trained(case, ranks, rank, each)):
            assert others == pytest.approx(numbers, rel=0, abs=1e-10), ranks
            assert max(float((weights[name] - alone[name]).abs().max()) for name in alone) < 1e-10, ranks


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
