"""The real package `verifiers` before 0.4: `load_environment`, datasets and rubrics."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from verifiers_package import PYTHON, needs_verifiers

from embodied import check
from embodied.core.types import EpisodeSpec
from embodied.envs.config import EnvConfig
from embodied.envs.text.verifiers import Verifiers

pytestmark = needs_verifiers(lambda version: version < (0, 4))

ENVIRONMENTS = '''
import time

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
    if given(completion) == "hang":
        time.sleep(1000)
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
        return [1.0 for _ in completions]

    return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[best]), **known)
'''


@pytest.fixture(autouse=True)
def environments(tmp_path, monkeypatch):
    (tmp_path / "my_sums.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def config(**options):
    values = {"name": "verifiers:my-sums", "python": Path(PYTHON), "full_score": 1.5, **options}
    return TypeAdapter(EnvConfig).validate_python(values)


@pytest.fixture
def opened(environments):
    bridges = []

    def open_env(kind, **options):
        chosen = config(kwargs={"kind": kind}, **options)
        bridges.append(Verifiers.load(chosen))
        return Verifiers(chosen, bridges[-1])

    yield open_env
    for bridge in bridges:
        bridge.close()


def spec(number=-1, seed=0):
    return EpisodeSpec("my-sums", number, seed, 0)


def test_single_turn(opened):
    env = opened("single")
    assert env.shared.facts | {"version": ""} == {
        "train": 45,  # 55 to 59 are asked in evaluations
        "held_out": 10,
        "turns": 1,
        "kind": "SingleTurnEnv",
        "version": "",
    }
    assert env.reset(spec(1)) == (
        {"role": "system", "content": "Only the number."},
        {"role": "user", "content": "56+57="},
    )
    turn = env.step("113")
    assert (turn.reward, turn.success, turn.done) == (1.5, True, True)
    assert turn.facts["expected"] == "113" and turn.facts["max_tokens asked for"] == 9
    assert turn.facts["scores"].items() >= {("right", 1.0), ("short", 1.0)}
    env.reset(spec(1))
    assert env.step("a hundred").reward == 0.0
    env.reset(spec(1))
    assert env.step("").reward == 0.5
    env.reset(spec(1))
    turn = env.step("raise")
    assert "an odd answer" in str(turn.facts["raised"]) and turn.reward == 0.0


def test_without_an_eval_dataset_the_first_examples_are_held_out(environments):
    chosen = config(kwargs={"evaluated": False})
    assert Verifiers.held_out(chosen) == 2


def test_multi_turn(opened):
    env = opened("multi")
    env.reset(spec(0))
    turn = env.step("7")
    assert turn.said == ({"role": "user", "content": "7 is wrong, 2 left"},) and not turn.done
    assert env.step("111").success
    env.reset(spec(0))
    for _ in range(2):
        assert not env.step("7").done
    assert env.step("7").done
    env.reset(spec(0))
    turn = env.cut_short(env.step("7"))
    assert (turn.reward, turn.done, turn.dropped) == (0.5, True, "")
    env.reset(spec(0))
    assert "no sandbox is left" in env.step("fail").dropped


def test_one_that_hangs_is_dropped_and_the_other_goes_on(opened):
    env = opened("multi")
    beside = Verifiers(env.config, env.shared)
    env.reset(spec(0)), beside.reset(spec(1))
    assert beside.step("7").said[0]["content"] == "7 is wrong, 2 left"
    for _ in range(2):
        env.step("hang")
    env.shared.config = env.config.model_copy(update={"score_s": 0.5})
    assert "did nothing for" in env.step("hang").dropped
    env.shared.config = env.config
    assert beside.step("8").said[0]["content"] == "8 is wrong, 1 left"
    assert beside.step("113").success


WORKER = """
import sys, time
from types import SimpleNamespace
from embodied.envs.text.verifiers_bridge import Bridge, Example

python, kwargs = sys.argv[1], {"kind": "single"}
config = SimpleNamespace(name="verifiers:my-sums", python=python, kwargs=kwargs, start_s=600, score_s=600)
bridge = Bridge(config)
example = Example(bridge, True, 0)
example.begin()
print(bridge.child.process.pid, flush=True)
example.answer("hang")
"""


def test_one_that_hangs_ends_when_its_worker_is_killed(environments):
    worker = subprocess.Popen([sys.executable, "-c", WORKER, PYTHON], stdout=subprocess.PIPE, text=True)
    with worker:
        pid = int(worker.stdout.readline())
        worker.kill()
    deadline = time.monotonic() + 100
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_tools(opened):
    env = opened("tools")
    system, _ = env.reset(spec(0))
    assert system["content"].startswith("Only the number.\n\n# Tools") and "Twice a number" in system["content"]
    turn = env.step('Twice, so <tool_call>{"name": "double", "arguments": {"x": 55}}</tool_call>')
    assert turn.said == ({"role": "user", "content": "<tool_response>\n110\n</tool_response>"},)
    turn = env.step('<tool_call>{"name": "triple", "arguments": {"x": 55}}</tool_call>')
    assert "triple" in turn.said[0]["content"]
    assert env.step("111").success


def test_a_mixture_of_environments(opened):
    env = opened("mixed")
    assert (env.shared.facts["held_out"], env.shared.facts["turns"]) == (20, 3)
    env.reset(spec(10))
    assert env.step("7").said[0]["content"] == "7 is wrong, 2 left"
    assert env.step("111").success


def test_check_says_what_it_is(environments, capsys):
    assert check.main(["env.name=verifiers:my-sums", f"env.python={PYTHON}", "env.full_score=1.5"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "55+56=" in printed and "held out 10 prompts" in printed and "contract kept" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env.name=verifiers:not-there"], "there is no module not_there, which is installed like a package"),
        (["env.name=verifiers:my-sums", "env.kwargs={wrong: 1}"], "my_sums cannot be loaded: TypeError: "),
        (["env.name=verifiers:my-sums", "env.kwargs={kind: best}"], "its rubric scores several answers together"),
    ],
)
def test_what_cannot_be_played_is_one_line(environments, capsys, words, message):
    assert check.main([*words, f"env.python={PYTHON}"]) == 2
    printed = capsys.readouterr().err
    assert message in " ".join(printed.split()), printed
