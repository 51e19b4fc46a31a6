"""Where tokens of conversations go in a network's rows, and which conversations go through it together."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_language import answers, apart, build, inputs_of
from torch.nn.attention.flex_attention import create_mask

from embodied.policies.language.attention import DENSE, attention_mask, rule
from embodied.policies.language.packing import first_fit, into_passes, lay_out


def flat(inputs):
    return [inputs[name].reshape(-1) for name in ("actions", "mask", "lengths", "groups")]


def tokens_in(packed):
    """Those that go through the network, without padding."""
    return (packed.blocks >= 0).sum()


def passes(conversations, most):
    return into_passes(*flat(inputs_of(*conversations)), most)


def test_a_prompt_is_laid_out_once_and_answers_restart_behind_it():
    packed = lay_out(*flat(inputs_of(*answers([7, 8], [9], prompt=(5, 6)))))
    assert packed.ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 2]]
    assert packed.segments.tolist() == [[0, 0, 1, 1, 2]]
    assert packed.sources.tolist() == [1, 2]
    assert packed.takes.tolist() == [0, 1, 0]
    assert packed.scored.tolist() == [2, 3, 6]


def test_only_prompts_are_shared_however_alike_answers_are():
    packed = lay_out(*flat(inputs_of(*answers([7, 8], [7, 8]))))
    assert tokens_in(packed) == 3 + 2 + 2


def test_conversations_of_a_group_with_different_prompts_share_what_is_alike():
    some = [(0, [(False, [5, 6, 7]), (True, [8])]), (0, [(False, [5, 9]), (True, [8])])]
    assert tokens_in(lay_out(*flat(inputs_of(*some)))) == 1 + 3 + 2


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
GROUPS = st.lists(st.tuples(st.integers(1, 9), LENGTHS), min_size=1, max_size=5)


def drawn(groups):
    """Groups (tokens of the prompt, tokens of each answer) as conversations whose prompts differ."""
    return [
        (number, [(False, [number + 3] * prompt), (True, [50 + at] * size)])
        for number, (prompt, sizes) in enumerate(groups)
        for at, size in enumerate(sizes)
    ]


@settings(deadline=None)
@given(GROUPS, st.integers(4, 60))
def test_tokens_are_those_of_prompts_once_and_of_all_answers(groups, row):
    packed = lay_out(*flat(inputs_of(*drawn(groups))), row=row)
    assert tokens_in(packed) == sum(prompt + sum(sizes) for prompt, sizes in groups)
    assert len(packed.scored) == sum(sum(sizes) for _, sizes in groups)


@settings(deadline=None, max_examples=30)
@given(GROUPS, st.integers(4, 60))
def test_both_kernels_have_the_same_mask_and_every_token_attends_to_some_token(groups, row):
    packed = lay_out(*flat(inputs_of(*drawn(groups))), row=row)
    parts = [torch.from_numpy(part) for part in (packed.blocks, packed.segments, packed.order)]
    rows, width = packed.blocks.shape
    for window in (None, 3):
        mask = attention_mask(packed, DENSE, torch.device("cpu"), window)
        assert torch.equal(mask, create_mask(rule(*parts, window), rows, 1, width, width, device="cpu"))
        assert mask.any(dim=-1).all()


@settings(deadline=None)
@given(GROUPS, st.integers(4, 60))
def test_each_conversation_is_in_one_pass_that_is_not_too_large(groups, most):
    conversations = drawn(groups)
    inputs = inputs_of(*conversations)
    found = passes(conversations, most)
    assert sorted(one for part in found for one in part) == list(range(len(conversations)))
    for part in found:
        count = tokens_in(lay_out(*flat(inputs_of(*(conversations[one] for one in part)))))
        assert count <= most or len(part) == 1
    # A group that fits is never split.
    for number, (prompt, sizes) in enumerate(groups):
        if prompt + sum(sizes) <= most:
            members = set(np.flatnonzero(inputs["groups"] == number).tolist())
            assert any(members <= set(part) for part in found)


def test_packing_puts_the_largest_items_first_into_the_first_bin_with_room():
    assert first_fit([3, 7, 2, 5], 9) == [[1, 2], [3, 0]]


def test_a_group_is_split_where_attention_would_cost_more_than_the_prompt_again():
    four = flat(inputs_of(*answers([8] * 10, [9] * 10, [10] * 10, [11] * 10, prompt=[5] * 6)))
    assert tokens_in(lay_out(*four)) == 46
    # 46 (1 + 46/50) = 88.3; two of 26 (1 + 26/50) = 79.0; four of 16 (1 + 16/50) = 84.5
    assert tokens_in(lay_out(*four, wide=50)) == 52
    # 64 (1 + 16/4) = 320
    assert tokens_in(lay_out(*four, wide=4)) == 64


def test_groups_need_not_stand_together():
    one, two = answers([8], [9]), answers([8], [9], prompt=(20, 21), group=1)
    mixed = [one[0], two[0], one[1], two[1]]
    assert tokens_in(lay_out(*flat(inputs_of(*mixed)))) == 3 + 2 + 2 + 2
    assert passes(mixed, 5) == [[0, 2], [1, 3]]


def test_the_policy_packs_as_it_will_score():
    policy = build()
    inputs = inputs_of(*answers([8] * 3, [9] * 3, prompt=[5] * 4))
    assert policy.pack(*flat(inputs), 10) == [[0, 1]]
    assert policy.pack(*flat(apart(inputs)), 10) == [[0], [1]]
