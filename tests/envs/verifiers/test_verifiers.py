"""Environments of the package `verifiers`, against a stand-in for their process: it speaks the same lines and asks the
endpoint over HTTP, and needs nothing to be installed."""

import json
import os
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter
from verifiers_stand_in import PICTURE, stand_in

from embodied.core.errors import EmbodiedError
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class
from embodied.envs.config import EnvConfig
from embodied.envs.text.text_env_checker import check_text_env
from embodied.envs.verifiers import env as verifiers
from embodied.envs.verifiers.env import Verifiers
from embodied.envs.verifiers.verifiers_child import Problem, split_examples, turns_of, what_counts


@pytest.fixture
def python(tmp_path):
    stand_in(tmp_path / "python")
    return tmp_path / "python"


def config(python, name="verifiers:stand-in", **options):
    verifiers._facts.clear()
    return TypeAdapter(EnvConfig).validate_python({"name": name, "python": python, **options})


@pytest.fixture
def opened(python):
    bridges = []

    def open_env(plays="one turn", **options):
        chosen = config(python, kwargs={"plays": plays}, **options)
        bridges.append(Verifiers.load(chosen))
        return Verifiers(chosen, bridges[-1])

    yield open_env
    for bridge in bridges:
        bridge.close()


def spec(number=-1, seed=0):
    return EpisodeSpec("stand-in", number, seed, 0)


def other(env):
    return Verifiers(env.config, env.shared)


def patient_for(seconds, env):
    env.shared.config = env.config.model_copy(update={"score_s": seconds})


def test_an_example_of_the_stand_in_is_asked_answered_and_scored(opened):
    env = opened()
    assert env.reset(spec(3)) == ({"role": "system", "content": "Add."}, {"role": "user", "content": "held out 3?"})
    turn = env.step("3")
    assert (turn.reward, turn.success, turn.done) == (1.0, True, True)
    assert turn.facts == {"max_tokens asked for": 7, "expected": "3", "scores": {"right": 1.0}}
    env.reset(spec(3))
    wrong = env.step("4")
    assert (wrong.reward, wrong.success, wrong.done, wrong.dropped) == (0.0, False, True, "")


def test_training_examples_are_drawn_by_the_seed(opened):
    env = opened()
    asked = [env.reset(spec(seed=seed))[1]["content"] for seed in (1, 2, 1)]
    assert asked[0] == asked[2] != asked[1] and all(one.startswith("train ") for one in asked)


def test_a_second_turn_says_only_what_is_new(opened):
    env = opened("two turns")
    env.reset(spec(5))
    turn = env.step("perhaps 5")
    assert turn.said == ({"role": "user", "content": "again, perhaps 5?"},) and not turn.done
    assert env.step("5").success


def test_an_empty_answer_is_an_answer(opened):
    env = opened("two turns")
    env.reset(spec(5))
    assert env.step("").said == ({"role": "user", "content": "again,  ?"},)


def test_conversations_go_on_beside_each_other(opened):
    first = opened("two turns")
    second = other(first)
    first.reset(spec(1)), second.reset(spec(2))
    assert second.step("b").said[0]["content"] == "again, b?"
    assert first.step("a").said[0]["content"] == "again, a?"
    assert first.step("1").success and second.step("2").success


def test_a_conversation_that_is_cut_short_is_scored_as_it_is(opened):
    env = opened("two turns")
    env.reset(spec(6))
    turn = env.cut_short(env.step("thinking"))
    assert (turn.reward, turn.done, turn.said) == (0.5, True, ())


# What goes wrong


