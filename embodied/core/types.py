"""Carriers between workers: small frozen dataclasses with their shapes.

Letters used everywhere: N envs, T decisions, C env steps per decision (the action chunk), A action dimensions. Arrays
are numpy between processes; float arrays keep the run's dtype. Functions for joining and dividing trajectories are at
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

import numpy as np

from embodied.core.arrays import Observation, concatenate, map_obs, room_for, take_rows, write
from embodied.core.rng import episode_seeds, generator

if TYPE_CHECKING:
    from embodied.core.chunks import ChunkRule

GOLDEN_RATIO = (5**0.5 - 1) / 2
Array = Any  # numpy array, or a torch tensor where data stays on a GPU


class EpisodeSpec(NamedTuple):
    """An episode of an env row. The driver owns the list; `index`, unique in a run, keys its randomness. A tuple,
    because a reset makes thousands."""

    task: str
    init_state_id: int  # number of the stored initial state; -1 for simulators without them
    seed: int  # drives the random initial state
    index: int  # type: ignore[assignment]  # hides the tuple's method
    question: int = -1  # of a text env's training questions, with algo.prompts=epochs; -1: `seed` draws it


@dataclass(frozen=True)
class EpisodeList:
    """An endless list of episodes with alternating tasks; `stream` separates training from evaluation.

    The k-th episode of a task has the same seed, and the same stored initial state, with any other tasks. A fixed
    horizon (PPO): env e plays episodes e, e + E, e + 2E, ... for E envs in total, so neither the number of sim workers
    nor the order in which envs finish changes any episode. Groups: as many consecutive episodes as a group has share an
    initial state; any free env plays them. Evaluation: a fixed list from a separate stream.
    """

    seed: int
    stream: str  # "train" or "eval"
    tasks: tuple[str, ...]
    stored_states: int = 0  # stored initial states of every task, used in order; 0: none
    group_size: int = 1  # consecutive episodes with the same initial state
    # Questions of each task, asked once in an epoch, in an order shuffled anew; empty: they are drawn.
    question_counts: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> EpisodeSpec:
        return self.at(np.array([index]))[0]

    def _question(self, round: int, task: int) -> int:
        """With three questions, rounds 0 to 2 are epoch 0 and may ask 2 0 1; rounds 3 to 5 are epoch 1."""
        epoch, place = divmod(round, self.question_counts[task])
        return int(shuffled(self.seed, self.tasks[task], epoch, self.question_counts[task])[place])

    def first(self, count: int) -> list[EpisodeSpec]:
        return self.at(np.arange(count))

    def at(self, initial: np.ndarray, index: np.ndarray | None = None) -> list[EpisodeSpec]:
        """These episodes of the list; with other numbers if `index` gives some."""
        rounds, tasks = np.divmod(initial // self.group_size, len(self.tasks))
        seeds = episode_seeds(self.seed, self.stream, rounds)
        states = (rounds % self.stored_states).tolist() if self.stored_states else repeat(-1)
        numbers = initial if index is None else index
        names = np.array(self.tasks, object)[tasks].tolist()
        questions = map(self._question, rounds.tolist(), tasks.tolist()) if self.question_counts else repeat(-1)
        fields = zip(names, states, seeds.tolist(), numbers.tolist(), questions, strict=False)
        return [*map(tuple.__new__, repeat(EpisodeSpec), fields)]  # `EpisodeSpec._make` takes three times as long


@lru_cache(maxsize=16)
def shuffled(seed: int, task: str, epoch: int, count: int) -> np.ndarray:
    """The order of a task's questions in an epoch."""
    return generator(seed, "epoch", task, epoch).permutation(count)


def head_start(env_ids: np.ndarray, max_episode_steps: int) -> np.ndarray:
    """The env steps that each env of a staggered run has already used of its step limit at the start: int [N].

    Multiples of the golden ratio are spread evenly over the envs of each sim worker, for any number of envs.
    """
    return (env_ids * GOLDEN_RATIO % 1 * max_episode_steps).astype(np.int64)


# What an env offers


