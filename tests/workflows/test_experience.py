"""Which learner rank is sent which episodes of a batch, and what becomes of those whose sim has died."""

from types import SimpleNamespace

import pytest
from idle_groups import idle_groups

from embodied.algorithms.group_pool import Group
from embodied.config.recipe import load

SIZE = 4


class Call:
    """A call of `send_stored`, which has ended: True where the sim had the episodes, None where it died first."""

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
        def send_stored(episodes, source, channel, key, keep):
            self.sent.append((channel, episodes, keep))
            return Call(None if sim in self.dead else True)

        return SimpleNamespace(send_stored=send_stored)


def experience(ranks, groups, *options, cost=lambda episodes: 1, rank_of=None):
    """Groups of four episodes, every other episode played by the same sim."""
    sims = Sims()
    config = load(["recipe=pointmass_grpo", f"algo.group_size={SIZE}", *options]).config
    found = idle_groups(config, ("reach",), sims=sims, learners=ranks)
    found.dealer = SimpleNamespace(cost=cost, deal=lambda groups, iteration: rank_of)
    episodes = range(groups * SIZE)
    found.stores.put("sim-0", episodes[::2])
    found.stores.put("sim-1", episodes[1::2])
    return found, sims, [Group(tuple(episodes[g * SIZE : (g + 1) * SIZE]), (0.0,) * SIZE) for g in range(groups)]


def had(sims, rank):
    return sorted(episode for channel, episodes, _ in sims.sent for episode in episodes if channel == rank)


@pytest.mark.parametrize("groups", [1, 2, 3, 7])
def test_every_episode_of_a_batch_is_sent_to_its_rank_and_who_has_none_gets_a_copy(groups):
    rank_of = {episode: episode * groups % 3 if groups > 1 else 2 for episode in range(groups * SIZE)}
    found, sims, all_groups = experience(3, groups, rank_of=rank_of)
    owned = {rank: [] for rank in range(3)}
    found._send_all(all_groups)
    for rank, unit in found.units:
        owned[rank] += [] if unit.is_padding else unit.ids.tolist()
    assert {episode: rank for rank in range(3) for episode in owned[rank]} == rank_of
    assert all(had(sims, rank) == (owned[rank] or [0]) for rank in range(3))


def certain(found, *groups):
    """Send these groups, which are certain in this order, during a rollout."""
    waiting = [*groups]
    found.pool = SimpleNamespace(certain=lambda: [waiting.pop(0)] if waiting else [], mark_sent=lambda group: None)
    return [*found.certain_units(wait=True)]


PERIODIC = ("pipeline.schedule=periodic", "algo.minibatch_size=null", "algo.epochs=1")


def test_groups_that_are_certain_go_to_the_rank_with_the_least_work():
    found, sims, groups = experience(2, 3, *PERIODIC, cost=lambda episodes: (10, 3, 5)[episodes[0] // SIZE])
    certain(found, *groups)
    assert (had(sims, 0), had(sims, 1)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11])
    assert not any(keep for _, _, keep in sims.sent)


def cost_of(episodes):
    return {4: 1, 5: 2, 6: 2, 7: 5}.get(episodes[0], 100 - episodes[0])


def test_with_shards_every_rank_has_a_part_of_every_group():
    found, sims, groups = experience(2, 2, *PERIODIC, "learner.shard=true", cost=cost_of)
    certain(found, groups[1])
    assert (had(sims, 0), had(sims, 1)) == ([7], [4, 5, 6])
    certain(found, groups[0])
    assert sorted(map(len, (had(sims, 0), had(sims, 1)))) == [3, 5]


def test_a_group_of_which_a_sim_died_before_it_had_sent_its_part_has_not_arrived():
    found, sims, groups = experience(1, 2, rank_of=dict.fromkeys(range(2 * SIZE), 0))
    sims.dead = {1}
    found._send_all(groups)
    assert not found.units and found.lost == {*range(2 * SIZE)} and not found.groups


def test_groups_of_a_dead_sim_are_not_sent():
    found, sims, groups = experience(1, 2)
    for sim, group in enumerate(groups):
        found.stores.put(sims.workers[sim], group.episodes)
    found.dealer.deal = lambda groups, iteration: {episode: 0 for group in groups for episode in group.episodes}
    found.sim_replaced(1)
    assert found.stores.lost_among(range(2 * SIZE)) == [*groups[1].episodes]
    found._send_all(groups)
    assert found.groups == groups[:1] and had(sims, 0) == [*groups[0].episodes]


def test_the_first_round_replaces_groups_that_were_carried_over_and_lost():
    found, _, _ = experience(1, 1, "algo.filter=resample", "algo.groups=2", "env.num_envs=8")
    found.pool.deal(SIZE)
    found.pool.add({0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0})
    assert found.pool.wanted(rounds=0, num_envs=8) == SIZE
    found.sim_replaced(1)
    found.begin()
    assert found.pool.wanted(rounds=0, num_envs=8) == 2 * SIZE and found.lost == {1, 3}
