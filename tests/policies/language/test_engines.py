"""Our own engine: what it writes is the model's, and nobody's neighbours, order or interruptions change a token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from language_models import (
    STOP,
    WORDS,
    answers,
    drained,
    engine_of,
    gpt2,
    llama,
    logprobs_by_the_model,
    question,
    qwen3,
)

from embodied.core import rng
from embodied.core.errors import ConfigError
from embodied.core.types import SamplingRule
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Request, Sampling, choose
from embodied.policies.lora import add_lora

MODELS = {
    "qwen3": qwen3,  # in float32, a step without modules
    "llama": llama,
    "gpt2": lambda: gpt2(torch.float32),
    "qwen3_modules": lambda: qwen3(torch.float64),
    "gpt2_modules": gpt2,
}
SHAPES = pytest.mark.parametrize("name", MODELS)
TWO_SHAPES = pytest.mark.parametrize("name", ["qwen3", "gpt2_modules"])


def tolerance(name):
    """Qwen3's norms compute in float32 always."""
    return 1e-9 if name == "gpt2_modules" else 1e-6


def questions(count=12, seed=0):
    """Prompts of 1 to 30 tokens, every third asked three times, with 1 to 30 tokens for the answer."""
    draws = np.random.default_rng(seed)
    prompts = [draws.integers(2, WORDS, draws.integers(1, 31)).tolist() for _ in range(count)]
    asked = [prompt for i, prompt in enumerate(prompts) for _ in range(1 if i % 3 else 3)]
    return [question(i, prompt, int(draws.integers(1, 31))) for i, prompt in enumerate(asked)]


def written(found):
    return {key: (answer.tokens.tolist(), answer.truncated) for key, answer in found.items()}


@SHAPES
def test_logprobs_are_those_of_one_forward_pass(name):
    model = MODELS[name]()
    asked = questions()
    found = answers(engine_of(model), asked)
    exact = next(model.parameters()).dtype == torch.float64
    for request in asked:
        answer = found[request.key]
        assert answer.tokens.dtype == np.int32
        assert answer.logprobs.dtype == (np.float64 if exact else np.float32)
        want = logprobs_by_the_model(model, request, answer)
        np.testing.assert_allclose(answer.logprobs, want, rtol=0, atol=tolerance(name))


@TWO_SHAPES
def test_greedy_answers_are_those_of_generate(name):
    model = MODELS[name]()
    found = answers(engine_of(model), questions(), temperature=0)
    for request in questions():
        ids = torch.tensor([request.tokens])
        settings = {"do_sample": False, "eos_token_id": STOP, "pad_token_id": 0}
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_tokens, **settings
            )
            out = out[0, len(request.tokens) :]
        assert found[request.key].tokens.tolist() == out.tolist()


def sampling(engine, override):
    return override and Sampling(3, f"act/{override.stream}", override, engine.stops)


@TWO_SHAPES
def test_conversations_written_together_keep_their_own_sampling_rules(name):
    model = MODELS[name]()
    overrides = [
        None,
        SamplingRule(0.0, stream="eval"),
        SamplingRule(1.0, stream="eval"),
        SamplingRule(0.4, top_p=0.8, top_k=5, stream="eval"),
        SamplingRule(1.0, stream="train"),
    ]
    asked = questions()
    engine = engine_of(model)
    mixed = answers(engine, [replace(r, sampling=sampling(engine, overrides[i % 5])) for i, r in enumerate(asked)])
    for place, override in enumerate(overrides):
        how = vars(override) if override else {}
        alone = answers(engine_of(model), asked, **how)
        for request in asked[place::5]:
            assert mixed[request.key].tokens.tolist() == alone[request.key].tokens.tolist()
    assert written(mixed) != written(answers(engine_of(model), asked))


