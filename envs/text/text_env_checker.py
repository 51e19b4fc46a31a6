"""Checks a text env's contract: `check_text_env(MyText, config)` plays conversations and names the first broken rule.

For authors of text envs: run it in a test, or as `python -m embodied.check env.name=my_pkg.my_module:MyText`.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from embodied.core.conversations import Said, in_words, pictures_in
from embodied.core.errors import EmbodiedError
from embodied.core.pictures import PictureError, load_picture
from embodied.core.types import EpisodeSpec
from embodied.envs.env_checker import ContractViolation, fail
from embodied.envs.own_modules import line_of
from embodied.envs.text.text_env import TextEnv, Turn, checked_said

SEED = 20_001
DRAWN = 400  # training prompts that are compared with the held-out ones
PLAYED = 4  # prompts of each kind that are answered
HIDDEN = "reset reads {}; where the prompt hides the question, choose it with self.draw(spec, question)"
ODD = (
    "",
    " ",
    "garbage",
    "\n\n\n",
    "é 漢字 \U0001f916 \x00 \ud7ff",
    "9" * 50_000,
    "<answer>",
    "\\boxed{",
    "{}[]()'\"%s",
)


@dataclass(frozen=True)
class CheckedTextEnv:
    """The check's findings about an env."""

    said: str  # its first held-out prompt
    solution: str | None
    conversations: int  # that were played


def check_text_env(kind: type[TextEnv], config: Any) -> CheckedTextEnv:
    """Raise `ContractViolation` for the first broken rule."""
    with env_call("load", "load raised"):
        shared = kind.load(config)
    try:
        return TextEnvChecker(kind, config, shared).run()
    finally:
        kind.unload(shared)


