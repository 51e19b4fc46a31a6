"""`check_text_env` passes envs that keep the contract and names the rule that each of these broken envs breaks."""

import itertools
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter

from embodied import check
from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class
from embodied.envs.config import EnvConfig
from embodied.envs.env_checker import ContractViolation
from embodied.envs.text import text_env
from embodied.envs.text.text_env import TextEnv, Turn
from embodied.envs.text.text_env_checker import check_text_env


def config(**options):
    return TypeAdapter(EnvConfig).validate_python({"name": f"{__name__}:Doubling", **options})


def doubling():
    """The example in the contract's own docstring."""
    lines = text_env.__doc__.partition("    class Doubling")
    code = "class Doubling" + "".join(lines[2]).replace("\n    ", "\n")
    names = {"TextEnv": TextEnv, "Turn": Turn, "__name__": __name__}
    exec(code, names)
    return names["Doubling"]


Doubling = doubling()


class Guessing(TextEnv):
    """Of several turns, with messages, and with nothing to imitate."""

    max_turns = 7

    def reset(self, spec):
        self.number = self.draw(spec, lambda rng: int(rng.integers(10_000)))
        return ({"role": "user", "content": f"guess a number of {self.number % 100}"},)

    def step(self, answer):
        if answer.strip() == str(self.number):
            return Turn(1.0, success=True)
        return Turn(said="no, again", done=answer == "")


def test_the_example_of_the_contract_keeps_it():
    seen = check_text_env(Doubling, config())
    assert seen.said.startswith("'twice ") and seen.solution.isdigit() and seen.conversations > 600


class Numbered(Guessing):
    def reset(self, spec):
        super().reset(spec)
        return ({"role": "user", "content": f"guess {self.number}"},)


class Hidden(Guessing):
    def reset(self, spec):
        super().reset(spec)
        return ({"role": "user", "content": "guess my number"},)


class HiddenBehindASolution(Doubling):
    """It draws by itself, and only the solution tells its questions apart."""

    def reset(self, spec):
        self.number = spec.seed if spec.init_state_id < 0 else 10**6 + spec.init_state_id
        return "twice my number is "


@pytest.mark.parametrize("kind", [Numbered, Hidden, HiddenBehindASolution])
def test_several_turns_messages_unknown_solutions_and_hidden_questions_are_fine(kind):
    assert (check_text_env(kind, config()).solution is None) == issubclass(kind, Guessing)


class HidesHeldOut(Hidden):
    """What it trains on is held out, though no prompt shows it."""

    def reset(self, spec):
        said = super().reset(EpisodeSpec(spec.task, max(spec.init_state_id, 0), spec.seed, spec.index))
        return said


class IgnoresTheSpec(Doubling):
    count = itertools.count()

    def reset(self, spec):
        self.number = next(self.count)
        return f"twice {self.number} is "


class RemembersTheLast(Doubling):
    def reset(self, spec):
        before = getattr(self, "number", 0)
        return super().reset(spec) + str(before)


class TrainsOnHeldOut(Doubling):
    def reset(self, spec):
        self.number = (spec.seed if spec.init_state_id < 0 else spec.init_state_id) % 300
        return f"twice {self.number} is "


class AlwaysTheSame(Doubling):
    def reset(self, spec):
        self.number = 5 if spec.init_state_id < 0 else spec.init_state_id + 6
        return f"twice {self.number} is "


class HoldsOutOne(Doubling):
    def reset(self, spec):
        self.number = 5 if spec.init_state_id >= 0 else spec.seed
        return f"twice {self.number} is "


class HeldOutBySeed(Doubling):
    def reset(self, spec):
        self.number = spec.seed if spec.init_state_id < 0 else 10**6 + spec.seed
        return f"twice {self.number} is "


class SaysNumbers(Doubling):
    def reset(self, spec):
        super().reset(spec)
        return self.number


class SaysNothing(Doubling):
    def reset(self, spec):
        super().reset(spec)
        return ""


class SaysWrongMessages(Doubling):
    def reset(self, spec):
        return [{"role": "user", "text": super().reset(spec)}]


class RaisesInReset(Doubling):
    def reset(self, spec):
        return {}[spec.task]


