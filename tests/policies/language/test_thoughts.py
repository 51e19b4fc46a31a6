"""Conversations of several turns with chat templates that leave out earlier thoughts, token by token."""

import json
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_sight
import torch
from talking_runs import Talk
from thinking_templates import QWEN3, R1, tokenizer_with
from tiny_language import SEES, build, publish

from embodied.core.conversations import FIRST_PLACE
from embodied.core.pictures import drawing
from embodied.core.types import RESTART
from embodied.learners.imitation import ExampleTokens, written
from embodied.policies.language.policy import LanguagePolicy
from embodied.policies.language.slot_engine import SlotEngine
from embodied.policies.language.tokenizer import of_characters
from embodied.workflows.roles import ScoringWorker

ANSWERS = {  # as a model writes them after each kind of prompt
    "qwen3": "<think>\nthe answer? more to think\n</think>\n\nthe answer is {}",
    "r1": "more to think\n</think>\n\nthe answer is {}",
    "silent": "the answer is {}",
}
MINICPM = Path("transformers_utils/chat_templates/template_minicpmv45.jinja")  # Qwen3's own, in vLLM's wheel


def user(text):
    return ({"role": "user", "content": text},)


def tool(text):
    return ({"role": "tool", "content": text},)


TURNS = [user("what?"), tool("41"), tool("42"), user("and more?"), user("and the tool?"), tool("43")]


def played(tokenizer, answer):
    """The streams of a conversation, and of each turn: (stream, where its prompt ends, the prompt it should have)."""
    history, messages, streams, turns = [], [], [[]], []
    for number, said in enumerate(TURNS):
        whole = tokenizer.conversation(history, said)
        prompt = streams[-1] + tokenizer.encode(said, first=not number) if whole is None else whole
        if prompt[: len(streams[-1])] != streams[-1]:
            streams.append([])
        messages += said
        turns.append((len(streams) - 1, tokenizer.decode(prompt), tokenizer.render(messages), prompt))
        reply = [*tokenizer.encode_text(answer.format(number)), min(tokenizer.stops)]
        streams[-1][:] = prompt + reply
        history.append((said, np.array(reply)))
        messages.append({"role": "assistant", "content": answer.format(number)})
    return streams, turns


