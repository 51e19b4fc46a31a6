"""Collect demonstrations in a folder: python -m embodied.collect recipe=maniskill_ppo out=demos/pushcube

An expert of the task (or the policy of `checkpoint`) plays in sim workers, which record observations and actions. The
driver writes the kept episodes into one dataset.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

from embodied import let_call
from embodied.config.command_line import CONFIG, from_python
from embodied.config.recipe import Loaded, RunConfig, load
from embodied.core.errors import ConfigError, EmbodiedError, naming
from embodied.core.files import as_path, check_place
from embodied.core.types import EnvSpec, EpisodeList, EpisodeResult, Recording
from embodied.envs import env_class, interpreter_of
from embodied.envs.capabilities import AS_TRAINED, EnvCapabilities
from embodied.envs.text.text_env import TextEnv
from embodied.evaluate import players
from embodied.records.progress import provenance
from embodied.records.success_stats import describe_results, describe_tasks, summarize
from embodied.run import launch
from embodied.run.ending import Interruption
from embodied.run.policy_source import PolicySource, find, resolved_recipe
from embodied.run.rehearsal import rehearse
from embodied.workflows.demonstrations import SOURCE

if TYPE_CHECKING:
    from embodied.datasets import Dataset

EXPERTS = {"scripted": "expert", "planner": "planner"}  # names of the experts, by collect.expert
PLANS = 150  # env steps that are enough for all plans of the planner


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv)


def start(argv: list[str]) -> None:
    collect_as(load(argv, entry="collect"))


def call(*words: str | Mapping[str, Any]) -> Dataset:
    """Collect from Python, like the command. Returns the dataset: `embodied.collect("pointmass_ppo", "out=demos")`."""
    from embodied.datasets import read_dataset

    return read_dataset(collect_as(load(from_python(words), entry="collect")))


def collect_as(loaded: Loaded | None) -> Path | None:
    """Find the policy or expert, play, keep the wanted episodes, print the result. Returns the dataset's folder."""
    if loaded is None:
        return None
    if issubclass(env_class(loaded.config.env), TextEnv):
        raise ConfigError(
            f"env.name={loaded.config.env.name} is a text env, and only robots have demonstrations so far; "
            "embodied.sft imitates the env's own solutions, or sft.data=FILE.jsonl with lines of prompt and answer"
        )
    out = place_of(loaded)
    collect(loaded, out, one_of(loaded))
    return out


def demonstrated(loaded: Loaded) -> Loaded:
    """The recipe with a dataset in `sft.data`. If it names none, the env's own expert demonstrates: an existing dataset
    in `run.dir` is used, or a new one is collected. A dry run prints the command that collects it."""
    config, kind = loaded.config, env_class(loaded.config.env)
    text = issubclass(kind, TextEnv)
    if config.sft.data or text:
        if idle := without_effect(loaded):
            source = f"there is sft.data={config.sft.data}" if config.sft.data else "nothing is collected"
            raise ConfigError(f"{', '.join(idle)} has no effect, since {source}; leave it out")
        if not text:
            check_still_there(config)
        return loaded
    if kind.expert is EnvCapabilities.expert:
        raise ConfigError(
            f"which demonstrations? env.name={config.env.name} has no expert; sft.data=demos/NAME, which "
            "python -m embodied.collect checkpoint=RUN out=demos/NAME makes from a policy"
        )
    decides = json.dumps(config.model_dump(mode="json", include={"env", "collect", "seed"}), sort_keys=True)
    out = config.run.dir / f"{loaded.name}-demonstrations-{hashlib.sha256(decides.encode()).hexdigest()[:8]}"
    if loaded.dry_run and not out.exists():
        kind.check_expert(config.env, config.collect.expert)
        launch.say(f"demonstrations  none yet: {config.collect.episodes} episodes of the expert, collected into {out}")
        return loaded
    if out.exists():
        check_whole(out)
        launch.say(f"demonstrations  {out}, collected before")
    else:
        launch.say(f"demonstrations  sft.data names none: {config.collect.episodes} episodes of the expert first")
        collect(loaded, out, None)
    return replace(loaded, config=config.with_values("sft", data=out))


def without_effect(loaded: Loaded) -> list[str]:
    """The command line's `collect` keys, without values equal to the resumed run's."""
    run, now = loaded.config.resume, loaded.config.collect.model_dump(mode="json")
    then = resolved_recipe(run).get("collect", {}) if isinstance(run, Path) else {}
    return [f"collect.{name}" for name in now if f"collect.{name}" in loaded.asked and then.get(name) != now[name]]


def check_still_there(config: RunConfig) -> None:
    """Refuse to resume a run with a missing dataset."""
    data, run = config.sft.data, config.resume
    if isinstance(run, Path) and not data.exists():
        again = [f"recipe={run / CONFIG}", f"out={data}"]
        raise ConfigError(
            f"resume={run} learns from {data}, which is gone: put it back, name its place with sft.data=FOLDER, or, if "
            f"the env's expert played, collect it again: python -m embodied.collect {join(again)}"
        )


def check_whole(out: Path) -> None:
    """Refuse earlier demonstrations with missing files."""
    from embodied.datasets import read_dataset

    try:
        read_dataset(out).check_whole()
        problem = "" if (out / SOURCE).is_file() else f"{out / SOURCE} is missing"
    except EmbodiedError as err:
        problem = str(err)
    if problem:
        raise ConfigError(f"{problem}; remove {out}, and the same command collects these demonstrations again")


