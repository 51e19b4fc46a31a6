"""Groups are handed on before a round is over only if the batch that is taken at the end would hold them too."""

from __future__ import annotations

from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.algorithms.config import GRPOConfig
from embodied.algorithms.group_pool import GroupPool
from embodied.config.sections import PipelineSection
from embodied.workflows.group_collector import discards_surplus

KEPT, EQUAL, LOW = (1.0, 0.0), (1.0, 1.0), (0.25, 0.0)  # scores of a group of two; LOW where a bound is given


def pool(discards=True, **options):
    return GroupPool(GRPOConfig(**{"name": "grpo", "groups": 2, "group_size": 2} | options), discards)


def numbers(groups, size=2):
    return [group.episodes[0] // size for group in groups]


def iterate(pool, num_envs, score, order, lost, early):
    """One iteration; `score` is an episode's, `order` that in which a round's episodes end, `lost` those that never do.
    With `early`, groups are handed on as soon as they are certain. Returns what is learned from, in the order in which
    it became known, and the discarded or carried episodes."""
    pool.counts.clear()
    found, rounds = [], 0
    while count := pool.wanted(rounds, num_envs):
        dealt = pool.deal(count)
        ended = [episode for episode in order(dealt, rounds) if episode not in lost]
        for part in [[episode] for episode in ended] if early else [ended]:
            pool.add({episode: score(episode) for episode in part})
            for group in pool.certain() if early else ():
                pool.mark_sent(group)
                found.append(group)
        pool.drop_groups_of([episode for episode in dealt if episode in lost])
        if early:
            for group in pool.certain():
                pool.mark_sent(group)
                found.append(group)
        rounds += 1
    assert not pool.playing
    return found, pool.take(), rounds


def compare(options, num_envs, score, order, lost=frozenset(), iterations=1, discards=True):
    """Both ways give the same groups; returns how many were handed on before the end of the iteration."""
    together, one_by_one = pool(discards, **options), pool(discards, **options)
    size, handed = together.config.group_size, 0
    for _ in range(iterations):
        none, taken, rounds = iterate(together, num_envs, score, order, lost, early=False)
        early, left, same_rounds = iterate(one_by_one, num_envs, score, order, lost, early=True)
        assert not none and rounds == same_rounds
        assert set(numbers(early, size)) <= set(numbers(taken, size))
        assert sorted(early + left) == taken and not (left and discards)
        assert one_by_one.counts == together.counts and one_by_one.held == together.held
        assert one_by_one.dealt == together.dealt and one_by_one.discarded == together.discarded
        if discards:
            assert one_by_one.held == () and one_by_one.dealt % size == 0
        handed += len(early)
    return handed


@pytest.mark.parametrize("how", ["none", "drop", "resample"])
def test_all_outcomes_in_all_orders_of_two_rounds(how):
    """Two groups of two; with resample up to two more in a second round, on four envs."""
    orders = list(permutations(range(4)))
    for verdicts in product((KEPT, EQUAL), repeat=4):
        for first, second in product(orders[::3], orders[::5]):
            order = lambda dealt, rounds: [dealt[at] for at in (first, second)[rounds] if at < len(dealt)]  # noqa: B023, E731
            score = lambda episode: verdicts[episode // 2][episode % 2]  # noqa: B023, E731
            compare({"filter": how, "max_rounds": 2}, 4, score, order)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4), st.integers(2, 4), st.integers(1, 9), st.sampled_from(["none", "drop", "resample"]),
    st.sampled_from([{}, {"filter_low": 0.4}, {"filter_high": 0.6}]), st.integers(0, 10**6), st.booleans(),
)  # fmt: skip
def test_any_course_of_several_iterations_with_what_they_carry_over(groups, size, envs, how, bounds, seed, discards):
    options = {"groups": groups, "group_size": size, "filter": how, "max_rounds": 3}
    random, orders = Random(seed), {}
    scores = [float(random.random() < 0.4) for _ in range(400)]
    lost = frozenset(episode for episode in range(400) if random.random() < 0.08)

    def order(dealt, rounds):
        return orders.setdefault(dealt, random.sample(dealt, len(dealt)))

    options |= bounds if how != "none" else {}
    compare(options, envs, scores.__getitem__, order, lost, iterations=3, discards=discards)


def test_a_group_waits_for_those_before_it_where_more_are_played_than_needed():
    """One of two groups is kept, so six envs play three more, 2 to 4: of these one is needed."""
    one = pool(filter="resample")
    dealt = one.deal(one.wanted(0, 6))
    one.add(dict(zip(dealt, [*KEPT, *EQUAL], strict=True)))
    assert numbers(one.certain()) == [0]
    one.mark_sent(*one.certain())
    dealt = one.deal(one.wanted(1, 6))
    assert len(dealt) == 6
    one.add(dict(zip(dealt[2:4], KEPT, strict=True)))
    assert one.certain() == []  # group 2 is not over, and would come first
    one.add({dealt[0]: 1.0})
    assert one.certain() == []
    one.add({dealt[1]: 1.0})
    assert numbers(one.certain()) == [3]


def test_first_rounds_hand_on_every_group_as_it_is_finished():
    one = pool(groups=4)
    one.deal(one.wanted(0, 8))
    one.add({6: 1.0, 7: 0.0})
    assert numbers(one.certain()) == [3]


def test_surplus_is_discarded_and_the_rest_of_a_group_skipped():
    one = pool(filter="resample", group_size=3, groups=1)
    one.deal(8)
    one.add(dict(zip(range(8), [1, 0, 0, 0, 1, 0, 1, 0], strict=True)))
    assert numbers(one.take(), 3) == [0]
    assert (one.held, one.discarded, one.dealt, one.solved) == ((), 5, 9, {})
    assert one.wanted(0, 4) == 3


def test_a_group_that_could_not_be_handed_on_is_lost():
    one = pool()
    one.deal(4)
    one.add(dict(zip(range(4), [*KEPT, *KEPT], strict=True)))
    for group in one.certain():
        one.mark_sent(group)
    one.drop_groups_of([0, 1])
    assert one.counts == {"kept": 1, "incomplete": 1} and one.sent == {1} and one.take() == []


def test_surplus_is_carried_only_with_sync_unless_asked():
    found = {
        s: discards_surplus(GRPOConfig(name="dapo"), PipelineSection(schedule=s)) for s in ("sync", "periodic", "async")
    }
    assert found == {"sync": False, "periodic": True, "async": True}
    assert discards_surplus(GRPOConfig(name="dapo", surplus="discard"), PipelineSection(schedule="sync"))
    assert not discards_surplus(GRPOConfig(name="dapo", surplus="carry"), PipelineSection(schedule="async"))
