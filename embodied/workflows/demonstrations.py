"""Demonstrations and examples of a recipe: checked before a run, and opened by its learners."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.algorithms.config import SFTConfig
from embodied.algorithms.imitation import KeptImitation
from embodied.core.errors import ConfigError, naming
from embodied.core.files import read_object
from embodied.core.types import EnvSpec
from embodied.envs import env_class
from embodied.envs.text.text_env import TextEnv
from embodied.learners.examples import check_shares, no_solution, read_examples

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.datasets import Dataset
    from embodied.envs.config import EnvConfig
    from embodied.workflows.launched_workers import Workers

SOURCE = "meta/source.json"  # beside LeRobot's files: policy or expert, env, success rate
REACH = 1.1  # of actions from -1 to 1, rounded or measured


def open_data(workers: Workers, options: SFTConfig | KeptImitation) -> int:
    """The learners open the dataset, if it fits the env; returns its number of items."""
    if not workers.spec.text:
        check_dataset(options, workers.spec, len(workers.learners), workers.config.policy)
    return workers.learners.open_data().wait()[0]


def check_data(config: RunConfig) -> None:
    """Refuse demonstrations or examples of sft that do not fit this env or these options."""
    items = "conversations" if env_class(config.env).speaks else "env steps"
    if (
        config.sft.data is not None or env_class(config.env).speaks
    ):  # else a dry run whose dataset will be collected first
        config.sft.check_warmup(count_items(config.env, config.sft), items)


def check_kept_data(config: RunConfig) -> None:
    """The same for algo.imitation, if it is set."""
    kept = config.algo.imitation
    of_start = kept and kept.data is None and not env_class(config.env).speaks
    if of_start and config.run.start_from is None:
        raise ConfigError(
            "algo.imitation names no demonstrations, and there is no run.start_from that imitated some; set its data: "
            "python -m embodied.collect recipe=NAME out=demos/A, then algo.imitation={data: demos/A}"
        )
    if kept and not of_start:
        count_items(config.env, kept)


def count_items(env: EnvConfig, options: SFTConfig | KeptImitation) -> int:
    """The number of items. Refuses data that do not fit this env or these options."""
    kind = env_class(env)
    if kind.speaks:
        return check_examples(env, options, kind)
    dataset = dataset_of(options)
    dataset.check_whole(options.episodes)
    return sum(entry["length"] for entry in dataset.entries[: options.episodes])


def check_examples(env: EnvConfig, options: SFTConfig | KeptImitation, kind: type[TextEnv]) -> int:
    """Refuse an unreadable file, prompts without answers or without a count, and options that only demonstrations on
    disk have."""
    section = options.section
    if options.cache:
        raise ConfigError(
            f"{section}cache={options.cache}: only demonstrations of robots have images to decode; leave it out"
        )
    count = options.episodes
    if options.data is not None:
        with naming(f"{section}data"):
            count = len(read_examples(options.data, options.episodes, options.names))
    elif kind.solution is TextEnv.solution:
        raise ConfigError(no_solution(env))
    if count is None:
        raise ConfigError(
            f"how many of env.name={env.name}'s prompts? try {section}episodes=20000; "
            f"or give examples with {section}data=FILE.jsonl"
        )
    return count


def dataset_of(options: SFTConfig | KeptImitation) -> Dataset:
    from embodied.datasets import read_dataset

    with naming(f"{options.section}data"):
        return read_dataset(options.data, images=False, names=options.names)


def env_of(path: Path) -> dict[str, Any]:
    """The options of the env in which a dataset was collected; {} if it does not say."""
    with suppress(ConfigError, OSError):  # somebody else's file says nothing
        env = read_object(path / SOURCE, ConfigError).get("env")
        return env if isinstance(env, dict) else {}
    return {}


def check_dataset(config: SFTConfig | KeptImitation, spec: EnvSpec, learners: int, policy: Any) -> None:
    """Refuse demonstrations of another robot, with other observations or units of actions, and too few of them."""
    from embodied.datasets.layout import ACTION, CAMERA, STATE

    if spec.privileged_dim:
        raise ConfigError("demonstrations hold no privileged numbers; set env.privileged=false")
    dataset = dataset_of(config)
    wanted = {ACTION: (spec.action.dim,), **({STATE: (spec.state_dim,)} if spec.state_dim else {})}
    wanted |= {CAMERA + camera: tuple(size) for camera, size in spec.images.items()}
    shapes = {name: tuple(feature["shape"]) for name, feature in dataset.features.items()}
    odd = [
        f"{name} is {list(size)} here, {list(shapes[name]) if name in shapes else 'missing'} there"
        for name, size in wanted.items()
        if shapes.get(name) != size
    ]
    if odd:
        raise ConfigError(f"{config.section}data={config.data} holds demonstrations of another env: {'; '.join(odd)}")
    check_actions(config, dataset, spec, policy)
    check_shares(min(config.episodes or len(dataset), len(dataset)), "demonstrations", learners)


def check_actions(config: SFTConfig | KeptImitation, dataset: Dataset, spec: EnvSpec, policy: Any) -> None:
    """Refuse choices that the env does not have, and actions in other units than the policy's."""
    from embodied.datasets.layout import ACTION

    column = dataset.theirs.get(ACTION, ACTION)
    figures, given = dataset.stats.get(column, {}), f"{config.section}data={config.data}"
    if any(np.size(figures.get(name, ())) != spec.action.dim for name in ("min", "max")):  # an older layout
        actions = np.concatenate([episode.actions for episode in dataset])
        figures = {"min": actions.min(axis=0), "max": actions.max(axis=0)}
    least, most = np.ravel(figures["min"]), np.ravel(figures["max"])
    if choices := spec.action.num_choices:
        kind = dataset.features[ACTION]["dtype"]
        if "int" not in kind or least[0] < 0 or most[0] >= choices:
            raise ConfigError(
                f"{given}: an action of this env is a choice from 0 to {choices - 1}, int64 [1], and there it is "
                f"{kind} from {least[0]:g} to {most[0]:g}"
            )
        return
    if (kind := dataset.features[ACTION]["dtype"]) == "bool":
        raise ConfigError(f"{given}: {column} is {kind}, and actions of this env are numbers from -1 to 1, float32")
    has_own_units = ":" in policy.name or (policy.published and (policy.pretrained or policy.statistics))
    far = np.maximum(-least, most)
    if not has_own_units and far.max() > REACH:
        at = int(far.argmax())
        raise ConfigError(
            f"{given}: {column}[{at}] is from {least[at]:g} to {most[at]:g}, and actions are from -1 to 1, which the "
            "env turns into its own units; convert the data's actions so (docs/demonstrations.md, Imitating)"
        )
