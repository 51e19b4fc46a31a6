"""Which learner rank is sent which episodes of a batch, and what becomes of those whose sim has died."""

from collections import Counter
from types import SimpleNamespace

import pytest

from embodied.algorithms.groups import Group
from embodied.workflows.group_collector import Experience, units_of

SIZE = 4


class Call:
    """A call of `hand_in`, which has ended: True where the sim had the episodes, None where it died first."""

    def __init__(self, result):
        self.result = result

    def done(self):
        return True

    def succeeded(self):
        return self.result is not None

    def wait(self):
        return [self.result]


class Sims:
    """Two sims; `sent` are (channel, episodes, whether they are kept) in order."""

    workers = "sim-0", "sim-1"

    def __init__(self):
        self.sent, self.dead = [], set()

    def __getitem__(self, sim):
        def hand_in(episodes, source, channel, batch, keep):
            self.sent.append((channel, episodes, keep))
            return Call(None if sim in self.dead else True)

        return SimpleNamespace(hand_in=hand_in)


def experience(ranks, groups, shard=False):
    """Groups of four episodes, every other episode played by the same sim."""
    sims = Sims()
    rollouts = SimpleNamespace(sims=sims, lives=Counter(), settle=lambda *calls: None)
    found = Experience(rollouts, shard)
    found.begin(list(range(ranks)))
    episodes = range(groups * SIZE)
    found.keep_at({"sim-0": episodes[::2], "sim-1": episodes[1::2]})
    return found, sims, [Group(tuple(episodes[g * SIZE : (g + 1) * SIZE]), (0.0,) * SIZE) for g in range(groups)]


def had(sims, rank):
    return sorted(episode for channel, episodes, _ in sims.sent for episode in episodes if channel == rank)


@pytest.mark.parametrize("groups", [1, 2, 3, 7])
def test_every_episode_of_a_batch_is_sent_to_its_rank_and_who_has_none_gets_a_copy(groups):
    found, sims, all_groups = experience(3, groups)
    rank_of = {episode: episode * groups % 3 if groups > 1 else 2 for episode in range(groups * SIZE)}
    found.send_all(all_groups, batch=1, rank_of=rank_of)
    owned = {rank: [] for rank in range(3)}
    for sent in found.arrived():
        for rank, unit in units_of(sent).items():
            owned[rank] += [] if unit.is_padding else unit.ids.tolist()
    assert {episode: rank for rank in range(3) for episode in owned[rank]} == rank_of
    assert all(had(sims, rank) == (owned[rank] or [0]) for rank in range(3))


def test_what_is_certain_goes_to_the_rank_that_has_least_to_do():
    found, sims, groups = experience(2, 3)
    for group, cost in zip(groups, (10, 3, 5), strict=True):
        found.send(group, batch=1, cost=lambda episodes, cost=cost: cost)
    assert (had(sims, 0), had(sims, 1)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11])
    assert not any(keep for _, _, keep in sims.sent)


def cost_of(episodes):
    return {4: 1, 5: 2, 6: 2, 7: 5}[episodes[0]]


def test_with_shards_every_rank_has_a_part_of_every_group():
    found, sims, groups = experience(2, 2, shard=True)
    found.send(groups[1], batch=1, cost=cost_of)
    assert (had(sims, 0), had(sims, 1)) == ([7], [4, 5, 6])
    found.send(groups[0], batch=1, cost=lambda episodes: 100 - episodes[0])
    assert sorted(map(len, (had(sims, 0), had(sims, 1)))) == [3, 5]


def test_a_group_of_which_a_sim_died_before_it_had_sent_its_part_has_not_arrived():
    found, sims, groups = experience(1, 2)
    sims.dead = {1}
    found.rollouts.lives["sim-1"] += 1
    assert found.gone([0, 1, 2, 3]) == [1, 3]
    found.send_all(groups, batch=1, rank_of=dict.fromkeys(range(2 * SIZE), 0))
    assert [sent.arrived() for sent in found.arrived()] == [False, False] and not found.arrived()
