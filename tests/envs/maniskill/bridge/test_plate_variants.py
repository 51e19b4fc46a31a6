"""What the PutOnPlate-25 tasks draw, by counting. Each test imports ManiSkill for itself, since every test worker
collects this file."""

import numpy as np
import pytest
from needed import requires

requires("mani_skill")


def test_objects_lie_apart_on_the_grid():
    from embodied.envs.maniskill.bridge.put_on_plate import FAR, NEAR, border_places, pairs, starts, two_objects

    assert len(pairs()) == 784 and len(border_places()) == 628 and len(starts()) == 14_375
    assert np.linalg.norm(pairs()[:, 0] - pairs()[:, 1], axis=1).min() > NEAR
    assert np.linalg.norm(two_objects()[:, 0] - two_objects()[:, 2], axis=1).min() > FAR
    assert np.abs(border_places() - [-0.16, 0.0]).max(axis=2).min() == pytest.approx(0.105)  # a step outside


def test_the_task_to_train_on_has_as_many_episodes_as_its_digits_say():
    from embodied.envs.maniskill.bridge.put_on_plate import variant

    assert len(variant("Main-v3", None)) == 16 * 1 * 16 * 784 * 4 == len(variant("Main-v3", "train"))
    assert len(variant("Main-v3", "test")) == 9 * 5 * 784 * 4
    assert len(variant("Main-v3", "all")) == 25 * 21 * 784 * 4


def test_an_episodes_number_is_read_digit_by_digit():
    from embodied.envs.maniskill.bridge.put_on_plate import pairs, variant

    main = variant("Main-v3", None)
    episode = main.episode(((3 * 1 + 0) * 16 + 5) * 784 * 4 + 100 * 4 + 2)
    assert (episode.object, episode.plate, episode.picture, episode.turn) == (3, 0, 5, 90.0)
    np.testing.assert_array_equal(episode.places, pairs()[100])
    with pytest.raises(IndexError, match="802816"):
        main.episode(802_816)


def test_a_variant_shows_what_training_did_not():
    from embodied.envs.maniskill.bridge.put_on_plate import TEMPLATES, variant, variants

    unseen = variants("test")
    assert set(unseen["Carrot-v1"].objects) == set(range(16, 25))
    assert set(unseen["Plate-v1"].plates) == set(range(1, 17))
    assert set(unseen["VisionImage-v1"].pictures) == set(range(16, 21))
    assert set(unseen["Instruct-v1"].templates) == set(range(1, 17)) and len(set(TEMPLATES)) == 17
    assert not set(unseen["VisionWhole05-v1"].textures) & {0} and unseen["VisionWhole05-v1"].weight == 0.5
    assert variant("EEPose-v1", None).episode(1).start.any() and unseen["PositionChangeTo-v1"].jumps


@pytest.mark.parametrize("name", ["MultiCarrot-v1", "MultiPlate-v1"])
@pytest.mark.parametrize("which", ["train", "test", "all"])
def test_the_extra_object_or_plate_differs_from_the_named_one(name, which):
    from embodied.envs.maniskill.bridge.put_on_plate import variants

    drawn = variants(which)[name]
    for number in np.random.default_rng(0).integers(len(drawn), size=300).tolist():
        episode = drawn.episode(number)
        kind, wrong = episode.extra
        assert wrong != getattr(episode, kind)
    assert len(drawn.episode(len(drawn) - 1).places) == 3
