"""A rollout that comes in pieces is the rollout that comes whole, and so is what frozen parts see in it."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from embodied.core.types import DECISIONS, Trajectory, join, map_decisions
from embodied.learners import model
from embodied.learners.train_batch import RolloutBuffer, item_numbers

HORIZON = 7


def rollout(source, rows, seed=0):
    draw = np.random.default_rng(seed)

    def some(*shape):
        return draw.normal(size=(HORIZON * len(rows), *shape))

    spans = {"actions": (1, 2), "logprobs": (1, 2)} | dict.fromkeys(
        ("values", "next_values", "versions", "episodes"), ()
    )
    arrays = {name: some(*spans.get(name, (1,))) for name in DECISIONS}
    obs = {
        "state": some(3),
        "images": {"top": some(2, 2, 3)},
        "instruction": np.array([f"{t} {r}" for r in rows for t in range(HORIZON)], object),
    }
    lengths = np.full(len(rows), HORIZON)
    return Trajectory(np.array(rows), lengths, obs, replay={"kind": some()}, source=source, **arrays)


def pieces(whole, *sizes):
    begin = 0
    for size in sizes:
        at = item_numbers(range(len(whole.ids)), range(begin, begin + size), HORIZON)
        yield replace(
            whole,
            lengths=np.full(len(whole.ids), size),
            first=begin,
            last=begin + size == HORIZON,
            **map_decisions(lambda array, at=at: array[at], whole),
        )
        begin += size


class Looking:
    def __init__(self):
        self.sizes = []

    def features(self, obs):
        self.sizes.append(len(obs["instruction"]))
        return {
            "seen": obs["state"].sum(dim=1, keepdim=True),
            "said": torch.tensor([[len(t)] for t in obs["instruction"]]),
        }


def taken(*arriving, rows=range(5), lot=6):
    """What came and was seen, looked at after every piece."""
    look = Looking()
    found = RolloutBuffer(lot, HORIZON)
    for piece in arriving:
        found.add(piece)
        found.encode(look, np.array(rows))
    return found, look


FIRST, SECOND = rollout("sim-0/0#1", [0, 1, 2], 1), rollout("sim-1/0#1", [3, 4], 2)
SOURCES = (FIRST.source, SECOND.source)


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1,) * 7, (6, 1)], ids=str)
def test_pieces_of_any_size_give_the_same_bits(sizes):
    whole, looked = taken(FIRST, SECOND)
    assert sorted(looked.sizes) == [2, 3, 6, 6, 6, 6, 6]  # two decisions of three rows, three of two, and what is left
    found, look = taken(*pieces(SECOND, *sizes), *pieces(FIRST, *sizes))
    assert found.has_all_of(SOURCES) and sorted(look.sizes) == sorted(looked.sizes)
    same(found.take(SOURCES), join((FIRST, SECOND)))
    for name, tensor in found.encoded(np.arange(5)).items():
        assert torch.equal(tensor, whole.features.kept[name])
    state = np.concatenate([each.obs["state"] for each in (FIRST, SECOND)])
    np.testing.assert_allclose(found.features.kept["seen"][:, 0], state.sum(axis=1))


def test_encoding_begins_before_the_rollout_has_ended():
    first, *_ = pieces(FIRST, 5, 2)
    found, look = taken(first)
    assert look.sizes == [6, 6] and not found.has_all_of(SOURCES[:1])  # four of five decisions, in lots of two


def test_rollouts_of_a_dead_sim_are_replaced_by_those_of_its_successor():
    again = rollout("sim-1/0#2", [3, 4], 3)
    early, *_ = pieces(SECOND, 6, 1)
    found, _ = taken(early, FIRST, *pieces(again, 2, 5))
    sources = (FIRST.source, again.source)
    assert found.has_all_of(sources) and not found.has_all_of(SOURCES)
    same(found.take(sources), join((FIRST, again)))
    assert torch.equal(found.features.kept["seen"], taken(FIRST, again)[0].features.kept["seen"])
    for alone in (FIRST, again):
        assert torch.equal(found.encoded(alone.ids)["seen"], taken(alone, rows=alone.ids)[0].features.kept["seen"])


def test_no_more_features_are_computed_once_they_cannot_be_kept(monkeypatch):
    monkeypatch.setattr(model, "KEPT_BYTES", 16 * 5 * HORIZON - 1)
    found, look = taken(FIRST, SECOND)
    assert look.sizes == [6] and found.features.kept == {}


def same(ours, theirs):
    for field in fields(Trajectory):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "obs":
            np.testing.assert_array_equal(a["state"], b["state"])
            np.testing.assert_array_equal(a["images"]["top"], b["images"]["top"])
            np.testing.assert_array_equal(a["instruction"], b["instruction"])
        elif field.name == "replay":
            np.testing.assert_array_equal(a["kind"], b["kind"])
        else:
            np.testing.assert_array_equal(a, b)
