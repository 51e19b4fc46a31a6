"""Which ranks compute a sequence together, and an order of passes in which nobody waits for ever."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.placement.balance import ExchangeCosts, SequenceLoad, divide_sequences, order_of_passes, sequence_ranks

K = 1024


def loads_of(tokens, token, place, owners=None):
    """Sequences that cost so much for every token, and for every pair of places."""
    owners = [None] * len(tokens) if owners is None else owners
    return [
        SequenceLoad(count, token * count + place * count**2, owner)
        for count, owner in zip(tokens, owners, strict=True)
    ]


@st.composite
def tables(draw):
    """Sequences on up to eight ranks, of random degrees and in random aligned groups."""
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    degrees = [degree for degree in (1, 2, 4) if degree <= ranks]
    owned = draw(
        st.lists(
            st.tuples(st.integers(0, ranks - 1), st.sampled_from(degrees), st.integers(1, 9000)),
            min_size=1,
            max_size=24,
        )
    )
    return ranks, [sequence_ranks(owner, degree) for owner, degree, _ in owned], [size for *_, size in owned]


def stuck(ranks, orders, groups):
    """Ranks that wait for ever where every rank runs its own list of sequences, and one of several ranks runs when all
    of them have come to it."""
    at = [0] * ranks
    while True:
        heads = {rank: orders[rank][at[rank]] for rank in range(ranks) if at[rank] < len(orders[rank])}
        ready = [n for n in set(heads.values()) if all(heads.get(rank) == n for rank in groups[n])]
        if not ready:
            return sorted(heads)
        for number in ready:
            for rank in groups[number]:
                at[rank] += 1


def orders_of(ranks, groups, order):
    return [[n for n in order if rank in groups[n]] for rank in range(ranks)]


def test_the_longest_of_many_sequences_is_divided_until_all_ranks_have_as_much_to_do():
    """Packed: 16 on one rank, of 32 in all. Divided: 8 on each of two ranks, the others on the other two."""
    sequences = loads_of([32 * K, 16 * K, 16 * K, *[8 * K] * 8], token=0.0, place=1.0)
    packed = divide_sequences(sequences, 4, ExchangeCosts(), [1])
    divided = divide_sequences(sequences, 4, ExchangeCosts(), [1, 2, 4])
    assert packed.imbalance == 2.0 and divided.imbalance == 1.0
    assert [len(ranks) for ranks in divided.ranks] == [2, *[1] * 10]


def test_a_degree_is_raised_only_where_the_exchange_costs_less_than_it_saves():
    """One sequence of 100 on two ranks: 50 each and the exchange."""
    for each, token, degree in ((49.0, 0.0, 2), (51.0, 0.0, 1), (0.0, 1.9, 2), (0.0, 2.1, 1)):
        found = divide_sequences(loads_of([100], 1.0, 0.0), 2, ExchangeCosts(each, token), [1, 2])
        assert [*map(len, found.ranks)] == [degree], "25 tokens go to the other rank"
    alike = divide_sequences(loads_of([K] * 8, 1.0, 1.0), 4, ExchangeCosts(), [1, 2, 4])
    assert alike.imbalance == 1.0 and {*map(len, alike.ranks)} == {1}


def test_two_sequences_are_divided_where_dividing_only_one_would_save_nothing():
    found = divide_sequences(loads_of([K, K], 1.0, 0.0), 4, ExchangeCosts(), [1, 2, 4])
    assert found.imbalance == 1.0 and [*map(len, found.ranks)] == [2, 2]


def test_a_sequence_is_divided_where_one_rank_has_no_room_for_it():
    dear = ExchangeCosts(each=1e9, most_tokens=K)
    found = divide_sequences(loads_of([K, K + 1, 5 * K], 1.0, 0.0), 4, dear, [1, 2, 4])
    assert [*map(len, found.ranks)] == [1, 2, 4]


@settings(max_examples=100, deadline=None)
@given(tables(), st.floats(0, 1000), st.booleans())
def test_dividing_never_leaves_more_to_do_than_not_dividing(table, each, owned):
    """... and a sequence that has an owner is computed by it, among aligned ranks."""
    num_ranks, groups, tokens = table
    sequences = loads_of(tokens, 1.0, 0.01, [group.start for group in groups] if owned else None)
    degrees = [degree for degree in (1, 2, 4) if degree <= num_ranks]
    alone, found = (divide_sequences(sequences, num_ranks, ExchangeCosts(each), some) for some in ([1], degrees))
    assert max(found.loads) <= max(alone.loads) * (1 + 1e-9)
    assert sum(found.loads) >= sum(alone.loads) * (1 - 1e-9)
    for sequence, ranks in zip(sequences, found.ranks, strict=True):
        assert ranks == sequence_ranks(ranks.start, len(ranks))
        assert sequence.owner is None or sequence.owner in ranks


@settings(max_examples=200, deadline=None)
@given(tables())
def test_no_rank_waits_for_ever_and_sharded_weights_are_gathered_together(table):
    ranks, groups, sizes = table
    order = order_of_passes(groups, sizes, ranks)
    assert sorted(order) == list(range(len(groups)))
    orders = orders_of(ranks, groups, order)
    assert not stuck(ranks, orders, groups)
    for number, group in enumerate(groups):
        assert len({orders[rank].index(number) for rank in group}) == 1, "the same number of passes before it"


def test_an_order_that_one_rank_shuffles_leaves_ranks_that_wait_for_ever():
    groups = [range(0, 4), range(0, 2), range(2, 4), range(0, 2), range(1, 2)]
    order = order_of_passes(groups, [9, 5, 5, 4, 3], 4)
    orders = orders_of(4, groups, order)
    assert not stuck(4, orders, groups)
    caught = 0
    for seed in range(100):
        shuffled = [*orders]
        shuffled[1] = random.Random(seed).sample(orders[1], len(orders[1]))
        shared = [n for n in shuffled[1] if len(groups[n]) > 1]
        waits = stuck(4, shuffled, groups)
        assert bool(waits) == (shared != [0, 1, 3])
        caught += bool(waits)
    assert caught > 50
