"""The sim worker of text envs: plays conversations for training and evaluation, and keeps them until learners want
them. It never sees the policy, only the tokens that come with answers.

Each row plays one conversation at a time; when one ends, the next begins. Conversations depend neither on their order
nor on which policy worker answers. Earlier text is never encoded again: a turn appends to the conversation's tokens,
unless the policy renders the conversation anew (`restarts`).
Scores of cut-off answers, and whether they are learned from, are decided elsewhere (`score_of` in
algorithms/group_pool.py, `trained_items` in learners/train_batch.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median_low
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np

from embodied.core.conversations import (
    FIRST_PLACE,
    Completion,
    Prompt,
    PromptBatch,
    Said,
    in_words,
    pictures_in,
    shortened_turn,
)
from embodied.core.errors import DeadlineExceeded, EmbodiedError
from embodied.core.request_queue import RequestClient, Waiting
from embodied.core.types import RESTART, EnvSpec, EpisodeResult, EpisodeSpec, Route, Trajectory
from embodied.envs import env_class
from embodied.envs.player import PlayerWorker, Tally
from embodied.envs.text.rewards import RewardSum
from embodied.envs.text.text_env import TextEnv, Turn, checked_said
from embodied.runtime import Timers

LOOK_S = 0.01  # between two checks for answers while env steps run
LONGEST_PROBLEM = 1_000  # characters in a table of episodes
SAMPLE_TURNS = 20  # of a sampled conversation
QUICK_S = 0.003  # if env steps mostly take less, they are played one after the other
REMEMBERED = 16  # number of latest steps for this decision
T = TypeVar("T")  # a conversation
NO_TOKENS = np.zeros(0, np.int32)  # before the first prompt: one object, so a message of many prompts has it once


class TextWorker(PlayerWorker):
    def __init__(self, *options, **more) -> None:
        super().__init__(*options, **more)
        self.envs: dict[str, EnvsOfConfig] = {}  # by the config as JSON; evaluations are mostly of the same
        self.steps = SideBySide(self.config.side_by_side)

    def build(self) -> EnvSpec:
        """Load the conversations' shared objects (a dataset may take seconds) and return the env's spec."""
        return self._envs_of(self.config).spec if self.num_stages else self.eval_spec()

    def eval_spec(self) -> EnvSpec:
        """The same for evaluations."""
        return self._envs_of(self.eval_config).spec

    def _envs_of(self, config: Any) -> EnvsOfConfig:
        if (key := config.model_dump_json()) not in self.envs:
            kind = env_class(config)
            self.envs[key] = EnvsOfConfig(kind, config, kind.load(config))
        return self.envs[key]

    def plays(self, tallies: Sequence[Tally], route: Route) -> Iterator[Iterator[None]]:
        yield self._converse(tallies, route)

    def _converse(self, tallies: Sequence[Tally], route: Route) -> Iterator[None]:
        """Play the conversations of all jobs together. Training's are kept, an evaluation's are written to disk."""
        started, stop = perf_counter(), lambda: self.stopped and all(tally.job.evaluation for tally in tallies)
        with ExitStack() as stack:
            parts = [self._make_part(tally, stack) for tally in tallies]
            talk = ConversationClient(route, self.timers)
            for ended in play_conversations(parts, talk, self.timers, self.steps, stop):
                self.tick()
                for part in parts:
                    over = [conversation for conversation in ended if conversation.part is part]
                    if part.tally.job.evaluation:
                        part.tally.add_finished(written(over, part.writers))
                    else:
                        part.tally.add_finished(self._keep_ended(over, part.tally, perf_counter() - started))
                yield

    def _make_part(self, tally: Tally, stack: ExitStack) -> Part:
        """The conversations of a job, with envs that no conversation uses."""
        job = tally.job
        if job.evaluation:
            config, rows = self.eval_config, self.eval_rows
        else:
            config, rows = self.config, max(1, self.config.num_envs // self.world_size)
        name = f"sim-{self.rank}"
        writers = [stack.enter_context(record(job.recording, name)) for record in job.recording.recorders]
        return Part(self._envs_of(config), tally, rows, writers)

    def _keep_ended(self, ended: list[Conversation], tally: Tally, seconds: float) -> list[EpisodeResult]:
        """Keep ended conversations for learners; returns their results. A conversation with an unusable answer does not
        count."""
        kept = []
        for conversation in ended:
            tally.env_steps += len(conversation.turns)
            tally.ends.append((conversation.num_sampled, seconds))
            if conversation.spec.index in tally.job.samples:
                tally.samples.append(conversation.sample())
            if conversation.problem:
                tally.problems.append(conversation.problem)
                continue
            kept.append(conversation)
        if kept:
            self.store |= dict.fromkeys([talk.spec.index for talk in kept], trajectory_of(kept))
        return [conversation.result() for conversation in kept]

    def close(self) -> None:
        self.steps.close()
        for envs in self.envs.values():
            envs.kind.unload(envs.shared)


def written(ended: list[Conversation], writers: Sequence[Any]) -> list[EpisodeResult]:
    """The results of conversations of an evaluation, which get transcripts."""
    results = [conversation.result() for conversation in ended]
    for writer in writers:
        for conversation, result in zip(ended, results, strict=True):
            writer.add(result, conversation.turns)
    return results


# Conversations, from prompt to trajectory


@dataclass
class EnvsOfConfig:
    """The envs of a config."""

    kind: type[TextEnv]
    config: Any
    shared: Any  # what `load` has opened for all of them
    free: list[TextEnv] = field(default_factory=list)  # envs without a conversation

    @cached_property
    def spec(self) -> EnvSpec:
        return self.kind.env_spec(self.config)


@dataclass
class Part:
    """The conversations of a job, played with envs of one config, at most `rows` at a time."""

    envs: EnvsOfConfig
    tally: Tally
    rows: int
    writers: Sequence[Any] = ()  # of transcripts

    def __post_init__(self) -> None:
        self.waiting, self.open = deque(self.tally.job.episodes), 0
        kind, self.config, self.spec = self.envs.kind, self.envs.config, self.envs.spec
        self.max_turns = self.spec.max_episode_steps
        self.rewrites, self.plays_groups = kind.rewrites(self.config), kind.plays_groups(self.config)
        self.rewards = RewardSum(self.config.rewards) if self.config.rewards else None

    def begin(self, timers: Timers) -> list[Conversation]:
        """Begin as many conversations as have room."""
        wanted: list[list[EpisodeSpec]] = []
        alone = self.tally.job.alone
        while self.waiting and self.open + len(wanted) < self.rows:
            if self.waiting[0].index in alone and (self.open or wanted):
                break
            wanted.append([self.waiting.popleft()])
            while self.plays_groups and self.waiting and is_same_prompt(self.waiting[0], wanted[-1][0]):
                wanted[-1].append(self.waiting.popleft())
            if wanted[-1][0].index in alone:
                break
        if wanted:
            self.tally.add_begun([spec for spec, *_ in wanted])
        self.open += len(wanted)
        with timers.measure("reset"):
            return [self._opened(*group) for group in wanted]

    def go_on(self, conversation: Conversation) -> Conversation:
        """The conversation that continues; if it has ended, the next one of its group."""
        if (begun := conversation.successor) is None:
            return conversation
        if not begun.is_extra:
            self.tally.add_begun([begun.spec])
        return begun

    def end(self, conversation: Conversation) -> list[Conversation]:
        """Make room for the next conversation; returns all conversations that have ended. Conversations of the group
        that the env has not played wait for another env."""
        self.open -= 1
        self.envs.free.append(conversation.env)
        self.waiting.extendleft(reversed(conversation.others))
        return [ended for ended in (*conversation.earlier, conversation) if not ended.is_extra]

    def _opened(self, spec: EpisodeSpec, *others: EpisodeSpec) -> Conversation:
        envs = self.envs
        env = envs.free.pop() if envs.free else envs.kind(envs.config, envs.shared)
        env.group_size = 1 + len(others)
        said = checked_said(env.reset(spec), envs.kind, self.spec.pictures)
        return Conversation(spec._replace(task=env.source or spec.task), env, said, self, others=others)


@dataclass
class Conversation:
    """A conversation, in progress or ended."""

    spec: EpisodeSpec
    env: TextEnv
    said: Said  # the env's last message
    part: Part
    answers: list[Completion] = field(default_factory=list)  # the tokens of each turn
    rewards: list[np.float32] = field(default_factory=list)  # of each answer's last token
    cut_off: list[bool] = field(default_factory=list)  # each answer, or a later one without tokens
    turns: list[dict[str, Any]] = field(default_factory=list)  # for a transcript
    success: list[bool] = field(default_factory=list)  # of each turn
    pictures: list[str] = field(default_factory=list)  # that its tokens show
    first_picture: int = 0  # of those that the tokens of the next prompt show
    problem: str = ""  # why it does not count
    scores: dict[str, float] = field(default_factory=dict)  # by env.rewards, without weights
    needs_history: bool = False  # True if the policy may render the conversation anew
    begin: int = 0  # turn with which the tokens of the next prompt begin: the latest restart
    forgotten: int = 0  # turns before the env's latest rewriting of the conversation
    # Of a group that one env plays:
    others: tuple[EpisodeSpec, ...] = ()  # its next conversations
    earlier: tuple[Conversation, ...] = ()  # its earlier ones, without their scores
    successor: Conversation | None = None  # the next one, which has begun
    is_extra: bool = False  # True if the env plays more than the group has
    prompts_before: int = 0  # most prompts of others with its number

    def weighted(self, answer: str, turn: Turn, reward: float, over: bool) -> tuple[Turn, float]:
        """The turn and its reward by `env.rewards`; functions score the last answer."""
        rewards = self.part.rewards
        scores = rewards.of_env(reward)
        if over:
            before = [as_text(turn["said"]) + turn["answer"] for turn in self.turns]
            scores |= rewards.of_conversation("".join([*before, as_text(self.said)]), answer, self.env.solution)
        for name, score in scores.items():
            self.scores[name] = self.scores.get(name, 0.0) + score
        return replace(turn, facts={**(turn.facts or {}), **scores}), rewards.total(scores)

    def append_answer(self, completion: Completion, turn: Turn, reward: float) -> None:
        """Append an answer and the env's turn."""
        restarts = completion.restarts or 0 < self.forgotten == len(self.answers)
        self.needs_history |= completion.needs_history
        if completion.restarts:  # earlier pictures are shown again
            self.begin, self.first_picture = len(self.answers), len(self.pictures)
            self.pictures += [name for before in self.turns[self.forgotten :] for name in pictures_in(before["said"])]
        if len(completion.tokens):  # otherwise the conversation has no room for another turn
            self.answers.append(replace(completion, restarts=restarts))
            self.rewards.append(np.float32())
            self.cut_off.append(False)
        if self.answers:
            self.rewards[-1] = np.float32(self.rewards[-1] + reward)
            self.cut_off[-1] |= completion.truncated
        if completion.num_said:
            self.pictures += pictures_in(self.said)
        self.success.append(turn.success)
        recorded = completion.logprobs if self.part.tally.job.evaluation else completion.logprobs[:0]
        self.turns.append(
            {
                "said": self.said,
                "answer": completion.text,
                "tokens": list(completion.pieces),
                "logprobs": [round(number, 4) for number in recorded.tolist()],
                "truncated": completion.truncated,
                "reward": reward,
                "facts": dict(turn.facts or {}),
            }
        )
        self.said = turn.said
        if turn.restarts:
            self.begin = self.forgotten = len(self.answers)
            self.first_picture = len(self.pictures)

    def begin_next(self) -> None:
        """Begin the group's next conversation with the env's message."""
        spec, *others = self.others or (self.spec,)
        begun = {"others": (*others,), "earlier": (*self.earlier, self)}
        if not self.others:
            begun |= {"is_extra": True, "prompts_before": self.prompts_before + self.part.max_turns}
        self.successor = Conversation(spec._replace(task=self.spec.task), self.env, self.said, self.part, **begun)

    def add_score(self, turn: Turn) -> None:
        """Take the env's score of the ended conversation."""
        reward = own_reward(turn, self, self.turns[-1]["answer"])
        if rewards := self.part.rewards:
            scores = rewards.of_env(reward)
            self.scores |= {name: self.scores.get(name, 0.0) + score for name, score in scores.items()}
            reward = rewards.total(scores)
        if self.answers:
            self.rewards[-1] = np.float32(self.rewards[-1] + reward)
        self.success[-1] = turn.success
        self.turns[-1]["reward"] += reward
        self.turns[-1]["facts"] |= turn.facts or {}

    def context(self) -> np.ndarray:
        """The tokens that the next message follows, unless the policy renders the conversation anew."""
        before = [turn.tokens for turn in self.answers[self.begin :]]
        return np.concatenate(before) if before else NO_TOKENS

    def history(self) -> tuple[tuple[Said, np.ndarray], ...]:
        """The messages and answers so far, for a policy that needs them."""
        turns = self.answers[self.forgotten :] if self.needs_history else ()
        answers = [each.tokens[each.num_said :] for each in turns]
        return tuple((turn["said"], answer) for turn, answer in zip(self.turns[self.forgotten :], answers))

    def shown_pictures(self) -> list[str]:
        """The names of the pictures that its tokens show, in order."""
        return self.pictures[: sum(int((turn.tokens == FIRST_PLACE).sum()) for turn in self.answers)]

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy chose."""
        return sum(answer.num_sampled for answer in self.answers)

    def result(self) -> EpisodeResult:
        spec, answers = self.spec, self.answers
        counted = not self.problem
        return EpisodeResult(
            index=spec.index,
            task=spec.task,
            init_state_id=spec.init_state_id,
            seed=spec.seed,
            length=len(self.turns),
            total_reward=float(sum(self.rewards)),
            success_once=any(self.success) if counted else None,
            success_at_end=self.success[-1] if counted else None,
            error=self.problem,
            truncated=any(self.cut_off) if counted else None,
            tokens=self.num_sampled,
            prompt_tokens=answers[0].num_said if answers else 0,
            all_tokens=sum(len(turn.tokens) for turn in answers),
            places=sum(int((turn.tokens < 0).sum()) for turn in answers) if self.pictures else 0,
            rewards=self.scores or None,
        )

    def sample(self) -> dict[str, Any]:
        """The conversation as a line of samples.jsonl: without log-probs and the middle of long texts."""
        ended = self.result()
        return {
            "version": max((answer.version for answer in self.answers), default=-1),
            "index": ended.index,
            "task": ended.task,
            "success": ended.success_once,
            "reward": ended.total_reward,
            "truncated": ended.truncated,
            "tokens": ended.tokens,
            "error": ended.error,
            "turns": [
                {**turn, **shortened_turn(turn), "tokens": [], "logprobs": []} for turn in self.turns[:SAMPLE_TURNS]
            ],
        }


def trajectory_of(conversations: Iterable[Conversation]) -> Trajectory:
    """All tokens of these conversations as decisions; the env's tokens are masked."""
    conversations = sorted(conversations, key=lambda talk: talk.spec.index)
    ids = np.array([talk.spec.index for talk in conversations])
    lengths = np.array([sum(len(turn.tokens) for turn in talk.answers) for talk in conversations])
    turns = [turn for talk in conversations for turn in talk.answers]
    sizes = np.array([(turn.num_said, turn.num_sampled) for turn in turns])
    tokens, ends = np.concatenate([turn.tokens for turn in turns]), sizes.sum(axis=1).cumsum()
    count, firsts, lasts = len(tokens), ends - sizes.sum(axis=1), ends - 1

    def at(places: np.ndarray, numbers: Any, dtype: type) -> np.ndarray:
        column = np.zeros(count, dtype)
        column[places] = numbers
        return column

    mask, obs = np.tile([False, True], len(turns)).repeat(sizes.ravel()), {}
    if conversations[0].part.spec.pictures:
        begins = np.flatnonzero(tokens == FIRST_PLACE)
        obs["picture"] = np.full(count, "", object)  # its name where one begins
        obs["picture"][begins] = [name for talk in conversations for name in talk.shown_pictures()]
    if any(talk.needs_history or talk.part.rewrites for talk in conversations):
        obs[RESTART] = at(firsts, [turn.restarts for turn in turns], bool)
    return Trajectory(
        ids=ids,
        lengths=lengths,
        obs=obs,
        actions=tokens[:, None, None],
        logprobs=at(mask, np.concatenate([turn.logprobs for turn in turns]), np.float32)[:, None, None],
        rewards=at(lasts, [reward for talk in conversations for reward in talk.rewards], np.float32)[:, None],
        terminated=at(lengths.cumsum() - 1, True, bool)[:, None],
        truncated=at(lasts, [is_cut for talk in conversations for is_cut in talk.cut_off], bool)[:, None],
        mask=mask[:, None],
        versions=np.array([turn.version for turn in turns]).repeat(sizes.sum(axis=1)),
        episodes=ids.repeat(lengths),
    )