class TextEnvChecker:
    def __init__(self, kind: type[TextEnv], config: Any, shared: Any) -> None:
        self.kind, self.config, self.shared = kind, config, shared
        self.tasks = kind.tasks(config)
        self.turns = kind.longest_episode(config)
        self.env = kind(config, shared)
        self.conversations = 0

    def run(self) -> CheckedTextEnv:
        for task in self.tasks:
            held_out = self.prompts_follow_from_the_spec(task)
            self.held_out_prompts_are_not_trained_on(task, held_out)
            self.epochs_ask_every_question(task)
        specs = [spec for task in self.tasks for spec in self.some_episodes(task)]
        self.odd_answers_are_scored_twice_alike(specs)
        self.solutions_are_successes(specs)
        self.conversations_end(specs)
        said = self.begin(specs[0])
        return CheckedTextEnv(in_a_line(said), self.solution(specs[0]), self.conversations)

    def some_episodes(self, task: str) -> list[EpisodeSpec]:
        """Some held-out and some training episodes."""
        return [spec for at in range(PLAYED) for spec in (held_out_spec(task, at), training_spec(task, at))]

    # Rules

    def prompts_follow_from_the_spec(self, task: str) -> list[str]:
        count = self.kind.held_out(self.config)
        if count < 1:
            fail("held-out", "there is no held-out prompt, so nothing can be evaluated")
        for spec in self.some_episodes(task):
            said, question = self.begin(spec), self.question(spec)
            self.answer(spec, "garbage")
            if said != self.begin(spec) or question != self.question(spec):
                fail("reset", f"{spec} asked twice: {said!r:.100}, then {self.begin(spec)!r:.100}")
            if said != self.checked_message(self.kind(self.config, self.shared).reset(spec), "reset"):
                fail("reset", f"another {self.kind.__name__} returns another prompt for {spec}")
        prompts = [self.question(held_out_spec(task, at)) for at in range(count)]
        if self.question(EpisodeSpec(task, count - 1, SEED + 1, 1)) != prompts[-1]:
            fail("held-out", "a held-out prompt follows from its number alone, and another seed changes it")
        if count > 1 and all(prompt == prompts[0] for prompt in prompts):
            fail("held-out", f"all {count} held-out prompts are alike: {HIDDEN.format('spec.init_state_id')}")
        return prompts

    def held_out_prompts_are_not_trained_on(self, task: str, held_out: list[str]) -> None:
        held_out_prompts = {*held_out}
        drawn = [self.question(training_spec(task, at)) for at in range(DRAWN)]
        if shown := [prompt for prompt in drawn if prompt in held_out_prompts]:
            fail(
                "held-out",
                f"training draws held-out prompts too, {len(shown)} of {DRAWN}, such as {shown[0]:.100}; "
                "self.draw(spec, question) keeps them apart",
            )
        if all(prompt == drawn[0] for prompt in drawn):
            fail("reset", f"{DRAWN} training prompts are alike: {HIDDEN.format('spec.seed')}")

    def epochs_ask_every_question(self, task: str) -> None:
        count = self.kind.num_questions(self.config, task)
        if count is None:
            return
        asked = [training_spec(task, at)._replace(question=at) for at in range(min(count, DRAWN))]
        repeated = len(asked) - len({self.question(spec) for spec in asked})
        if repeated > len(asked) // 2:
            fail(
                "questions",
                f"num_questions is {count}, but {repeated} of {len(asked)} repeat another: reset reads spec.question",
            )

    def odd_answers_are_scored_twice_alike(self, specs: list[EpisodeSpec]) -> None:
        solved = ["", "garbage"]  # on every prompt so far
        for spec in specs:
            for answer in self.odd_answers(spec):
                turns = []
                for _ in range(2):
                    self.begin(spec)
                    turns.append(self.answer(spec, answer))
                if len({(turn.reward, turn.success, turn.done, repr(turn.said)) for turn in turns}) > 1:
                    fail("score", f"the answer {answer!r:.60} to {spec} is scored {turns[0]}, then {turns[1]}")
                if answer in solved and not turns[0].success:
                    solved.remove(answer)
        for answer in solved:
            fail("success", f"the answer {answer!r} is a success on every prompt")

    def solutions_are_successes(self, specs: list[EpisodeSpec]) -> None:
        for spec in specs:
            if self.solution(spec) is None:
                continue
            turns = self.play(spec, None)
            if not turns[-1].success:
                said = f"of {len(turns)} turns" if turns[-1].done else f"after {len(turns)} turns it continues"
                fail("solution", f"solution() is not scored as a success ({said}): {turns[-1]!r:.200}")

    def conversations_end(self, specs: list[EpisodeSpec]) -> None:
        """Fails unless a conversation ends before the turn limit with one of the tried answers."""
        for spec in specs:
            ways = [*ODD[:3], *([None] if self.solution(spec) is not None else [])]
            if any(self.play(spec, way)[-1].done for way in ways):
                return
        fail("end", f"no conversation ended within {self.turns} turns; step returns Turn(done=True) at its end")

    # Conversations

    def begin(self, spec: EpisodeSpec) -> Said:
        self.conversations += 1
        with env_call("reset", f"reset raised for {spec}"):
            return self.checked_message(self.env.reset(spec), "reset")

    def question(self, spec: EpisodeSpec) -> str:
        """The question of a conversation: the question from `draw`, which the prompt may hide, else the prompt and its
        solution."""
        self.env.drawn = None
        said = self.begin(spec)
        return repr((said, self.solution_now()) if self.env.drawn is None else self.env.drawn)

    def solution(self, spec: EpisodeSpec) -> str | None:
        """A solution to the first prompt."""
        self.begin(spec)
        return self.solution_now()

    def solution_now(self) -> str | None:
        with env_call("solution", "solution() raised", clear=()):
            solution = self.env.solution()
        if solution is not None and not isinstance(solution, str):
            fail("solution", f"solution() is {type(solution).__name__}, it must be text or None")
        return solution

    def odd_answers(self, spec: EpisodeSpec) -> list[str]:
        """Answers as policies give them: odd answers, and a truncated right one."""
        solution = self.solution(spec)
        return [*ODD, *([solution[: len(solution) // 2]] if solution else [])]

    def play(self, spec: EpisodeSpec, answer: str | None) -> list[Turn]:
        """A whole conversation in which every answer is this one, or a solution."""
        self.begin(spec)
        turns: list[Turn] = []
        while len(turns) < self.turns and not (turns and turns[-1].done):
            said = self.solution_now() or "" if answer is None else answer
            turns.append(self.answer(spec, said))
        return turns

    def answer(self, spec: EpisodeSpec, answer: str) -> Turn:
        with env_call("step", f"step({answer!r:.60}) raised after {spec}"):
            turn = self.env.step(answer)
        if not isinstance(turn, Turn):
            fail("turn", f"step returned {type(turn).__name__}, it must be a Turn")
        if turn.dropped:
            fail("score", f"the answer {answer!r:.60} to {spec} cannot be scored: {turn.dropped}")
        number = isinstance(turn.reward, int | float) or hasattr(turn.reward, "item")
        if not number or not math.isfinite(turn.reward):
            fail("reward", f"{turn.reward!r} after the answer {answer!r:.60}; a reward is a finite number")
        for name, flag in (("success", turn.success), ("done", turn.done)):
            if not isinstance(flag, bool):
                fail(name, f"{name}={flag!r} is {type(flag).__name__}, it must be a bool: {name}=bool(...)")
        if not turn.done:
            self.checked_message(turn.said, "step")
        return turn

    def checked_message(self, said: Any, method: str) -> Said:
        """Checks that an env's message is text or messages, and returns it."""
        try:
            said = checked_said(said, self.kind, may_show=True)
        except EmbodiedError as err:
            fail("said", f"{method}: {err}")
        for name in pictures_in(said):
            if not self.kind.shows_pictures(self.config):
                fail("pictures", f"{method} shows {name:.60}, and shows_pictures does not return True")
            try:
                load_picture(name)
            except PictureError as err:
                fail("pictures", str(err))
        return said


def held_out_spec(task: str, number: int) -> EpisodeSpec:
    return EpisodeSpec(task, number, SEED, number)


def training_spec(task: str, number: int) -> EpisodeSpec:
    return EpisodeSpec(task, -1, SEED + number, number)


def in_a_line(said: Said) -> str:
    """An env's message as one line."""
    if isinstance(said, str):
        return repr(said)
    return "; ".join(f"{message['role']}: {in_words(message)!r}" for message in said)


@contextmanager
def env_call(rule: str, what: str, clear: tuple[type[Exception], ...] = (EmbodiedError,)) -> Iterator[None]:
    """An exception in the env's code breaks `rule`; the violation says `what`, and the line. Exceptions of the types
    `clear` pass."""
    try:
        yield
    except clear:
        raise
    except Exception as err:
        last = " ".join(traceback.format_exception_only(err)[-1].split())
        raise ContractViolation(rule, f"{what}: {last}{line_of(err)}") from err
