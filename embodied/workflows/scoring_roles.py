"""Workers that score conversations instead of their env, or in addition to it: by a function, by a classifier network,
or by a language model, which gets its questions over a queue, like a policy.

A score is the reward of a conversation's last token. The other tokens' rewards are the env's if scores add to them,
else 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from embodied.config.sections import RolesSection
from embodied.core.conversations import Prompt, PromptBatch
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import as_path
from embodied.core.request_queue import Waiting
from embodied.core.types import EnvSpec, Servers, Trajectory
from embodied.envs import import_class
from embodied.envs.request_client import RequestClient
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.folder import tokenizer_of
from embodied.policies.language.worker import LanguageWorker
from embodied.policies.policy_folder import read_weights
from embodied.runtime import Needs
from embodied.runtime.device_memory import Computing, DeviceTensors, give_back_unused, num_bytes
from embodied.workflows.relay import RelayWorker

READ_TOGETHER = 32  # conversations in a batch of the classifier


@dataclass(frozen=True)
class Talk:
    """A conversation as text."""

    episode: int
    asked: str  # the conversation before the last answer, without special tokens
    answer: str  # as the env receives it


class ScoringWorker(RelayWorker):
    """Gives each conversation a score by `scores`."""

    def __init__(self, policy: Any, roles: RolesSection, device: str) -> None:
        self.config, self.roles, self.device = policy, roles, device

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        self.tokenizer = tokenizer_of(self.config, spec.max_episode_steps != 1)

    def relay(self, parts: list[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        talks = [self.talks(part) for part in parts]
        scores = iter(self.scores([talk for each in talks for talk in each]))
        results = [self.paid(part, [next(scores) for _ in each]) for part, each in zip(parts, talks, strict=True)]
        sums = np.array([sum(float(part.rewards.sum()) for part in results), sum(map(len, talks))])
        total, count = self.all_reduce(sums) if self.world_size > 1 else sums
        return results, {"reward/mean": float(total / max(count, 1))}

    def scores(self, talks: Sequence[Talk]) -> list[float]:
        raise NotImplementedError

    def talks(self, trajectory: Trajectory) -> list[Talk]:
        """The conversations of a group."""
        result = []
        for episode, end, length in zip(
            trajectory.ids.tolist(), np.cumsum(trajectory.lengths), trajectory.lengths, strict=True
        ):
            tokens, sampled = trajectory.actions[end - length : end, 0, 0], trajectory.mask[end - length : end, 0]
            last = int(np.flatnonzero(~sampled).max(initial=-1)) + 1  # begin of the last answer
            written = tokens[last:].tolist()
            answer = self.tokenizer.decode(written[:-1] if written and written[-1] in self.tokenizer.stops else written)
            result.append(Talk(episode, self.tokenizer.plain_text(tokens[:last]), answer))
        return result

    def paid(self, trajectory: Trajectory, scores: list[float]) -> Trajectory:
        if odd := [score for score in scores if not np.isfinite(score)]:
            raise ConfigError(f"roles.{self.roles.scorer} gave the reward {odd[0]}; it must be a finite number")
        weight = self.roles.reward_weight
        rewards = np.array(trajectory.rewards) if weight is not None else np.zeros_like(trajectory.rewards)
        rewards[np.cumsum(trajectory.lengths) - 1, 0] += np.array(scores) * (1.0 if weight is None else weight)
        return replace(trajectory, rewards=rewards)


class VerifierWorker(ScoringWorker):
    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        super().build(spec, start)
        self.verify = import_class(self.roles.verifier, "roles.verifier")

    def scores(self, talks: Sequence[Talk]) -> list[float]:
        return [float(self.verify(talk.asked, talk.answer)) for talk in talks]


class ClassifierWorker(ScoringWorker):
    """Reads conversations with a sequence classifier of transformers."""

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from embodied.policies.language.folder import BUILDING

        super().build(spec, start)
        self.belongings, self.computing = DeviceTensors(self.timers), Computing()
        folder = as_path(self.roles.reward_model)
        options = {"local_files_only": True, "trust_remote_code": False}
        try:
            self.words = AutoTokenizer.from_pretrained(folder, **options)
            with BUILDING:
                model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
            self.model = model.eval().to(self.device)
        except Exception as err:  # transformers raises many kinds
            cause = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
            raise CheckpointError(f"roles.reward_model={folder} is not a sequence classifier: {cause}") from None
        self.model.requires_grad_(False)
        if self.words.pad_token is None:
            self.words.pad_token = self.words.eos_token
        self.model.config.pad_token_id = self.words.pad_token_id

    def scores(self, talks: Sequence[Talk]) -> list[float]:
        rewards: list[float] = []
        with torch.no_grad(), self.computing.measured():
            for first in range(0, len(talks), READ_TOGETHER):
                self.tick()
                texts = [talk.asked + talk.answer for talk in talks[first : first + READ_TOGETHER]]
                read = self.words(texts, return_tensors="pt", padding=True).to(self.device)
                logits = self.model(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).logits.float()
                rewards += (logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, -1]).tolist()
        return rewards

    def needs(self, shared: bool = False) -> Needs:
        return Needs(num_bytes(self.model.parameters()) + self.computing.num_bytes)

    def onload(self) -> None:
        self.belongings.onload()

    def offload(self) -> None:
        if not self.belongings.away:
            self.belongings.offload({"network": [*self.model.parameters(), *self.model.buffers()]})
            give_back_unused()


class JudgedWorker(ScoringWorker):
    """Asks a language model about each conversation, over the queue of the model's workers."""

    def connect(self, servers: Servers) -> None:
        self.client = JudgeClient(servers, room=self.config.max_running)

    def scores(self, talks: Sequence[Talk]) -> list[float]:
        questions = [self.question(talk) for talk in talks]
        verdicts = self.client.ask([*dict.fromkeys(questions)], self.tick)  # equal answers are asked about once
        says = self.roles.judge_says
        return [
            float(verdicts[asked].strip().startswith(says) if says else verdicts[asked].strip() == talk.answer.strip())
            for talk, asked in zip(talks, questions, strict=True)
        ]

    def question(self, talk: Talk) -> str:
        return self.roles.judge_prompt.replace("{asked}", talk.asked).replace("{answer}", talk.answer)


