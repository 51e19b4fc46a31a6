"""Sums and sorting: what they ask, that held-out prompts stay held out, and what counts as right."""

import platform
import re
import sys

import pytest
from pydantic import TypeAdapter

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeList, EpisodeSpec
from embodied.envs import env_class
from embodied.envs.config import EnvConfig
from embodied.envs.text.text_env import TextEnv
from embodied.envs.text.text_env_checker import check_text_env

EVERY = [("sums", "add2"), ("sums", "fewshot_sums"), ("sums", "calc2"), ("sort", "sort4"), ("tools", "find")]


def config(name, **options):
    return TypeAdapter(EnvConfig).validate_python({"name": name, **options})


def env_of(name, task):
    chosen = config(name, task=task)
    return env_class(chosen)(chosen, env_class(chosen).load(chosen))


def asked(env, task, init_state_id=-1, seed=0, index=0):
    return env.reset(EpisodeSpec(task, init_state_id, seed, index))


@pytest.mark.parametrize(("name", "task"), EVERY)
def test_held_out_prompts_are_never_drawn_for_training(name, task):
    env = env_of(name, task)
    held_out = [asked(env, task, number, seed=number) for number in range(200)]
    assert len({*held_out}) == 200
    training = [asked(env, task, seed=seed) for seed in range(10_000)]
    assert not {*held_out} & {*training}
    assert len({*training}) > 1500, "training sees many different prompts"


@pytest.mark.parametrize(
    ("name", "task", "prompt", "right", "wrong"),
    [
        ("sums", "add2", r"(\d\d)\+(\d\d)=", ["{sum}", " {sum}", "{sum}\n"], ["", "{sum}1", "1{sum}", "={sum}"]),
        (
            "sums",
            "fewshot_sums",
            r"3 \+ 5 = 8\n12 \+ 7 = 19\n24 \+ 13 = 37\n(\d+) \+ (\d+) =",
            [" {sum}\n", " {sum}\n3 + 5", "{sum}"],
            ["\n{sum}", " {sum} +", ""],
        ),
    ],
)
def test_sums_ask_for_the_sum(name, task, prompt, right, wrong):
    env = env_of(name, task)
    for seed in range(5):
        numbers = re.fullmatch(prompt, asked(env, task, seed=seed))
        total = sum(map(int, numbers.groups()))
        for answer in right:
            turn = env.step(answer.format(sum=total))
            assert turn.success and turn.reward == 1.0 and turn.done and turn.facts == {"expected": str(total)}
        for answer in wrong:
            turn = env.step(answer.format(sum=total))
            assert not turn.success and turn.reward == 0.0 and turn.done


@pytest.mark.parametrize(
    ("task", "alone", "call", "other", "reply"),
    [
        ("find", "recall", r"<find>[A-Z]\w{3}</find>", "<find>Nobody</find>", "nothing was found\n"),
        ("python", "powers", r"<py>\d\d\*\*\d\d%\d\d</py>", "<py>1/0</py>", "ZeroDivisionError: division by zero\n"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the kernel confines programs")
def test_a_tool_tells_the_answer_to_a_call_and_only_with_the_tool(task, alone, call, other, reply):
    env, without = env_of("tools", task), env_of("tools", alone)
    assert env.longest_episode(env.config) == 2 and without.longest_episode(without.config) == 1
    for number in range(3):
        assert asked(env, task, number) == asked(without, alone, number)  # the same held-out questions
        expected = without.solution()
        assert re.fullmatch(call, env.solution())
        turn = env.step(env.solution())
        assert not turn.done and turn.said.split()[-1] == expected == env.solution()
        assert env.step(expected).success and without.step(expected).success
        assert not without.step(call).success
    asked(env, task)
    assert env.step(other).said == reply


def test_sorting_asks_for_four_to_six_digits_in_order():
    env = env_of("sort", "sort4")
    prompts = [asked(env, "sort4", seed=seed) for seed in range(300)]
    digits = [prompt.removeprefix("sort ").removesuffix(":") for prompt in prompts]
    assert {len(each) for each in digits} == {4, 5, 6}
    assert env.solution() == "".join(sorted(digits[-1]))
    assert env.step("".join(sorted(digits[-1]))).success
    assert not env.step("".join(sorted(digits[-1], reverse=True))).success


@pytest.mark.parametrize(("name", "task"), EVERY)
def test_sums_and_sorting_keep_the_contract(name, task):
    chosen = config(name, task=task)
    seen = check_text_env(env_class(chosen), chosen)
    assert seen.solution


def test_tasks_of_a_list_take_turns():
    chosen = config("sums", task=["add2", "calc2"])
    kind = env_class(chosen)
    specs = EpisodeList(0, "train", kind.tasks(chosen), group_size=2).first(8)
    env = kind(chosen, None)
    assert ["*" in env.reset(spec) for spec in specs] == [False, False, True, True] * 2
    assert kind.env_spec(chosen).max_episode_steps == 2, "a calculator needs two turns"
    check_text_env(kind, chosen)


def test_too_few_questions_are_refused_with_what_to_change():
    class Few(TextEnv):
        def reset(self, spec):
            return str(self.draw(spec, lambda rng: int(rng.integers(50))))

    with pytest.raises(ConfigError, match="only 50 different questions are drawn, and num_held_out=200"):
        asked(Few(config("sums")), "few")

    class All(Few):
        num_held_out = 50

    assert len({asked(All(config("sums")), "all", number) for number in range(50)}) == 50
    with pytest.raises(ConfigError, match="lower its num_held_out=50"):
        asked(All(config("sums")), "all")
