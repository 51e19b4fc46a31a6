"""`env.name=verifiers:<environment>`: environments of the package `verifiers`, in the interpreter `env.python`, since
they need other versions of libraries.

An example of the environment is a prompt, its rollout a conversation, and its rubric's score the reward at the end.
Evaluations ask the examples of its eval_dataset, or without one the first 5%, at most 500, of its dataset.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodied.core.conversations import Said
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.types import EpisodeSpec
from embodied.envs.text.text_env import TextEnv, Turn
from embodied.envs.text.verifiers_bridge import Bridge, Child, Example, Lost, how_to_install

MOST_TURNS = 10  # answers in a conversation, if the environment has no limit
PRECISION = 1e-6  # of a score that is a sum of weighted parts

_facts: dict[str, dict[str, Any]] = {}  # descriptions of environments by config, in this process


class Verifiers(TextEnv):
    example: Example | None = None

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        facts_of(config)

    @classmethod
    def load(cls, config: Any) -> Bridge:
        """The process that has loaded the environment, and the endpoint that it asks."""
        bridge = Bridge(config)
        _facts[key(config)] = bridge.facts
        return bridge

    @classmethod
    def unload(cls, shared: Bridge) -> None:
        shared.close()

    @classmethod
    def held_out(cls, config: Any) -> int:
        return facts_of(config)["held_out"]

    @classmethod
    def num_questions(cls, config: Any, task: str) -> int:
        return facts_of(config)["train"]

    @classmethod
    def longest_episode(cls, config: Any) -> int:
        return config.max_episode_steps or facts_of(config)["turns"] or MOST_TURNS

    def reset(self, spec: EpisodeSpec) -> Said:
        if self.example is not None:
            self.example.forget()
        held_out, facts = spec.init_state_id >= 0, self.shared.facts
        if held_out:
            number = spec.init_state_id % facts["held_out"]
        else:
            number = self.choose(spec, facts["train"])
        self.example = Example(self.shared, held_out, number)
        try:
            said = self.example.begin()
        except Lost as err:
            which = f"{'held-out' if held_out else 'training'} example {number}"
            raise EmbodiedError(f"env.name={self.config.name}: {which} could not be asked: {err}") from None
        self.asked_for = asked_for(self.example.request.body)
        return said

    def step(self, answer: str) -> Turn:
        try:
            heard = self.example.answer(answer)
        except Lost as err:
            return self.lost(err)
        return self.worth(heard) if isinstance(heard, dict) else Turn(said=heard, facts=self.asked_for)

    def cut_short(self, turn: Turn) -> Turn:
        """The environment scores the conversation so far, as for a model without room for more."""
        try:
            ended = self.example.stop()
        except Lost as err:
            return self.lost(err)
        return self.worth(ended) if ended else self.lost(Lost("the environment did not stop when asked to"))

    def lost(self, err: Lost) -> Turn:
        self.example.forget()
        self.example = None
        return Turn(dropped=str(err))

    def worth(self, ended: dict[str, Any]) -> Turn:
        """The last turn of a conversation."""
        self.example = None
        reward = float(ended["reward"])
        scores = {name: round(value, 4) for name, value in ended["metrics"].items()}
        facts = {**self.asked_for, "expected": ended["answer"], "scores": scores, "raised": ended["raised"]}
        success = reward >= self.config.full_score - PRECISION
        return Turn(reward=reward, success=success, facts={name: fact for name, fact in facts.items() if fact})


def asked_for(body: dict[str, Any]) -> dict[str, Any]:
    """Sampling arguments of an environment that are ignored, since the recipe sets them."""
    tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    return {"max_tokens asked for": tokens} if tokens else {}


def key(config: Any) -> str:
    return json.dumps([config.name, str(config.python), config.kwargs], sort_keys=True)


def facts_of(config: Any) -> dict[str, Any]:
    """An environment's facts: its number of examples, and the most answers of a rollout."""
    if config.python is None:
        raise ConfigError(
            f"env.name={config.name} runs in an interpreter of its own, env.python=FOLDER/bin/python: "
            f"{how_to_install(Path('FOLDER/bin/python'))}"
        )
    if key(config) not in _facts:
        child = Child(config)
        try:
            _facts[key(config)] = child.ready()
        finally:
            child.close()
    return _facts[key(config)]
