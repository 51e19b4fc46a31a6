"""Plays episodes in the rows of a vector env, and records them.

`EpisodePlayer` is the common part of rollouts and evaluations (`evaluation.py`): rows without an episode stay frozen,
and no policy sees them. Episodes and their outcomes do not depend on the number of rows.

`Stage` plays rollouts for training. The cycle of a decision is ask -> take -> ask: `ask` sends the current observation
to the policy, `take` receives its actions, plays and records them, and begins new episodes on the rows that are done.
With two stages the policy answers one while the other is simulated (`step_stages`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from embodied.core.arrays import (
    FiniteChecks,
    Observation,
    host,
    is_tensor,
    leaves,
    map_obs,
    on_host,
    room_for,
    take_rows,
    tensor_of,
    text_arrays,
    with_rows,
)
from embodied.core.errors import ConfigError
from embodied.core.types import (
    ActReply,
    Array,
    ChunkResult,
    EpisodeList,
    EpisodeResult,
    EpisodeSpec,
    Note,
    Trajectory,
    head_start,
    in_sequences,
)
from embodied.envs.request_client import PolicyClient
from embodied.envs.vector_env import VectorEnv
from embodied.runtime import Channel, Timers

Refill = Callable[[np.ndarray, ChunkResult], None]  # begins episodes on rows that are done


class EpisodeTracker:
    """The open episodes of N env rows. An episode is a success at the end if its last live step was a success.

    Rewards and success that come as tensors are added up on their device, and read when an episode ends."""

    def __init__(self, num_envs: int, has_success: bool) -> None:
        self.has_success = has_success
        self.specs: list[EpisodeSpec | None] = [None] * num_envs
        self.episode = np.full(num_envs, -1, np.int64)
        self.started = np.zeros(num_envs, np.int64)  # episodes begun by each row
        self.decision = np.zeros(num_envs, np.int64)
        self.length = np.zeros(num_envs, np.int64)
        self.total_reward: Array = np.zeros(num_envs)
        self.success_once: Array = np.zeros(num_envs, bool)
        self.success_now: Array = np.zeros(num_envs, bool)
        self.success_at_reset: Array = np.zeros(num_envs, bool)
        self.keys: tuple[Array, Array] | None = None  # episodes and decisions, on the device of observations

    def begin(self, rows: np.ndarray, specs: Sequence[EpisodeSpec], success: Array | None) -> None:
        """These rows were just reset to these episodes."""
        for row, spec in zip(rows.tolist(), specs, strict=True):
            self.specs[row] = spec
        self.episode[rows] = [spec.index for spec in specs]
        self.started[rows] += 1
        self.decision[rows] = self.length[rows] = 0
        begun, self.keys = np.zeros(len(self.episode), bool), None
        begun[rows] = True
        at_reset = np.zeros(len(begun), bool) if success is None else success
        self.total_reward = with_rows(self.total_reward, begun, room_for(self.total_reward, len(begun)))
        for name in ("success_at_reset", "success_once", "success_now"):
            setattr(self, name, with_rows(getattr(self, name), begun, at_reset))

    def noise_keys(self, at: np.ndarray, obs: Observation) -> tuple[Array, Array]:
        """The episodes and decisions of these rows, as keys of their noise, on the device of their observations."""
        first = next(leaves(obs))
        if not is_tensor(first):
            return self.episode[at], self.decision[at]
        if self.keys is None:
            episodes, decisions = tensor_of(np.stack([self.episode, self.decision]), first.device)
            self.keys = episodes, decisions
        if len(at) == len(self.episode):
            return self.keys
        return self.keys[0][at], self.keys[1][at]

    def record(self, result: ChunkResult) -> None:
        """Count one decision's env steps."""
        mask = result.mask
        live = mask.any(axis=1)
        self.decision[live] += 1
        if self.keys is not None:
            self.keys = (self.keys[0], self.keys[1] + 1) if live.all() else None
        self.length += mask.sum(axis=1)
        if is_tensor(result.rewards):  # 0 for steps that were not taken
            self.total_reward = tensor_of(self.total_reward, result.rewards.device) + result.rewards.sum(dim=1)
        else:
            self.total_reward += (result.rewards * mask).sum(axis=1)
        if is_tensor(result.success):  # steps not taken repeat the last step's success
            self.success_once = tensor_of(self.success_once, result.success.device) | result.success.any(dim=1)
            self.success_now = with_rows(self.success_now, live, result.success[:, -1])
        elif result.success is not None:
            self.success_once |= (result.success & mask).any(axis=1)
            last = np.maximum(mask.sum(axis=1) - 1, 0)
            now = result.success[np.arange(len(mask)), last]
            self.success_now = np.where(live, now, self.success_now)

    def results(self, rows: np.ndarray) -> list[EpisodeResult]:
        """The outcome of rows whose episode just ended."""
        if not len(rows):
            return []
        known = on_host([self.total_reward, self.success_once, self.success_now, self.success_at_reset])
        numbers = (array[rows].tolist() for array in (self.length, *known))
        return [*map(self._result, [self.specs[row] for row in rows.tolist()], *numbers)]

    def _result(self, spec: EpisodeSpec, length: int, total_reward: float, *flags: float) -> EpisodeResult:
        once, at_end, at_reset = (bool(flag) if self.has_success else None for flag in flags)
        counted = spec.index, spec.task, spec.init_state_id, spec.seed, length, float(total_reward)
        return EpisodeResult(*counted, once, at_end, at_reset)

    # The content of a checkpoint; the specs follow from the episode numbers.
    ARRAYS = "episode started decision length total_reward success_once success_now success_at_reset".split()

    def get_state(self) -> dict[str, np.ndarray]:
        return {name: np.array(host(getattr(self, name))) for name in self.ARRAYS}

    def set_state(self, state: dict[str, np.ndarray], specs: list[EpisodeSpec]) -> None:
        for name in self.ARRAYS:
            setattr(self, name, np.array(state[name]).astype(host(getattr(self, name)).dtype))
        self.specs, self.keys = list(specs), None


