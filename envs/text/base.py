"""The contract of text envs: Gymnasium with strings, and scoring is part of it.

`reset` says what the policy is asked, `step` hears its answer and replies: a reward, and either the end or more to
answer. One object holds one conversation at a time; what all of a worker's conversations share (a dataset, a process
that scores) is loaded once by `load`.

    class Doubling(TextEnv):
        def reset(self, spec):
            self.number = int(self.rng(spec).integers(100))
            return f"twice {self.number} is "

        def step(self, answer):
            right = answer.strip() == str(2 * self.number)
            return Turn(reward=float(right), success=right)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from embodied.core.conversations import Said
from embodied.core.rng import generator
from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec
from embodied.envs.preflight import BeforeARun
from embodied.envs.protocols import Protocol

MAX_TURNS = 1


@dataclass(frozen=True)
class Turn:
    """What an env makes of an answer."""

    reward: float = 0.0
    said: Said = ()  # what it replies; the conversation goes on where there is something
    success: bool = False
    done: bool = True
    facts: dict[str, Any] | None = None  # more to show of it in a transcript: {"expected": "95"}


class TextEnv(BeforeARun):
    """Base of every text env, constructed as `MyText(config, shared)` for each conversation that goes on at a time."""

    worker: ClassVar[str] = "embodied.envs.text.worker:TextWorker"
    mixes_tasks: ClassVar[bool] = True
    num_held_out: ClassVar[int] = 200
    """Prompts for evaluations, which training never shows."""

    def __init__(self, config: Any, shared: Any = None) -> None:
        self.config, self.shared = config, shared

    # What a plug-in implements

    def reset(self, spec: EpisodeSpec) -> Said:
        """Begin a conversation: the held-out prompt number `spec.init_state_id`, or where that is -1 a prompt to train
        on, drawn by `spec.seed` alone. Text is continued as it is; messages go through the chat template."""
        raise NotImplementedError

    def step(self, answer: str) -> Turn:
        """Hear an answer, without the token that ended it. An answer that was cut off comes like any other."""
        raise NotImplementedError

    def solution(self) -> str | None:
        """A right answer to what was said last, to learn from by imitation; None where it is not known."""
        return None

    @classmethod
    def load(cls, config: Any) -> Any:
        """What all conversations of a worker share; called once in each worker."""
        return None

    @classmethod
    def unload(cls, shared: Any) -> None:
        """The worker ends: let go of what `load` has opened."""

    @classmethod
    def tasks(cls, config: Any) -> tuple[str, ...]:
        """The tasks `env.task` means, each of which an `EpisodeSpec` may name; episodes take turns among them."""
        return (config.task,) if isinstance(config.task, str) else tuple(config.task)

    # What the outside uses

    @classmethod
    def protocols(cls, config: Any) -> tuple[Protocol, ...]:
        """How evaluations are played: prompts that training never shows, in order."""
        rules = (
            f"{cls.num_held_out} prompts that training never shows, in order; an answer ends where the policy ends it"
        )
        return (Protocol("held-out-v1", rules, stored_states=cls.num_held_out),)

    @classmethod
    def env_spec(cls, config: Any) -> EnvSpec:
        """What a language policy must know of it."""
        turns = config.max_episode_steps or MAX_TURNS
        return EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=turns, has_success=True, text=True)

    @staticmethod
    def rng(spec: EpisodeSpec) -> np.random.Generator:
        """The randomness of this conversation: the same for all that begin alike."""
        if spec.init_state_id >= 0:
            return generator(0, "held out", spec.task, spec.init_state_id)
        return generator(spec.seed, "prompt", spec.task)