def test_a_hanging_conversation_is_dropped_and_others_go_on_in_a_new_process(opened):
    stuck = opened("two turns")
    beside, pid = other(stuck), stuck.shared.child.process.pid
    stuck.reset(spec(1)), beside.reset(spec(2))
    assert beside.step("half way").said[0]["content"] == "again, half way?"
    patient_for(0.2, stuck)
    turn = stuck.step("hang")
    patient_for(60, stuck)
    assert turn.dropped == "the environment did nothing for env.score_s=0.2" and turn.done
    assert beside.step("2").success
    assert stuck.shared.child.process.pid != pid
    assert stuck.reset(spec(1))[1]["content"] == "held out 1?"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_conversation_whose_process_dies_is_dropped_and_the_process_replaced(opened):
    env = opened()
    env.reset(spec(1))
    assert env.step("die").dropped == "the environment's process died"
    env.reset(spec(1))
    assert env.step("1").success


def test_a_process_that_dies_while_nothing_is_asked_of_it_is_replaced(opened):
    env = opened("two turns", score_s=1000)

    def killed():
        os.kill(env.shared.child.process.pid, 9)
        env.shared.child.over.wait(60)

    killed()
    assert env.reset(spec(1))[1]["content"] == "held out 1?"
    assert env.step("perhaps").said[0]["content"] == "again, perhaps?"
    killed()
    assert env.step("1").success


def test_an_environment_that_fails_drops_the_conversation_with_the_reason(opened):
    env = opened()
    env.reset(spec(1))
    turn = env.step("fail")
    assert turn.dropped == "the environment failed: RuntimeError: no sandbox is left" and turn.reward == 0


def test_an_environment_may_rewrite_the_conversation(opened):
    env = opened("rewrites")
    system, _ = env.reset(spec(5))
    turn = env.step("perhaps 5")
    rest = [("user", "something else?"), ("assistant", "perhaps 5"), ("user", "again, perhaps 5?")]
    assert turn.restarts and turn.said == (system, *({"role": who, "content": words} for who, words in rest))
    turn = env.step("5")
    assert turn.success and not turn.restarts


def test_runs_of_an_agent_are_parts_of_a_conversation_or_the_conversations_of_a_group(opened):
    env = opened("siblings")
    first = env.reset(spec(5))
    parts = [env.step(answer) for answer in ("long", "short", "longer")]
    assert [(turn.said, turn.restarts, turn.done) for turn in parts] == [
        (first, True, False),
        (first, True, False),
        ((), False, True),
    ]
    assert parts[-1].reward == 1.0
    env = opened("siblings", together=True)
    env.reset(spec(5))
    turns = [env.step(answer) for answer in ("long", "longer", "twelve")]
    assert [turn.ends_sample for turn in turns] == [True, True, False]
    assert [score.reward for score in turns[-1].scores] == [0.0, 1.0, 1.0]


def test_pictures_come_as_data_urls(opened):
    env = opened("pictures", pictures=True)
    assert env.reset(spec(5)) == ({"role": "user", "content": [{"type": "image", "image": PICTURE}]},)
    assert env.step("5").success
    with pytest.raises(EmbodiedError, match="it shows the picture x; only data URLs are read"):
        env.reset(spec(1))


@pytest.mark.parametrize(
    ("plays", "why"),
    [
        ("pictures", "it says image_url, and a conversation here is text; try env.pictures=true"),
        ("streams", "it asks for something else than one chat completion: "),
    ],
)
def test_an_unsupported_environment_is_refused_by_name(opened, plays, why):
    env = opened(plays)
    with pytest.raises(EmbodiedError) as caught:  # by what it asks first, or after an answer
        env.step("1" if env.reset(spec(1)) else "")
    assert f"env.name=verifiers:stand-in (StandInEnv): {why}" in str(caught.value)