class EpisodePlayer:
    """A vector env, its playing rows, and their observations."""

    def __init__(self, env: VectorEnv, timers: Timers) -> None:
        self.env = env
        self.timers = timers
        self.rows = EpisodeTracker(env.num_envs, env.env_spec.has_success)
        self.playing = np.zeros(env.num_envs, bool)
        self.obs: Observation | None = None

    def begin(self, rows: np.ndarray, specs: Sequence[EpisodeSpec], elapsed: np.ndarray | None = None) -> None:
        """Begin these episodes on these rows, in one batch; `elapsed` env steps [N] of their limit count as used."""
        by_row: list[EpisodeSpec | None] = [None] * self.env.num_envs
        for row, spec in zip(rows.tolist(), specs, strict=True):
            by_row[row] = spec
        mask = np.zeros(self.env.num_envs, bool)
        mask[rows] = True
        with self.timers.measure("reset"):
            obs, info = self.env.reset(options={"reset_mask": mask, "episodes": by_row, "elapsed": elapsed})
        self.obs = text_arrays(obs)
        self.rows.begin(rows, specs, info.get("success"))
        self.playing[rows] = True

    def seen(self) -> tuple[np.ndarray, Observation]:
        """The playing rows and their observations."""
        at = np.flatnonzero(self.playing)
        return at, self.obs if self.playing.all() else take_rows(self.obs, at)

    def play(self, actions: Array, on_frame: Callable[[np.ndarray], None] | None = None) -> ChunkResult:
        """Play one decision of every row, actions [N, C, A]."""
        with self.timers.measure("step"):
            result = self.env.step_chunk(actions, on_frame=on_frame)
        self.rows.record(result)
        self.obs = text_arrays(result.obs)
        return result

    def end(self, result: ChunkResult) -> tuple[np.ndarray, list[EpisodeResult]]:
        """The rows whose episodes ended in this decision, and their results; they stop playing."""
        done = np.flatnonzero(result.done & self.playing)
        self.playing[done] = False
        return done, self.rows.results(done)


def of_rows(array: Array, at: np.ndarray) -> Array:
    """The rows `at` of an array. All rows are returned without indexing, which would copy an index to the device."""
    return array if len(at) == len(array) else array[at]


def spread(actions: Array, at: np.ndarray, num_rows: int) -> Array:
    """The actions of all rows: these rows' actions, and zeros for frozen rows."""
    if len(at) == num_rows:
        return actions
    everywhere = room_for(actions, num_rows)
    everywhere[at] = actions
    return everywhere


