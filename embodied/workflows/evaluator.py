"""Plays a fixed list of episodes to the end, also if sim workers die, and evaluates them.

Finished episodes of a dead worker count; its successor plays the rest. Its open episodes may have killed it: they are
played last, one at a time, and an episode that kills twice is an error episode. Results are passed on as they arrive,
and a request to stop takes effect after the current decisions. The first `eval.videos` episodes are filmed, and
`eval.failure_videos` failures. Failures are only known afterwards, so they are replayed after the results are written:
only recorded episodes pay for recording.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.core.conversations import EvaluationShare, SamplingRule
from embodied.core.errors import ChannelClosed, EvaluationStopped
from embodied.core.types import EnvSpec, EpisodeList, EpisodeResult, EpisodeSpec, Note, Recording, Route, deal_by_task
from embodied.envs import env_class, speaks
from embodied.envs.capabilities import EvaluationProtocol, choose_protocol
from embodied.records.results import BUFFERS
from embodied.records.transcripts import record_transcripts
from embodied.records.videos import VideoRecorder
from embodied.runtime import Channel, Handle
from embodied.workflows.contract import ROLLOUT

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.config.sections import EvalSection
    from embodied.records.results import PartialEvaluation
    from embodied.workflows.rollout_manager import RolloutManager
    from embodied.workflows.workers import Workers

MAX_ATTEMPTS = 2  # of an episode whose worker dies

Heard = Callable[[Iterable[EpisodeResult]], object]


def never() -> bool:
    return False


def ignore(episodes: Iterable[EpisodeResult]) -> None:
    """The default for `heard`: ignores results."""


@dataclass(frozen=True)
class EvaluationPlan:
    """The episodes and envs of a run's evaluations, the same for all weights."""

    protocol: EvaluationProtocol
    env: Any  # config of the envs under this protocol
    episodes: list[EpisodeSpec]
    most: int | None  # number of different episodes; None: unlimited
    rows: int  # env rows of each sim worker


def evaluation_plan(
    config: RunConfig, tasks: tuple[str, ...], all_tasks: tuple[str, ...], num_sims: int
) -> EvaluationPlan:
    """The evaluation's episodes of `tasks`, among the episodes of `all_tasks`."""
    kind, options = env_class(config.env), config.eval
    protocol = choose_protocol(kind, config.env, options.protocol)
    # All held-out prompts, `samples` times each: more episodes would only repeat them.
    most = protocol.stored_states * len(all_tasks) * options.samples if speaks(kind) else None
    fixed = EpisodeList(options.seed, "eval", all_tasks, protocol.stored_states, options.samples)
    count = min(options.episodes, most or options.episodes)
    episodes = [spec for spec in fixed.first(count) if spec.task in tasks]
    rows = eval_rows(len(episodes), options.num_envs or config.env.num_envs, num_sims)
    return EvaluationPlan(protocol, protocol.apply(config.env), episodes, most, rows)


