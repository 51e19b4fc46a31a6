"""Options of the text envs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from embodied.core.errors import nearest
from embodied.core.options import LocalPath, Requirement, one_or_several, only_with
from embodied.envs.config import CommonEnvConfig, Rewards, Tasks, rewards, side_by_side, with_task


class TextConfig(CommonEnvConfig):
    """The options that all text envs share: a step is a turn of the conversation, and the env says when it is over."""

    speaks = True
    on_success: ClassVar[str] = "continue"
    after_success: ClassVar[int] = 0
    action_cost: ClassVar[float] = 0.0
    stagger: ClassVar[bool] = False
    retries: ClassVar[int] = 0

    num_envs: int = Field(
        64, gt=0, le=2**20, description="Simultaneous conversations of the whole run, divided among the sims."
    )
    side_by_side: int = side_by_side()
    rewards: Rewards = rewards()
    rules = (
        only_with(
            "python",
            {"name": lambda name: name.startswith("verifiers:")},
            "other text envs run in this interpreter; leave it out",
        ),
    )


class ToyTextConfig(TextConfig):
    TASKS: ClassVar[dict[str, str]] = {}  # the usual one first

    task: Tasks = Field(
        "", description="The task, or a list to take in turn; unset: the first of python -m embodied.list tasks."
    )

    @classmethod
    def tasks_in_words(cls, name: str) -> list[tuple[str, str]]:
        return list(cls.TASKS.items())

    @model_validator(mode="before")
    @classmethod
    def _usual_task(cls, values: Any) -> Any:
        return with_task(values, next(iter(cls.TASKS))) if isinstance(values, dict) else values

    def conflicts(self) -> Iterator[str]:
        for task in {*one_or_several(self.task)} - {*self.TASKS}:
            choices = f"(known: {', '.join(self.TASKS)}){nearest(task, self.TASKS)}"
            yield f"env.task={task!r} is not a task of {self.name} {choices}"


class SumsConfig(ToyTextConfig):
    """A toy for small language models: add or multiply numbers, also with a calculator."""

    env = "embodied.envs.text.toys:Sums"
    TASKS: ClassVar = {
        "add2": "37+58=",
        "fewshot_sums": "37 + 8 = after three examples, for models that have read of such things",
        "calc2": "37*58=, where <calc>37*58</calc> asks a calculator",
        "mul2": "37*58= without one",
    }

    name: Literal["sums"] = Field(description="A toy for small language models: add numbers.")


class ToolsConfig(ToyTextConfig):
    """A toy for small language models that learn to call a tool."""

    env = "embodied.envs.text.tool_toys:Tools"
    TASKS: ClassVar = {
        "find": "age of Bado: , where <find>Bado</find> searches documents",
        "recall": "the same without them",
        "python": "37^12 mod 97=, where <py>37**12%97</py> runs a program",
        "powers": "the same without it",
    }

    name: Literal["tools"] = Field(description="A toy for small language models that learn to call a tool.")


class SortConfig(ToyTextConfig):
    """A toy for small language models: sort digits."""

    env = "embodied.envs.text.toys:Sort"
    TASKS: ClassVar = {"sort4": "sort 98171: of four to six digits"}

    name: Literal["sort"] = Field(description="A toy for small language models: sort digits.")


class PicturesConfig(ToyTextConfig):
    """A toy for small models that read images: drawings, and a question to each."""

    env = "embodied.envs.text.toys:PictureQuestions"
    TASKS: ClassVar = {
        "count": "how many dots there are, one to six",
        "colour": "the colour of the disc, beside a square",
        "add": "the sum of two digits from 1 to 5",
    }

    name: Literal["pictures"] = Field(description="A toy for small models that see: drawings, and a question to each.")
    pixels: int = Field(48, ge=16, le=4096, description="Width and height of a picture.")


class ReverseTextConfig(TextConfig):
    """Text to be written backwards, rewarded by similarity."""

    env = "embodied.envs.text.toys:ReverseText"

    name: Literal["reverse_text"] = Field(description="Text to be written backwards, rewarded by similarity.")
    task: Literal["sentences", "letters"] = Field(
        "sentences", description="sentences: messages, for chat models. letters: a few, for small models."
    )
    file: LocalPath | None = Field(
        None, description='The sentences: JSONL with lines {"prompt": "..."}; unset: random everyday words.'
    )

    rules = (only_with("file", {"task": "sentences"}, "it holds sentences; leave one of them out"),)


class MathConfig(TextConfig):
    """Questions from a file, whose boxed answers are compared as mathematics."""

    env = "embodied.envs.text.math:Math"
    needs = Requirement(("math-verify",), "reasoning")

    name: Literal["math"] = Field(description="Questions from a file, whose boxed answers are compared as mathematics.")
    task: str = Field("math", description="How results name it.")
    file: LocalPath | None = Field(
        None,
        description="Questions: JSONL, parquet, a folder of the package datasets, or hf:ORG/NAME:CONFIG:SPLIT of the "
        "hub, with rows as they are published (docs/text_envs.md).",
    )
    columns: dict[Literal["question", "prompt", "messages", "answer", "images", "videos", "solve_rate"], str] = Field(
        {}, description="The data set's own names for these, such as {question: query, answer: extra_info.result}."
    )
    solve_rate: tuple[float, float] | None = Field(
        None,
        description="Train only on questions whose stored `solve_rate` is between these two, such as [0.1,0.9]; null: "
        "on all.",
    )
    held_out: LocalPath | None = Field(
        None, description="A file like env.file for evaluations; unset: the first 5% of the questions, at most 500."
    )
    frames: int = Field(8, ge=1, le=512, description="Most frames of a video that are shown, spread evenly over it.")
    frame_s: float | None = Field(
        None, gt=0, description="Seconds from a shown frame of a video to the next; unset: env.frames frames."
    )
    score_s: float = Field(5.0, gt=0, description="Seconds for comparing an answer; after them it counts as wrong.")


class MixtureConfig(TextConfig):
    """Several text envs in one run, drawn by their weights."""

    env = "embodied.envs.text.mixture:Mixture"

    name: Literal["mixture"] = Field(description="Several text envs in one run (docs/text_envs.md).")
    task: str = Field("mixture", description="How the mixture is called; results name its envs.")
    mixture: dict[str, dict[str, Any]] = Field(
        description="The options of each env, with its `name` and its `weight` in training (1), under a key of your "
        "choice."
    )

    def conflicts(self) -> Iterator[str]:
        if not self.mixture:
            yield "env.mixture is empty: name text envs, such as {sums: {name: sums}, sort: {name: sort}}"
        for name, options in self.mixture.items():
            weight = options.get("weight", 1)
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                yield f"env.mixture.{name}.weight={weight!r}: should be a number above 0"
            if options.get("name") in (None, "mixture") or not re.fullmatch(r"[\w-]+", name):
                yield f"env.mixture.{name}: takes the options of a text env, its name among them"
