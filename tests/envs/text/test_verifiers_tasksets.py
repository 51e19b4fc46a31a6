"""The real package `verifiers` from 0.4 on: tasksets, tasks, and the agents of an env that play them."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from served_language import SECRET, served
from tiny_language import PLAIN, build, publish
from verifiers_package import PYTHON, needs_verifiers

from embodied import check
from embodied.core.types import EpisodeSpec
from embodied.envs.config import EnvConfig
from embodied.envs.text import verifiers
from embodied.envs.text.verifiers import Verifiers
from embodied.serving.config import TOKEN

CALLING = "{% for t in tools %}{{ t['function']['name'] }}<tool_call>{% endfor %}" + PLAIN
PAGE = Path(__file__).parents[3] / "docs" / "text_envs.md"
pytestmark = needs_verifiers(lambda version: version >= (0, 4))

TASKS = '''
import time

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("an odd answer")
        if trace.last_reply == "hang":
            time.sleep(1000)
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
    count: int = 40


class Sums(vf.Taskset[SumTask, SumsConfig]):
    of = SumTask

    def load(self):
        for a in range(10, 10 + self.config.count):
            data = SumData(prompt=f"{a}+{a + 1}=", answer=str(2 * a + 1), system_prompt="Only the number.")
            yield self.of(data, self.config.task)


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
'''
MODULES = {
    "my_parts": TASKS,
    "my_sums": 'from my_parts import Sums\n\n__all__ = ["Sums"]\n',
    "my_guesses": 'from my_parts import Guessing, Sums\n\n__all__ = ["Guessing", "Sums"]\n',
    "my_tools": """
import verifiers.v1 as vf
from my_parts import Double, Sums, SumsConfig, ToolTask


class WithTools(vf.Taskset[ToolTask, SumsConfig]):
    of, load = ToolTask, Sums.load


__all__ = ["WithTools"]
""",
}


@pytest.fixture(autouse=True)
def tasksets(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    with (tmp_path / "my_parts.py").open("a") as file:
        file.write('\n\nif __name__ == "__main__":\n    Double.run()\n')  # a tool server is a program
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


@pytest.fixture
def opened(tasksets):
    bridges = []

    def open_env(name, **kwargs):
        values = {"name": f"verifiers:{name}", "python": Path(PYTHON), "full_score": 1.5, "kwargs": kwargs}
        chosen = TypeAdapter(EnvConfig).validate_python(values)
        bridges.append(Verifiers.load(chosen))
        return Verifiers(chosen, bridges[-1])

    yield open_env
    for bridge in bridges:
        bridge.close()


def spec(number=0):
    return EpisodeSpec("my-sums", number, 0, 0)


def test_a_task_is_asked_answered_and_scored(opened):
    env = opened("my-sums", taskset={"count": 60})
    facts = {name: env.shared.facts[name] for name in ("train", "held_out", "turns", "kind")}
    assert facts == {"train": 57, "held_out": 3, "turns": 1, "kind": "SingleAgentEnv"}
    system, user = env.reset(spec(1))
    assert (system["content"], user) == ("Only the number.", {"role": "user", "content": "11+12="})
    turn = env.step("23")
    assert (turn.reward, turn.success, turn.done) == (1.5, True, True)
    assert turn.facts == {"expected": "23", "scores": {"right": 1.0, "short": 0.5}}
    env.reset(spec(1))
    assert env.step("a hundred").reward == 0.0
    env.reset(spec(1))
    assert env.step("").reward == 0.5
    env.reset(spec(1))
    assert "ValueError: an odd answer" in env.step("raise").dropped


def test_an_env_that_replies_goes_on_and_can_be_cut_short(opened):
    env = opened("my-guesses")
    env.reset(spec())
    turn = env.step("7")
    assert turn.said == ({"role": "user", "content": "7 is wrong, 2 left"},) and not turn.done
    assert env.step("21").success
    env.reset(spec())
    assert [env.step("7").done for _ in range(3)] == [False, False, True]
    env.reset(spec())
    turn = env.cut_short(env.step("7"))
    assert (turn.reward, turn.done, turn.dropped) == (0.5, True, "")
    env.reset(spec())
    assert "no sandbox is left" in env.step("fail").dropped


def test_tools_are_called_in_words(opened):
    env = opened("my-tools")
    system, _ = env.reset(spec())
    assert system["content"].startswith("Only the number.\n\n# Tools") and "Twice a number" in system["content"]
    turn = env.step('Twice, so <tool_call>{"name": "double_double", "arguments": {"x": 55}}</tool_call>')
    assert turn.said == ({"role": "user", "content": "<tool_response>\n110\n</tool_response>"},)
    assert "triple" in env.step('<tool_call>{"name": "triple", "arguments": {}}</tool_call>').said[0]["content"]
    assert env.step("21").success


def test_one_that_hangs_is_dropped_and_the_others_go_on(opened):
    env = opened("my-guesses")
    beside = Verifiers(env.config, env.shared)
    env.reset(spec(0)), beside.reset(spec(1))
    assert beside.step("7").said[0]["content"] == "7 is wrong, 2 left"
    for _ in range(2):
        env.step("hang")
    env.shared.config = env.config.model_copy(update={"score_s": 0.5})
    assert "did nothing for" in env.step("hang").dropped
    env.shared.config = env.config
    assert beside.step("23").success


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


def test_the_package_is_a_client_of_our_server(tasksets, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    folder = publish(tmp_path / "model", "qwen3", tied=False, template=CALLING)
    with served(build(pretrained=str(folder), max_tokens=8), folder) as server:
        words = [PYTHON, "-c", ASKS, str(Path(verifiers.__file__).parent), server.url, SECRET]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        rolled = json.loads(done.stdout.splitlines()[-1])
        assert server.generation.answers == 3
    assert len(rolled) == 3 and all(one["reward"] in (0.0, 0.5) and not one["raised"] for one in rolled)


def test_the_taskset_of_the_page_keeps_the_contract(tmp_path, capsys):
    (page,) = re.findall(r"^```python\n# my_vf_sums.py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "my_vf_sums.py").write_text(page)
    words = ["env.name=verifiers:my_vf_sums", f"env.python={PYTHON}", "env.kwargs={taskset: {largest: 30}}"]
    assert check.main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "held out 20 prompts" in printed and "contract kept" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env.name=verifiers:not-there"], "there is no module not_there, which is installed like a package"),
        (["env.name=verifiers:my-sums", "env.kwargs={taskset: {wrong: 1}}"], "taskset.wrong Extra inputs"),
        (["env.name=verifiers:my-sums", "env.kwargs={wrong: 1}"], "wrong Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_played_is_one_line(capsys, words, message):
    assert check.main([*words, f"env.python={PYTHON}"]) == 2
    printed = capsys.readouterr().err
    assert message in " ".join(printed.split()), printed