@pytest.mark.parametrize(
    ("template", "kind", "arguments", "streams"),
    [
        (QWEN3, "qwen3", {}, [0, 0, 0, 1, 2, 2]),  # thoughts stay while tools reply
        (QWEN3, "silent", {}, [0] * 6),
        (QWEN3, "silent", {"enable_thinking": False}, [0, 1, 2, 3, 4, 5]),  # each prompt ends with an empty thought
        (R1, "r1", {}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_each_prompt_is_what_the_template_renders_in_the_tokens_that_were_written(template, kind, arguments, streams):
    tokenizer = tokenizer_with(template, **arguments)
    _, turns = played(tokenizer, ANSWERS[kind])
    for number, (stream, text, rendered, prompt) in enumerate(turns):
        assert (stream, text) == (streams[number], rendered)
        assert prompt == tokenizer.encode_text(rendered)


@pytest.mark.parametrize(("template", "kind"), [(QWEN3, "qwen3"), (R1, "r1")])
def test_kept_thoughts_are_one_stream_of_what_was_written_and_what_the_template_adds(template, kind):
    tokenizer = tokenizer_with(template, "keep")
    (stream,), turns = played(tokenizer, ANSWERS[kind])
    expected = tokenizer.render(TURNS[0])
    for number, said in enumerate(TURNS):
        behind = tokenizer.render([*TURNS[0], {"role": "assistant", "content": "@"}, *said]).split("@")[1]
        expected += (behind if number else "") + ANSWERS[kind].format(number)
    assert tokenizer.decode(stream) == expected + "<|im_end|>"
    assert stream == tokenizer.encode_text(expected + "<|im_end|>")
    assert all(prompt == stream[: len(prompt)] for *_, prompt in turns)


@pytest.mark.skipif(find_spec("vllm") is None, reason="the template is in vLLM's wheel")
def test_a_published_template_of_this_kind_is_followed():
    wheel = Path(find_spec("vllm").origin).parent
    for thinks, kind, streams in [(True, "r1", [0, 0, 0, 1, 2, 2]), (False, "silent", [0, 1, 2, 3, 4, 5])]:
        tokenizer = tokenizer_with((wheel / MINICPM).read_text(), enable_thinking=thinks)
        _, turns = played(tokenizer, ANSWERS[kind])
        assert [stream for stream, *_ in turns] == streams
        assert all(prompt == tokenizer.encode_text(rendered) for _, _, rendered, prompt in turns)


def test_tokens_stay_as_written_even_if_the_tokenizer_would_choose_others():
    tokenizer = tokenizer_with(QWEN3)
    (end,) = tokenizer.stops
    letters = [token for letter in "the answer" for token in tokenizer.encode_text(letter)]
    assert letters != tokenizer.encode_text("the answer")
    thought = tokenizer.encode_text("<think>\nmore\n</think>\n\n")
    whole = tokenizer.conversation([(user("what?"), [*thought, *letters, end])], user("and?"))
    assert whole == tokenizer.encode_text(tokenizer.render(user("what?"))) + letters + [end] + tokenizer.encode_text(
        "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    (both,) = tokenizer.encode_text(" the")  # of which this template renders a part
    stripping = tokenizer_with(QWEN3.replace("parts[-1].lstrip('\n')", "parts[-1].strip()"))
    whole = stripping.conversation([(user("what?"), [*thought[:-1], both, end])], user("and?"))
    messages = [*user("what?"), {"role": "assistant", "content": "the"}, *user("and?")]
    assert stripping.decode(whole) == stripping.render(messages)


def test_imitation_and_scores_read_each_answer_behind_its_own_prompt():
    tokenizer, answer = tokenizer_with(QWEN3), ANSWERS["qwen3"]
    example = tuple((said, answer.format(number)) for number, said in enumerate(TURNS))
    streams, turns = played(tokenizer, answer)
    found = written(tokenizer, example)
    assert [tokens.tolist() for tokens, _ in found] == streams
    sampled = [tokens[mask].tolist() for tokens, mask in found]
    replies = [[*tokenizer.encode_text(reply), min(tokenizer.stops)] for _, reply in example]
    assert sampled == [[*chain(*some)] for some in (replies[:3], replies[3:4], replies[4:])]  # new answers alone
    tokens, mask = map(np.concatenate, zip(*found, strict=True))
    restart = np.isin(np.arange(len(tokens)), np.cumsum([len(stream) for stream in streams])[:-1])
    scoring = ScoringWorker(None, None, "cpu")
    scoring.tokenizer = tokenizer
    one = {"ids": np.array([7]), "lengths": np.array([len(tokens)]), "actions": tokens[:, None, None]}
    (talk,) = scoring.talks(SimpleNamespace(**one, mask=mask[:, None], obs={RESTART: restart}))
    assert (talk.asked, talk.answer) == (tokenizer.plain_text(turns[-1][3]), example[-1][1])


def test_imitation_shows_earlier_pictures_again_where_earlier_turns_change(tmp_path):
    """A batch lists the pictures that each stream of tokens shows: [first], [first, second]."""
    folder = tiny_sight.publish(tmp_path / "model", "qwen2_5_vl", thought="<think></think>")
    policy, names = build(SEES, pretrained=str(folder)), [drawing("add", seed, 48) for seed in (1, 2)]
    policy.tokenizer.prepare_turns("template")
    shown = [({"role": "user", "content": [{"type": "image", "image": name}]},) for name in names]
    batch = ExampleTokens(policy, [tuple(zip(shown, "78"))], 0, 1).batch(torch.tensor([0]))
    assert batch["pictures"] == [names[0], *names] and len(batch["lengths"]) == 2
    assert int((batch["actions"] == FIRST_PLACE).sum()) == 3


# Whole runs

CHAT = (  # a prompt ends with an empty thought, which later prompts leave out
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think></think>{% endif %}"
)


@pytest.mark.parametrize(
    ("thoughts", "env"), [("template", "Chat"), ("template", "ShownAgain"), ("template", "Forgets"), ("keep", "Chat")]
)
def test_learners_train_on_the_tokens_that_the_engine_saw(thoughts, env, monkeypatch, tmp_path):
    seen, trained, keep, forward = set(), set(), SlotEngine.step, LanguagePolicy.forward

    def step(engine):
        answers = keep(engine)
        for answer in answers:
            prompt = answer.key.prompt
            before = [] if answer.key.restarts else prompt.tokens.tolist()
            seen.add(((*before, *answer.key.said), tuple(answer.tokens.tolist())))
        return answers

    def score(policy, inputs):
        if torch.is_grad_enabled():
            tokens, mask = inputs["actions"].reshape(-1), inputs["mask"].reshape(-1)
            ends = np.cumsum(inputs["lengths"])
            for begin, end in zip(ends - inputs["lengths"], ends):
                stream, sampled = tokens[begin:end].tolist(), np.array(mask[begin:end])
                edges = np.flatnonzero(np.diff(sampled.astype(int), prepend=0, append=0))
                trained.update((tuple(stream[:a]), tuple(stream[a:b])) for a, b in edges.reshape(-1, 2))
        return forward(policy, inputs)

    monkeypatch.setattr(SlotEngine, "step", step)
    monkeypatch.setattr(LanguagePolicy, "forward", score)
    if env != "ShownAgain":
        folder = publish(tmp_path / "model", "qwen3", False, CHAT)
    else:
        folder = tiny_sight.publish(tmp_path / "model", "qwen2_5_vl", thought="<think></think>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(40, 70)]}))  # short answers
    options = [
        "policy.max_tokens=16",
        f"policy.pretrained={folder}",
        f"policy.thoughts={thoughts}",
        f"env.name=talking_env:{env}",
    ]
    with Talk(tmp_path / "run", *options, "policy.dtype=float64") as run:
        _, row = run.iterate(0)
    assert row["train/logprob_gap"] < 1e-6 and row["train/grad_norm"] > 1e-3
    assert len(trained) > 5 and trained <= seen
    prompts = [of_characters().decode([token for token in prompt if token >= 0]) for prompt, _ in seen]
    assert {prompt.count("<think>") for prompt in prompts} == ({1} if thoughts == "template" else {1, 2, 3})
    assert max(prompt.count(-1) for prompt, _ in seen) == (3 if env == "ShownAgain" else 0)
    assert max(prompt.count("again") for prompt in prompts) == (1 if env == "Forgets" else 2)