@dataclass(frozen=True)
class ActionSpec:
    """Continuous: `dim` numbers in [-1, 1]. Discrete: one integer in [0, num_choices) (then dim is 1)."""

    dim: int
    num_choices: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dim, int) and self.dim < 1:
            raise ValueError(f"an action of {self.dim} numbers is invalid")

    @property
    def discrete(self) -> bool:
        return self.num_choices is not None

    def __str__(self) -> str:
        return f"one of {self.num_choices}" if self.discrete else f"{self.dim} numbers"


@dataclass(frozen=True)
class EnvSpec:
    """Everything that a policy must know about an env, without the simulator."""

    action: ActionSpec
    state_dim: int | None = None
    privileged_dim: int | None = None
    images: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # camera -> (H, W, 3)
    instruction: bool = False
    max_episode_steps: int = 0
    has_success: bool = False
    control_hz: float = 20.0  # frames per second of a video at one frame per env step
    text: bool = False  # a text env: decisions are tokens, a step is a turn
    pictures: bool = False  # its messages may show pictures
    backend: str = ""  # the env's resolved physics backend, recorded with every result

    def __post_init__(self) -> None:
        for camera, size in self.images.items():
            if len(size) != 3 or size[2] != 3 or min(size) < 1:
                raise ValueError(
                    f"camera {camera!r} is {list(size)}, not [height, width, 3]: images are uint8 and in three colours "
                    "(of RGBA, image[..., :3])"
                )
            if "." in camera:
                raise ValueError(f"camera {camera!r}: a name has no dots; try {camera.replace('.', '_')!r}")


@dataclass(frozen=True)
class ChunkResult:
    """The outcome of one decision: C env steps of every env.

    `mask[n, c]` is True if env n was running before step c. After the end of an episode the rest of the chunk has
    reward 0, mask False and the last success. `obs` is the observation after the chunk; for a row that ended inside the
    chunk it is its final observation, since rows are only reset later, by `reset`.

    Two envs, chunk of 3, env 1 terminates at its second step with reward 5:
        rewards    [[1, 1, 1], [1, 5, 0]]
        mask       [[T, T, T], [T, T, F]]
        terminated [[F, F, F], [F, T, F]]
    """

    obs: Observation
    rewards: Array  # float [N, C]
    terminated: np.ndarray  # bool [N, C]
    truncated: np.ndarray  # bool [N, C]
    mask: np.ndarray  # bool [N, C]
    success: Array | None  # bool [N, C]; None for envs without success
    errors: tuple[tuple[int, str], ...] = ()  # rows whose episode the simulator gave up, and why

    @property
    def done(self) -> np.ndarray:
        """bool [N]: the episode ended inside this chunk."""
        return (self.terminated | self.truncated).any(axis=1)


# A policy's answers


@dataclass(frozen=True)
class NoiseSpec:
    """The random numbers for one decision of one env: `width` independent numbers of this kind."""

    kind: str  # "normal" or "uniform"
    width: int


@dataclass(frozen=True)
class PolicyOutput:
    """One decision for each of N envs. Log-probs are at the finest level: one per action dimension (or token)."""

    actions: np.ndarray  # [N, C, A]
    logprobs: np.ndarray  # [N, C, A]
    values: np.ndarray  # [N]
    replay: dict[str, np.ndarray] = field(default_factory=dict)  # extra [N, ...] inputs that `forward` needs again


# Played episodes and conversations


class EpisodeResult(NamedTuple):
    """One finished episode, for training metrics and episodes.csv."""

    index: int  # type: ignore[assignment]  # hides the tuple's method
    task: str
    init_state_id: int
    seed: int
    length: int  # env steps
    total_reward: float
    success_once: bool | None
    success_at_end: bool | None
    success_at_reset: bool | None = None
    error: str = ""
    truncated: bool | None = None  # True if an answer was cut off; None for simulators
    tokens: int = 0  # sampled tokens of a language policy
    prompt_tokens: int = 0  # tokens of the first prompt
    all_tokens: int = 0  # tokens of the whole conversation
    places: int = 0  # picture tokens among these
    rewards: dict[str, float] | None = None  # by env.rewards, without weights


