"""`env.name=reasoning_gym:<task>`: the generated puzzles of reasoning_gym, whose answers come in <answer> tags.

A training conversation asks one of the first 10,000 questions of a data set with seed 0, an evaluation questions of
another seed; common questions are not trained on. The package's scores reward parts of an answer, and longer texts that
contain it. Here an answer is right or wrong, unless `env.partial_scores` is set, and a text that only contains the
answer is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from embodied.core.conversations import Said
from embodied.core.errors import ConfigError, in_a_line, nearest
from embodied.core.rng import generator
from embodied.core.types import EpisodeSpec
from embodied.envs.text.scoring_process import Scorers
from embodied.envs.text.text_env import TRIES, TextEnv, Turn

SCORES = "embodied.envs.reasoning_gym.env:scores"
POOL = 10_000  # questions to train on
# Question i of seed s is made by a generator of seed s + i, so this is far from the training questions.
HELD_OUT_SEED = 1 << 30
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class HeldOutQuestions:
    system: str
    scorer: Scorers
    questions: frozenset[str]  # the held-out questions


class ReasoningGym(TextEnv):
    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        from reasoning_gym.factory import DATASETS

        task = task_of(config)
        if task not in DATASETS:
            near = nearest(task, DATASETS) or f" (known: {', '.join(sorted(DATASETS))})"
            raise ConfigError(f"env.name={config.name}: reasoning_gym has no task {task!r}{near}")
        if reserved := {"size", "seed"} & config.kwargs.keys():
            raise ConfigError(
                f"env.kwargs: {', '.join(sorted(reserved))} is chosen by env.name=reasoning_gym; leave it out"
            )
        try:
            dataset_of(task, options(config, 0))[0]
        except Exception as err:  # from the package's own assertions
            raise ConfigError(f"env.name={config.name} env.kwargs={config.kwargs}: {in_a_line(err)}") from err

    @classmethod
    def scored_example(cls) -> tuple[str, str, dict[str, Any]]:
        name, made = "chain_sum", json.dumps({"seed": 0, "size": 1})
        question = {"name": name, "options": made, "index": 0, "partial": False}
        return SCORES, entry_of(name, made, 0)["answer"], question

    @classmethod
    def load(cls, config: Any) -> HeldOutQuestions:
        """The held-out questions, and the scoring process."""
        from reasoning_gym.utils import SYSTEM_PROMPTS

        held_out = dataset_of(task_of(config), options(config, HELD_OUT_SEED))
        held_out_questions = frozenset(held_out[index]["question"] for index in range(cls.num_held_out))
        return HeldOutQuestions(SYSTEM_PROMPTS["default"], Scorers(SCORES), held_out_questions)

    @classmethod
    def unload(cls, shared: HeldOutQuestions) -> None:
        shared.scorer.close()

    @classmethod
    def num_questions(cls, config: Any, task: str) -> int:
        return POOL

    def reset(self, spec: EpisodeSpec) -> Said:
        self.options, self.index, self.entry = self.chosen(spec)
        return (
            {"role": "system", "content": self.shared.system},
            {"role": "user", "content": self.entry["question"]},
        )

    def chosen(self, spec: EpisodeSpec) -> tuple[str, int, dict[str, Any]]:
        """The options of a data set, the number of a question in it, and the question."""
        task = task_of(self.config)
        if spec.init_state_id >= 0:
            index, of = spec.init_state_id % self.num_held_out, options(self.config, HELD_OUT_SEED)
            return of, index, entry_of(task, of, index)
        rng, of = generator(spec.seed, "prompt", spec.task), options(self.config, 0)
        tries = rng.integers(POOL, size=TRIES).tolist()
        for index in [spec.question, *tries] if spec.question >= 0 else tries:  # held-out questions are drawn again
            if (entry := entry_of(task, of, index))["question"] not in self.shared.questions:
                return of, index, entry
        raise ConfigError(f"env.name={self.config.name}: it has too few questions besides the held-out ones")

    def step(self, answer: str) -> Turn:
        facts, answers = {"expected": self.entry["answer"]}, ANSWER.findall(answer)
        if not answers:
            return Turn(facts={**facts, "problem": "no <answer> tag"})
        config, given = self.config, answers[-1].strip()
        where = {"name": task_of(config), "options": self.options, "index": self.index}
        score, problem = self.shared.scorer.score(config.score_s, answer=given, **where, partial=config.partial_scores)
        facts |= {"given": given, "score": score} | ({"problem": problem} if problem else {})
        return Turn(reward=score, success=score == 1.0, facts=facts)

    def solution(self) -> str | None:
        answer = self.entry["answer"]
        return None if answer is None else f"<answer>{answer}</answer>"


def task_of(config: Any) -> str:
    """The task's name in reasoning_gym."""
    return config.name.partition(":")[2]


def options(config: Any, seed: int) -> str:
    """The arguments of a data set as JSON, from which the scoring process makes the same data set."""
    return json.dumps({**config.kwargs, "seed": seed, "size": POOL}, sort_keys=True)


@cache
def dataset_of(name: str, options: str) -> Any:
    """A data set of reasoning_gym; its options are JSON."""
    import reasoning_gym

    options = json.loads(options)
    if name == "composite" and isinstance(options.get("datasets"), list):
        from reasoning_gym.composite import DatasetSpec

        options["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **entry}) for entry in options["datasets"]]
    return reasoning_gym.create_dataset(name, **options)


@lru_cache(1024)
def entry_of(name: str, options: str, index: int) -> dict[str, Any]:
    """A question of a data set. It is cached, since making one may take long and a group asks the same question."""
    return dataset_of(name, options)[index]


def scores() -> Callable[..., float]:
    """For the scoring process: the data set's own score. Scores below 1 count only if `partial` is set, and never for a
    text that only contains the answer."""
    from reasoning_gym.dataset import ProceduralDataset

    def score(answer: str, name: str, options: str, index: int, partial: bool) -> float:
        dataset = dataset_of(name, options)
        entry = entry_of(name, options, index)
        points = float(dataset.score_answer(answer, entry))
        scorer = dataset
        if name == "composite":
            scorer = dataset.datasets[entry["metadata"]["source_dataset"]]
        pays_for_length = type(scorer).score_answer is ProceduralDataset.score_answer
        return points if points == 1.0 or (partial and not pays_for_length) else 0.0

    return score