class RaisesOn(Doubling):
    odd = ""

    def step(self, answer):
        assert answer != self.odd
        return super().step(answer)


class RaisesOnNothing(RaisesOn):
    def step(self, answer):
        answer[0]
        return super().step(answer)


class RaisesOnWords(Doubling):
    def step(self, answer):
        success = int(answer or 0) == 2 * self.number
        return Turn(float(success), success=success)


class RaisesOnOtherAlphabets(Doubling):
    def step(self, answer):
        answer.encode("ascii")
        return super().step(answer)


class RaisesOnLongAnswers(Doubling):
    def step(self, answer):
        success = answer.isascii() and answer.isdigit() and int(answer) == 2 * self.number  # int() takes 4300 digits
        return Turn(float(success), success=success)


class RaisesOnCutOffAnswers(Doubling):
    def step(self, answer):
        if answer and self.solution().startswith(answer) and answer != self.solution():
            raise IndexError("cut off")
        return super().step(answer)


class ReturnsATuple(Doubling):
    def step(self, answer):
        return 1.0, True


class RewardsWith(Doubling):
    reward: object = 0.0

    def step(self, answer):
        return Turn(self.reward, success=super().step(answer).success)


class RewardsNaN(RewardsWith):
    reward = math.nan


class RewardsNone(RewardsWith):
    reward = None


class RewardsText(RewardsWith):
    reward = "1"


class NumpySuccess(Doubling):
    def step(self, answer):
        return Turn(success=np.bool_(super().step(answer).success))


class NumberDone(Doubling):
    def step(self, answer):
        return Turn(success=super().step(answer).success, done=1)


class GoesOnInSilence(Doubling):
    def step(self, answer):
        return Turn(done=False)


class GoesOnWithANumber(Doubling):
    def step(self, answer):
        return Turn(said=5, done=False)


class NeverEnds(Doubling):
    max_turns = 5

    def step(self, answer):
        return Turn(said="more? ", success=super().step(answer).success, done=False)

    def solution(self):
        return None


class ScoresByChance(Doubling):
    count = itertools.count()

    def step(self, answer):
        return Turn(float(next(self.count) % 3 == 0), success=super().step(answer).success)


class EverythingIsRight(Doubling):
    def step(self, answer):
        return Turn(1.0, success=True)


class WrongSolution(Doubling):
    def solution(self):
        return str(2 * self.number + 1)


class SolvesWithANumber(Doubling):
    def solution(self):
        return 2 * self.number


class SolutionRaises(Doubling):
    def solution(self):
        return self.nothing


class LoadRaises(Doubling):
    @classmethod
    def load(cls, config):
        return open("/nowhere/at/all")


class NothingHeldOut(Doubling):
    num_held_out = 0

    def reset(self, spec):
        self.number = spec.seed
        return str(spec.seed)


class CountsWithoutAsking(Doubling):
    @classmethod
    def num_questions(cls, config, task):
        return 9_800

    def reset(self, spec):
        return super().reset(replace(spec, seed=spec.seed % 100))


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (HidesHeldOut, "held-out"),
        (CountsWithoutAsking, "questions"),
        (LoadRaises, "load"),
        (IgnoresTheSpec, "reset"),
        (RemembersTheLast, "reset"),
        (AlwaysTheSame, "reset"),
        (RaisesInReset, "reset"),
        (NothingHeldOut, "held-out"),
        (TrainsOnHeldOut, "held-out"),
        (HoldsOutOne, "held-out"),
        (HeldOutBySeed, "held-out"),
        (SaysNumbers, "said"),
        (SaysNothing, "said"),
        (SaysWrongMessages, "said"),
        (RaisesOn, "step"),
        (RaisesOnNothing, "step"),
        (RaisesOnWords, "step"),
        (RaisesOnOtherAlphabets, "step"),
        (RaisesOnLongAnswers, "step"),
        (RaisesOnCutOffAnswers, "step"),
        (ReturnsATuple, "turn"),
        (RewardsNaN, "reward"),
        (RewardsNone, "reward"),
        (RewardsText, "reward"),
        (NumpySuccess, "success"),
        (EverythingIsRight, "success"),
        (NumberDone, "done"),
        (GoesOnInSilence, "said"),
        (GoesOnWithANumber, "said"),
        (ScoresByChance, "score"),
        (NeverEnds, "end"),
        (WrongSolution, "solution"),
        (SolvesWithANumber, "solution"),
        (SolutionRaises, "solution"),
    ],
)
def test_a_broken_env_is_caught_by_the_name_of_the_rule(broken, rule):
    with pytest.raises(ContractViolation) as caught:
        check_text_env(broken, config())
    assert caught.value.rule == rule, caught.value


