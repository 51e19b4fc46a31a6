"""Evaluate policies on a fixed episode list: python -m embodied.evaluate checkpoint=RUN_DIR eval.episodes=200

Training also evaluates through `write_evaluation`, so both play the same episodes. The same command continues an
interrupted evaluation: only missing episodes are played. Several policies (`checkpoint=[A,B,random]`) play the same
episodes and are compared on them; several tasks (`env.task=[A,B]`) are played one after the other if the simulator
cannot mix them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied import let_call
from embodied.config.command_line import from_python, stored_recipe
from embodied.config.recipe import Loaded, RunConfig, load
from embodied.core.errors import ConfigError, EmbodiedError, EvaluationStopped
from embodied.core.files import check_place
from embodied.core.options import pinned
from embodied.core.types import EpisodeResult
from embodied.envs import env_class, interpreter_of
from embodied.envs.capabilities import choose_protocol
from embodied.envs.own_modules import file_name
from embodied.placement import PlacementPlan
from embodied.policies.config import TEMPLATE
from embodied.policies.policy_folder import read_json
from embodied.records.results import (
    COMPARISON,
    RESULTS,
    PartialEvaluation,
    is_part_of,
    mark,
    read_results,
    remove_partial,
    write_comparison,
    write_results,
)
from embodied.records.success_stats import (
    count_causes,
    describe_causes,
    describe_pair,
    describe_results,
    describe_tasks,
    reference_lines,
    summarize,
    warn_of_errors,
)
from embodied.records.transcripts import TRANSCRIPTS, join_transcripts
from embodied.records.videos import remove_drafts, worth_seeing, write_mosaic
from embodied.reporting.run_page import REPORT, report_or_say_why
from embodied.reporting.runs import Run
from embodied.run import launch
from embodied.run.devices import is_small
from embodied.run.ending import Interruption
from embodied.run.policy_source import (
    PolicySource,
    check_fits,
    describe_published,
    find_all,
    of_another_env,
    other_training,
)
from embodied.run.published_models import compare_with_published, differing_before
from embodied.run.rehearsal import check_all_fit, rehearse
from embodied.run.run_folder import MANIFEST, policy_in, try_lock

if TYPE_CHECKING:
    from embodied.runtime import Cluster
    from embodied.workflows.evaluator import Evaluator

Part = tuple[RunConfig, PlacementPlan]  # tasks of one env, and the plan for them


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv)


def start(argv: list[str]) -> None:
    """Find the policies, take env and protocol from the first policy's recipe, play, write and print the results."""
    loaded = load(argv, entry="evaluate")
    if loaded is not None:
        play(loaded)