def eval_rows(num_episodes: int, num_envs: int, num_sims: int) -> int:
    """Env rows of each sim worker for evaluation episodes: the smallest number with the same number of turns, such as
    50 instead of 64 for 200 episodes."""
    share = -(-num_episodes // num_sims)
    most = max(1, min(-(-num_envs // num_sims), share))
    turns = max(1, -(-share // most))
    return max(1, -(-share // turns))


class Evaluator:
    """Plays fixed episodes with the current weights."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.config, plan = workers.config, workers.evaluation
        self.protocol, self.env, self.episodes, self.most = plan.protocol, plan.env, plan.episodes, plan.most

    @property
    def version(self) -> int:
        """Version of the evaluated weights."""
        return self.workers.weight_sync.version

    def read_spec(self) -> EnvSpec:
        """The env's spec in evaluations."""
        self.spec = self.workers.rollouts.ask(self.workers.sims.eval_spec)[0]
        return self.spec

    def evaluate(
        self,
        out: Path,
        dataset: Path | None = None,
        kept: PartialEvaluation | None = None,
        stop: Callable[[], bool] = never,
    ) -> list[EpisodeResult]:
        """Play the fixed evaluation episodes that `kept` lacks with the current version; returns all results in episode
        order. Videos of the first episodes go into `out/videos`, the dataset to its path (None: `out/dataset`); `stop`
        is as in `play_fixed`."""
        results = dict(kept.finished) if kept else {}
        with self.workers.timers.measure("evaluate"):
            self.read_spec()
            missing = [spec for spec in self.episodes if spec.index not in results]
            if missing:
                recording = self.first_recording(out)
                played = self.play(missing, recording, heard=kept.add if kept else ignore, stop=stop)
                results |= {result.index: result for result in played}
            results = [results[spec.index] for spec in self.episodes]
        if self.config.eval.dataset:
            write_dataset(out, dataset or out / "dataset", self.spec, results)
        return results

    def failures_to_film(self, out: Path, results: Iterable[EpisodeResult]) -> list[EpisodeSpec]:
        """The failures to be replayed for a video in `out/videos`."""
        indices = {spec.index for spec in self.episodes}
        again = to_record_again(
            self.config.eval, self.episodes, [result for result in results if result.index in indices]
        )
        return again if any((out / "videos").glob("*.mp4")) else []  # else this machine writes no videos

    def film(
        self,
        out: Path,
        failures: list[EpisodeSpec],
        notify: Callable[[str], object],
        stop: Callable[[], bool] = never,
    ) -> None:
        """Replay and film these episodes, with a `notify` for each; when `stop` becomes true, the remaining episodes
        get no video."""
        done: set[int] = set()
        count = f"{len(failures)} failure{'s' * (len(failures) > 1)}"
        notify(f"videos      {count} to film, played once more; the results do not wait for it")

        def heard(episodes: Iterable[EpisodeResult]) -> None:
            for index in sorted({episode.index for episode in episodes} - done):
                done.add(index)
                notify(f"videos      {len(done)} of {count} filmed (episode {index})")

        video_episodes = frozenset(spec.index for spec in failures)
        recording = replace(self.first_recording(out), video_episodes=video_episodes, failures_only=True, buffers=None)
        with self.workers.timers.measure("evaluate"), suppress(EvaluationStopped):
            self.play(failures, recording, heard=heard, stop=stop)

    def first_recording(self, out: Path) -> Recording:
        """The recording of an evaluation: transcripts; or videos of the first episodes, and buffers for the dataset."""
        from embodied.datasets.writer import EpisodeRecorder

        options = self.config.eval
        conversations = speaks(env_class(self.config.env))
        return Recording(
            video_episodes=frozenset(range(options.videos)),
            videos=out / "videos",
            overlay=options.overlay,
            cameras=options.cameras,
            buffers=out / BUFFERS if options.dataset else None,
            recorders=(record_transcripts,) if conversations else (VideoRecorder, EpisodeRecorder),
        )

    def shares(self, kept: PartialEvaluation) -> dict[int, EvaluationShare]:
        """The missing episodes of an evaluation for each sim worker, to be played beside a rollout."""
        missing = [spec for spec in self.episodes if spec.index not in kept.finished]
        about = (rule_of(self.config.eval), self.first_recording(kept.folder), self.workers.notes)
        dealt = deal_to_sims(missing, len(self.workers.sims), self.workers.spec.text)
        return {sim: EvaluationShare(tuple(specs), *about) for sim, specs in dealt.items() if specs}

    def noted(self) -> list[EpisodeResult]:
        """Record the results of evaluation episodes that ended beside a rollout."""
        notes = [self.workers.notes.get() for _ in range(self.workers.notes.qsize())]
        for note in notes:
            self.workers.rollouts.warn(note.warning)
        return [result for note in notes for result in note.finished]

    def play(
        self,
        episodes: list[EpisodeSpec],
        recording: Recording,
        expert: str | None = None,
        heard: Heard = ignore,
        stop: Callable[[], bool] = never,
    ) -> list[EpisodeResult]:
        """Play the episodes; returns their outcomes in order. An expert needs no policy worker."""
        workers = self.workers

        def begin(sim: int, share: list[EpisodeSpec], route: Route, alone: frozenset[int]) -> Handle:
            return workers.sims[sim].evaluate(share, route, recording, workers.notes, alone, expert)

        with workers.device_sharing.phase(ROLLOUT), workers.ended_if_given_up():
            options = (rule_of(self.config.eval), bool(expert), heard, stop)
            return play_fixed(workers.rollouts, episodes, begin, workers.notes, *options)


def rule_of(options: EvalSection) -> SamplingRule:
    """The sampling rule of an evaluation; the log-probs in its transcripts are at temperature 1."""
    return SamplingRule(options.temperature, options.top_p, options.top_k, "eval")


def play_fixed(
    rollouts: RolloutManager,
    episodes: list[EpisodeSpec],
    begin: Callable[[int, list[EpisodeSpec], Route, frozenset[int]], Handle],
    notes: Channel,
    sampling: SamplingRule,
    by_expert: bool = False,
    heard: Heard = ignore,
    stop: Callable[[], bool] = never,
) -> list[EpisodeResult]:
    """Play the episodes; returns their outcomes in order. `begin(sim, its episodes, route, episodes to be played
    alone)` starts a sim. `heard` gets finished episodes early, also if a worker fails. Raises EvaluationStopped if
    `stop()` is true and episodes are missing. With experts no policy worker serves."""
    num_sims = len(rollouts.sims)
    results: dict[int, EpisodeResult] = {}
    left = deal_to_sims(episodes, num_sims, rollouts.spec.text)
    attempts: Counter[int] = Counter()
    while left := {sim: specs for sim, specs in left.items() if specs}:
        if stop():
            raise EvaluationStopped(f"{sum(map(len, left.values()))} of {len(episodes)} episodes were not played")
        alone = frozenset(attempts)
        share = partial(begin_share, begin, left, alone)
        listener = NoteListener(rollouts, notes, heard, stop)
        calls, routes = rollouts.play(left, share, 1, sampling, asked=not by_expert, background=listener)
        noted = listener.all_notes()
        for sim, call in calls.items():
            of_sim = [note for note in noted if note.source == routes[sim][0].source]
            results |= {result.index: result for note in of_sim for result in note.finished}
            if call.succeeded():
                results |= {result.index: result for result in call.wait()[0]}
            else:
                suspects = {index for note in of_sim for index in note.begun} - results.keys()
                attempts.update(suspects)
                hopeless = {index for index in suspects if attempts[index] >= MAX_ATTEMPTS}
                cause = next(iter(call.failed.values())).cause
                results |= {spec.index: error(spec, cause) for spec in left[sim] if spec.index in hopeless}
            left[sim] = sorted(
                (spec for spec in left[sim] if spec.index not in results), key=lambda spec: spec.index in attempts
            )
        heard(results.values())
    return [results[spec.index] for spec in episodes]


def deal_to_sims(episodes: list[EpisodeSpec], num_sims: int, text: bool) -> dict[int, list[EpisodeSpec]]:
    """The episodes of each sim worker: distributed in turn, or for simulators by task, since a sim loads the scenes of
    all its tasks."""
    if text or len({spec.task for spec in episodes}) <= 1:
        return {sim: episodes[sim::num_sims] for sim in range(num_sims)}
    dealt = enumerate(deal_by_task([spec.task for spec in episodes], num_sims))
    return {sim: [episodes[at] for at in places] for sim, places in dealt}


class NoteListener:
    """Collects the notes of the playing sims, passes on finished episodes, and stops the sims on request."""

    def __init__(self, rollouts: RolloutManager, notes: Channel, heard: Heard, stop: Callable[[], bool]) -> None:
        self.rollouts, self.notes, self.heard, self.stop = rollouts, notes, heard, stop
        self.noted: list[Note] = []
        self.stopping = False
        self.problem: Exception | None = None

    def due(self) -> bool:
        """True if notes have arrived, or if the sims should be stopped."""
        return self.notes.qsize() > 0 or (not self.stopping and self.stop())

    def go_on(self) -> None:
        """Pass on finished episodes."""
        new = [self.notes.get() for _ in range(self.notes.qsize())]
        self.noted += new
        for note in new:
            self.rollouts.warn(note.warning)
        try:
            self.heard(result for note in new for result in note.finished)
        except Exception as err:  # a full disk: without stored results the evaluation ends
            self.problem = self.problem or err
        if not self.stopping and (self.problem or self.stop()):
            self.stopping = True
            self.rollouts.sims.stop_playing()

    def all_notes(self) -> list[Note]:
        """All notes of a finished round."""
        with suppress(ChannelClosed):  # closed by a failed worker
            self.go_on()
        if self.problem:
            raise self.problem
        return self.noted


def begin_share(begin, left: dict[int, list[EpisodeSpec]], alone: frozenset[int], sim: int, route: Route) -> Handle:
    return begin(sim, left[sim], route, alone)


def error(spec: EpisodeSpec, cause: str) -> EpisodeResult:
    """An episode that is neither a success nor a failure."""
    return EpisodeResult(spec.index, spec.task, spec.init_state_id, spec.seed, 0, 0.0, None, None, error=cause)


def to_record_again(
    options: EvalSection, episodes: list[EpisodeSpec], results: list[EpisodeResult]
) -> list[EpisodeSpec]:
    """The failures without a video yet, at most the wanted number."""
    failed = {result.index for result in results if result.success_once is False}
    recorded = sum(index < options.videos for index in failed)
    missing = [spec for spec in episodes if spec.index in failed and spec.index >= options.videos]
    return missing[: max(0, options.most_failure_videos - recorded)] if options.videos else []


def write_dataset(out: Path, path: Path, spec: EnvSpec, results: list[EpisodeResult]) -> None:
    """Write these episodes, in order and without error episodes, from their buffers as a dataset in LeRobot's layout.
    The buffers stay: an evaluation that is interrupted before its results writes the dataset again."""
    from embodied.datasets import DatasetWriter, buffer_name, features_of, fps_of

    shutil.rmtree(path, ignore_errors=True)  # written before the evaluation or the run was interrupted
    played = [result for result in results if not result.error]
    if played:
        with DatasetWriter(path, fps_of(spec), features_of(spec)) as writer:
            for result in played:
                writer.add_buffer(out / BUFFERS / buffer_name(result.index))
