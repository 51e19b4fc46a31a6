"""A player: plays jobs in the rows of an env, records them, asks policy workers, and reports to the driver.

`PlayerWorker.play` plays the jobs of a round in turns, decision by decision: `play_horizon` for rollouts of a fixed
length, `play_episodes` for whole episodes of training and of evaluations (`envs/text/text_worker.py`: conversations).
The cycle of a decision is ask -> take -> ask: `ask` sends the current observations to the policy, `take` receives the
actions, plays and records them, and episodes begin on the rows that are done. While the policy answers one stage of a
sim worker, another stage is simulated.

Rows without an episode stay frozen, and no policy sees them: episodes and their outcomes do not depend on the number of
rows. Requests wait in the player (`core/request_queue.py`), and any policy worker may answer them.
Whole episodes stay with the player until learners want them (`store.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from embodied.core.arrays import (
    FiniteChecks,
    Observation,
    concatenate,
    host,
    is_tensor,
    leaves,
    map_obs,
    on_cpu,
    room_for,
    take_rows,
    tensor_of,
    text_arrays,
    with_rows,
)
from embodied.core.errors import ConfigError
from embodied.core.request_queue import PolicyClient
from embodied.core.rng import normal
from embodied.core.types import (
    ActReply,
    Array,
    ChunkResult,
    EpisodeList,
    EpisodeResult,
    EpisodeSpec,
    Job,
    Played,
    Recording,
    Report,
    Route,
    Trajectory,
    head_start,
    in_sequences,
)
from embodied.envs.store import StoringWorker
from embodied.runtime import Channel, Timers, served_while_busy

if TYPE_CHECKING:
    from embodied.core.chunks import LateActions
    from embodied.envs.vector_env import VectorEnv

OVER = object()  # the end of an iterator


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
        self.errors: dict[int, str] = {}  # by row: why the simulator gave its episode up
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
        self.errors |= dict(result.errors)
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
        outcomes = on_cpu([self.total_reward, self.success_once, self.success_now, self.success_at_reset])
        numbers = (array[rows].tolist() for array in (self.length, *outcomes))
        return [*map(self._result, rows.tolist(), *numbers)]

    def _result(self, row: int, length: int, total_reward: float, *flags: float) -> EpisodeResult:
        spec = self.specs[row]
        once, at_end, at_reset = (bool(flag) if self.has_success else None for flag in flags)
        counted = spec.index, spec.task, spec.init_state_id, spec.seed, length, float(total_reward)
        return EpisodeResult(*counted, once, at_end, at_reset, self.errors.pop(row, ""))

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
        self.late: LateActions | None = None  # in an evaluation with delays or overlapping chunks

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
        if self.late is not None:
            self.late.begin(rows)

    def observe_playing(self) -> tuple[np.ndarray, Observation]:
        """The playing rows and their observations."""
        at = np.flatnonzero(self.playing)
        return at, self.obs if self.playing.all() else take_rows(self.obs, at)

    def ask(self, client: PolicyClient, **what: Any) -> None:
        """Request the decisions of the playing rows."""
        self.at, self.shown = self.observe_playing()
        if self.late is not None:
            self.shown = self.late.shown(self.shown, self.at)
        client.ask(self.shown, *self.rows.noise_keys(self.at, self.shown), **what)

    def receive(self, client: PolicyClient) -> ActReply:
        with self.timers.measure("wait"):
            return client.answer()

    def take(
        self, client: PolicyClient, tally: Tally, record: Record | None = None, recorders: Sequence[Recorder] = ()
    ) -> tuple[np.ndarray, ChunkResult]:
        """Play and record the answer to the last `ask`; returns the rows whose episodes ended, which stop playing."""
        reply, episodes = self.receive(client), self.rows.episode[self.at]
        actions = actions_of_all_rows(reply.output.actions, self.at, self.env.num_envs)
        if self.late is not None:
            actions = self.late.play(actions)
        for recorder in recorders:
            recorder.record_decision(self.obs, actions, self.at, reply.values)

        def on_frame(moved: np.ndarray) -> None:
            for recorder in recorders:
                recorder.on_frame(moved)

        result = self.play(add_noise(actions, self.rows, tally.job.recording), on_frame if recorders else None)
        tally.env_steps += int(of_rows(result.mask, self.at).sum())
        for recorder in recorders:
            recorder.record_result(result)
        if record is not None:
            record.decision(self, episodes, reply, result)
        done, outcomes = self.end(result)
        if record is not None:
            record.end(outcomes)
        for recorder in recorders if len(done) else ():
            recorder.finish(done, outcomes)
        tally.add_finished(outcomes)
        return done, result

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


def actions_of_all_rows(actions: Array, at: np.ndarray, num_rows: int) -> Array:
    """The actions of all rows: these rows' actions, and zeros for frozen rows."""
    if len(at) == num_rows:
        return actions
    everywhere = room_for(actions, num_rows)
    everywhere[at] = actions
    return everywhere