# Playing them with the policy workers' answers


class SideBySide(Generic[T]):
    """Plays env steps of at most `most` conversations at the same time, in threads, if they take long (tools, scores,
    requests to servers). Quick steps stay in the worker's own thread: a thread would cost more than they do, and the
    order of everything stays the same. The calls of an env never overlap.

        steps.begin(conversation, pass_answer)      # an answer came; `pass_answer` lets its env step
        for conversation, over in steps.take_ended(wait_for_one=True): ...
    """

    def __init__(self, most: int, quick_s: float = QUICK_S) -> None:
        self.most, self.quick_s = most, quick_s
        self.seconds: deque[float] = deque(maxlen=REMEMBERED)  # of the latest steps
        self.begun: list[tuple[T, Future[bool]]] = []  # in the order of the answers
        self.threads: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        """True if a step has not been reported as ended."""
        return bool(self.begun)

    def begin(self, conversation: T, step: Callable[[], bool]) -> None:
        """Begin a step; its function returns whether the conversation is over."""
        if self.most > 1 and len(self.seconds) > 1 and median_low(self.seconds) > self.quick_s:
            self.threads = self.threads or ThreadPoolExecutor(self.most, "env-step")
            self.begun.append((conversation, self.threads.submit(self._timed, step)))
        else:
            done: Future[bool] = Future()
            done.set_result(self._timed(step))
            self.begun.append((conversation, done))

    def take_ended(self, wait_for_one: bool) -> list[tuple[T, bool]]:
        """The steps that have ended since the last call, in the order in which they began: (conversation, is it over).
        Raises an exception that one of them raised."""
        if wait_for_one and self.begun:
            wait([step for _, step in self.begun], return_when=FIRST_COMPLETED)
        begun, over = self.begun, []
        self.begun = []
        for conversation, step in begun:
            (over if step.done() else self.begun).append((conversation, step))
        return [(conversation, step.result()) for conversation, step in over]

    def give_up(self) -> None:
        """Forget all steps: steps that have not begun are cancelled, running steps are waited for."""
        running = [step for _, step in self.begun if not step.cancel()]
        self.begun = []
        wait(running)

    def close(self) -> None:
        """End the threads."""
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)

    def _timed(self, step: Callable[[], bool]) -> bool:
        began = perf_counter()
        try:
            return step()
        finally:
            self.seconds.append(perf_counter() - began)