def test_an_engine_writes_with_adapters():
    model = qwen3()
    before = written(answers(engine_of(model), questions(3)))
    add_lora({"": model}, LanguageConfig(name="language", lora_rank=4, lora_scale=2.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    found = answers(engine_of(model), questions(3))
    assert written(found) != before
    for request in questions(3):
        want = logprobs_by_the_model(model, request, found[request.key])
        np.testing.assert_allclose(found[request.key].logprobs, want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_half_precision_writes_the_log_probs_of_the_model(how):
    model = qwen3(torch.bfloat16 if how == "weights" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = answers(engine_of(model), questions(3))
        for request in questions(3):
            assert not found[request.key].dropped
            want = logprobs_by_the_model(model, request, found[request.key])
            np.testing.assert_allclose(found[request.key].logprobs, want, rtol=0, atol=0.1)


def random_drain(model, asked, draws):
    """The answers when requests come in any order and number, into any number of rows, and are at times interrupted."""
    engine = engine_of(model, max_running=int(draws.integers(1, 20)))
    engine.begin(1, 3, "train", SamplingRule())
    waiting = [(request, [], []) for request in asked]
    draws.shuffle(waiting)
    found, begun = {}, {}

    def note(answer, done):
        request, tokens, logprobs = begun.pop(answer.key)
        tokens, logprobs = [*tokens, *answer.tokens.tolist()], [*logprobs, *answer.logprobs.tolist()]
        if done:
            found[answer.key] = tokens, logprobs, answer.truncated
        else:
            waiting.append((request, tokens, logprobs))

    while waiting or engine.running:
        for _ in range(min(int(draws.integers(0, 5)), engine.room, len(waiting))):
            request, tokens, _ = known = waiting.pop(0)
            begun[request.key] = known
            stream = [*request.tokens, *tokens]
            engine.add(Request(request.key, stream, request.max_tokens - len(tokens), request.episode))
        for answer in engine.step():
            note(answer, done=True)
        if draws.random() < 0.05:
            for answer in engine.abort():
                note(answer, done=False)
    return found


@SHAPES
def test_no_order_batch_row_or_interruption_changes_a_token(name):
    model, asked = MODELS[name](), questions(6)
    want = answers(engine_of(model), asked)
    for seed in range(6 if name == "qwen3" else 2):
        found = random_drain(model, asked, np.random.default_rng(seed))
        assert {k: (tokens, cut) for k, (tokens, _, cut) in found.items()} == written(want)
        for key, (_, logprobs, _) in found.items():
            np.testing.assert_allclose(logprobs, want[key].logprobs, rtol=0, atol=tolerance(name))


def test_a_token_is_the_inverse_cdf_at_the_noise_of_its_episode_and_place():
    model = gpt2()
    request = Request("q", [5, 6, 7], 8, episode=11)
    answer = answers(engine_of(model), [request], temperature=0.7, seed=9, stream="eval")["q"]
    stream = [5, 6, 7]
    for token in answer.tokens.tolist():
        with torch.no_grad():
            chances = (model(torch.tensor([stream])).logits[0, -1] / 0.7).softmax(-1).numpy()
        noise = rng.uniform(9, "act/eval", np.array([11]), np.array([len(stream)]), 1)[0, 0]
        assert token == np.searchsorted(np.cumsum(chances), noise, side="right")
        stream.append(token)


@pytest.mark.parametrize(
    ("rule", "kept", "chances"),
    [
        ({}, 4, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, 2, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.6}, 2, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.3, "top_p": 0.7}, 2, [4 / 7, 3 / 7, 0, 0]),  # of the three, .444 + .333 reaches it
        ({"top_p": 0.7}, 2, [4 / 7, 3 / 7, 0, 0]),  # .4 + .3 reaches it
        ({"top_p": 0.71}, 3, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.5, "top_k": 3}, 2, [4 / 7, 3 / 7, 0, 0]),  # of the three, .444 + .333 reaches it
        ({"top_p": 1e-9}, 1, [1, 0, 0, 0]),
        ({"temperature": 0.5}, 4, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 0.5, "top_k": 2}, 2, [16 / 25, 9 / 25, 0, 0]),
    ],
)
def test_tokens_are_drawn_from_what_the_rule_keeps_and_scored_among_all(rule, kept, chances):
    """Probabilities .4 .3 .2 .1, in an order of their own; noise in equal steps shows every token's share."""
    order, steps = [2, 0, 3, 1], 1000
    given = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logits = torch.empty(4, dtype=torch.float64)
    logits[order] = given.log() + 5.0
    noise = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    tokens, logprobs = choose(logits.expand(steps, -1), SamplingRule(**rule), noise)
    found = torch.bincount(tokens, minlength=4)[order] / steps
    np.testing.assert_allclose(found, chances, atol=1.01 / steps)
    assert int((found > 0).sum()) == kept
    np.testing.assert_allclose(logprobs, logits.log_softmax(-1)[tokens], atol=1e-12)