def call(policy: Run | Path | str, *words: str | Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate from Python, like the command. Returns the content of results.json (for several policies
    comparison.json): `embodied.evaluate(run, "eval.episodes=200")`. `policy` is anything that `checkpoint=` accepts."""
    checkpoint = policy.folder if isinstance(policy, Run) else policy
    loaded = load([f"checkpoint={checkpoint}", *from_python(words)], entry="evaluate")
    out = play(loaded) if loaded else None
    assert out is not None, "it was asked for no help, and is no dry run"
    return read_json(out / (RESULTS if (out / RESULTS).is_file() else COMPARISON))


def play(loaded: Loaded) -> Path | None:
    """Returns the folder of the results; None for a dry run."""
    from embodied.workflows.evaluator import evaluated

    loaded = replace(loaded, config=evaluated(pinned(loaded.config)))
    sources = find_all(loaded)
    for source in sources:
        source.config.chunk_rule(loaded.config.eval.delay)  # refuses chunks that are too short for it
        if source.config.acts_best and (temperature := loaded.config.eval.temperature):
            raise ConfigError(
                f"eval.temperature={temperature:g}: {source.name} plays its best actions only; leave it out"
            )
    parts = [planned(part, sources, loaded.dry_run) for part in one_env_each(loaded.config)]
    if not loaded.dry_run:
        for config, _ in parts:
            check_all_fit([source for source in sources if of_another_env(source, config.env)], config.env)
    announce(loaded, parts, sources)
    if loaded.dry_run:
        for config, _ in parts:
            rehearse(config, *sources)
        return None
    policies = {source.name: source.described() for source in sources}
    asked = [asked_for(parts, source.config, policies[source.name]) for source in sources]
    wanted = asked[0] if len(asked) == 1 else {"policies": asked}
    runs, alone = loaded.config.run.dir, sources[0]
    folder = runs / "compare" if len(sources) > 1 else alone.out or runs / f"evaluate-{alone.name}"
    check_place("run.dir", folder)
    with Interruption(at_once=True), open_folder(folder, wanted) as out:
        print(f"results     {out}", flush=True)
        if len(sources) == 1:
            refuse_errors_only({alone.name: evaluate(parts, alone, policies[alone.name], out)}, out)
        else:
            compare(parts, sources, policies, wanted, out)
        if recipe := stored_recipe(out):  # the page of the policy's run counts the evaluations beside it
            report_or_say_why(recipe.parent)
    return out


def planned(run_config: RunConfig, sources: list[PolicySource], dry: bool) -> Part:
    """The config and the plan. Several policies act in turn, so the plan is for the largest."""
    policies = [source.config for source in sources]
    largest = next((policy for policy in policies if not is_small(policy)), policies[0])
    config, plan = launch.planned(run_config.model_copy(update={"policy": largest}), learn=False, dry=dry)
    return config.model_copy(update={"policy": run_config.policy}), plan


def compare(
    parts: list[Part], sources: list[PolicySource], policies: dict[str, dict], wanted: dict[str, Any], out: Path
) -> None:
    """Evaluate several policies one after the other, and compare them."""
    mark(out, {"asked": wanted})
    played = {}
    for source in sources:
        folder = out / source.name
        if (folder / RESULTS).is_file():
            results, played[source.name] = read_results(folder)
            print(f"{source.name}, played before: {describe_results(results)}{describe_tasks(results)}")
        else:
            played[source.name] = evaluate(parts, source, policies[source.name], folder)
    print("\n".join(map(describe_pair, write_comparison(out, played)["pairs"])))
    print(f"  comparison  {out / 'comparison.json'}")
    from embodied import report

    print(f"  report      {report.write([out / name for name in played], out / report.COMPARISON)}")
    remove_partial(out)
    refuse_errors_only(played, out)


def refuse_errors_only(played: dict[str, list[EpisodeResult]], out: Path) -> None:
    """Raise an error if all episodes ended in errors; their results are kept."""
    for name, episodes in played.items():
        if all(episode.error for episode in episodes):
            failed = f"{name} was not evaluated, every episode ended in an error"
            raise EmbodiedError(f"{failed}: {describe_causes(count_causes(episodes))}; see {out}")


def one_env_each(config: RunConfig) -> list[RunConfig]:
    """An evaluation for each task if one env cannot play all tasks; else a single one."""
    kind = env_class(config.env)
    tasks = kind.tasks(config.env)
    if kind.mixes_tasks or len(tasks) == 1:
        return [config]
    return [config.with_values("env", task=task) for task in dict.fromkeys(tasks)]


# Printed lines and opened folders, before episodes are played


def announce(loaded: Loaded, parts: list[Part], sources: list[PolicySource]) -> None:
    """Print the first screen, with warnings: options without effect, policies trained in another env."""
    config, plan = parts[0]
    protocol = choose_protocol(env_class(config.env), config.env, config.eval.protocol)
    for key, value in protocol.options.items():
        if f"env.{key}" in loaded.asked and getattr(loaded.config.env, key) != value:
            fixed = "the env's own" if value is None else value
            raise ConfigError(
                f"env.{key}={getattr(loaded.config.env, key)} has no effect: {protocol.name} plays with {fixed}; "
                "eval.protocol=as-trained-v1 takes the env's options as they are"
            )
    env = config.env.model_copy(update={"task": loaded.config.env.task})
    played = config.model_copy(update={"env": env, "policy": sources[0].config})
    print(launch.describe(played, as_played(plan, config), weights=sources[0].folder))
    for line in launch.notes(loaded):
        print(line)
    if len(sources) > 1:
        print(f"policies    {', '.join(source.name for source in sources)}")
    for source in sources:
        if source.published:
            print(f"protocol    {describe_published(source.config, env)}")
        warnings = [other_training(source, loaded, protocol.options), unlike_reference(played, source)]
        for note in filter(None, warnings):
            print(f"note        {note}")


def unlike_reference(played: RunConfig, source: PolicySource) -> str:
    """Lines with the settings that differ from the published evaluation of `eval.reference`."""
    if not played.eval.reference or not (differs := differing_before(played, source.config)):
        return ""
    return f"{source.name} is not played as eval.reference={played.eval.reference}: {'; '.join(differs)}"


def as_played(plan: PlacementPlan, config: RunConfig) -> PlacementPlan:
    """The plan with the env rows that play the episodes."""
    from embodied.workflows.evaluator import eval_rows

    sims = plan.count("sim")
    rows = eval_rows(config.eval.episodes, config.eval.num_envs or config.env.num_envs, sims)
    return replace(plan, num_envs=rows * sims)


@contextmanager
def open_folder(path: Path, asked: dict[str, Any]) -> Iterator[Path]:
    """The folder of the same interrupted evaluation, if no other process uses it; otherwise `path`, with a number if it
    exists. Nothing is overwritten; empty folders and folders of refused evaluations are removed."""
    new_parent = [] if path.parent.exists() else [path.parent]
    for attempt in count(1):
        out = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
        try:
            out.mkdir(parents=True)
            new = True
        except FileExistsError:
            new = False
        lock = os.open(out, os.O_RDONLY)
        if (mine := try_lock(lock)) is not False and (new or (mine and is_part_of(out, asked))):
            break
        os.close(lock)
    try:
        yield out
    except BaseException as err:
        if isinstance(err, ConfigError) and {file.name for file in out.iterdir()} <= {"logs"}:
            shutil.rmtree(out / "logs", ignore_errors=True)
        with suppress(OSError):  # it is not empty
            for folder in (out, *new_parent):
                folder.rmdir()
        raise
    finally:
        os.close(lock)


# Playing


def evaluate(parts: list[Part], source: PolicySource, policy: dict[str, Any], out: Path) -> list[EpisodeResult]:
    """Play all tasks with fresh workers, write and print the results of one policy."""
    # One env after the other, each with its own workers; `kept` continues an interrupted command.
    tasks = tuple(task for config, _ in parts for task in env_class(config.env).tasks(config.env))
    kept: PartialEvaluation | None = None
    episodes: list[EpisodeResult] = []
    evaluators: list[Evaluator] = []
    for planned_part in parts:
        with open_workers(planned_part, parts, source, tasks, out) as evaluator:
            if kept is None:  # a refused evaluation leaves no files
                kept = PartialEvaluation(out, asked_for(parts, source.config, policy), policy, notify=launch.say)
                if kept.finished:
                    print(f"going on    {kept} were over already", flush=True)
            with going_on_later(kept):
                episodes += evaluator.evaluate(out, out / "dataset" / name_of_part(planned_part, parts), kept)
            evaluators.append(evaluator)
            if planned_part is parts[-1]:  # results are written together, for complete evaluations only
                show_results(source, write_evaluation(kept, evaluators, episodes), out)
                film_failures(evaluator, out, episodes)
    for planned_part, evaluator in zip(parts[:-1], evaluators):
        if evaluator.failures_to_film(out, episodes):
            with open_workers(planned_part, parts, source, tasks, out) as again:
                again.read_spec()
                film_failures(again, out, episodes)
    for video in worth_seeing((out / "videos").glob("*.mp4"))[:3]:
        print(f"  video       {video}")
    return episodes


def name_of_part(part: Part, parts: list[Part]) -> str:
    """The folder of a part's logs and dataset; empty for a single part."""
    return file_name(str(part[0].env.task)) if len(parts) > 1 else ""


@contextmanager
def open_workers(
    part: Part, parts: list[Part], source: PolicySource, tasks: tuple[str, ...], out: Path
) -> Iterator[Evaluator]:
    """Fresh workers that play a part of the evaluation."""
    config = part[0].model_copy(update={"policy": source.config})
    with launch.cluster(config, part[1], out / "logs" / name_of_part(part, parts)) as cluster:
        yield players(config, cluster, source, tasks)


def show_results(source: PolicySource, results: dict[str, Any], out: Path) -> None:
    print(f"{source.name}: {describe_results(results)}{describe_tasks(results)}{warn_of_errors(results)}")
    if "reference" in results:
        print("\n".join(f"  {line}" for line in reference_lines(results["reference"])))
    made = {"results": RESULTS, "report": REPORT, "transcripts": TRANSCRIPTS, "dataset": "dataset"}
    for name, file in made.items():
        if (out / file).exists():
            print(f"  {name:<11} {out / file}", flush=True)


def film_failures(
    evaluator: Evaluator,
    out: Path,
    episodes: list[EpisodeResult],
    notify: Callable[[str], object] = launch.say,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Replay failed episodes for videos after the results are written, and add the videos to the report."""
    failures = evaluator.failures_to_film(out, episodes)
    try:
        if failures:
            evaluator.film(out, failures, notify, stop)
    except BaseException:
        notify(f"the results are whole: {out / RESULTS}; some of its failures have no video")
        raise
    finally:
        add_videos(evaluator, out, bool(failures))


def add_videos(evaluator: Evaluator, out: Path, new: bool) -> None:
    """Join all videos if `eval.mosaic` asks for it, and rewrite the report if it has changed."""
    remove_drafts(out)
    if evaluator.config.eval.mosaic:
        write_mosaic(out / "videos")
    if new or evaluator.config.eval.mosaic:
        report_or_say_why(out)


def players(config: RunConfig, cluster: Cluster, source: PolicySource, all_tasks: tuple[str, ...] = ()) -> Evaluator:
    """Workers that play with a policy; raises ConfigError if it does not fit the env. `all_tasks` are all tasks of the
    evaluation; this env plays some of them."""
    from embodied.workflows.evaluator import Evaluator, evaluation_plan
    from embodied.workflows.launched_workers import Workers
    from embodied.workflows.rl_loop import EVALUATION_ROLES

    plan = evaluation_plan(config, cluster, all_tasks)
    workers = Workers(EVALUATION_ROLES, config, cluster, plan, notify=launch.say)
    check_fits(source, config.env, workers.spec)
    workers.adopt(source.weights_for(workers.spec))
    return Evaluator(workers)


@contextmanager
def going_on_later(kept: PartialEvaluation) -> Iterator[None]:
    """Keep finished episodes when an evaluation ends early."""
    try:
        yield
    except BaseException:
        kept.write()
        print(f"{kept} are over, without rates; the same command plays the rest: {kept.folder}", flush=True)
        raise


def begin_in_run(
    evaluator: Evaluator, out: Path, checkpoint: Path, notify: Callable[[str], None] = launch.say
) -> PartialEvaluation:
    """The evaluation of the acting version, saved in `checkpoint`; new or continued. `notify` gets lines on its
    progress."""
    folder = policy_in(checkpoint)
    policy = {
        "name": checkpoint.name,
        "family": evaluator.config.policy.name,
        "folder": str(folder),
        "sha256": read_json(checkpoint / MANIFEST)["files"].get(f"{folder.name}/model.safetensors"),
    }
    from embodied.workflows.evaluator import evaluated

    config = evaluated(evaluator.config)
    return PartialEvaluation(out, asked_for([(config, None)], config.policy, policy), policy, notify=notify)


def evaluate_in_run(
    evaluator: Evaluator,
    kept: PartialEvaluation,
    stop: Callable[[], bool],
    tell: Callable[[dict[str, Any]], object],
    notify: Callable[[str], object] = launch.say,
) -> bool:
    """Play it to the end, `tell` its results, and film failures. False if `stop` ended it before the results."""
    try:
        episodes = evaluator.evaluate(kept.folder, kept=kept, stop=stop)
    except EvaluationStopped:
        return False
    finally:
        kept.write()
    tell(write_evaluation(kept, [evaluator], episodes))
    film_failures(evaluator, kept.folder, episodes, notify, stop)
    return True


# The results


def write_evaluation(
    kept: PartialEvaluation, evaluators: list[Evaluator], episodes: list[EpisodeResult]
) -> dict[str, Any]:
    """Write results.json, episodes.csv and the report of these evaluators' episodes; there is one evaluator per env."""
    results = {
        "policy_version": evaluators[0].version,
        "policy": kept.policy,
        "protocol": played_by(evaluators),
        **summarize(episodes),
        "causes": count_causes(episodes),
        "provenance": kept.provenance(),
    }
    first = evaluators[0].config
    if first.eval.reference:
        results["reference"] = compare_with_published(results, first, first.policy)
    join_transcripts(kept.folder, {episode.index for episode in episodes})
    write_results(kept.folder, results, episodes)
    kept.end()
    report_or_say_why(kept.folder)
    return results


def asked_for(parts: Sequence[tuple[RunConfig, Any]], played: Any, policy: dict[str, Any]) -> dict[str, Any]:
    """Everything that decides an episode's outcome and its records. The number of rows does not matter."""
    config, _ = parts[0]
    protocol = choose_protocol(env_class(config.env), config.env, config.eval.protocol)
    env = protocol.apply(config.env).model_dump(mode="json", exclude={"num_envs", "side_by_side"})
    return {
        "policy": {**played.model_dump(mode="json"), "sha256": policy["sha256"]},
        "protocol": f"{protocol.name}: {protocol.rules}",
        "env": {**env, "task": [config.env.task for config, _ in parts]},
        "eval": config.eval.model_dump(mode="json", exclude={"num_envs", "interleave", "reference"}),
        "seed": config.seed,
        "precision": config.learner.precision,
    }


def played_by(evaluators: list[Evaluator]) -> dict[str, Any]:
    """The settings with which the episodes were played."""
    first = evaluators[0]
    env, policy = first.env.model_dump(mode="json"), first.config.policy
    if len(evaluators) > 1:
        env["task"] = [evaluator.env.task for evaluator in evaluators]
    return {
        "name": first.protocol.name,
        "rules": first.protocol.rules,
        "env": env,
        **({"messages": policy.model_dump(mode="json", include={*TEMPLATE, "chat"})} if policy.speaks else {}),
        "eval": first.config.eval.model_dump(mode="json"),
        **({"chunks": {"length": policy.chunk, **asdict(first.chunks)}} if first.chunks else {}),
        "backend": ", ".join(dict.fromkeys(evaluator.spec.backend for evaluator in evaluators)),
        **interpreter_of(first.config.env),
        "max_episode_steps": max(evaluator.spec.max_episode_steps for evaluator in evaluators),
    }


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