def test_a_mistake_in_the_code_is_said_with_its_line():
    with pytest.raises(
        ContractViolation, match=r"step\('garbage'\) raised.*ValueError.*test_text_env_checker\.py, line \d+"
    ):
        check_text_env(RaisesOnWords, config())


def test_what_was_loaded_is_let_go_of_though_a_rule_is_broken():
    gone = []

    class Loads(EverythingIsRight):
        @classmethod
        def load(cls, config):
            return config.kwargs["data"]

        @classmethod
        def unload(cls, shared):
            gone.append(shared)

    with pytest.raises(ContractViolation):
        check_text_env(Loads, config(kwargs={"data": "words"}))
    assert gone == ["words"]


OWN = """
from embodied.envs import TextEnv, Turn

class Adding(TextEnv):
    num_held_out = 20

    def reset(self, spec):
        self.number = self.draw(spec, lambda rng: int(rng.integers(1000)))
        return f"{spec.task}: {self.number} + {self.config.kwargs['plus']} = "

    def step(self, answer):
        return Turn(float(answer == self.solution()), success=answer == self.solution())

    def solution(self):
        return str(self.number + self.config.kwargs["plus"])
"""


def test_an_env_of_ones_own_is_checked_with_its_options_and_tasks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_adding.py").write_text(OWN)
    words = ["env.name=my_adding:Adding", "env.task=[one,two]"]
    assert check.main([*words, "env.kwargs={plus: 7}", "env.max_episode_steps=3"]) == 0
    printed = capsys.readouterr().out
    for part in ("one: ", "+ 7 = ", "held out    20 prompts", "at most 3 answers", "contract    kept"):
        assert part in printed
    assert check.main([*words]) == 1, "a kwarg is missing"
    assert "rule 'reset' is broken: reset raised" in capsys.readouterr().err


def test_options_for_robots_are_refused_for_an_own_text_env(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_adding_2.py").write_text(OWN)
    chosen = config(name="my_adding_2:Adding", reward="difference")
    with pytest.raises(ConfigError, match="scores answers itself"):
        env_class(chosen).check(chosen)


@pytest.mark.parametrize("options", [{"name": "sums", "task": ["add2", "fewshot_sums"]}, {"name": "sort"}])
def test_a_language_policy_fits_text_envs_and_no_other(options):
    from embodied.config.recipe import load

    words = [f"env.{key}={value}".replace("'", "") for key, value in options.items()]
    assert load(["recipe=sums_grpo", *words, "run.start_from=null"]).config.env.name == options["name"]
    with pytest.raises(ConfigError, match=r"try policy\.name=language"):
        load(["recipe=pointmass_ppo", *words])


HANGS = """
import signal
import time
from embodied.envs import TextEnv

class Hangs(TextEnv):
    def reset(self, spec):
        return "?"

    def step(self, answer):
        if self.config.kwargs["deaf"]:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                pass
"""


@pytest.mark.parametrize(("deaf", "where"), [(0, r"at .*my_hangs\.py:\d+"), (1, "which cannot be interrupted")])
def test_a_check_ends_at_its_limit_and_says_what_it_was_doing(tmp_path, deaf, where):
    (tmp_path / "my_hangs.py").write_text(HANGS)
    command = ["env.name=my_hangs:Hangs", f"env.kwargs={{deaf: {deaf}}}", "limit_s=0.5"]
    program = f"from embodied import check; check.CLOSE_S = 0.5; raise SystemExit(check.main({command}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    told = f"error: not finished after limit_s=0.5 seconds, while .*, {where}; try a larger limit_s\n"
    assert re.fullmatch(told, done.stderr), done.stderr
