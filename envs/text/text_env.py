"""The contract of text envs: like Gymnasium, but with strings and with scoring.

`reset` returns the prompt, `step` takes an answer and returns a reward, and either the end or a reply to answer. One
object holds one conversation at a time; `load` loads objects that all of a worker's conversations share (a dataset, a
scoring process). Long steps run in threads, for several conversations at the same time (`env.side_by_side`), so shared
objects must be safe for threads.

    class Doubling(TextEnv):
        def reset(self, spec):
            self.number = self.draw(spec, lambda rng: int(rng.integers(10_000)))
            return f"twice {self.number} is "

        def step(self, answer):
            right = answer.strip() == str(2 * self.number)
            return Turn(reward=float(right), success=right)

        def solution(self):
            return str(2 * self.number)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np

from embodied.core.conversations import Said, is_content, pictures_in
from embodied.core.errors import ConfigError, EmbodiedError, MissingAsset
from embodied.core.rng import generator
from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec
from embodied.envs.capabilities import EnvCapabilities, EvaluationProtocol

REWARDS = ("own", "success")
TRIES = 1000  # after this many draws in a row without a new question, there are hardly more
Question = TypeVar("Question")
HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # a lone surrogate, which tokenizers refuse


@dataclass(frozen=True)
class Turn:
    """An env's response to an answer."""

    reward: float = 0.0
    said: Said = ()  # the env's reply; if it is not empty, the conversation continues
    success: bool = False
    done: bool | None = None  # None: unless something was said
    facts: dict[str, Any] | None = None  # further values for transcripts: {"expected": "95"}
    dropped: str = ""  # why the conversation ends without counting, such as a failed scorer
    restarts: bool = False  # True: `said` is the whole conversation so far, rewritten; needs `rewrites`
    ends_sample: bool = False  # True: the conversation is over, and `said` begins the group's next one
    scores: Sequence[Turn] | None = None  # by conversation of the group, how it ended, if one env plays all

    def __post_init__(self) -> None:
        if self.done is None:
            object.__setattr__(self, "done", not self.said)


class TextEnv(EnvCapabilities):
    """Base of every text env, constructed as `MyText(config, shared)` for each open conversation."""

    worker: ClassVar[str] = "embodied.envs.text.text_worker:TextWorker"
    speaks: ClassVar[bool] = True
    mixes_tasks: ClassVar[bool] = True
    max_turns: ClassVar[int] = 1
    """The most answers of a conversation, unless `env.max_episode_steps` is set."""
    num_held_out: ClassVar[int] = 200
    """The number of prompts for evaluations, which training never shows."""
    # Drawn once in a process: the held-out questions, as a list and as a set, and the rest of `every`.
    _held_out: ClassVar[dict[Any, tuple[list, frozenset, list]]] = {}
    source: str = ""
    """The task of this conversation, if it is not that of the spec."""
    group_size: int = 1
    """The number of conversations of its group, set before `reset` if it plays them all."""
    drawn: Any = None
    """The question of this conversation, if `draw` chose it; the prompt may hide it, as in games."""

    def __init__(self, config: Any, shared: Any = None) -> None:
        self.config, self.shared = config, shared

    # Methods of a plug-in

    def reset(self, spec: EpisodeSpec) -> Said:
        """Begin a conversation with held-out prompt number `spec.init_state_id`, or if that is -1 with a training
        prompt drawn by `spec.seed` alone. Text is continued as it is; messages go through the chat template."""
        raise NotImplementedError

    def step(self, answer: str) -> Turn:
        """Take an answer, without the token that ended it, and return the env's turn. Cut-off answers are passed like
        any other."""
        raise NotImplementedError

    def cut_short(self, turn: Turn) -> Turn:
        """The last turn of a conversation that `step` would continue: its answer was cut off, or was the last allowed
        one."""
        return turn

    def solution(self) -> str | None:
        """A right answer to the last message, for imitation; None if unknown."""
        return None

    @classmethod
    def load(cls, config: Any) -> Any:
        """Loads what all conversations of a worker share; called once in each worker."""
        return None

    @classmethod
    def unload(cls, shared: Any) -> None:
        """Close what `load` has opened; called when the worker ends."""

    @classmethod
    def held_out(cls, config: Any) -> int:
        """The number of held-out prompts of each task."""
        return cls.num_held_out

    @classmethod
    def shows_pictures(cls, config: Any) -> bool:
        """True if its messages may show pictures, which only some policies can read."""
        return False

    @classmethod
    def shows_videos(cls, config: Any) -> bool:
        """True if its pictures may be frames of videos, which only policy.engine=transformers reads."""
        return False

    @classmethod
    def rewrites(cls, config: Any) -> bool:
        """True if its turns may rewrite earlier messages (`Turn.restarts`)."""
        return False

    @classmethod
    def plays_groups(cls, config: Any) -> bool:
        """True if one env plays all conversations of a group, one after the other (`Turn.ends_sample`), and scores them
        together at the end (`Turn.scores`)."""
        return False

    @classmethod
    def num_questions(cls, config: Any, task: str) -> int | None:
        """The number of training questions, which `algo.prompts=epochs` asks in turn; None: unlimited. An env with a
        number reads `spec.question`, as `choose` does."""
        return None

    @classmethod
    def scored_example(cls) -> tuple[str, str, dict[str, Any]]:
        """For `embodied.doctor`, in envs that need packages: the kind of `Scorer`, a right answer, and the other
        arguments of its `score`."""
        raise NotImplementedError

    # Helpers for plug-ins

    def choose(self, spec: EpisodeSpec, count: int) -> int:
        """The number of a training question, below `count`: `spec.question`, or drawn by `spec.seed`."""
        if spec.question >= 0:
            return spec.question % count
        return int(generator(spec.seed, "prompt", spec.task).integers(count))

    def draw(
        self, spec: EpisodeSpec, question: Callable[[np.random.Generator], Question], every: Sequence[Question] = ()
    ) -> Question:
        """The held-out question number `spec.init_state_id`, or a training question, which is never a held-out one.
        `question` makes a question from a random generator; the held-out ones are the first different ones. `every`
        lists all questions if that is possible; `num_questions` of them are for training."""
        self.drawn = self._draw_question(spec, question, every)
        return self.drawn

    @cached_property
    def _settings(self) -> str:
        """The config as a string, cached since this takes as long as a draw."""
        return repr(self.config)

    def _draw_question(
        self, spec: EpisodeSpec, question: Callable[[np.random.Generator], Question], every: Sequence[Question]
    ) -> Question:
        key = type(self), spec.task, self._settings
        if key not in self._held_out:
            first = first_questions(question, generator(0, "held out", spec.task), self.held_out(self.config))
            held_out = frozenset(first)
            self._held_out[key] = first, held_out, [drawn for drawn in every if drawn not in held_out]
        in_order, held_out, rest = self._held_out[key]
        if spec.init_state_id >= 0:
            return in_order[spec.init_state_id % len(in_order)]
        if spec.question >= 0 and rest:
            return rest[spec.question % len(rest)]
        return training_question(type(self).__name__, question, spec.seed, spec.task, held_out)

    # Methods for callers

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise if a package is missing, or an option is set that only robots have."""
        config.needs.check(f"env.name={config.name}", MissingAsset)
        if config.reward not in REWARDS:
            raise ConfigError(
                f"env.reward={config.reward}: {config.name} scores answers itself; there are {', '.join(REWARDS)}"
            )

    @classmethod
    def longest_episode(cls, config: Any) -> int:
        """The most turns of a conversation."""
        return config.max_episode_steps or cls.max_turns

    @classmethod
    def count_training_questions(cls, config: Any) -> tuple[int, ...]:
        """The number of questions of each task, for `algo.prompts=epochs`."""
        tasks = cls.tasks(config)
        counts = [count for task in tasks if (count := cls.num_questions(config, task)) is not None]
        if len(counts) < len(tasks):
            raise ConfigError(
                f"algo.prompts=epochs asks every question once before any again, and env.name={config.name} has an "
                f"unlimited number; leave it out, or give {cls.__name__} a method num_questions"
            )
        if empty := [task for task, count in zip(tasks, counts, strict=True) if count < 1]:
            raise ConfigError(
                f"env.task={empty[0]}: {cls.__name__}.num_questions says that no questions to train on are in it"
            )
        return tuple(counts)

    @classmethod
    def protocols(cls, config: Any) -> tuple[EvaluationProtocol, ...]:
        """The protocol of evaluations: prompts that training never shows, in order."""
        count = cls.held_out(config)
        rules = f"prompts that training never shows, {count}, in order; an answer ends where the policy ends it"
        return (EvaluationProtocol("held-out-v1", rules, stored_states=count),)

    @classmethod
    def env_spec(cls, config: Any) -> EnvSpec:
        """The env's description for a language policy."""
        turns = cls.longest_episode(config)
        seen = cls.shows_pictures(config)
        spec = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=turns, has_success=True, text=True)
        return replace(spec, pictures=seen)


