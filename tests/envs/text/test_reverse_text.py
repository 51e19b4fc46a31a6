"""The env of texts to be written backwards."""

import json
from difflib import SequenceMatcher

import pytest

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs.text.config import ReverseTextConfig
from embodied.envs.text.toys import ReverseText


def config(**options):
    return ReverseTextConfig(name="reverse_text", **options)


def asked(env, task, held_out=-1, seed=0):
    return env.reset(EpisodeSpec(task, held_out, seed, 0))


def test_the_right_answer_to_letters_is_the_letters_backwards():
    env = ReverseText(config(task="letters"))
    said = asked(env, "letters", 3)
    text = said.removeprefix("reverse ").removesuffix(":")
    assert said == f"reverse {text}:" and 3 <= len(text) <= 6 and env.solution() == text[::-1]
    assert env.step(text[::-1]).success and env.step(text[::-1]).reward == 1.0
    near = env.step(f"{text[::-1]}x")
    assert not near.success and near.reward == SequenceMatcher(None, f"{text[::-1]}x", text[::-1]).ratio() > 0.8
    assert env.step("").reward == 0.0


def test_a_sentence_backwards_is_right_between_tags_alone():
    env = ReverseText(config())
    system, user = asked(env, "sentences", seed=5)
    assert (system["role"], user["role"]) == ("system", "user") and "<reversed_text>" in system["content"]
    right = user["content"][::-1]
    assert env.step(right).reward == 0.0, "without tags"
    assert env.step(env.solution()).success
    assert env.step(f"<reversed_text>?</reversed_text> no: <reversed_text>\n{right}\n</reversed_text>").success
    assert 0 < env.step(f"<reversed_text>{right[:4]}</reversed_text>").reward < 1


def test_texts_of_a_file_are_held_out_from_the_first(tmp_path):
    path = tmp_path / "texts.jsonl"
    texts = [f"text number {number}" for number in range(ReverseText.num_held_out + 1)]
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in [*texts, texts[0]]))
    given = config(file=path)
    ReverseText.check(given)
    env = ReverseText(given, ReverseText.load(given))
    assert asked(env, "sentences", 7)[1]["content"] == texts[7]
    assert asked(env, "sentences", seed=3)[1]["content"] == texts[-1]
    path.write_text(json.dumps({"prompt": "one"}))
    with pytest.raises(ConfigError, match="needs more than 200 texts"):
        ReverseText.check(given)
    path.write_text('{"text": "one"}')
    with pytest.raises(ConfigError, match=r"it has no 'prompt'; env\.file is JSONL"):
        ReverseText.check(given)