@dataclass(frozen=True)
class Trajectory:
    """K consecutive decisions of R sequences, one sequence after the other, with all inputs of the learner.

    A sequence is an env row's decisions in a rollout or in a piece of it (its id is the row's number; it may span
    several episodes), or one whole episode (its id is the episode's index). With two decisions of sequence 3 and one of
    sequence 5, `ids` is [3, 5], `lengths` [2, 1], K = 3, and row 2 of every array is the only decision of sequence 5.

    `values` is V(obs) at act time. `next_values` is V of the final observation if the episode was truncated inside the
    decision, else V of the next observation. Algorithms without values have None.
    """

    ids: np.ndarray  # int [R], ascending
    lengths: np.ndarray  # int [R], decisions
    obs: Observation  # arrays [K, ...]
    actions: np.ndarray  # [K, C, A]: a decision is C env steps of A numbers
    logprobs: np.ndarray  # [K, C, A], log-probs of the actions under the version that acted
    rewards: np.ndarray  # [K, C], of each env step
    terminated: np.ndarray  # bool [K, C]: the episode ended in this env step
    truncated: np.ndarray  # bool [K, C]: the step limit cut the episode off in this env step
    mask: np.ndarray  # bool [K, C]: executed env steps; False after the end of an episode
    versions: np.ndarray  # int [K], the policy version that acted
    episodes: np.ndarray  # int [K], EpisodeSpec.index
    values: np.ndarray | None = None  # [K]
    next_values: np.ndarray | None = None  # [K]
    replay: dict[str, np.ndarray] = field(default_factory=dict)  # [K, ...], inputs of `forward` besides actions
    source: str = ""  # who sends it: worker, stage and round, as in `ActRequest`; of whole episodes worker#transfer
    first: int = 0  # number of this piece's first decision in the rollout
    last: bool = True  # True for the rollout's last piece


@dataclass(frozen=True)
class Unit:
    """A unit of training data for a learner rank: env rows of a rollout, episodes of a group, or examples of a data
    set. The driver announces it in the rank's channel; its sources put the trajectories into the same channel. Examples
    have no source: each rank has read its own."""

    sources: tuple[str, ...]  # senders, as in `Trajectory`
    ids: np.ndarray  # int [S], ascending; of examples in the order of the gradient steps
    advantages: np.ndarray | None = None  # [S], for algorithms with groups
    scores: np.ndarray | None = None  # [S], returns of whole episodes
    is_padding: bool = False  # a copy of another rank's unit, for passes without effect


@dataclass(frozen=True)
class BatchEnd:
    """The last message of a batch: no more units follow."""

    iteration: int
    total: int
    seconds: float = 0.0  # since the learners began to wait for units


# Items of a learner's channel: from players or roles, and the driver. (Simulators' Python 3.9 reads this too.)
ForLearner = Union[Trajectory, Unit, BatchEnd]  # noqa: UP007


# Messages between roles during a rollout


@dataclass(frozen=True)
class ActRequest:
    """A player's request for the next actions of N env rows, or a part of such a request.

    `final_obs` are the last observations of rows `final_rows`, whose episodes were truncated in the previous decision;
    only their values are needed. With `value_only` the same holds for `obs` (the end of a rollout).
    """

    source: str  # receiver of the answer, e.g. "sim-0/1#7" (sim worker 0, stage 1, in round 7 of the run)
    number: int  # number of the request in its round
    obs: Observation
    episodes: Array  # int [N]
    decisions: Array  # int [N]
    final_obs: Observation | None = None
    final_rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int, ascending
    value_only: bool = False
    checked_later: bool = False  # whether a last, `value_only` request of its source asks for the check of all answers
    first: int = 0  # number of the first row within the whole request
    rule: SamplingRule | None = None  # how actions are sampled; None: the round's rule

    @property
    def rows(self) -> int:
        return len(self.episodes)

    @property
    def key(self) -> tuple[int, int, int]:
        """Identifies the answer."""
        return self.number, self.first, self.rows

    def for_rows(self, rows: range) -> ActRequest:
        """A request for these rows only."""
        within = slice(rows.start, rows.stop)
        final = (self.final_rows >= rows.start) & (self.final_rows < rows.stop)
        return replace(
            self,
            obs=map_obs(lambda array: array[within], self.obs),
            episodes=self.episodes[within],
            decisions=self.decisions[within],
            final_obs=take_rows(self.final_obs, final) if self.final_obs is not None and final.any() else None,
            final_rows=self.final_rows[final] - rows.start,
            first=self.first + rows.start,
        )


