"""Updates of ranks that have any sequences of a batch: of rollouts, of groups, and of conversations. As a program it is
one of two ranks in processes of their own: python dealt_ranks.py FILE RANK."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import toy
from speaking_policy import Judging, Speaking, talks

from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.core.types import BatchEnd, Unit, choose
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.train_batch import build_batch
from embodied.learners.update import update_policy
from embodied.runtime.collective import Alone, Gloo
from embodied.runtime.rendezvous import RendezvousFile

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


def differences(case, ranks, rank, collective):
    """By how much weights and numbers differ from those of a rank that has everything, at most."""
    weights, numbers = trained(case, ranks, rank, collective)
    alone, known = trained(case, np.zeros_like(ranks), 0, Alone())
    assert numbers.keys() == known.keys()
    return (
        max(float((weights[name] - alone[name]).abs().max()) for name in alone),
        max(abs(numbers[name] - known[name]) for name in known),
    )


if __name__ == "__main__":
    collective = Gloo(RendezvousFile(sys.argv[1], 120.0), int(sys.argv[2]), 2)
    found = [differences(case, ranks, int(sys.argv[2]), collective) for case in CASES for ranks in deals(case, 2, 3)]
    print(json.dumps(found), flush=True)