def first_questions(
    question: Callable[[np.random.Generator], Question], rng: np.random.Generator, count: int
) -> list[Question]:
    """The first `count` different questions."""
    questions: dict[Question, None] = {}
    repeated = 0
    while len(questions) < count:
        drawn = question(rng)
        repeated = repeated + 1 if drawn in questions else 0
        if repeated == TRIES:
            raise ConfigError(
                f"only {len(questions)} different questions are drawn, and num_held_out={count} are held out"
            )
        questions[drawn] = None
    return list(questions)


@lru_cache(maxsize=16)
def training_question(
    env: str, question: Callable[[np.random.Generator], Question], seed: int, task: str, known: frozenset[Question]
) -> Question:
    """The question that is drawn with this seed, and is not a `known` one. Cached, since the conversations of a group
    draw the same one after the other; only a `question` that is one object for all of them benefits."""
    rng = generator(seed, "prompt", task)
    for _ in range(TRIES):
        if (drawn := question(rng)) not in known:
            return drawn
    raise ConfigError(f"{env}: {TRIES} questions in a row were held-out ones; lower its num_held_out={len(known)}")


def checked_said(said: Said, kind: type[TextEnv], may_show: bool = False) -> Said:
    """Checks that an env's message is text or messages of whole characters, with pictures only if it `may_show` them,
    and returns it."""
    if isinstance(said, list):
        said = tuple(said)
    fine = isinstance(said, str) or (
        isinstance(said, tuple)
        and all(
            isinstance(message, dict) and {"role", "content"} <= message.keys() and is_content(message["content"])
            for message in said
        )
    )
    if not fine or not said:
        raise EmbodiedError(
            f"{kind.__name__} says {said!r:.100}; it must be text, or messages such as "
            '({"role": "user", "content": "..."},)'
        )
    if pictures_in(said) and not may_show:
        raise EmbodiedError(
            f"{kind.__name__} shows a picture ({pictures_in(said)[0]:.60}); its shows_pictures must return True, "
            "so that only policies that read pictures play it"
        )
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str, skipkeys=True)
    if half := HALF_CHARACTER.search(text):
        raise EmbodiedError(
            f"{kind.__name__} says {text[:100]!r}, which holds half a character ({half[0]!r}); decode the bytes with "
            'errors="replace"'
        )
    return said
