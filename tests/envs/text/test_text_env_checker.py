"""`check_text_env` passes envs that keep the contract and names the rule that each of these broken envs breaks."""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from embodied import check
from embodied.core.pictures import drawing
from embodied.core.types import EpisodeSpec
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


@pytest.mark.parametrize("kind", [Numbered, Hidden])
def test_several_turns_messages_unknown_solutions_and_hidden_questions_are_fine(kind):
    assert check_text_env(kind, config()).solution is None


class HidesHeldOut(Hidden):
    """What it trains on is held out, though no prompt shows it."""

    def reset(self, spec):
        said = super().reset(EpisodeSpec(spec.task, max(spec.init_state_id, 0), spec.seed, spec.index))
        return said


def kind(**members):
    return type("Broken", (Doubling,), members)


def asks(number):
    """Its question is drawn so."""

    def reset(self, spec):
        self.number = number(spec)
        return f"twice {self.number} is "

    return kind(reset=reset)


def says(change):
    return kind(reset=lambda self, spec: change(self, Doubling.reset(self, spec)))


def scores(turn):
    return kind(step=lambda self, answer: turn(self, answer, Doubling.step(self, answer).success))


def solves(solution):
    return kind(solution=solution)


def right_or_not(success):
    return Turn(float(success), success=success)


def numbered(spec, held_out=0):
    return spec.seed if spec.init_state_id < 0 else spec.init_state_id + held_out


class RemembersTheLast(Doubling):
    def reset(self, spec):
        before = getattr(self, "number", 0)
        return super().reset(spec) + str(before)


class NeverEnds(Doubling):
    max_turns = 5

    def step(self, answer):
        return Turn(said="more? ", success=super().step(answer).success, done=False)

    def solution(self):
        return None


class CountsWithoutAsking(Doubling):
    @classmethod
    def num_questions(cls, config, task):
        return 9_800

    def reset(self, spec):
        return super().reset(spec._replace(seed=spec.seed % 100))


count = itertools.count()
PICTURE = {"type": "image", "image": drawing("count", 1, pixels=48)}
EverythingIsRight = scores(lambda self, answer, right: Turn(1.0, success=True))
BROKEN = {
    "hides what it holds out": ("held-out", HidesHeldOut),
    "counts more questions than it asks": ("questions", CountsWithoutAsking),
    "fails to load": ("load", kind(load=classmethod(lambda cls, config: Path("/nowhere/at/all").read_text()))),
    "ignores the spec": ("reset", asks(lambda spec: next(count))),
    "remembers the last": ("reset", RemembersTheLast),
    "raises in reset": ("reset", says(lambda self, said: {}[said])),
    "holds out nothing": ("held-out", type("None", (asks(lambda spec: spec.seed),), {"num_held_out": 0})),
    "trains on what is held out": ("held-out", asks(lambda spec: numbered(spec) % 300)),
    "holds out by seed": ("held-out", asks(lambda spec: spec.seed + 10**6 * (spec.init_state_id >= 0))),
    "says nothing": ("said", says(lambda self, said: "")),
    "shows what it does not tell": ("pictures", says(lambda self, said: [{"role": "user", "content": [PICTURE]}])),
    "raises on nothing": ("step", scores(lambda self, answer, right: answer[0] and right_or_not(right))),
    "raises on alphabets": ("step", scores(lambda self, said, right: (said.encode("ascii"), right_or_not(right))[1])),
    "raises on long ones": (  # int() takes 4300 digits
        "step",
        scores(lambda self, said, right: (said.isascii() and said.isdigit() and int(said), right_or_not(right))[1]),
    ),
    "raises on cut-off ones": (
        "step",
        scores(lambda self, said, right: right_or_not(right or (self.solution().startswith(said or "?") and {}[said]))),
    ),
    "returns a tuple": ("turn", scores(lambda self, answer, right: (1.0, True))),
    "rewards NaN": ("reward", scores(lambda self, answer, right: Turn(math.nan, success=right))),
    "succeeds in numpy": ("success", scores(lambda self, answer, right: Turn(success=np.bool_(right)))),
    "takes everything": ("success", EverythingIsRight),
    "ends with a number": ("done", scores(lambda self, answer, right: Turn(success=right, done=1))),
    "goes on in silence": ("said", scores(lambda self, answer, right: Turn(done=False))),
    "scores by chance": ("score", scores(lambda self, said, right: Turn(float(next(count) % 3 == 0), success=right))),
    "never ends": ("end", NeverEnds),
    "has a wrong solution": ("solution", solves(lambda self: str(2 * self.number + 1))),
    "fails to solve": ("solution", solves(lambda self: self.nothing)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_text_env_is_refused_with_the_name_of_the_rule(broken):
    rule, env = BROKEN[broken]
    with pytest.raises(ContractViolation) as caught:
        check_text_env(env, config())
    assert caught.value.rule == rule, caught.value


def test_loaded_data_is_released_after_a_broken_rule():
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


@pytest.mark.parametrize(
    ("deaf", "where"),
    [(0, r"at .*my_hangs\.py:\d+"), pytest.param(1, "which cannot be interrupted", marks=pytest.mark.slow)],
)
def test_a_check_ends_at_its_limit_and_says_what_it_was_doing(tmp_path, deaf, where):
    (tmp_path / "my_hangs.py").write_text(HANGS)
    command = ["env.name=my_hangs:Hangs", f"env.kwargs={{deaf: {deaf}}}", "limit_s=5"]
    program = (
        f"from embodied import check; check.CLOSE_S, check.TELL_S = 0.5, 0.01; raise SystemExit(check.main({command}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    told = f"error: not finished after limit_s=5 seconds, while .*, {where}; try a larger limit_s\n"
    assert re.fullmatch(told, done.stderr), done.stderr
    assert "... 0 s: holding conversations with my_hangs:Hangs" in done.stdout
