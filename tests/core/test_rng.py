import numpy as np
import pytest

from embodied.core import rng


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the published known-answer vectors of Philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, expected):
    assert tuple(rng.philox(np.array([counter], np.uint32), key)[0]) == expected


def test_the_noise_of_a_row_does_not_depend_on_the_other_rows():
    episodes, decisions = np.array([4, 9, 2**40]), np.array([0, 3, 7])
    together = rng.normal(5, "act", episodes, decisions, 7)
    for row in range(3):
        alone = rng.normal(5, "act", episodes[row : row + 1], decisions[row : row + 1], 7)
        assert np.array_equal(alone[0], together[row])


def test_another_seed_name_episode_or_decision_gives_other_noise():
    def draw(seed=1, name="a", episode=2, decision=3):
        return rng.uniform(seed, name, np.array([episode]), np.array([decision]), 4)

    assert np.array_equal(draw(), draw())
    for other in (
        draw(seed=2),
        draw(seed=1 + 2**32),
        draw(name="b"),
        draw(episode=3),
        draw(episode=2**33),
        draw(decision=4),
    ):
        assert not np.isclose(draw(), other).any()


def test_normal_noise_has_the_moments_of_a_standard_normal():
    x = rng.normal(0, "moments", np.arange(4000), np.zeros(4000, int), 5)
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02
    assert np.abs(np.corrcoef(x.T) - np.eye(5)).max() < 0.05


def test_generators_with_other_names_differ():
    assert rng.generator(1, "a").random() != rng.generator(1, "b").random()
    assert rng.generator(1, "a", 2).random() == rng.generator(1, "a", 2).random()


@pytest.mark.parametrize("seed", [0, 7, 2**40, 2**70])
@pytest.mark.parametrize("first", [0, 2**32 - 20])
def test_the_seeds_of_many_episodes_are_those_of_a_generator_each(seed, first):
    turns = np.arange(first, first + 20)
    one_by_one = [int(rng.generator(seed, "episode", "train", turn).integers(2**31 - 1)) for turn in turns.tolist()]
    assert rng.episode_seeds(seed, "train", turns).tolist() == one_by_one
