"""OpenVLA's tokens, units and prompts by hand."""

import numpy as np
import pytest
import torch
from tiny_vla import build

from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.openvla.network import ActionTokens, pick
from embodied.policies.vla.policy import pad_rows
from embodied.policies.vla.statistics import Statistics, statistics_of


def test_tower_layers_after_the_features_in_use_are_frozen():
    still = {name.split(".")[2] for name, p in build().named_parameters() if not p.requires_grad}
    assert still == {"blocks", "norm", "attn_pool"}  # the towers' last blocks and what comes after them


def test_sampling_follows_the_tempered_probabilities():
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    numbers = (torch.arange(20_000) + 0.5) / 20_000
    for temperature in (1.0, 0.5):
        chosen = pick(logits.expand(20_000, 4), numbers, temperature)
        wanted = (logits / temperature).softmax(-1)
        np.testing.assert_allclose(np.bincount(chosen, minlength=4) / 20_000, wanted, atol=1e-3)


def test_action_tokens_are_the_published_ids():
    codes = ActionTokens(256)
    # 256 edges are 2/255 apart. Published ids are 32000 - bin with bins from 1, ours count from id 31744.
    assert codes.encode(np.array([-1.0, 1.0, 0.0])).tolist() == [255, 0, 128]
    assert codes.decode(torch.tensor([255]))[0] == pytest.approx(-1 + 1 / 255)
    assert codes.decode(torch.tensor([0]))[0] == codes.decode(torch.tensor([1]))[0] == pytest.approx(1 - 1 / 255)
    assert np.array_equal(codes.encode(codes.decode(torch.arange(1, 256)).numpy()), np.arange(1, 256))


def test_statistics_scale_what_the_mask_says():
    statistics = Statistics(np.array([-2.0, 0.0]), np.array([4.0, 1.0]), np.array([True, False]))
    assert statistics.from_unit(torch.tensor([[0.5, 0.5]])).tolist() == [[2.5, 0.5]]  # 0.5 * 1.5 * 6 - 2
    assert statistics.to_unit(torch.tensor([[2.5, 0.5]])).tolist() == [[0.5, 0.5]]
    stats = {"a": {"action": {"q01": [0.0], "q99": [1.0]}}, "b_no_noops": {"action": {"q01": [0.0], "q99": [2.0]}}}
    assert statistics_of(stats, "b", "x").high == [2.0] and statistics_of(stats, "a", "x").mask.all()
    for key, words in ((None, r"policy\.statistics=a\|b_no_noops"), ("c", "there are: a, b_no_noops")):
        with pytest.raises(ConfigError, match=words):
            statistics_of(stats, key, "x")


RANGE, NAN = {"q01": [0.0, -1.0], "q99": [1.0, 1.0]}, float("nan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": [True]}, r"q01 and q99 and mask are of the sizes \(2,\), \(2,\) and \(1,\)"),
        ({"q01": [0.0]}, "of the sizes"),
        ({"q01": "abc"}, "could not convert"),
        ({"q01": [[0.0], [-1.0]]}, "of the sizes"),
        ({"q01": [0.0, NAN]}, "is no range"),
        ({"q01": [0.0, None]}, "is no range"),
        ({"q01": [0.0, 2.0]}, "is no range"),
    ],
)
def test_invalid_action_ranges_are_refused_unless_masked(change, words):
    with pytest.raises(CheckpointError, match=f"here: the action statistics of kitchen cannot be read: .*{words}"):
        statistics_of({"kitchen": {"action": RANGE | change}}, None, "here")
    masked = RANGE | {"q01": [0.0, NAN], "mask": [True, False]}
    assert statistics_of({"kitchen": {"action": masked}}, None, "here").from_unit(torch.zeros(2))[1] == 0


def test_prompts_are_aligned_behind_the_first_token():
    ids, there = pad_rows([[1, 5, 6], [1, 7]], in_front=True)
    assert ids.tolist() == [[1, 5, 6], [1, 0, 7]] and there.tolist() == [[True] * 3, [True, False, True]]
