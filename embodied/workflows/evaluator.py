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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from embodied.core.errors import EvaluationStopped
from embodied.core.types import (
    EnvSpec,
    EpisodeList,
    EpisodeResult,
    EpisodeSpec,
    Job,
    Recording,
    Report,
    SamplingRule,
    deal_by_task,
)
from embodied.envs import env_class
from embodied.envs.capabilities import choose_protocol
from embodied.runtime import Cluster
from embodied.workflows import ROLLOUT, EvaluationPlan
from embodied.workflows.launched_workers import Workers
from embodied.workflows.rollout_manager import Evaluation, RolloutManager, Round

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.config.sections import EvalSection, EvaluationSet
    from embodied.core.chunks import ChunkRule
    from embodied.records.results import PartialEvaluation

MAX_ATTEMPTS = 2  # of an episode whose worker dies

OnResults = Callable[[Iterable[EpisodeResult]], object]


def evaluation_plan(config: RunConfig, cluster: Cluster, all_tasks: tuple[str, ...] = ()) -> EvaluationPlan:
    """The evaluation's episodes of this env's tasks, among the episodes of `all_tasks` (empty: the same tasks)."""
    num_sims = sum(host.roles.count("sim") for host in cluster.hosts)
    if config.eval.sets:
        return plan_of_sets(evaluated(config), num_sims)
    kind, options = env_class(config.env), config.eval
    tasks = kind.tasks(config.env)
    all_tasks = all_tasks or tasks
    protocol = choose_protocol(kind, config.env, options.protocol)
    # All held-out prompts, `samples` times each: more episodes would only repeat them.
    most = protocol.stored_states * len(all_tasks) * options.samples if kind.speaks else None
    fixed = EpisodeList(options.seed, "eval", all_tasks, protocol.stored_states, options.samples)
    count = min(options.episodes, most or options.episodes)
    episodes = [spec for spec in fixed.first(count) if spec.task in tasks]
    rows = eval_rows(len(episodes), options.num_envs or config.env.num_envs, num_sims)
    return EvaluationPlan(protocol, protocol.apply(config.env), episodes, most, rows)


def unasked(config: RunConfig) -> list[str]:
    """A note if a text env has fewer held-out prompts than `eval.episodes` asks for."""
    kind, options = env_class(config.env), config.eval
    if not kind.speaks or options.sets:
        return []
    prompts = choose_protocol(kind, config.env, options.protocol).stored_states * len(kind.tasks(config.env))
    if (most := prompts * options.samples) >= options.episodes:
        return []
    times = f", {options.samples} times each" * (options.samples > 1)
    return [f"eval.episodes={options.episodes} is more than there are: all {prompts} prompts are asked{times}, {most}"]


def evaluated(config: RunConfig) -> RunConfig:
    """The config of evaluations: with `eval.sets` their questions are the env, and all are asked."""
    if not (config.eval.sets and env_class(config.env).speaks):  # sets of other envs are refused later
        return config
    from embodied.envs.text.math import QuestionSets, env_of_sets, sets_of

    if env_class(config.env) is QuestionSets:
        return config
    env, options = env_of_sets(config.eval.sets, config.env), config.eval
    QuestionSets.check(env)
    count = sum(len(asked) * samples_of(name, options) for name, asked in sets_of(env).items())
    return config.model_copy(update={"env": env}).with_values("eval", episodes=count)


def samples_of(name: str, options: EvalSection) -> int:
    """Answers to each question of a set."""
    return options.sets[name].samples or options.samples