def collect(loaded: Loaded, out: Path, checkpoint: str | None) -> None:
    """Play with `checkpoint` or an expert, and write the dataset."""
    with naming("checkpoint"):
        source = find(checkpoint, loaded) if checkpoint else find("random")  # an expert needs no policy
    expert = None if checkpoint else loaded.config.collect.expert
    name = checkpoint or EXPERTS[expert]
    if expert:
        env_class(loaded.config.env).check_expert(loaded.config.env, expert)
    config = as_played(loaded.config, source)
    config, plan = launch.planned(config, learn=False)
    print(launch.describe(config, plan, weights=source.folder).replace(source.config.name, name), flush=True)
    if loaded.dry_run:
        rehearse(config, source)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    buffers = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        with Interruption(at_once=True):
            spec, episodes = play(config, plan, source, buffers, expert)
    except KeyboardInterrupt:
        shutil.rmtree(buffers)
        raise
    results = summarize(episodes)
    if expert == "planner":
        warn_of_time(episodes, spec.max_episode_steps)
    kept = write(out, spec, config, episodes, buffers)
    by = {"by": name, "policy": source.described() if checkpoint else None, "played": results["overall"]}
    env = {"env": config.env.model_dump(mode="json"), **interpreter_of(config.env)}
    metadata = {**by, **env, "provenance": provenance()}
    (out / SOURCE).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(buffers)  # after a failure the folder stays, with the workers' logs
    print(f"{name}: {describe_results(results)}{describe_tasks(results)}")
    print(f"  kept        {kept} of {len(episodes)} episodes")
    print(f"  dataset     {out}")


def place_of(loaded: Loaded) -> Path:
    asked = loaded.arguments.get("out", ())
    if len(asked) != 1:
        raise ConfigError("no folder is given: set out=demos/NAME, a new folder")
    return check_place("out", as_path(asked[0]), new=True)


def one_of(loaded: Loaded) -> str | None:
    """The policy to play; None: an expert."""
    asked = loaded.arguments.get("checkpoint", (None,))
    if len(asked) != 1:
        raise ConfigError(f"checkpoint={list(asked)}: one at a time; the folders can differ")
    expert = loaded.config.collect.expert
    if asked[0] and expert != "scripted":
        raise ConfigError(f"checkpoint={asked[0]} plays, not collect.expert={expert}; leave out one of them")
    return asked[0]


def warn_of_time(episodes: list[EpisodeResult], limit: int) -> None:
    late = sum(not (episode.error or episode.success_once) and episode.length >= limit for episode in episodes)
    if late and limit < PLANS:
        advice = f"within {limit} env steps; env.max_episode_steps={PLANS} leaves time for all plans"
        print(f"  not solved  {late} episodes {advice}")


def as_played(config: RunConfig, source: PolicySource) -> RunConfig:
    """The recipe for collecting: episodes end as in training, with as many env rows."""
    kind = env_class(config.env)
    if len(kind.tasks(config.env)) > 1 and not kind.mixes_tasks:
        raise ConfigError(f"env.task={list(config.env.task)}: {config.env.name} plays one task at a time; name one")
    rules = {"protocol": AS_TRAINED.name, "episodes": config.collect.episodes}
    return config.model_copy(update={"policy": source.config, "eval": config.eval.model_copy(update=rules)})


def play(
    config: RunConfig, plan, source: PolicySource, buffers: Path, expert: str | None
) -> tuple[EnvSpec, list[EpisodeResult]]:
    """Play episodes that neither training nor evaluation plays, and write a buffer of each into this folder. Dead
    workers are replaced. Returns the env's spec and the outcomes in episode order. An expert needs no policy worker."""
    from embodied.datasets.writer import EpisodeRecorder

    with launch.cluster(config, plan, buffers / "logs") as cluster:
        evaluator, noise = players(config, cluster, source), config.collect.noise
        spec = evaluator.read_spec()
        if noise and spec.action.discrete:
            raise ConfigError(f"collect.noise={noise:g} needs continuous actions; leave it out")
        tasks = env_class(config.env).tasks(config.env)
        episodes = EpisodeList(config.seed, "demonstrations", tasks).first(config.collect.episodes)
        recording = Recording(buffers=buffers, noise=noise, seed=config.seed, recorders=(EpisodeRecorder,))
        return spec, evaluator.play(episodes, recording, expert)


def write(out: Path, spec: EnvSpec, config: RunConfig, episodes: list[EpisodeResult], buffers: Path) -> int:
    """Write the dataset of the episodes to keep; returns their number."""
    from embodied.datasets import DatasetWriter, buffer_name, features_of, fps_of

    everything = config.collect.keep == "all" or not spec.has_success
    kept = [episode for episode in episodes if not episode.error and (everything or episode.success_once)]
    if not kept:
        raise EmbodiedError(f"none of {len(episodes)} episodes was a success; collect.keep=all keeps failures, too")
    with DatasetWriter(out, fps_of(spec), features_of(spec)) as writer:
        for episode in kept:
            writer.add_buffer(buffers / buffer_name(episode.index))
    return len(kept)


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
