"""The real package `verifiers`: `load_environment`, datasets and rubrics before 0.4, tasksets and agents from then on.

python -m venv FOLDER && FOLDER/bin/python -m pip install "verifiers>=0.4,<0.5"
EMBODIED_VERIFIERS_PYTHON=FOLDER/bin/python python -m pytest tests/envs/verifiers/test_verifiers_package.py
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from served_language import SECRET, served
from tiny_language import PLAIN, build, publish

from embodied import check
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.types import EpisodeSpec
from embodied.envs.config import EnvConfig
from embodied.envs.verifiers import env as verifiers
from embodied.envs.verifiers.env import Verifiers
from embodied.serving.config import TOKEN

CALLING = "{% for t in tools %}{{ t['function']['name'] }}<tool_call>{% endfor %}" + PLAIN
PAGE = Path(__file__).parents[3] / "docs" / "text_envs.md"
PYTHON = os.environ.get("EMBODIED_VERIFIERS_PYTHON")
if not PYTHON:
    pytest.skip("EMBODIED_VERIFIERS_PYTHON names no interpreter with verifiers", allow_module_level=True)
ASK = [PYTHON, "-c", "from importlib.metadata import version; print(version('verifiers'))"]
VERSION = subprocess.run(ASK, capture_output=True, text=True, timeout=100, check=True).stdout
OLD = tuple(map(int, VERSION.split(".")[:2])) < (0, 4)

ENVIRONMENTS = '''
import verifiers as vf
from datasets import Dataset


def examples(numbers):
    return Dataset.from_list([{"question": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in numbers])


def given(completion):
    last = completion[-1]
    return (last["content"] if isinstance(last, dict) else last.content).strip()


def right(completion, answer):
    if given(completion) == "raise":
        raise ValueError("an odd answer")
    return float(given(completion) == answer)


def short(completion):
    return float(len(given(completion)) < 4)


class Guessing(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        if given(messages) == "fail":
            raise vf.ToolError("no sandbox is left")
        state["guesses"] = state.get("guesses", 0) + 1
        return [{"role": "user", "content": f"{given(messages)} is wrong, {3 - state['guesses']} left"}]

    @vf.stop
    async def guessed(self, state, **kwargs):
        return bool(state["trajectory"]) and given(state["trajectory"][-1]["completion"]) == state["answer"]


def double(x: int) -> int:
    """Twice a number.

    Args:
        x: the number
    """
    return 2 * x


def load_environment(kind="single", evaluated=True):
    system = "Only the number."
    train, held_out = examples(range(10, 60)), examples(range(55, 65)) if evaluated else None
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
    known = {"dataset": train, "eval_dataset": held_out, "system_prompt": system}
    if kind == "single":
        return vf.SingleTurnEnv(rubric=rubric, **known, sampling_args={"max_tokens": 9})
    if kind == "multi":
        return Guessing(max_turns=3, rubric=rubric, **known)
    if kind == "tools":
        return vf.ToolEnv(tools=[double], rubric=rubric, **known)
    if kind == "mixed":
        return vf.EnvGroup([load_environment("single"), load_environment("multi")], env_names=["one", "many"])

    def best(completions, **kwargs) -> list[float]:
        sizes = [len(given(one)) for one in completions]
        return [float(size == max(sizes)) for size in sizes]

    return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[best]), **known)
'''
TASKSETS = '''
import verifiers.v1 as vf
from verifiers.v1.envs.best_of_n import BestOfNEnv


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("an odd answer")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 4)


class Double(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def double(self, x: int) -> str:
        """Twice a number."""
        return str(2 * x)


class ToolTask(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [Double(vf.ToolsetConfig())]


class SumsConfig(vf.TasksetConfig):
    count: int = 60


class Sums(vf.Taskset[SumTask, SumsConfig]):
    of = SumTask

    def load(self):
        for a in range(55, 55 + self.config.count):
            data = SumData(prompt=f"{a}+{a + 1}=", answer=str(2 * a + 1), system_prompt="Only the number.")
            yield self.of(data, self.config.task)


class WithTools(vf.Taskset[ToolTask, SumsConfig]):
    of, load = ToolTask, Sums.load


class Longest(BestOfNEnv):
    async def finalize(self, task, episode):
        sizes = [len(trace.last_reply) for trace in episode.traces]
        for trace, size in zip(episode.traces, sizes):
            trace.record_reward("longest", float(size == max(sizes)))


class BoxTask(SumTask):
    NEEDS_CONTAINER = True


class InBoxes(vf.Taskset[BoxTask, SumsConfig]):
    of, load = BoxTask, Sums.load


class Guessing(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            heard = await talk.turn()
            for left in (2, 1):
                if heard.terminated or heard.last_reply == task.data.answer:
                    break
                if heard.last_reply == "fail":
                    raise vf.ToolsetError("no sandbox is left")
                heard = await talk.turn(f"{heard.last_reply} is wrong, {left} left")


if __name__ == "__main__":  # a tool server is a program
    Double.run()
'''
MODULES = {
    "my_sums": ["Sums"],
    "my_guesses": ["Guessing", "Sums"],
    "my_tools": ["WithTools", "Double"],
    "my_ranks": ["Longest", "Sums"],
    "my_boxes": ["InBoxes"],
}
NAMES = {"single": "my-sums", "multi": "my-guesses", "tools": "my-tools", "ranks": "my-ranks", "boxes": "my-boxes"}


@pytest.fixture(autouse=True)
def environments(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(TASKSETS)
    for name, parts in MODULES.items():
        text = f"from my_parts import {', '.join(parts)}\n\n__all__ = {parts[: 1 if name == 'my_tools' else None]}\n"
        (tmp_path / f"{name}.py").write_text(ENVIRONMENTS if OLD else text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def config(kind, together=False, **kwargs):
    name, kwargs = ("my-sums", {"kind": kind, **kwargs}) if OLD else (NAMES[kind], kwargs)
    values = {
        "name": f"verifiers:{name}",
        "python": Path(PYTHON),
        "full_score": 1.5,
        "kwargs": kwargs,
        "together": together,
    }
    return TypeAdapter(EnvConfig).validate_python(values)


@pytest.fixture
def opened(environments):
    bridges = []

    def open_env(kind, *options, **kwargs):
        chosen = config(kind, *options, **kwargs)
        bridges.append(Verifiers.load(chosen))
        return Verifiers(chosen, bridges[-1])

    yield open_env
    for bridge in bridges:
        bridge.close()


def begun(env, number=0):
    return env.reset(EpisodeSpec("my-sums", number, 0, 0))


def test_an_example_of_the_real_package_is_asked_answered_and_scored(opened):
    env = opened("single")
    facts = {name: env.shared.facts[name] for name in ("train", "held_out", "turns", "kind")}
    # before 0.4 the examples from 55 to 59 of the data set are asked in evaluations, too
    assert facts == (
        {"train": 45, "held_out": 10, "turns": 1, "kind": "SingleTurnEnv"}
        if OLD
        else {"train": 57, "held_out": 3, "turns": 1, "kind": "SingleAgentEnv"}
    )
    system, user = begun(env, 1)
    assert (system["content"], user) == ("Only the number.", {"role": "user", "content": "56+57="})
    turn = env.step("113")
    assert (turn.reward, turn.success, turn.done, turn.facts["expected"]) == (1.5, True, True, "113")
    assert turn.facts["scores"].items() >= {("right", 1.0), ("short", 1.0 if OLD else 0.5)}
    assert turn.facts.get("max_tokens asked for") == (9 if OLD else None)
    assert [env.step(answer).reward for answer in ("a hundred", "") if begun(env)] == [0.0, 0.5]
    begun(env)
    turn = env.step("raise")
    assert "an odd answer" in (str(turn.facts["raised"]) if OLD else turn.dropped) and turn.reward == 0.0


def test_an_env_that_replies_goes_on_and_can_be_cut_short(opened):
    env = opened("multi")
    begun(env)
    turn = env.step("7")
    assert turn.said == ({"role": "user", "content": "7 is wrong, 2 left"},) and not turn.done
    assert env.step("111").success
    begun(env)
    assert [env.step("7").done for _ in range(3)] == [False, False, True]
    begun(env)
    turn = env.cut_short(env.step("7"))
    assert (turn.reward, turn.done, turn.dropped) == (0.5, True, "")
    begun(env)
    assert "no sandbox is left" in env.step("fail").dropped


def test_tools_are_called_in_words(opened):
    env, name = opened("tools"), "double" if OLD else "double_double"
    system, _ = begun(env)
    assert system["content"].startswith("Only the number.\n\n# Tools") and "Twice a number" in system["content"]
    turn = env.step(f'Twice, so <tool_call>{{"name": "{name}", "arguments": {{"x": 55}}}}</tool_call>')
    assert turn.said == ({"role": "user", "content": "<tool_response>\n110\n</tool_response>"},)
    assert "triple" in env.step('<tool_call>{"name": "triple", "arguments": {"x": 55}}</tool_call>').said[0]["content"]
    assert env.step("111").success


@pytest.mark.skipif(not OLD, reason="of load_environment")
def test_a_mixture_and_an_environment_without_an_eval_dataset(opened):
    env = opened("mixed")
    assert (env.shared.facts["held_out"], env.shared.facts["turns"]) == (20, 3)
    begun(env, 10)
    assert env.step("7").said[0]["content"] == "7 is wrong, 2 left"
    assert env.step("111").success
    assert Verifiers.held_out(config("single", evaluated=False)) == 2


def test_answers_that_are_scored_together_are_the_conversations_of_a_group(opened):
    env = opened("ranks", True) if OLD else opened("ranks", True, n=3)
    env.group_size = 3
    begun(env, 1)
    turns = [env.step(answer) for answer in ("113", "hundreds", "111")]
    assert [turn.ends_sample for turn in turns] == [True, True, False]
    assert turns[0].said[-1] == {"role": "user", "content": "56+57="}
    rewards = [score.reward for score in turns[-1].scores]
    assert rewards == ([0.0, 1.0, 0.0] if OLD else [1.5, 1.0, 0.5])
    if OLD:
        with pytest.raises(ConfigError, match=r"scores several answers together; try env.together=true"):
            Verifiers.check(config("ranks"))
    else:
        env = opened("ranks", n=2)
        begun(env)
        assert env.step("111").restarts and env.step("111").reward == 5.0


@pytest.mark.skipif(OLD, reason="of agents")
def test_an_agent_that_is_not_trained_needs_a_model_of_its_own(opened):
    env = opened("single", id="user-sim")
    with pytest.raises(EmbodiedError, match="its agent user is not to be trained, but asks the policy"):
        begun(env)


@pytest.mark.skipif(OLD, reason="of tasksets")
def test_tasks_for_containers_name_the_option_that_gives_them_one():
    with pytest.raises(ConfigError, match=r"need a container; with Docker try env.kwargs=.agent: .runtime: .type: doc"):
        Verifiers.check(config("boxes"))


ASKS = """
import asyncio, json, sys
import verifiers.v1 as vf