@dataclass(frozen=True)
class ActReply:
    source: str
    key: tuple[int, int, int]  # key of the request
    output: PolicyOutput | None  # None for value_only
    values: np.ndarray  # [N]
    final_values: np.ndarray | None
    version: int


@dataclass(frozen=True)
class Answerers:
    """The policy workers for a source's next requests, each with its request channel.

    Every replacement has a new name, so the requests of workers not named here wait again.
    """

    source: str
    channels: dict[str, Any]
    others: frozenset[str] = frozenset()  # workers that only finish their own requests
    replies: Any = None  # the Channel for the answers, for a source's first request


Route = tuple[Answerers, ...]
"""How a sim worker asks in a round, by stage. The names of the sources differ from round to round, so nothing of an
earlier round is taken for an answer."""


@dataclass(frozen=True)
class Merging:
    """The limits within which a policy worker answers requests of several sim workers together."""

    rows: int = 1  # largest number of env rows answered together; a larger request is answered alone
    wait_s: float = 0.0  # largest wait of a request for other sims' requests


@dataclass(frozen=True)
class Recording:
    """The videos and buffers recorded of an evaluation's episodes."""

    video_episodes: frozenset[int] = frozenset()  # indices of the recorded episodes
    videos: Path | None = None  # the folder of their videos
    failures_only: bool = False  # True: videos of successes are deleted
    overlay: bool = False  # instruction, step, reward, value and success in every frame
    cameras: bool = False  # the policy's cameras, beside the scene
    buffers: Path | None = None  # the folder in which every episode is recorded for a dataset
    noise: float = 0.0  # deviation of the noise on executed actions; recorded actions are without noise
    seed: int = 0  # seed of that noise
    recorders: tuple[Callable[..., Any], ...] = ()  # recorder classes; the sim worker constructs one of each