class Stage(EpisodePlayer):
    """Env rows of the run, whose episodes go on from rollout to rollout."""

    def __init__(
        self,
        env: VectorEnv,
        env_ids: np.ndarray,
        num_envs_total: int,
        timers: Timers,
        began: Callable[[Sequence[int]], None] = lambda episodes: None,
    ) -> None:
        """`began` is called with the indices of episodes before they begin."""
        super().__init__(env, timers)
        self.env_ids = env_ids
        self.num_envs_total = num_envs_total
        self.began = began
        self.initial = np.full(env.num_envs, -1, np.int64)  # the episode from whose initial state a row began
        if env.config.retries and not env.env_spec.has_success:
            raise ConfigError(
                f"env.retries={env.config.retries} plays episodes that end without success again, but "
                f"{env.config.name} {env.config.task} reports no success; leave it out"
            )
        self.final_obs: Observation | None = None  # of the rows `final_rows`, truncated in the last decision
        self.final_rows = np.empty(0, np.int64)

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
        self.began(next_index.tolist())
        self.begin(rows, episodes.at(self.initial[rows], next_index), elapsed)

    def reset_all(self, episodes: EpisodeList) -> None:
        """Begin the next episode of every row: when a run begins, when it is resumed without the simulator's state, and
        after a restart. With `env.stagger` a part of each row's step limit counts as used, so that episodes do not all
        end at once."""
        elapsed = head_start(self.env_ids, self.env.env_spec.max_episode_steps) if self.env.config.stagger else None
        self.reset(np.arange(self.env.num_envs), episodes, elapsed)

    def ask_all(self, client: PolicyClient, value_only: bool = False) -> None:
        """Request the next decision of every row, or only values at the end of a rollout."""
        final = {"final_obs": self.final_obs, "final_rows": self.final_rows}
        self.ask(client, value_only=value_only, checked_later=True, **final)

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


def play_horizon(
    stage: Stage, tally: Tally, client: PolicyClient, record: Record, hand_on: Callable[[int], None]
) -> Iterator[None]:
    """Play a job's horizon: every row continues its episode and then plays its own next ones. Yields when the next
    decision is requested. `hand_on(number)` hands on the decisions before this one."""
    job = tally.job
    stage.env.checks = FiniteChecks()  # numbers on a device are checked at the end
    if stage.obs is None:
        stage.reset_all(job.episodes)
    stage.ask_all(client)
    yield
    for decision in range(1, job.horizon + 1):
        stage.go_on(*stage.take(client, tally, record), job.episodes)
        stage.ask_all(client, value_only=decision == job.horizon)
        if job.pieces and decision > 1 and (decision - 1) % job.pieces == 0:
            hand_on(decision - 1)  # the observation after the last decision is not valued yet
        yield
    record.value(stage, stage.receive(client))
    stage.env.check_noted()
    stage.final_obs, stage.final_rows = None, np.empty(0, np.int64)
    hand_on(job.horizon)