def test_equally_likely_tokens_are_no_more_than_top_k():
    tokens, _ = choose(torch.zeros(50, 9), SamplingRule(top_k=3), (torch.arange(50) + 0.5) / 50)
    assert sorted({*tokens.tolist()}) == [0, 1, 2]


@TWO_SHAPES
def test_logprobs_of_rollouts_are_of_the_temperature_that_tokens_are_drawn_at(name):
    model, asked = MODELS[name](), questions()
    found = answers(engine_of(model), asked, 0.6, logprob_temperature=0.6)
    assert written(found) == written(answers(engine_of(model), asked, 0.6))
    for request in asked:
        want = logprobs_by_the_model(model, request, found[request.key], 0.6)
        np.testing.assert_allclose(found[request.key].logprobs, want, rtol=0, atol=2 * tolerance(name))


def test_tokens_come_as_often_as_the_model_says():
    model, tries = gpt2(), 4000
    found = answers(engine_of(model, max_running=500), [question(i, [5, 6], 1) for i in range(tries)])
    with torch.no_grad():
        chances = model(torch.tensor([[5, 6]])).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount([int(answer.tokens[0]) for answer in found.values()], minlength=WORDS)
    assert (((counts - tries * chances) ** 2) / (tries * chances)).sum() < 90  # chi squared of 49: p = .0003


def test_a_prompt_that_several_ask_is_computed_once():
    engine = engine_of(qwen3(), max_running=8)
    answers(engine, [question(i, [7] * 21, 5) for i in range(6)])
    assert engine.metrics() == {"prefilled": 20, "copied": 100, "kept": 0}
    engine.begin(1, 0, "train", SamplingRule())
    engine.add(question(0, [7] * 21, 30))
    engine.step()
    engine.add(question(1, [7] * 21, 30))  # while the other runs
    engine.step()
    assert engine.metrics() == {"prefilled": 20, "copied": 20, "kept": 0}
    engine.abort()


def next_turn(request, answer, said):
    return replace(request, tokens=[*request.tokens, *map(int, answer.tokens), *said])


@SHAPES
@pytest.mark.parametrize("max_running", [9, 4])
def test_a_next_turn_computes_only_what_was_added_and_writes_the_same(name, max_running):
    model, draws = MODELS[name](), np.random.default_rng(max_running)
    stops = tuple(range(2, WORDS, 3))
    engine, fresh = engine_of(model, stops, max_running=max_running), engine_of(model, stops)
    asked = [replace(question(i, draws.integers(2, WORDS, 12).tolist()), keep=True) for i in range(6)]
    engine.begin(1, 3, "train", SamplingRule())
    for turn in range(3):
        found, wanted = drained(engine, asked), answers(fresh, asked)
        assert written(found) == written(wanted)
        for request in asked:
            logprobs = logprobs_by_the_model(model, request, found[request.key])
            np.testing.assert_allclose(found[request.key].logprobs, logprobs, rtol=0, atol=tolerance(name))
        numbers = engine.metrics()
        assert numbers["kept"] + numbers["prefilled"] + numbers["copied"] == sum(len(r.tokens) - 1 for r in asked)
        if turn and max_running > 4:  # else conversations take the rows of those between two turns
            assert numbers["kept"] >= 0.5 * sum(len(request.tokens) for request in asked)
        said = [draws.integers(2, WORDS, draws.integers(1, 9)) for _ in asked]
        asked = [next_turn(request, found[request.key], more) for request, more in zip(asked, said, strict=True)]
        draws.shuffle(asked)
    engine.begin(2, 3, "train", SamplingRule())  # weights may be others now
    drained(engine, asked)
    assert engine.metrics()["kept"] == 0


