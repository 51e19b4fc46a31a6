"""Proofs of what a server computed: honest ones pass however the server batches, and a liar is refused by name."""

import base64
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_language import build

from embodied.core import rng
from embodied.core.types import SamplingRule
from embodied.policies.language.engine import Request, choose, draw_errors, make_engine
from embodied.policies.language.http_messages import ParsedAnswer
from embodied.policies.language.trials import LIMIT, STAKES, CheckedAnswer, Trial
from embodied.policies.language.trust import (
    BLOCK,
    LIMITS,
    ProofBlock,
    answer_errors,
    check_logprobs,
    check_proof,
    likelier,
    rounding_noise,
    states_behind,
)

RULES = (SamplingRule(), SamplingRule(0.7), SamplingRule(0.0), SamplingRule(1.0, top_k=5), SamplingRule(0.9, top_p=0.6))


def test_tokens_that_were_drawn_as_asked_have_no_error_and_others_have():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(3, -1)
    errors = draw_errors(logits, torch.arange(3), SamplingRule(), torch.full((3,), 0.6))
    assert errors.tolist() == pytest.approx([0.4, 0.0, 0.1])
    draw = torch.Generator().manual_seed(0)
    logits, noise = 3 * torch.randn(500, 40, generator=draw), torch.rand(500, generator=draw, dtype=torch.float64)
    for rule in RULES:
        tokens, _ = choose(logits, rule, noise)
        assert draw_errors(logits, tokens, rule, noise).max() < 1e-6
        for other in RULES:
            assert other == rule or draw_errors(logits, tokens, other, noise).mean() > 100 * LIMITS[torch.float32].drawn


