"""The policy worker of language models: an engine continues sims' conversations, each answered as soon as it is over.

Prompts are encoded here, once; the answer is returned as tokens with their log-probs and as text. A token's noise is
keyed by the episode and the token's index, so an answer depends on the request alone: a repeated request gets the same
answer from any worker.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from embodied.core.conversations import (
    ANOTHER_PROMPT,
    Completion,
    CompletionBatch,
    Prompt,
    Remark,
    Said,
    Vacancy,
    WrittenTokens,
    pictures_in,
)
from embodied.core.pictures import PictureError
from embodied.core.types import EnvSpec, SamplingRule
from embodied.policies import make_policy
from embodied.policies.language.engine import Answer, Request, Sampling, make_engine
from embodied.policies.policy_worker import PolicyWorker
from embodied.runtime import Channel, Needs
from embodied.runtime.device_memory import DeviceTensors
from embodied.runtime.published_weights import Publication

SIGN_OF_LIFE_S = 30.0  # interval of signs of life to sims that wait for long answers


@dataclass(frozen=True)
class OpenPrompt:
    """A prompt that is being answered."""

    source: str
    prompt: Prompt
    said: tuple[int, ...]  # the env's message, encoded
    restarts: bool = False  # True if it is the whole conversation instead


class LanguageWorker(PolicyWorker):
    def build(self, spec: EnvSpec) -> None:
        """The policy, and the engine that generates with it."""
        self.belongings = DeviceTensors(self.timers)
        self.device = "cpu" if self.config.tensor_parallel > 1 else self.device  # a GPU may not hold the whole model
        self.policy = make_policy(self.config, spec).eval().to(self.device)
        self.engine = make_engine(self.config, self.policy)
        self.policy.cache_tensors = self.engine.cache_tensors
        # The last message, whether it came first, and its tokens.
        self.last_message: tuple[Said, bool, tuple[int, ...]] = ("", False, ())
        self._reset_numbers()

    def route(self, publication: Publication) -> str:
        """Like other policies; but weights that the engine divides over GPUs come through the host."""
        return super().route(publication if self.config.tensor_parallel == 1 else replace(publication, gpu=""))

    def load_weights(self, publication: Publication, route: str, channel: Channel, whole: bool) -> int | None:
        version = super().load_weights(publication, route, channel, whole)
        if version is not None:
            self._load_engine(version)
        return version

    def _load_engine(self, version: int) -> None:
        with self.alive(self.engine.patience_s):
            self.engine.load(self.policy.model_weights(), version)

    def needs(self, shared: bool = False) -> Needs:
        """Like other policies, plus the engine's own weights and cache."""
        needs = super().needs(shared)
        return replace(needs, num_bytes=needs.num_bytes + self.engine.num_bytes())

    def onload(self) -> None:
        super().onload()
        self.belongings.move("onload", "engine", self.engine.onload)

    def offload(self) -> None:
        self.belongings.move("offload", "engine", self.engine.offload)
        super().offload()

    def begin(self, version: int, rule: SamplingRule) -> None:
        """Begin a round. An engine without weights after offloading loads the policy's."""
        if self.engine.needs_load:
            self._load_engine(version)
        self.engine.begin(version, self.seed, rule.stream, rule)

    def serve(
        self,
        requests: Channel,
        replies: dict[str, Channel],
        version: int,
        rule: SamplingRule = SamplingRule(),  # noqa: B008  frozen
        first_sources: Collection[str] | None = None,
        name: str = "",
        vacancies: Channel | None = None,
        remarks: Channel | None = None,
    ) -> int:
        """Continue these sources' conversations with this version until the round is over; returns the number of
        tokens. Prompts of other sources belong to an earlier round. If several engines share the prompts, `vacancies`
        receives, under this `name`, the free room and the answered prompts. `remarks` receives the engine's
        remarks."""
        waiting: deque[tuple[str, Prompt]] = deque()
        before, heard = self.tokens, dict.fromkeys(replies, time.monotonic())
        show = rule.stream == "eval"
        with self.weights.acting(version), torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            self.begin(version, rule)
            if vacancies:
                room = self.engine.room
                vacancies.put(Vacancy(name, room))
            while self._take(requests, replies, waiting):
                finished = self.go_on(waiting, version, show)
                if remarks:
                    for remark in self.engine.take_remarks():
                        remarks.put(remark)
                now = time.monotonic()
                quiet = [source for source, when in heard.items() if now - when > SIGN_OF_LIFE_S]
                for source, completions in {**dict.fromkeys(quiet, ()), **finished}.items():
                    replies[source].put(CompletionBatch(source, tuple(completions)))
                    heard[source] = now
                if vacancies and finished:
                    answered = [(source, done.number) for source, answers in finished.items() for done in answers]
                    vacancies.put(Vacancy(name, room, tuple(answered)))
                self.tick()
            stopped = self.engine.abort()
            if vacancies and stopped:
                self.tokens += sum(len(answer.tokens) for answer in stopped)
                vacancies.put(Vacancy(name, room, unfinished=tuple(map(unfinished, stopped))))
        return self.tokens - before

    def go_on(
        self, waiting: deque[tuple[str, Prompt]], version: int, show: bool = False
    ) -> dict[str, list[Completion]]:
        """Begin waiting prompts while there is room, and generate a token for every open answer; returns finished
        answers by source."""
        started, finished = time.perf_counter(), {}
        with self.timers.measure("act"), self.computing.measured():
            for source, completion in [*self._begin(waiting, version), *self._step(version, show)]:
                finished.setdefault(source, []).append(completion)
        self.busy_s += time.perf_counter() - started
        return finished

    def _take(self, requests: Channel, known: dict[str, Channel], waiting: deque) -> bool:
        """Take arrived messages; wait for one if there is no work. False once the round is over."""
        while requests.qsize() or not (self.engine.running or waiting):
            with self.timers.measure("wait"):
                item = requests.get()
            if item is None:
                return False
            if item.source in known:
                waiting += [(item.source, prompt) for prompt in item.prompts]
                if self.policy.sight:
                    self.policy.sight.read_ahead(name for asked in item.prompts for name in pictures_in(asked.said))
        return True

    def _begin(self, waiting: deque, version: int) -> list[tuple[str, Completion]]:
        """Give the engine prompts while it has room; returns answers to prompts that cannot be continued."""
        refused, most = [], self.policy.max_length
        while waiting and self.engine.room > 0:
            source, prompt = waiting.popleft()
            asked, written = OpenPrompt(source, prompt, ()), ()
            try:
                asked = self._encoded(asked)
            except PictureError as err:
                refused.append((source, self._completion(asked, NOTHING, version, str(err))))
                continue
            if prompt.written:
                written = prompt.written.tokens.tolist()
                self.resumed += len(written)
            tokens = [*([] if asked.restarts else prompt.tokens.tolist()), *asked.said, *written]
            if len(tokens) >= most:
                refused.append((source, self._no_room(asked, version, len(tokens))))
                continue
            limit = min((prompt.max_tokens or self.config.max_tokens) - len(written), most - len(tokens))
            shown = (*prompt.pictures, *pictures_in(prompt.said)) if self.policy.sight else ()
            rule = prompt.override
            sampling = rule and Sampling(self.seed, f"act/{rule.stream}", rule, self.engine.stops)
            noise = prompt.episode + (prompt.forgotten + len(prompt.history)) * ANOTHER_PROMPT
            self.engine.add(Request(asked, tokens, limit, noise, sampling, shown, prompt.has_more_turns))
        return refused

    def _encoded(self, asked: OpenPrompt) -> OpenPrompt:
        """The same with the env's message as tokens, or the whole conversation if the chat template has changed it."""
        tokenizer, prompt = self.policy.tokenizer, asked.prompt
        if not prompt.said:
            return asked
        if (whole := tokenizer.conversation(prompt.history, prompt.said)) is None:
            return replace(asked, said=self._encode(prompt.said, not len(prompt.tokens)))
        before = prompt.tokens.tolist()
        extends = whole[: len(before)] == before
        return replace(asked, said=tuple(whole[len(before) :] if extends else whole), restarts=not extends)

    def _encode(self, said: Said, first: bool) -> tuple[int, ...]:
        """The tokens of a message. Prompts of a group follow each other, so the last message's tokens are kept."""
        if self.last_message[:2] != (said, first):
            self.last_message = said, first, tuple(self.policy.tokenizer.encode(said, first=first))
        return self.last_message[2]

    def _no_room(self, asked: OpenPrompt, version: int, count: int) -> Completion:
        """A first prompt that is too long drops its conversation. A later message that is too long ends the
        conversation as truncated and adds no tokens to it."""
        if len(asked.prompt.tokens) or asked.prompt.forgotten:
            self.no_room += 1
            return self._completion(replace(asked, said=(), restarts=False), NOTHING, version)
        why = f"a prompt of {count} tokens leaves no room for an answer within {self.policy.max_length}, the most that "
        why += "policy.max_length or the model's positions allow"
        return self._completion(asked, NOTHING, version, why)

    def _step(self, version: int, show: bool) -> list[tuple[str, Completion]]:
        if not self.engine.running:
            return []
        self.running = max(self.running, self.engine.running)
        self.steps += 1
        return [
            (answer.key.source, self._completion(answer.key, answer, version, answer.dropped, show))
            for answer in self.engine.step()
        ]

    def _completion(
        self, asked: OpenPrompt, answer: Answer, version: int, dropped: str = "", show: bool = False
    ) -> Completion:
        self.tokens += len(answer.tokens)
        answer = whole_answer(asked.prompt.written, answer)
        ids, tokenizer = answer.tokens.tolist(), self.policy.tokenizer
        return Completion(
            number=asked.prompt.number,
            tokens=np.array([*asked.said, *ids], np.int32),
            logprobs=answer.logprobs,
            version=version,
            text=tokenizer.decode(ids[:-1] if ids and ids[-1] in tokenizer.stops else ids),
            pieces=tuple(tokenizer.decode([token]) for token in ids) if show or asked.prompt.override else (),
            truncated=answer.truncated,
            dropped=dropped,
            needs_history=tokenizer.rewrites,
            restarts=asked.restarts,
        )

    def drop_servers(self, names: Collection[str]) -> list[Remark]:
        """Drop the servers that other policy workers have dropped; returns the remarks on their answers."""
        if not hasattr(self, "engine"):
            return []
        self.engine.drop_servers(names)
        return self.engine.take_remarks()

    def engine_numbers(self) -> dict[str, float]:
        """The engine's counters since the last call, for the log; {} for a worker that is not built yet."""
        if not hasattr(self, "engine"):
            return {}
        numbers = {"tokens_per_s": self.tokens / self.busy_s if self.busy_s else 0.0, "running_max": self.running}
        numbers |= {name: getattr(self, name) for name in ("tokens", "steps", "resumed", "no_room")}
        self._reset_numbers()
        return {f"engine/{name}": float(value) for name, value in (numbers | self.engine.metrics()).items()}

    def _reset_numbers(self) -> None:
        self.tokens, self.busy_s, self.steps, self.running = 0, 0.0, 0, 0
        self.resumed = 0  # tokens of answers that another engine had begun
        self.no_room = 0  # conversations that the env's message ended: policy.max_length was reached

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


def whole_answer(written: WrittenTokens | None, answer: Answer) -> Answer:
    """The whole answer, including the tokens that another engine has written."""
    if written is None:
        return answer
    tokens, logprobs = (written.tokens, answer.tokens), (written.logprobs, answer.logprobs)
    return replace(answer, tokens=np.concatenate(tokens), logprobs=np.concatenate(logprobs))


def unfinished(answer: Answer) -> tuple[tuple[str, int], WrittenTokens]:
    """The prompt of a stopped answer (source and number), and its tokens so far."""
    whole = whole_answer(answer.key.prompt.written, answer)
    return (answer.key.source, answer.key.prompt.number), WrittenTokens(whole.tokens, whole.logprobs)


NOTHING = Answer(None, np.zeros(0, np.int32), np.zeros(0, np.float32), truncated=True)