class Stage(EpisodePlayer):
    def __init__(
        self,
        env: VectorEnv,
        name: str,
        env_ids: np.ndarray,
        num_envs_total: int,
        timers: Timers,
        journal: Channel | None = None,
    ) -> None:
        super().__init__(env, timers)
        self.name = name
        self.env_ids = env_ids
        self.num_envs_total = num_envs_total
        self.journal = journal
        self.initial = np.full(env.num_envs, -1, np.int64)  # the episode from whose initial state a row began
        if env.config.retries and not env.env_spec.has_success:
            raise ConfigError(
                f"env.retries={env.config.retries} plays episodes that end without success again, but "
                f"{env.config.name} {env.config.task} reports no success; leave it out"
            )
        self.client: PolicyClient | None = None
        self.checked_later = False  # numbers on a device are checked at the end of a rollout
        self.final_obs: Observation | None = None  # of the rows `final_rows`, truncated in the last decision
        self.final_rows = np.empty(0, np.int64)

    # In rollouts of a fixed number of decisions, every row continues with its own next episode

    def reset(
        self,
        rows: np.ndarray,
        episodes: EpisodeList,
        elapsed: np.ndarray | None = None,
        retried: np.ndarray | bool = False,
    ) -> None:
        """Begin the next episode of these rows: env e plays episodes e, e + E, e + 2E, ... The rows `retried`, bool
        [len(rows)], begin in the initial state of their last episode."""
        next_index = self.env_ids[rows] + self.rows.started[rows] * self.num_envs_total
        self.initial[rows] = np.where(retried, self.initial[rows], next_index)
        if self.journal is not None:
            self.journal.put(Note(self.name, begun=tuple(next_index.tolist())))
        self.begin(rows, episodes.at(self.initial[rows], next_index), elapsed)

    def reset_all(self, episodes: EpisodeList) -> None:
        """Begin the next episode of every row: when a run begins, when it is resumed without the simulator's state, and
        after a restart. With `env.stagger` a part of each row's step limit counts as used, so that episodes do not all
        end at once."""
        elapsed = head_start(self.env_ids, self.env.env_spec.max_episode_steps) if self.env.config.stagger else None
        self.reset(np.arange(self.env.num_envs), episodes, elapsed)

    def go_on(self, done: np.ndarray, result: ChunkResult, episodes: EpisodeList) -> None:
        """Keep the last observations of truncated episodes, whose values are requested next, and begin the next
        episodes."""
        self.final_rows = np.flatnonzero(result.truncated.any(axis=1))
        self.final_obs = (
            map_obs(lambda array: of_rows(array, self.final_rows), self.obs) if len(self.final_rows) else None
        )
        if len(done):
            self.reset(done, episodes, retried=self.env.config.retries > 0 and self._to_retry(done))

    def _to_retry(self, done: np.ndarray) -> np.ndarray:
        """Bool [len(done)]: the rows whose episode failed and may be tried again."""
        tried = (self.rows.episode[done] - self.initial[done]) // self.num_envs_total
        return ~host(self.rows.success_once)[done] & (tried < self.env.config.retries)

    # With whole episodes, a free row takes the next waiting episode

    def refill(self, free: np.ndarray, _: ChunkResult | None = None, *, waiting: deque[EpisodeSpec]) -> None:
        """Begin waiting episodes on free rows."""
        if len(free) and waiting:
            specs = [waiting.popleft() for _ in free[: len(waiting)]]
            self.begin(free[: len(specs)], specs)

    # Both

    def play_for(self, client: PolicyClient, horizon: int) -> None:
        """Begin a rollout of `horizon` decisions, or of whole episodes, with actions from this client."""
        self.client, self.checked_later = client, bool(horizon)
        self.env.checks = FiniteChecks() if horizon else None

    def ask(self, value_only: bool = False) -> None:
        """Send the policy the observations of the playing rows."""
        self.at, self.shown = self.seen()
        self.client.ask(
            self.shown,
            *self.rows.noise_keys(self.at, self.shown),
            final_obs=self.final_obs,
            final_rows=self.final_rows,
            value_only=value_only,
            checked_later=self.checked_later,
        )

    def receive(self) -> ActReply:
        with self.timers.measure("wait"):
            return self.client.answer()

    def take(self, record: Record, refill: Refill) -> None:
        """Play and record the policy's answer to the last `ask`; `refill` begins episodes on the rows that are done."""
        reply = self.receive()
        episodes = self.rows.episode[self.at]
        result = self.play(spread(reply.output.actions, self.at, self.env.num_envs))
        record.decision(self, episodes, reply, result)
        done, outcomes = self.end(result)
        record.end(outcomes)
        refill(done, result)

    def close(self, record: Record) -> None:
        """Receive the values that the end of a rollout needs; the last request was `ask(value_only=True)`."""
        record.value(self, self.receive())
        self.env.check_noted()
        self.final_obs, self.final_rows = None, np.empty(0, np.int64)


