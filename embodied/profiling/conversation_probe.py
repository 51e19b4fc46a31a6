"""What the parts of a language recipe cost: to ask and score, to write answers, to learn from conversations.

An item is a conversation, whole: a sim's part of it is to ask and to score all of its turns, an engine's to write all
of its answers. How many tokens those have is what the policy's first weights make of it.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

import numpy as np

from embodied.core.conversations import Completion, CompletionBatch, PromptBatch
from embodied.core.types import EpisodeList, Route, Trajectory
from embodied.envs.text.worker import TextWorker
from embodied.policies import make_policy
from embodied.policies.language.worker import LanguageWorker
from embodied.profiling.role_probe import ProbedPart, ProbeWorker, ReplayedChannel, Samples, real, tasks_of, used_bytes

NUMBER = "\\boxed{7}"


class ConversationProbe(ProbeWorker):
    def rollout(self, num_envs: int, decisions: int, repeats: int) -> Samples:
        """Hold so many conversations, one round more than `repeats`."""
        part = self._part(num_envs)
        samples = self.samples.setdefault(num_envs, Samples(bytes=part.bytes, horizon=1))
        for repeat in range(repeats + 1):
            direct = AnsweredDirectly(part.policy) if part.policy else AnsweredWithNothing()
            started = perf_counter()
            self._play(part, num_envs, 1, Route(("probe",), (direct,), (direct,)))
            wall = perf_counter() - started
            self.tick()
            if repeat:
                samples.reset_s.append(0.0)
                samples.decision_s = wall
                for name, seconds in (("sim", wall - direct.busy_s), ("policy", direct.busy_s)):
                    if name in self.measured:
                        samples.seconds.setdefault(name, []).append(seconds)
        samples.policy_bytes = part.policy.needs().num_bytes if part.policy else 0.0
        return samples

    def _rows(self, num_envs: int) -> int:
        """All envs: asking costs little."""
        return num_envs

    def _num_items(self, played: Trajectory) -> int:
        return len(played.ids)

    def _has_frozen_parts(self, part: ProbedPart) -> bool:
        return False

    def _play(self, part: ProbedPart, num_envs: int, decisions: int, route: Route) -> float:
        episodes = EpisodeList(self.config.seed + self.rank, "profile", tasks_of(self.config))
        part.sim.keep(())
        part.sim.collect([episodes[i] for i in range(num_envs)], route)
        part.sim.hand_over([np.array(part.sim.kept())], "probe", (part.kept,))
        return 0.0

    def _part(self, rows: int) -> ProbedPart:
        if rows not in self.parts:
            before = used_bytes("cpu")
            sim = real(TextWorker, self.config.env.model_copy(update={"num_envs": rows}), tick=self.tick)
            spec = sim.spec()
            taken = max(used_bytes("cpu") - before, 0)
            policy = self._policy(sim) if "policy" in self.measured else None
            self.parts[rows] = ProbedPart(sim, ReplayedChannel(), policy, taken, spec.max_episode_steps)
        return self.parts[rows]

    def _policy(self, sim: Any) -> LanguageWorker:
        config, spec = self.config, sim.spec()
        policy = real(LanguageWorker, config.policy, config.seed, config.learner.precision, self.device)
        policy.build(spec)
        policy.policy.load_state_dict(make_policy(config.policy, spec, config.seed).state_dict())
        policy.weights.version = 0
        policy.engine.load(policy.policy.model_weights(), 0)
        return policy


class AnsweredWithNothing:
    """A channel to nobody, both ways: every request has a number for an answer, at no cost."""

    def __init__(self) -> None:
        self.waiting: deque = deque()
        self.busy_s = 0.0

    def put(self, batch: PromptBatch) -> None:
        self.waiting.append(batch)

    def get(self) -> CompletionBatch:
        batch = self.waiting.popleft()
        tokens, logprobs = np.zeros(2, np.int32), np.zeros(1, np.float32)
        answers = (Completion(prompt.number, tokens, logprobs, 0, NUMBER) for prompt in batch.prompts)
        return CompletionBatch(batch.source, tuple(answers))


class AnsweredDirectly:
    """A channel to an engine in the same process, both ways: it writes when somebody waits for its answers."""

    def __init__(self, policy: LanguageWorker) -> None:
        self.policy = policy
        self.waiting: deque = deque()
        self.busy_s = 0.0
        policy.engine.begin(0, policy.seed, "profile", 1.0)

    def put(self, batch: PromptBatch) -> None:
        self.waiting += [(batch.source, prompt) for prompt in batch.prompts]

    def get(self) -> CompletionBatch:
        started, found = perf_counter(), {}
        while not found:
            found = self.policy.go_on(self.waiting, 0)
        self.busy_s += perf_counter() - started
        return CompletionBatch("probe", tuple(found["probe"]))