@dataclass(frozen=True)
class SamplingRule:
    """How a policy's actions or tokens are sampled. Robot policies only use the temperature. Tokens are drawn from
    logits divided by the temperature (0: the likeliest token), among the `top_k` likeliest (0: all), restricted to the
    smallest set whose probabilities reach `top_p`, after those below `min_p` times the largest are excluded."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stream: str = "train"  # stream of random numbers: train or eval
    logprob_temperature: float = 1.0
    """That of the log-probs that come with answers, of all tokens: in rollouts the one that tokens are drawn at, since
    losses compare with them."""
    min_p: float = 0.0

    @property
    def draws_from_all(self) -> bool:
        return self.top_p == 1.0 and not self.top_k and not self.min_p


@dataclass(frozen=True)
class Job:
    """What a player plays in a round: episodes to their ends, or a `horizon` of decisions of every env row.

    With a horizon every row continues its open episode and then plays its own next ones, and learners get the decisions
    when its horizon is over, or in pieces during the round (`pipeline.granularity`). Whole episodes stay with the
    player until the driver asks for them. The episodes of an evaluation are played in separate envs and recorded. A
    player plays its jobs of a round at the same time.
    """

    episodes: EpisodeList | Sequence[EpisodeSpec]
    horizon: int = 0  # decisions; 0: whole episodes
    outlets: tuple[Any, ...] = ()  # with a horizon: by learner rank, the Channel for the decisions of its env rows
    batch: int = 0  # key in these channels
    pieces: int = 0  # decisions of a piece that is sent during the rollout; 0: the whole horizon is sent at the end
    labels: Literal["", "labelled", "played"] = ""  # with a horizon: the expert's actions are recorded, and played
    at_once: bool = False  # whole episodes are reported, and may be handed in, as soon as they end
    samples: frozenset[int] = frozenset()  # conversations that are returned as samples
    # Of an evaluation
    evaluation: str = ""  # its name, unique among the rounds of all evaluations; empty: training
    recording: Recording = Recording()
    rule: SamplingRule | None = None  # how actions are sampled; None: the round's rule
    rules: Mapping[str, tuple[SamplingRule, int | None]] = field(default_factory=dict)
    """Of tasks with a rule of their own: how their tokens are sampled, and the most tokens of an answer (None: the
    policy's limit)."""
    alone: frozenset[int] = frozenset()  # the last episodes, if each is played alone
    expert: str | None = None  # its actions are played; None: policy workers'
    chunks: ChunkRule | None = None  # how chunks follow each other; None: each is played as a whole, at once


@dataclass(frozen=True)
class Report:
    """A player's immediate report to the driver, which survives the player's death."""

    evaluation: str = ""  # name of the evaluation; empty: training
    begun: tuple[int, ...] = ()  # indices of beginning episodes
    finished: tuple[EpisodeResult, ...] = ()
    warning: str = ""  # for the user


@dataclass(frozen=True)
class Played:
    """The results of a player's job, and the seconds of its round by activity."""

    env_steps: int
    finished: tuple[EpisodeResult, ...]  # episodes that ended in this job
    step_s: float = 0.0
    reset_s: float = 0.0
    wait_s: float = 0.0  # seconds of waiting for the policy's answers
    problems: tuple[str, ...] = ()  # reason for each discarded episode
    samples: tuple[dict[str, Any], ...] = ()  # conversations for samples.jsonl
    ends: tuple[tuple[int, float], ...] = ()  # of conversations: sampled tokens, and seconds since the rollout began


LABELS = "labels"  # in `Trajectory.replay`: [K, C, A], the expert's actions
RESTART = "restart"  # in `obs` of conversations: bool [K], where a stream restarts; absent if none can
FIELDS = ("actions", "logprobs", "rewards", "terminated", "truncated", "mask", "versions", "episodes")
DECISIONS = (*FIELDS, "values", "next_values")  # arrays with a row per decision, besides `obs` and `replay`


# Dividing and joining trajectories


def decisions_of(trajectory: Trajectory) -> Observation:
    """All arrays with a row per decision, as one tree; without values if there are none."""
    fields = {name: getattr(trajectory, name) for name in ("obs", "replay", *DECISIONS)}
    return {name: arrays for name, arrays in fields.items() if arrays is not None}


def map_decisions(function: Callable, *trajectories: Trajectory) -> dict[str, Any]:
    """The function's result for every array with a row per decision, by the fields of a trajectory."""
    return map_obs(function, *map(decisions_of, trajectories))


def join(parts: Sequence[Trajectory]) -> Trajectory:
    """The sequences of all parts, in the order of their ids."""
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda piece: int(piece.ids[0]))
    facts = {name: np.concatenate([getattr(piece, name) for piece in parts]) for name in ("ids", "lengths")}
    joined = replace(parts[0], source="", **facts, **map_decisions(lambda *arrays: concatenate(arrays), *parts))
    return joined if (np.diff(joined.ids) > 0).all() else choose(joined, np.sort(joined.ids))


def join_units(units: Sequence[Unit]) -> Unit:
    """The sequences of these units, in the order of their ids."""
    order = np.argsort(np.concatenate([unit.ids for unit in units]))
    columns = {name for name in ("ids", "advantages", "scores") if getattr(units[0], name) is not None}
    arrays = {name: np.concatenate([getattr(unit, name) for unit in units])[order] for name in columns}
    sources = tuple(source for unit in units for source in unit.sources)
    return replace(units[0], sources=sources, **arrays)