def play_episodes(
    player: EpisodePlayer,
    tally: Tally,
    episodes: Sequence[EpisodeSpec],
    client: PolicyClient,
    record: Record | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Play these episodes of a job to their ends; a free row takes the next one. Yields when the next decisions are
    requested. When `stop()` is true, the decision in progress is the last one, and open episodes are given up."""
    job, waiting = tally.job, deque(episodes)
    player.env.checks, player.playing[:] = None, False
    player.late = None
    if job.chunks:
        from embodied.core.chunks import LateActions

        player.late = LateActions(job.chunks, player.env.num_envs, player.env.env_spec.action.dim)
    with ExitStack() as stack:
        kinds = job.recording.recorders
        recorders = [stack.enter_context(kind(player.env, job.recording, tally.warn)) for kind in kinds]

        def refill(free: np.ndarray) -> None:
            """Begin waiting episodes on free rows."""
            free = free[: num_startable(waiting, player.playing, job.alone)]
            if not len(free):
                return
            specs = [waiting.popleft() for _ in free]
            tally.add_begun(specs)
            player.begin(free, specs)
            client.begin(free)
            for recorder in recorders:
                recorder.begin(free, specs, player.obs.get("instruction"))

        refill(np.arange(player.env.num_envs))
        while player.playing.any() and not stop():
            player.ask(client, rule=job.rule)
            yield
            done, _ = player.take(client, tally, record, recorders)
            refill(np.flatnonzero(~player.playing) if waiting and waiting[0].index in job.alone else done)


def num_startable(waiting: deque[EpisodeSpec], playing: np.ndarray, alone: frozenset[int]) -> int:
    """The number of waiting episodes that may begin now."""
    if waiting and waiting[0].index in alone:
        return int(not playing.any())
    return sum(spec.index not in alone for spec in waiting)


def add_noise(actions: Array, rows: EpisodeTracker, recording: Recording) -> Array:
    """The actions [N, C, A] with the requested noise, which follows from episode and decision."""
    if not recording.noise:
        return actions
    width = actions[0].size
    noise = normal(recording.seed, "disturbance", rows.episode, rows.decision, width).reshape(actions.shape)
    return (actions + recording.noise * noise).astype(actions.dtype)


class Recorder(Protocol):
    """Records the episodes of env rows in an evaluation. A context manager that discards unfinished episodes at the
    end. It is constructed with the env, the recording, and a function that shows the user a line, for a recorder that
    gives up."""

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        """Episodes begin on these rows."""

    def record_decision(self, obs: Observation, actions: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        """The next decision of all rows, which observe `obs`; `values` are of the rows `at`, empty if unknown."""

    def on_frame(self, active: np.ndarray) -> None:
        """These rows, a mask, have taken an env step."""

    def record_result(self, result: ChunkResult) -> None:
        """Record the result of the decision."""

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        """The episodes of these rows are over."""

    def __enter__(self) -> Recorder: ...

    def __exit__(self, *raised: object) -> None: ...


class Record:
    """Records one stage's decisions until they are handed on as a trajectory."""

    def __init__(self, source: str, horizon: int = 0) -> None:
        """Holds `horizon` decisions of every env row, with values; without a horizon whole episodes, without values."""
        self.source, self.horizon = source, horizon
        self.handed = 0  # decisions that have been handed on
        self.decisions: list[tuple[np.ndarray, Observation]] = []  # ids of the sequences, and arrays of their decisions

    def decision(self, player: Stage, episodes: np.ndarray, reply: ActReply, result: ChunkResult) -> None:
        at, output = player.at, map_obs(copy_of_message, vars(reply.output))
        if self.horizon:
            self.value(player, reply)
        arrays = {
            "obs": player.shown,
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
        self.add(player.env_ids[at] if self.horizon else episodes, arrays)

    def add(self, ids: np.ndarray, arrays: Observation) -> None:
        """A decision of these sequences."""
        self.decisions.append((ids, arrays))

    def end(self, outcomes: Sequence[EpisodeResult]) -> None:
        """These episodes ended in the last decision."""

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


def copy_of_message(array: Array) -> Array:
    """A copy, since the memory of a message is reused."""
    return array if is_tensor(array) else np.array(array)


class Tally:
    """The results of a player's job. Ends are reported immediately if the driver wants them at once, and beginnings
    and ends of an evaluation's episodes always."""

    def __init__(self, job: Job, report: Callable[[Report], None] = lambda report: None) -> None:
        self.job, self.report = job, report
        self.env_steps = 0
        self.finished: list[EpisodeResult] = []
        self.problems: list[str] = []
        self.samples: list[dict[str, Any]] = []
        self.ends: list[tuple[int, float]] = []

    def add_begun(self, specs: Sequence[EpisodeSpec]) -> None:
        if self.job.evaluation:
            self.report(Report(self.job.evaluation, begun=tuple(spec.index for spec in specs)))

    def add_finished(self, results: Sequence[EpisodeResult]) -> None:
        self.finished += results
        if results and (self.job.evaluation or self.job.at_once):
            self.report(Report(self.job.evaluation, finished=tuple(results)))

    def warn(self, text: str) -> None:
        self.report(Report(self.job.evaluation, warning=text))

    def results_with(self, *seconds: float) -> Played:
        """The results, with the seconds of stepping, resetting and waiting."""
        lists = (self.problems, self.samples, self.ends)
        return Played(self.env_steps, tuple(self.finished), *seconds, *map(tuple, lists))


class PlayerWorker(StoringWorker):
    """A sim worker of any kind."""

    def __init__(
        self,
        config,
        stages: int = 1,
        inbox: Channel | None = None,
        eval_config=None,
        eval_rows: int = 1,
        whole_episodes: bool = False,
    ) -> None:
        """`inbox` gets the reports. Evaluations use `eval_rows` separate envs of `eval_config`; with no stages there
        are no training envs. With `whole_episodes` no episode is open between rollouts."""
        self.config, self.num_stages, self.inbox = config, stages, inbox
        self.eval_config, self.eval_rows = eval_config or config, eval_rows
        self.whole_episodes = whole_episodes
        self.stopped = False

    def play(self, jobs: Sequence[Job], route: Route) -> list[Played]:
        """Play these jobs at the same time; returns the results of each."""
        before, tallies = self.timers.totals(), [Tally(job, self.report) for job in jobs]
        playing = deque(self.plays(tallies, route))
        while playing:
            turn = playing.popleft()
            self.tick()  # an expert's turns wait for no answer, which would be a sign of life
            if next(turn, OVER) is not OVER:
                playing.append(turn)
        spent = self.timers.seconds_since(before, "step", "reset", "wait")
        return [tally.results_with(*spent) for tally in tallies]

    def plays(self, tallies: Sequence[Tally], route: Route) -> Iterable[Iterator[Any]]:
        """Iterators that play the jobs of these tallies, each one decision further at a time. Every stage, and every
        evaluation, asks by its own place of the route."""
        raise NotImplementedError

    def report(self, report: Report) -> None:
        if self.inbox is not None:
            self.inbox.put(report)

    @served_while_busy
    def stop_playing(self) -> None:
        """Give up the evaluation in progress, and any later one."""
        self.stopped = True


class EpisodeStream(Record):
    """Puts each whole episode into `store` when it ends."""

    def __init__(self, source: str, store: dict[int, Trajectory]) -> None:
        super().__init__(source)
        self.store = store
        # By episode, its decisions: the arrays of a joint step, and the episode's row in them.
        self.open: dict[int, list[tuple[Observation, int]]] = {}

    def add(self, ids: np.ndarray, arrays: Observation) -> None:
        for row, episode in enumerate(ids.tolist()):
            self.open.setdefault(episode, []).append((arrays, row))

    def end(self, outcomes: Sequence[EpisodeResult]) -> None:
        for result in outcomes:
            decisions, rows = zip(*self.open.pop(result.index), strict=True)
            whole = map_obs(partial(rows_of, rows), *decisions)
            ids, lengths = np.array([result.index]), np.array([len(rows)])
            self.store[result.index] = Trajectory(ids=ids, lengths=lengths, **whole)


def rows_of(rows: Sequence[int], *arrays: Array) -> Array:
    """One row of each of these arrays, as one array."""
    return concatenate([array[row : row + 1] for array, row in zip(arrays, rows, strict=True)])