def test_the_endpoint_wants_its_key_and_knows_no_other_conversation(opened):
    env = opened()
    url = "http://{}:{}".format(*env.shared.server_address)
    assert url.startswith("http://127.0.0.1:")

    def code(key, number=10**6, path="v1/chat/completions"):
        body = json.dumps({"model": f"policy-{number}"}).encode()
        request = urllib.request.Request(f"{url}/{path}", body, {"Authorization": f"Bearer {key}"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        with caught.value as refused:
            return refused.code

    env.reset(spec(1))
    assert code("guessed", number=1) == 401
    assert code(env.shared.key) == 404
    assert code(env.shared.key, number="x") == 404
    assert code(env.shared.key, path="nothing") == 400
    assert env.step("1").success


# Tools


def test_tools_are_described_called_and_answered_in_words(opened):
    env = opened("tools")
    system, user = env.reset(spec(8))
    assert system["role"] == "system" and '"name": "double"' in system["content"] and user["content"] == "held out 8?"
    turn = env.step('Let me see. <tool_call>\n{"name": "double", "arguments": {"x": 4}}\n</tool_call>')
    assert turn.said == ({"role": "user", "content": "<tool_response>\n8\n</tool_response>"},)
    assert env.step("8").success


@pytest.mark.parametrize("call", ['{"name": "double", "arguments": 4}', "{double}", '{"arguments": {}}'])
def test_calls_that_are_not_well_formed_are_text(opened, call):
    env = opened("tools")
    env.reset(spec(8))
    turn = env.step(f"<tool_call>{call}</tool_call>")
    assert turn.done and not turn.success and not turn.dropped


# What the process makes of an environment


def examples(*prompts, **more):
    return [{"prompt": [{"role": "user", "content": prompt}], **more} for prompt in prompts]


def split(dataset, eval_dataset=()):
    train, held_out = split_examples(dataset, eval_dataset)
    return [[one["prompt"][0]["content"] for one in part] for part in (train, held_out)]


def test_the_eval_dataset_is_held_out_and_what_it_repeats_is_not_trained_on():
    assert split(examples(*"abcd"), examples(*"cx")) == [["a", "b", "d"], ["c", "x"]]


def test_without_an_eval_dataset_the_first_examples_are_held_out():
    assert split(examples(*"aba")) == [["b"], ["a"]]
    train, held_out = split(examples(*map(str, range(100))))
    assert (len(train), held_out) == (95, [*"01234"])


def test_games_that_ask_all_the_same_differ_in_what_is_to_be_found():
    first, other = examples("Guess.", answer="cat") + examples("Guess.", answer="dog"), examples("Guess.", answer="cow")
    assert split(first + other, first) == [["Guess."], ["Guess.", "Guess."]]


def test_an_environment_that_only_evaluates_what_it_trains_on_is_refused():
    with pytest.raises(Problem, match="no example is left to train on: all 2 are held out"):
        split(examples(*"ab"), examples(*"ab"))


def test_an_environment_has_as_many_turns_as_its_longest_part_or_does_not_say():
    one, three, endless = (SimpleNamespace(max_turns=turns) for turns in (1, 3, -1))
    assert [turns_of(env) for env in (one, endless, SimpleNamespace())] == [1, 0, 0]
    assert turns_of(SimpleNamespace(envs=[one, three])) == 3
    assert turns_of(SimpleNamespace(envs=[one, endless])) == 0


def test_an_error_or_no_reward_is_no_score():
    assert what_counts({"reward": 0.0, "error": {"error": "ToolError"}, "error_chain": "a -> b"}) == {"error": "a -> b"}
    assert "error" in what_counts({"reward": None})
    assert what_counts({"reward": 2, "metrics": {"right": 1, "note": "x"}, "answer": "4"}) == {
        "reward": 2,
        "metrics": {"right": 1},
        "answer": "4",
    }


# Before a run


def test_the_contract_is_kept(opened, python):
    chosen = config(python)
    assert env_class(chosen) is Verifiers
    seen = check_text_env(Verifiers, chosen)
    assert "held out 0?" in seen.said and Verifiers.held_out(chosen) == 20 and Verifiers.longest_episode(chosen) == 1


def test_a_process_that_ends_or_hangs_while_it_loads_is_named(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 7\n")
    script.chmod(0o755)
    with pytest.raises(EmbodiedError, match="its process ended with code 7 while loading"):
        Verifiers.check(config(script))
    script.write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(EmbodiedError, match=r"was not loaded within env.start_s=0.2"):
        Verifiers.check(config(script, start_s=0.2))