class ConversationClient(RequestClient):
    """Requests the answers of conversations, and finds the conversation of each answer."""

    def __init__(self, route: Route, timers: Timers) -> None:
        super().__init__(*route)
        self.timers = timers
        self.open: dict[int, Conversation] = {}  # by number of the prompt
        self.number = 0

    @property
    def busy(self) -> bool:
        """True if an answer is awaited."""
        return bool(self.open)

    def ask(self, conversations: Iterable[Conversation]) -> None:
        """Send these conversations to the policies."""
        prompts = [self._prompt(prompt) for prompt in conversations]
        self.put(*(Waiting(prompt.number, prompt, 1, prompt.episode, prompt.has_more_turns) for prompt in prompts))

    def _prompt(self, conversation: Conversation) -> Prompt:
        self.number += 1
        self.open[self.number] = conversation
        tokens, history = conversation.context(), conversation.history()
        more = len(conversation.turns) + 1 < conversation.part.max_turns
        pictures = tuple(conversation.pictures[conversation.first_picture :])
        job, spec = conversation.part.tally.job, conversation.spec
        override, limit = job.rules.get(spec.task, (job.rule, None))
        about = self.number, spec.index, conversation.said, tokens, pictures, limit, override, more
        return Prompt(*about, history=history, forgotten=conversation.prompts_before + conversation.forgotten)

    def messages(self, requests: list[Prompt]) -> list[PromptBatch]:
        return [PromptBatch(self.source, tuple(requests))]

    def answers(self, seconds: float | None) -> list[tuple[Conversation, Completion]]:
        """Wait at most `seconds` for answers; returns the answers that arrived together, without repeated ones."""
        with self.timers.measure("wait"):
            try:
                batch = self.get(seconds)
            except DeadlineExceeded:
                if seconds is None:
                    raise
                return []
        completions = (
            [completion for completion in batch.completions if self.queue.take_answer(completion.number)]
            if batch
            else []
        )
        return [(self.open.pop(completion.number), completion) for completion in completions]