def plan_of_sets(config: RunConfig, num_sims: int) -> EvaluationPlan:
    """All questions of all sets in order, each as often as its set has samples."""
    from embodied.envs.text.math import QuestionSets, sets_of

    options, protocol = config.eval, choose_protocol(QuestionSets, config.env, config.eval.protocol)
    asked = [
        (name, number)
        for name, questions in sets_of(config.env).items()
        for number in range(len(questions))
        for _ in range(samples_of(name, options))
    ]
    episodes = [EpisodeSpec(name, number, options.seed, index) for index, (name, number) in enumerate(asked)]
    rows = eval_rows(len(episodes), options.num_envs or config.env.num_envs, num_sims)
    rules = {name: (rule_of(options, of_set), of_set.max_tokens) for name, of_set in options.sets.items()}
    return EvaluationPlan(protocol, config.env, episodes, len(episodes), rows, rules)


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

    @property
    def chunks(self) -> ChunkRule | None:
        """How chunks of actions follow each other."""
        return self.config.policy.chunk_rule(self.config.eval.delay)

    def read_spec(self) -> EnvSpec:
        """The env's spec in evaluations."""
        self.spec = self.workers.rollouts.ask(self.workers.sims.eval_spec)[0]
        return self.spec

    def evaluate(
        self,
        out: Path,
        dataset: Path | None = None,
        kept: PartialEvaluation | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[EpisodeResult]:
        """Play the fixed evaluation episodes that `kept` lacks with the current version; returns all results in episode
        order. Videos of the first episodes go into `out/videos`, the dataset to its path (None: `out/dataset`); `stop`
        is as in `play`."""
        results = dict(kept.finished) if kept else {}
        with self.workers.timers.measure("evaluate"):
            self.read_spec()
            missing = [spec for spec in self.episodes if spec.index not in results]
            if missing:
                recording = self.first_recording(out)
                store = kept.add if kept else lambda results: None
                played = self.play(missing, recording, on_results=store, stop=stop)
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
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Replay and film these episodes, with a `notify` for each; when `stop` becomes true, the remaining episodes
        get no video."""
        done: set[int] = set()
        count = f"{len(failures)} failure{'s' * (len(failures) > 1)}"
        notify(f"videos      {count} to film, played once more; the results do not wait for it")

        def on_results(episodes: Iterable[EpisodeResult]) -> None:
            for index in sorted({episode.index for episode in episodes} - done):
                done.add(index)
                notify(f"videos      {len(done)} of {count} filmed (episode {index})")

        video_episodes = frozenset(spec.index for spec in failures)
        recording = replace(self.first_recording(out), video_episodes=video_episodes, failures_only=True, buffers=None)
        with self.workers.timers.measure("evaluate"), suppress(EvaluationStopped):
            self.play(failures, recording, on_results=on_results, stop=stop)

    def first_recording(self, out: Path) -> Recording:
        """The recording of an evaluation: transcripts; or videos of the first episodes, and buffers for the dataset."""
        from embodied.datasets.writer import EpisodeRecorder
        from embodied.records.results import BUFFERS
        from embodied.records.transcripts import record_transcripts
        from embodied.records.videos import VideoRecorder

        options = self.config.eval
        conversations = env_class(self.config.env).speaks
        return Recording(
            video_episodes=frozenset(range(options.videos)),
            videos=out / "videos",
            overlay=options.overlay,
            cameras=options.cameras,
            buffers=out / BUFFERS if options.dataset else None,
            recorders=(record_transcripts,) if conversations else (VideoRecorder, EpisodeRecorder),
        )

    def missing_of(self, kept: PartialEvaluation) -> Evaluation:
        """The missing episodes of an evaluation, to be played beside a rollout."""
        missing = [spec for spec in self.episodes if spec.index not in kept.finished]
        rules = self.workers.evaluation.rules
        recording, rule = self.first_recording(kept.folder), rule_of(self.config.eval)
        job = Job((), recording=recording, rule=rule, rules=rules, chunks=self.chunks)
        dealt = deal_to_sims(missing, len(self.workers.sims), self.workers.spec.text)
        jobs = {sim: replace(job, episodes=specs) for sim, specs in dealt.items() if specs}
        return Evaluation(jobs, lambda report: kept.add(report.finished))

    def play(
        self,
        episodes: list[EpisodeSpec],
        recording: Recording,
        expert: str | None = None,
        on_results: OnResults = lambda results: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[EpisodeResult]:
        """Play the episodes; returns their outcomes in order. An expert needs no policy worker. `on_results` gets
        finished episodes early, also if a worker fails. Raises EvaluationStopped if `stop()` is true and episodes are
        missing."""
        rollouts, rule = self.workers.rollouts, rule_of(self.config.eval)
        chunks = None if expert else self.chunks
        job = Job((), recording=recording, expert=expert, rules=self.workers.evaluation.rules, chunks=chunks)
        table = EpisodeTable(rollouts, episodes, job, on_results, stop)
        with self.workers.device_sharing.phase(ROLLOUT), self.workers.ended_if_given_up():
            while jobs := table.next_jobs():
                evaluation = Evaluation(jobs, table.add_report)
                table.add_round(rollouts.play({}, rule, evaluation, table, by_expert=bool(expert)))
        return [table.results[spec.index] for spec in episodes]


def rule_of(options: EvalSection, of_set: EvaluationSet | None = None) -> SamplingRule:
    """The sampling rule of an evaluation, or of one of its sets; the log-probs in transcripts are at temperature 1."""
    stated = of_set.model_dump(exclude_none=True) if of_set else {}
    chosen = {key: stated.get(key, getattr(options, key)) for key in ("temperature", "top_p", "top_k", "min_p")}
    return SamplingRule(**chosen, stream="eval")


def deal_to_sims(episodes: list[EpisodeSpec], num_sims: int, text: bool) -> dict[int, list[EpisodeSpec]]:
    """The episodes of each sim worker: distributed in turn, or for simulators by task, since a sim loads the scenes of
    all its tasks."""
    if text or len({spec.task for spec in episodes}) <= 1:
        return {sim: episodes[sim::num_sims] for sim in range(num_sims)}
    dealt = enumerate(deal_by_task([spec.task for spec in episodes], num_sims))
    return {sim: [episodes[at] for at in places] for sim, places in dealt}


class EpisodeTable:
    """The fixed episodes of an evaluation. Each is played once, and again if its sim died, at most MAX_ATTEMPTS
    times."""

    def __init__(
        self,
        rollouts: RolloutManager,
        episodes: list[EpisodeSpec],
        job: Job,
        on_results: OnResults,
        stop: Callable[[], bool],
    ) -> None:
        self.rollouts, self.episodes, self.job, self.on_results, self.stop = rollouts, episodes, job, on_results, stop
        self.left = deal_to_sims(episodes, len(rollouts.sims), rollouts.spec.text)  # by sim
        self.results: dict[int, EpisodeResult] = {}
        self.begun: set[int] = set()  # in this round
        self.attempts: Counter[int] = Counter()  # of episodes that were open when their sim died
        self.stopping = False
        self.problem: Exception | None = None

    def next_jobs(self) -> dict[int, Job]:
        """The jobs of the next round, by sim; none if all episodes have results."""
        self.left = {sim: specs for sim, specs in self.left.items() if specs}
        if self.left and self.stop():
            missing = sum(map(len, self.left.values()))
            raise EvaluationStopped(f"{missing} of {len(self.episodes)} episodes were not played")
        self.begun, alone = set(), frozenset(self.attempts)
        return {sim: replace(self.job, episodes=specs, alone=alone) for sim, specs in self.left.items()}

    def is_due(self) -> bool:
        """True if reports have arrived, or if the sims should be stopped."""
        return self.rollouts.inbox.qsize() > 0 or (not self.stopping and self.stop())

    def go_on(self) -> None:
        self.rollouts.read_reports()
        if not self.stopping and (self.problem or self.stop()):
            self.stopping = True
            self.rollouts.sims.stop_playing()

    def add_report(self, report: Report) -> None:
        """Record beginnings and results, and pass on the results."""
        self.begun.update(report.begun)
        self.results |= {result.index: result for result in report.finished}
        try:
            self.on_results(report.finished)
        except Exception as err:  # a full disk: without stored results the evaluation ends
            self.problem = self.problem or err

    def add_round(self, played: Round) -> None:
        """Record the end of a round; open episodes of a dead sim may have killed it."""
        if self.problem:
            raise self.problem
        open_episodes = self.begun - self.results.keys()
        for sim, cause in played.failures.items():
            suspects = [spec for spec in self.left[sim] if spec.index in open_episodes]
            self.attempts.update(spec.index for spec in suspects)
            hopeless = [spec for spec in suspects if self.attempts[spec.index] >= MAX_ATTEMPTS]
            self.results |= {spec.index: error(spec, cause) for spec in hopeless}
        self.on_results(self.results.values())
        for sim, specs in self.left.items():
            missing = [spec for spec in specs if spec.index not in self.results]
            self.left[sim] = sorted(missing, key=lambda spec: spec.index in self.attempts)


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
    from embodied.records.results import BUFFERS

    shutil.rmtree(path, ignore_errors=True)  # written before the evaluation or the run was interrupted
    played = [result for result in results if not result.error]
    if played:
        with DatasetWriter(path, fps_of(spec), features_of(spec)) as writer:
            for result in played:
                writer.add_buffer(out / BUFFERS / buffer_name(result.index))