class JudgeClient(RequestClient):
    """The client's end of the queue. A judge gets more questions as it answers, so a slow judge gets fewer. A
    question's number is also the number of its noise, which has no effect: a judge takes the likeliest tokens."""

    number = 0

    def ask(self, questions: Sequence[str], tick: Any) -> dict[str, str]:
        """The answers by question."""
        asked = dict(enumerate(questions, self.number))
        self.number += len(asked)
        self.put(*(Waiting(n, Prompt(n, n, text), 1, n, False) for n, text in asked.items()))
        answers: dict[str, str] = {}
        while len(answers) < len(asked):
            batch = self.get()
            tick()
            for completion in batch.completions if batch else ():
                if self.queue.answered(completion.number):
                    answers[asked[completion.number]] = completion.text
            self._send()
        return answers

    def messages(self, requests: list[Prompt]) -> list[PromptBatch]:
        return [PromptBatch(self.source, tuple(requests))]


class JudgeWorker(LanguageWorker):
    """A language model whose weights never change, with an engine that answers reward workers."""

    def __init__(self, policy: LanguageConfig, roles: RolesSection, seed: int, device: str) -> None:
        super().__init__(roles.judge_policy(policy), seed, device=device)
        self.judge = roles.judge
        self.weights = SimpleNamespace(acting=acting, version=0, close=lambda: None)

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        super().build(spec)
        self.policy.initialise(np.random.default_rng(self.seed))
        if self.judge == "start" and start is not None:  # a timed run begins with new weights
            self.policy.begin_with(read_weights(start))
        self._load_engine(0)


def acting(version: int) -> AbstractContextManager[None]:
    """Do nothing: a judge has its own weights, so it waits for no update."""
    return nullcontext()