def step_stages(
    stages: Sequence[Stage], records: Sequence[Record], refills: Sequence[Refill], horizon: int = 0
) -> Iterator[int]:
    """Play `horizon` decisions, or until all rows are done. Stages take turns, so the policy answers one while another
    is simulated. Yields the number of decisions after each round."""
    for stage in stages:
        if stage.playing.any():
            stage.ask()
    decisions = 0
    while any(stage.playing.any() for stage in stages) and (not horizon or decisions < horizon):
        decisions += 1
        for stage, record, refill in zip(stages, records, refills, strict=True):
            if stage.playing.any():
                stage.take(record, refill)
                if stage.playing.any():
                    stage.ask(value_only=decisions == horizon)
        yield decisions


class Record:
    """Records one stage's decisions until they are handed on as a trajectory."""

    def __init__(self, source: str, horizon: int = 0) -> None:
        """Holds `horizon` decisions of every env row, with values; without a horizon whole episodes, without values."""
        self.source, self.horizon = source, horizon
        self.handed = 0  # decisions that have been handed on
        self.env_steps = 0
        self.finished: list[EpisodeResult] = []
        self.decisions: list[tuple[np.ndarray, Observation]] = []  # ids of the sequences, and arrays of their decisions

    def decision(self, stage: Stage, episodes: np.ndarray, reply: ActReply, result: ChunkResult) -> None:
        at, output = stage.at, map_obs(owned, vars(reply.output))
        if self.horizon:
            self.value(stage, reply)
        arrays = {
            "obs": stage.shown,
            "replay": output["replay"],
            "actions": output["actions"],
            "logprobs": output["logprobs"],
            "rewards": of_rows(result.rewards, at),
            "terminated": of_rows(result.terminated, at),
            "truncated": of_rows(result.truncated, at),
            "mask": of_rows(result.mask, at),
            "versions": np.full(len(at), reply.version, np.int64),
            "episodes": episodes,
        }
        if self.horizon:
            arrays |= {"values": output["values"], "next_values": room_for(output["values"], len(at))}
        self.add(stage.env_ids[at] if self.horizon else episodes, arrays)
        self.env_steps += int(arrays["mask"].sum())

    def add(self, ids: np.ndarray, arrays: Observation) -> None:
        """A decision of these sequences."""
        self.decisions.append((ids, arrays))

    def end(self, outcomes: Sequence[EpisodeResult]) -> None:
        """These episodes ended in the last decision."""
        self.finished += outcomes

    def value(self, stage: Stage, reply: ActReply) -> None:
        """Record the values of the observations after the last decision."""
        if self.decisions:
            _, arrays = self.decisions[-1]
            arrays["next_values"][:] = reply.values
            if len(rows := stage.final_rows):
                arrays["next_values"][slice(None) if len(rows) == len(reply.values) else rows] = reply.final_values

    def trajectory(self, end: int | None = None) -> Trajectory:
        """The decisions before `end` (None: all) that have not been handed on."""
        count = len(self.decisions) if end is None else end - self.handed
        recorded, self.decisions = self.decisions[:count], self.decisions[count:]
        ids, lengths, arrays = in_sequences(recorded)
        first, self.handed = self.handed, self.handed + count
        last = not self.horizon or self.handed == self.horizon
        return Trajectory(ids=ids, lengths=lengths, source=self.source, first=first, last=last, **arrays)


def owned(array: Array) -> Array:
    """A copy, since the memory of a message is reused."""
    return array if is_tensor(array) else np.array(array)