def choose(trajectory: Trajectory, ids: Sequence[int] | np.ndarray, source: str = "") -> Trajectory:
    """A copy of these sequences, in this order. All sequences in their order are returned without a copy."""
    ids = np.array(ids, np.int64)
    if np.array_equal(ids, trajectory.ids):
        return replace(trajectory, source=source)
    place = {int(number): at for at, number in enumerate(trajectory.ids)}
    at = np.array([place[number] for number in ids.tolist()], np.int64)
    ends = np.cumsum(trajectory.lengths)
    starts = ends - trajectory.lengths
    rows = np.concatenate([np.empty(0, np.int64), *(np.arange(starts[i], ends[i]) for i in at)])
    facts: dict[str, Any] = {"ids": trajectory.ids[at], "lengths": trajectory.lengths[at], "source": source}
    return replace(trajectory, **facts, **map_decisions(lambda array: array[rows], trajectory))


def in_sequences(decisions: list[tuple[np.ndarray, Observation]]) -> tuple[np.ndarray, np.ndarray, Observation]:
    """Sorts decisions by sequence: returns ids, lengths and one tree of arrays, sequence after sequence. A
    decision has the ids [n] of its sequences and a tree of arrays [n, ...]; the list, in order of time, is emptied."""
    first = decisions[0][0]
    if (np.diff(first) > 0).all() and all(np.array_equal(ids, first) for ids, _ in decisions):
        return first, np.full(len(first), len(decisions)), in_rows(decisions)
    of = np.concatenate([ids for ids, _ in decisions])
    ids, lengths = np.unique(of, return_counts=True)
    place = np.empty(len(of), np.int64)
    place[np.argsort(of, kind="stable")] = np.arange(len(of))
    room = map_obs(lambda array: room_for(array, len(of)), decisions[0][1])
    decisions.reverse()
    begin = 0
    while decisions:  # freed as soon as copied, so memory does not double
        sequences, arrays = decisions.pop()
        write(room, place[begin : begin + len(sequences)], arrays)
        begin += len(sequences)
    return ids, lengths, room


def in_rows(decisions: list[tuple[np.ndarray, Observation]]) -> Observation:
    """`in_sequences` for decisions that all have the same sequences: tensors stay on their device, without an index
    from the host."""
    count, steps = len(decisions[0][0]), len(decisions)
    room = map_obs(lambda array: room_for(array, count * steps), decisions[0][1])
    table = map_obs(lambda array: array.reshape(count, steps, *array.shape[1:]), room)  # a view of the same memory
    while decisions:
        write(table, (slice(None), len(decisions) - 1), decisions.pop()[1])
    return room


def env_blocks(num_envs: int, ranks: int) -> list[range]:
    """The global env ids that each learner rank owns: contiguous, as equal as possible."""
    borders = [num_envs * rank // ranks for rank in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(borders)]


def rows_of_sims(num_envs: int, num_sims: int, num_tasks: int) -> list[np.ndarray]:
    """The env rows of each sim worker. If the rows are a multiple of the tasks, row e always plays task e % num_tasks,
    and a worker gets rows of as few tasks as possible; else it gets consecutive rows.

    Six rows of three tasks for two sims: 0 3 1 and 4 2 5.
    """
    size = num_envs // num_sims
    if num_envs % num_tasks:
        return [np.arange(sim * size, (sim + 1) * size) for sim in range(num_sims)]
    return [np.array(rows) for rows in deal_by_task(np.arange(num_envs) % num_tasks, num_sims)]


def deal_by_task(tasks: Sequence[Any] | np.ndarray, num_sims: int) -> list[list[int]]:
    """The indices of this list that each sim worker gets. Tasks get equal shares of the workers, so a worker has the
    same few tasks in every list with all tasks, independent of how often each occurs."""
    names, task, counts = np.unique(np.asarray(tasks), return_inverse=True, return_counts=True)
    dealt: list[list[int]] = [[] for _ in range(num_sims)]
    for number, count in enumerate(counts.tolist()):
        for place, at in enumerate(np.flatnonzero(task == number).tolist()):
            dealt[(number * count + place) * num_sims // (len(names) * count)].append(at)
    return dealt
