"""A group's prompt goes through the network once, and nothing else changes."""

import numpy as np
import pytest
import torch
from tiny_language import alone, answers, apart, build, inputs_of

from embodied.policies.language import policy as module
from embodied.policies.language.packing import lay_out

DRAW = np.random.default_rng(3)


def some(count):
    return DRAW.integers(3, 100, size=count).tolist()


TWO_GROUPS = [
    *answers(*(some(size) for size in (3, 1, 5, 2)), prompt=some(9), group=4),
    *answers(*(some(size) for size in (2, 4, 1)), prompt=some(6), group=2),
]
TURNS = [(0, [(False, [5, 6, 7]), (True, [8, 9]), (False, [10]), (True, [11])])]  # mask F F F T T F T
MIXED = [*TWO_GROUPS, *TURNS, (7, [(False, [5, 6, 7]), (True, [8])])]


def results(policy, inputs):
    """Log-probs, entropies and the gradient of a sum of both."""
    policy.zero_grad()
    scores = policy(inputs)
    weights = torch.linspace(0.5, 2, len(scores.logprobs), dtype=policy.exact)[:, None, None]
    (weights * (scores.logprobs + 0.1 * scores.entropy)).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return scores.logprobs.detach(), scores.entropy.detach(), torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize(
    ("options", "bar"),
    [
        ({"preset": "tiny_gpt2", "dtype": "float64"}, 1e-12),
        ({"preset": "tiny"}, 1e-5),
        ({"preset": "tiny", "dtype": "float64"}, 1e-5),  # its norms compute in float32
    ],
)
def test_shared_prompts_score_and_learn_like_separate_conversations(options, bar):
    policy, inputs = build(**options), inputs_of(*MIXED)
    shared, separate = results(policy, inputs), results(policy, apart(inputs))
    for one, other in zip(shared, separate, strict=True):
        assert (one - other).abs().max() <= bar * max(1.0, float(other.abs().max()))
    expected = alone(policy, inputs)
    mask = inputs["mask"].reshape(-1)
    for which, known in enumerate(shared[:2]):
        found = torch.cat([each[which] for each in expected]).detach()
        assert (known[mask, 0, 0] - found).abs().max() <= bar * max(1.0, float(found.abs().max()))
    assert shared[2].abs().max() > 1e-3


def test_large_groups_that_are_split_score_and_learn_alike():
    policy, inputs = build(preset="tiny_gpt2", dtype="float64"), inputs_of(*answers(*(some(90) for _ in range(7))))
    shared, separate = results(policy, inputs), results(policy, apart(inputs))
    for one, other in zip(shared, separate, strict=True):
        assert (one - other).abs().max() <= 1e-12 * max(1.0, float(other.abs().max()))


def test_tokens_of_the_env_have_no_log_prob_and_no_gradient():
    policy, inputs = build(preset="tiny_gpt2", dtype="float64"), inputs_of(*TURNS)
    scores = policy(inputs)
    told = ~torch.from_numpy(inputs["mask"].reshape(-1))
    assert told.tolist() == [True, True, True, False, False, True, False]
    assert not scores.logprobs[told].any() and not scores.entropy[told].any() and not scores.values.any()
    assert scores.logprobs[~told].all()
    scores.logprobs[told].sum().backward()
    assert not any(p.grad.any() for p in policy.parameters() if p.grad is not None)


def test_conversations_of_which_nothing_was_sampled_can_stand_in_for_others():
    policy = build()
    scores = policy(inputs_of((0, [(False, [5, 6])])))
    (0.0 * scores.logprobs.sum()).backward()
    assert not any(p.grad.any() for p in policy.parameters() if p.grad is not None)


def test_a_conversation_that_begins_with_a_sampled_token_is_refused():
    with pytest.raises(ValueError, match="begins with a sampled token"):
        build()(inputs_of((0, [(True, [5, 6])])))


def test_imitation_is_the_negative_log_prob_of_each_token():
    policy, inputs = build(), inputs_of(*TURNS)
    assert torch.equal(policy.imitate(inputs, None), -policy(inputs).logprobs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_at_least_float32(dtype):
    scores = build(dtype=dtype)(inputs_of(*TURNS))
    assert {scores.logprobs.dtype, scores.entropy.dtype, scores.values.dtype} == {torch.float32}


def test_recomputed_activations_give_the_same_gradient():
    from embodied.learners.model import recompute

    inputs = inputs_of(*MIXED)
    known = results(build(), inputs)
    policy = build()
    assert len(policy.blocks()) == 3
    recompute(policy)
    assert torch.equal(results(policy, inputs)[2], known[2])


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float64"},
        {"dtype": "float64", "preset": "tiny_gpt2"},  # of which the head is the embeddings
        {"dtype": "float64", "train_layers": 1},
        {"dtype": "float64", "lora_rank": 2, "lora_targets": "reference"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_log_probs_of_a_large_vocabulary_are_made_in_parts_and_never_kept(options, monkeypatch):
    policy, inputs, kept = build(**options), inputs_of(*MIXED), []
    places = len(lay_out(*(inputs[key].ravel() for key in ("actions", "mask", "lengths", "groups"))).sources)

    def keep(tensor):
        kept.append((*tensor.shape,))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        whole = results(policy, inputs)
        assert (places, 100) in kept
        kept.clear()
        monkeypatch.setattr(module, "LOGITS_BYTES", 5 * 100 * policy.exact.itemsize)
        parts = results(policy, inputs)
    assert (places, 100) not in kept
    bar = 1e-12 if options["dtype"] == "float64" else 0.01  # a gradient in bfloat16 has two digits
    for one, other in zip(whole, parts, strict=True):
        assert (one - other).abs().max() <= bar * max(1.0, float(other.abs().max()))