sys.path.insert(0, sys.argv[1])
from verifiers_child import TasksetEnvironment


async def main(url, key):
    env = TasksetEnvironment(vf, "my_tools", {})
    async with env.connected(url, key):
        print(json.dumps([await env.roll(one, "m") for one in env.train[:3]]))


asyncio.run(main(*sys.argv[2:]))
"""


@pytest.mark.skipif(OLD, reason="of tasksets")
def test_the_package_is_a_client_of_our_server(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    folder = publish(tmp_path / "model", "qwen3", tied=False, template=CALLING)
    with served(build(pretrained=str(folder), max_tokens=8), folder) as server:
        words = [PYTHON, "-c", ASKS, str(Path(verifiers.__file__).parent), server.url, SECRET]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        rolled = json.loads(done.stdout.splitlines()[-1])
        assert server.generation.answers == 3
    assert len(rolled) == 3 and all(one["reward"] in (0.0, 0.5) and not one["raised"] for one in rolled)


@pytest.mark.skipif(OLD, reason="of tasksets")
def test_the_taskset_of_the_page_keeps_the_contract(tmp_path, capsys):
    (page,) = re.findall(r"^```python\n# my_vf_sums.py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "my_vf_sums.py").write_text(page)
    words = ["env.name=verifiers:my_vf_sums", f"env.python={PYTHON}", "env.kwargs={taskset: {largest: 30}}"]
    assert check.main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "held out 20 prompts" in printed and "contract kept" in printed
