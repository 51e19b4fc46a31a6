"""Measures the parts of a language recipe: the env's prompts and scores, generation, and updates.

An item is a whole conversation: a sim asks and scores all of its turns, an engine generates all of its answers. Their
lengths in tokens come from the policy's initial weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied.core.conversations import Completion, CompletionBatch, PromptBatch
from embodied.core.types import SamplingRule, Trajectory
from embodied.envs.text.text_worker import TextWorker
from embodied.policies.language.language_worker import LanguageWorker
from embodied.profiling.role_probe import DirectChannel, ProbedPart, ProbeWorker, Samples

NUMBER = "\\boxed{7}"


class ConversationProbe(ProbeWorker):
    sim_worker = TextWorker
    policy_worker = LanguageWorker

    def rollout(self, num_envs: int, decisions: int, repeats: int) -> Samples:
        samples = super().rollout(num_envs, decisions, repeats)
        part = self.parts[self._rows(num_envs)]
        if part.policy:
            samples.conversations += sizes_of(part.kept.get())
            samples.pass_cost = part.policy.policy.pass_cost()
        return samples

    def _rows(self, num_envs: int) -> int:
        """All env rows, since asking costs little."""
        return num_envs

    def _horizon(self, limit: int) -> int:
        return 1

    def _num_decisions(self, direct: DirectChannel) -> int:
        return 1

    def _num_items(self, played: Trajectory) -> int:
        return len(played.ids)

    def _cut_episodes(self, sim: TextWorker, limit: int) -> None:
        """Conversations are never cut short."""

    def _policy(self, sim: TextWorker) -> LanguageWorker:
        policy = super()._policy(sim)
        policy.engine.load(policy.policy.model_weights(), 0)
        return policy

    def _answers(self, part: ProbedPart, copies: int) -> DirectChannel:
        return EngineAnswers(part.policy) if part.policy else NumberAnswers()


def sizes_of(played: Trajectory) -> list[tuple[int, int]]:
    """The tokens of each conversation's prompt, and of the rest."""
    masks = np.split(played.mask[:, 0], np.cumsum(played.lengths)[:-1])
    prompts = [int(np.argmax(mask)) if mask.any() else len(mask) for mask in masks]
    return [(prompt, len(mask) - prompt) for prompt, mask in zip(prompts, masks, strict=True)]


class NumberAnswers(DirectChannel):
    """The answer to every request is a number."""

    def answer(self) -> CompletionBatch:
        batch: PromptBatch = self.waiting.popleft()
        tokens, logprobs = np.zeros(2, np.int32), np.zeros(1, np.float32)
        answers = (Completion(prompt.number, tokens, logprobs, 0, NUMBER) for prompt in batch.prompts)
        return CompletionBatch(batch.source, tuple(answers))


class EngineAnswers(DirectChannel):
    def __init__(self, policy: LanguageWorker) -> None:
        super().__init__()
        self.policy = policy
        policy.begin(0, SamplingRule(stream="profile"))

    def put(self, batch: PromptBatch) -> None:
        self.waiting += [(batch.source, prompt) for prompt in batch.prompts]

    def answer(self) -> CompletionBatch:
        answers: dict[str, Any] = {}
        while not answers:
            answers = self.policy.go_on(self.waiting, 0)
        return CompletionBatch("probe", tuple(answers["probe"]))
