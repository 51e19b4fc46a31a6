"""Epochs over a text env's questions: each comes once before any comes again, whatever holds the questions."""

import json

import pytest
from pydantic import TypeAdapter
from talking_runs import Talk

from embodied.core.types import EpisodeList
from embodied.envs import env_class
from embodied.envs.config import EnvConfig
from embodied.envs.text.math import Math, MathQuestions, questions

GROUP = 2


def config(**options):
    return TypeAdapter(EnvConfig).validate_python(options)


def episodes_of(chosen, seed=0):
    kind = env_class(chosen)
    counts = kind.count_training_questions(chosen)
    return EpisodeList(seed, "train", kind.tasks(chosen), group_size=GROUP, question_counts=counts), counts


def env_of(chosen):
    kind = env_class(chosen)
    return kind(chosen, MathQuestions(*questions(chosen), None) if kind is Math else kind.load(chosen))


def asked(chosen, first, count, seed=0):
    """What groups ask, from the `first` on."""
    episodes, _ = episodes_of(chosen, seed)
    env = env_of(chosen)
    return [repr(env.reset(episodes[number * GROUP])) for number in range(first, first + count)]


def sources(folder):
    lines = [{"question": f"{number}?", "answer": 1} for number in range(60)]
    (folder / "math.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"prompt": f"text {n}"}) for n in range(230)))
    return {
        "math": config(name="math", file=str(folder / "math.jsonl")),
        "reverse_text": config(name="reverse_text", file=str(folder / "texts.jsonl")),
        "sums": config(name="sums", task="fewshot_sums"),
    }


@pytest.mark.parametrize("name", ["math", "reverse_text", "sums"])
def test_every_question_is_asked_once_in_an_epoch_and_in_another_order_in_the_next(name, tmp_path):
    chosen = sources(tmp_path)[name]
    (count,) = episodes_of(chosen)[1]
    first, second = asked(chosen, 0, count), asked(chosen, count, count)
    assert len({*first}) == count and {*first} == {*second}
    assert first != second and first != asked(chosen, 0, count, seed=1)


def test_a_run_that_goes_on_from_any_group_asks_what_is_left_of_its_epoch(tmp_path):
    chosen = sources(tmp_path)["math"]
    whole = asked(chosen, 0, 114)
    assert whole == asked(chosen, 0, 20) + asked(chosen, 20, 94), "the number of a group alone says what it asks"
    episodes, _ = episodes_of(chosen)
    assert episodes[40].question == episodes[41].question != episodes[42].question, "a group has one question"


def test_tasks_of_different_size_have_epochs_of_their_own():
    episodes, counts = episodes_of(config(name="sums", task=["add2", "fewshot_sums"]))
    assert counts == (90 * 90 - 200, 49 * 49 - 200)
    of = [episodes[number * GROUP] for number in range(2 * counts[1])]
    assert len({spec.question for spec in of if spec.task == "fewshot_sums"}) == counts[1]
    assert len({spec.question for spec in of if spec.task == "add2"}) == counts[1]


def test_a_resumed_run_goes_on_in_the_middle_of_its_epoch(tmp_path):
    def indices(loop):
        return [spec.question for spec in loop.collector.specs_of(loop.collector.pool.deal(20))]

    words = ("env.name=sums", "env.task=add2", "algo.prompts=epochs")
    with Talk(tmp_path / "one", *words) as run:
        numbers = run.iterate(0)[1]
        state, then = run.loop.collector.save(), indices(run.loop)
    with Talk(tmp_path / "two", *words) as run:
        run.loop.collector.restore(state)
        assert indices(run.loop) == then
    assert numbers["groups/epochs"] == 5 / (90 * 90 - 200)