def test_an_answer_ends_with_its_stop_token_or_is_cut_off():
    model = gpt2()
    (free,) = answers(engine_of(model, stops=()), [question(0, [5, 6], 10)]).values()
    assert len(free.tokens) == 10 and free.truncated
    stop = int(free.tokens[3])
    assert stop not in free.tokens[:3]
    (answer,) = answers(engine_of(model, stops=(stop,)), [question(0, [5, 6], 10)]).values()
    assert answer.tokens.tolist() == free.tokens[:4].tolist()
    assert not answer.truncated and len(answer.logprobs) == 4
    (answer,) = answers(engine_of(model, stops=(stop,)), [question(0, [5, 6], 4)]).values()
    assert not answer.truncated  # the stop token is the last that it may write


def test_a_conversation_never_becomes_longer_than_max_length():
    found = answers(engine_of(gpt2(), stops=(), max_length=16), [question(0, [5] * 10), question(1, [5] * 16)])
    assert [len(found[0].tokens), found[0].truncated] == [6, True]
    assert [len(found[1].tokens), found[1].truncated, found[1].dropped] == [0, True, ""]


def test_aborted_requests_return_the_tokens_written_so_far():
    engine = engine_of(gpt2(), stops=(), max_running=3)
    engine.begin(1, 3, "train", SamplingRule())
    for number in range(2):
        engine.add(question(number, [5, 6, number]))
    engine.step(), engine.step()
    engine.add(question(2, [5]))
    assert (engine.running, engine.room) == (3, 0)
    back = {answer.key: answer for answer in engine.abort()}
    assert {key: len(answer.tokens) for key, answer in back.items()} == {0: 2, 1: 2, 2: 0}
    assert all(answer.truncated for answer in back.values())
    assert (engine.running, engine.room) == (0, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_answer_with_numbers_that_are_not_finite_is_dropped_without_changing_others(value):
    model = gpt2()
    fine = [question(i, [5, 6, i]) for i in range(2, 6)]
    want = written(answers(engine_of(model), fine))
    with torch.no_grad():
        model.transformer.wte.weight = torch.nn.Parameter(model.transformer.wte.weight.clone())  # not the head's
        model.transformer.wte.weight[STOP + 40] = value
    asked = [question(0, [5, 41, 6]), *fine[:2], question(1, [5, 6, 41]), *fine[2:]]
    found = answers(engine_of(model, max_running=3), asked)
    assert found[0].dropped == found[1].dropped == "a log-prob is not finite"
    found = {key: answer for key, answer in found.items() if key > 1 and 41 not in answer.tokens}
    assert len(found) > 1
    assert written(found) == {key: want[key] for key in found}


def test_room_is_what_cache_gb_holds():
    token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, dim, bytes
    assert engine_of(qwen3(), max_length=100, cache_gb=5.5 * 100 * token / 1e9).room == 5
    assert engine_of(qwen3(), max_length=100, cache_gb=1.0, max_running=7).room == 7
    with pytest.raises(ConfigError, match=r"no room for one conversation.*try policy.max_length=50"):
        engine_of(qwen3(), max_length=100, cache_gb=50.5 * token / 1e9)


def test_new_weights_of_the_policy_write_the_next_round():
    model = gpt2()
    engine = engine_of(model)
    with torch.inference_mode():  # as a worker acts
        before = answers(engine, questions(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter + 0.1
            parameter.data[0] += 0.5
    after = answers(engine, questions(3))
    assert written(before) != written(after)
    for request in questions(3):
        np.testing.assert_allclose(
            after[request.key].logprobs, logprobs_by_the_model(model, request, after[request.key]), rtol=0, atol=1e-9
        )


def test_a_round_may_begin_only_when_nothing_runs():
    engine = engine_of(gpt2())
    engine.begin(1, 0, "train", SamplingRule())
    engine.add(question(0, [5]))
    with pytest.raises(AssertionError, match="of the one before"):
        engine.begin(2, 0, "train", SamplingRule())
    assert len(drained(engine, [])) == 1
    with pytest.raises(ValueError, match="nothing to continue"):
        engine.add(question(1, []))