@pytest.mark.parametrize(
    ("sizes", "rounding"),
    [({"preset": "tiny_gpt2", "dtype": "float64"}, 1e-6), ({"preset": "tiny"}, 1e-4)],
    ids=["modules", "fast"],
)
@pytest.mark.parametrize("at_a_time", [1, 4])
def test_a_proof_is_of_the_states_that_the_learner_computes_however_answers_are_batched(sizes, rounding, at_a_time):
    policy = sharpened(**sizes, max_length=128, max_running=at_a_time)
    engine, rule = make_engine(policy.config, policy), SamplingRule(0.8)
    engine.begin(1, 3, "train", rule)
    asked = [Request(n, [5 + n, 6, 7], length, n) for n, length in enumerate((1, BLOCK, BLOCK + 1, 5, 2 * BLOCK, 40))]
    waiting, found = [replace(r, sampling=replace(engine.round, proves=True)) for r in asked], {}
    while waiting or engine.running:
        while waiting and engine.room:
            engine.add(waiting.pop(0))
        found |= {answer.key: answer for answer in engine.step()}
    for request in asked:
        answer = found[request.key]
        proof = [ProofBlock.from_text(block.to_text()) for block in answer.proof]
        assert len(proof) == -(-len(answer.tokens) // BLOCK)
        places = len(request.tokens) + np.arange(len(answer.tokens))
        noise = rng.uniform(3, "act/train", np.full(len(places), request.episode), places, 1)[:, 0]
        written = answer.tokens.tolist()
        told = policy, states_behind(policy, request.tokens, written), written
        assert max(answer_errors(*told, proof, rule, noise)) < rounding
        assert answer_errors(*told, proof[:-1], rule, noise)[0] == 1.0


def sharpened(**options):
    """A policy that prefers some tokens to others, unlike a fresh one."""
    policy = build(**options)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return policy


def test_a_number_near_zero_counts_no_more_than_others():
    states = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    states[0, 3] = 1e-9
    rounded = states + 1e-7 * torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    assert ProofBlock.of(rounded).error(states) < 1e-6


OF_SERVERS = [("float32", SamplingRule()), ("float32", SamplingRule(0.0))]
OF_SERVERS += [("bfloat16", SamplingRule(0.7, top_k=5)), ("bfloat16", SamplingRule(top_p=0.6))]
SMALL = {"preset": "tiny_gpt2", "max_length": 64, "max_running": 20}


def checked(policy, server, asked, rule, seen=lambda tokens: tokens, drawn=None, check=check_proof):
    """What the policy finds of a server's answers. The server's kernels are others."""
    engine = make_engine(policy.config, server)
    engine.begin(1, 3, "train", drawn or rule)
    waiting, answers = list(asked), []
    with rounding_noise(server, 99):
        while waiting or engine.running:
            while waiting and engine.room:
                request = waiting.pop(0)
                sampling = replace(engine.round, proves=True)
                engine.add(replace(request, tokens=seen(request.tokens), sampling=sampling))
            answers += engine.step()
    for answer in answers:
        proof = [block.to_text() for block in answer.proof]
        parsed = ParsedAnswer(answer.tokens.tolist(), answer.logprobs.tolist(), "length", None, proof=proof)
        places = 3 + np.arange(len(answer.tokens))
        noise = rng.uniform(3, "act/train", np.full(len(places), answer.key), places, 1)[:, 0]
        yield check(policy, asked[answer.key].tokens, parsed, rule, noise)


def moved(policy, by):
    """The same policy with noise on its weights."""
    other, draw = copy.deepcopy(policy), torch.Generator().manual_seed(2)
    for parameter in other.parameters():
        parameter.data *= 1 + by * torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
    return other


@pytest.mark.parametrize(("dtype", "rule"), OF_SERVERS, ids=str)
def test_answers_whose_errors_exceed_the_measured_rounding_are_refused(dtype, rule, monkeypatch):
    policy = sharpened(**SMALL, dtype=dtype)
    monkeypatch.setitem(
        LIMITS, policy.dtype, replace(LIMITS[policy.dtype], proof=0.0, drawn=0.0)
    )  # every answer is suspicious
    asked = [Request(n, [5 + n, 6, 7], 1 + n % 5, n) for n in range(10)]
    assert not any(each.mismatch for each in checked(policy, policy, asked, rule))
    if dtype == "float32":
        assert all(each.mismatch for each in checked(policy, moved(policy, 1e-3), asked, rule))
    others = checked(policy, policy, asked, rule, lambda tokens: [9, *tokens[1:]])
    assert sum(bool(each.mismatch) for each in others) > 8


@pytest.mark.parametrize("check", [check_proof, check_logprobs])
def test_in_bfloat16_several_answers_together_expose_weights_that_no_single_answer_does(check):
    policy, rule = sharpened(**SMALL, dtype="bfloat16"), SamplingRule()
    asked = [Request(n, [5 + n % 60, 6 + n % 7, 7 + n % 11], 24, n) for n in range(80)]

    def evidence(*server):
        trial = Trial()
        for each in checked(policy, *server, check=check):
            assert not each.mismatch
            if found := trial.add(each):
                return found
        return ""

    assert not evidence(policy, asked, rule)
    assert "differ from the learner's numbers" in evidence(moved(policy, 0.01), asked, rule)
    if check is check_logprobs:
        assert "were not drawn" in evidence(policy, asked, rule, lambda tokens: tokens, SamplingRule(0.3))


def test_the_capital_of_a_trial_grows_with_every_win_and_starts_again_after_a_loss():
    trial, won = Trial(), CheckedAnswer(size=1.0)
    assert trial.add(CheckedAnswer(size=-1.0)) == ""
    answers = 0
    while not (found := trial.add(won)):
        answers += 1
        assert trial.capital[1] == pytest.approx((1 + STAKES) ** answers)
    assert np.mean((1 + STAKES) ** answers) < LIMIT < np.mean((1 + STAKES) ** (answers + 1))  # 1.9 ** 27 / 3
    assert answers == 26 and "of 28 that were checked together, differ from the learner's numbers by more" in found


def test_only_the_first_answer_of_a_prompt_or_a_conversation_is_bet_on():
    trial = Trial()
    asked = [Request(0, [1, 2], 4, 7), Request(1, [1, 2], 4, 8), Request(2, [1, 2, 3], 4, 7), Request(3, [1, 3], 4, 9)]
    assert [trial.is_new(request) for request in asked] == [True, False, False, True]


def test_a_server_is_accused_for_errors_in_one_direction_and_not_for_rounding():
    draw = np.random.default_rng(0)
    rounding, common = draw.normal(size=(3000, 2, 64)), draw.normal(size=64)
    honest, liar = Trial(), Trial()
    assert not any(honest.add(CheckedAnswer(shifts=each)) for each in rounding)
    found = [bool(liar.add(CheckedAnswer(shifts=each + 0.8 * common))) for each in rounding[:100]]
    assert 20 < found.index(True) < 60


def test_the_place_of_a_token_among_likelier_tokens_is_uniform_if_it_was_drawn_by_the_rule():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    assert likelier(logits, torch.tensor([2]), SamplingRule(), torch.tensor([0.6]))[0] == pytest.approx(-0.36 - 0.05)
    assert likelier(logits, torch.tensor([1]), SamplingRule(), torch.tensor([0.6]))[0] == pytest.approx(0.4 - 0.05)


def test_a_block_that_was_not_computed_does_not_fit_and_one_that_cannot_be_read_is_refused():
    states = torch.randn(BLOCK, 16, generator=torch.Generator().manual_seed(0))
    honest = ProofBlock.of(states)
    assert honest.error(states) < 1e-6 < 1e-3 < honest.error(states * 1.01)
    small = states.flatten().abs().topk(len(honest.places), largest=False).indices.sort().values
    true_but_small = replace(honest, places=small.numpy().astype("<u4"), numbers=states.flatten()[small].numpy())
    shuffled = replace(honest, places=honest.places[::-1])
    far_away = replace(honest, places=honest.places + np.uint32(10**6))
    empty = replace(honest, places=honest.places[:0], numbers=honest.numbers[:0])
    no_numbers = replace(honest, numbers=np.full_like(honest.numbers, np.nan))
    for wrong in (true_but_small, shuffled, far_away, empty, no_numbers):
        assert wrong.error(states) > 0.5
    for means in (honest.means[:3], np.full_like(honest.means, np.nan)):
        assert replace(honest, means=means).error(states) == 1
    for text in (None, 7, "a", "!!!!", base64.b64encode(b"12345").decode()):
        with pytest.raises(ValueError, match="a block of the proof cannot be read"):
            ProofBlock.from_text(text)