def play_conversations(
    parts: Sequence[Part],
    talk: ConversationClient,
    timers: Timers,
    steps: SideBySide,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[Conversation]]:
    """Play all of these to their ends, and yield the newly ended ones. On `stop`, open conversations are abandoned."""

    def begin() -> list[Conversation]:
        return [conversation for part in parts for conversation in part.begin(timers)]

    try:
        talk.ask(begin())
        while (talk.busy or steps.busy) and not stop():
            for conversation, completion in talk.answers(LOOK_S if steps.busy else None) if talk.busy else ():
                with timers.measure("step"):
                    steps.begin(conversation, partial(pass_answer, conversation, completion))
            with timers.measure("step"):
                stepped = steps.take_ended(wait_for_one=not talk.busy)
            ended = [one for conversation, over in stepped if over for one in conversation.part.end(conversation)]
            talk.ask([*(conversation.part.go_on(conversation) for conversation, over in stepped if not over), *begin()])
            if ended:
                yield ended
    finally:
        steps.give_up()


def pass_answer(conversation: Conversation, completion: Completion) -> bool:
    """Pass an answer to the env; returns True if the conversation is over, and those before it of a group that the env
    plays."""
    turn = Turn(dropped=completion.dropped) if completion.dropped else conversation.env.step(completion.text)
    if not isinstance(turn, Turn):
        raise EmbodiedError(f"{type(conversation.env).__name__}.step returned {type(turn).__name__}, it must be a Turn")
    last = len(conversation.turns) + 1 >= conversation.part.max_turns or (completion.truncated and not turn.restarts)
    if last and not (turn.done or turn.ends_sample):
        turn = conversation.env.cut_short(turn)
    over = turn.done or turn.ends_sample or not turn.said or last
    if turn.dropped:
        for scored in (*conversation.earlier, conversation):
            scored.problem = " ".join(str(turn.dropped).split())[:LONGEST_PROBLEM]
        conversation.append_answer(completion, Turn(), 0.0)
        return True
    reward = own_reward(turn, conversation, completion.text)
    if conversation.part.rewards:
        turn, reward = conversation.weighted(completion.text, turn, reward, over)
    conversation.append_answer(completion, turn, reward)
    if turn.ends_sample or not over:
        checked_said(turn.said, type(conversation.env), conversation.part.spec.pictures)
    if turn.ends_sample:
        conversation.begin_next()
    for scored, score in zip((*conversation.earlier, conversation), turn.scores or ()):
        scored.add_score(score)
    return over and not turn.ends_sample


def own_reward(turn: Turn, conversation: Conversation, answer: str) -> float:
    """The env's reward of a turn, as `env.reward` has it."""
    reward = float(turn.success) if conversation.part.config.reward == "success" else float(turn.reward)
    if not np.isfinite(reward):
        raise EmbodiedError(f"{type(conversation.env).__name__}.step gave the reward {reward} for {answer[:80]!r}")
    return reward


def is_same_prompt(one: EpisodeSpec, other: EpisodeSpec) -> bool:
    held_out = one.init_state_id >= 0  # then the seed does not choose it
    return one[: 2 if held_out else 3] == other[: 2 if held_out else 3]


def as_text(said: Said) -> str:
    """An env's message as plain text."""
    return said if isinstance(said, str) else "".join(map(in_words, said))
