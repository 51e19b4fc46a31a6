"""Published models: their hub ids, the recipes that evaluate and train them, and their published rates, from
assets/published_models.yaml. An evaluation is compared with the published one: the difference of the success rates with
its interval, and the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from embodied import assets
from embodied.config.recipe import load
from embodied.core.errors import ConfigError, nearest
from embodied.core.yaml_text import read_yaml, write_yaml
from embodied.envs import env_class
from embodied.envs.capabilities import choose_protocol
from embodied.records.success_stats import independent_difference, wilson

# Options that change no outcome, belong to training, or follow from a model's folder
OF_TRAINING = ("train", "detach_value", "keyframes", "augment", "exploration", "noise_level", "noise_range", "sft_loss")
OF_FOLDER = ("pretrained", "statistics", "preset", "head", "proprio", "film", "horizon")
LORA = ("lora_rank", "lora_scale", "lora_targets", "lora_init", "lora_path", "lora_config")
AS_PLAYED = "name task num_envs compile stagger backend tasks_in_memory video_size initial_states".split()
ONE_SEED = 500
APART = (*OF_TRAINING, *OF_FOLDER, *LORA, *AS_PLAYED, "initial_log_scale", "reward", "reward_kwargs")


FILE = Path(assets.__file__).resolve().parent / "published_models.yaml"


@dataclass(frozen=True)
class PublishedModel:
    """A model (or one for each suite), with its authors' success rates."""

    name: str
    family: str  # policy.name
    hub: str  # its id; {suite} is the suite's name with dashes
    evaluate: str  # the recipe with its evaluation protocol
    train: tuple[str, ...]  # recipes that train it further by RL
    episodes: int  # of each rate
    rates: dict[str, float]  # suite or task -> success in percent
    source: str
    options: dict[str, Any] = field(default_factory=dict)  # settings that differ from the recipe's

    def hub_id(self, suite: str) -> str:
        return self.hub.format(suite=suite.replace("_", "-"))


@cache
def published_models() -> dict[str, PublishedModel]:
    """All published models by name."""
    models = read_yaml(FILE.read_text(encoding="utf-8"))
    return {
        name: PublishedModel(name, **{**fields, "train": tuple(fields["train"])}) for name, fields in models.items()
    }


def recipes_to_train(evaluation: str) -> list[str]:
    """The RL recipes for the models evaluated by this recipe; empty for other recipes."""
    recipes = [
        recipe for model in published_models().values() if model.evaluate == evaluation for recipe in model.train
    ]
    return list(dict.fromkeys(recipes))


def reference_of(name: str, task: str | Sequence[str]) -> tuple[PublishedModel, str]:
    """The model of `eval.reference`, and the suite of `env.task`."""
    models = published_models()
    if name not in models:
        raise ConfigError(f"eval.reference={name!r}: there are {', '.join(models)}{nearest(name, models)}")
    model = models[name]
    suites = {task_name.partition("/")[0] for task_name in ([task] if isinstance(task, str) else task)}
    if len(suites) > 1 or not suites <= model.rates.keys():
        raise ConfigError(
            f"eval.reference={name} has published rates for env.task={'|'.join(model.rates)}, and here is "
            f"{write_yaml(task)}"
        )
    return model, suites.pop()


def compare_with_published(results: dict[str, Any], played: Any, policy: Any) -> dict[str, Any]:
    """The entry `reference` of results.json: the published rate, our rate minus it with an interval, and the settings
    that differ. `played` is the evaluation's config, `policy` the options of its policy."""
    task = results["protocol"]["env"]["task"]
    model, suite = reference_of(played.eval.reference, task)
    count = round(model.rates[suite] / 100 * model.episodes)
    ours = results["overall"]["success_once"]
    comparison: dict[str, Any] = {"name": model.name, "task": suite, "hub": model.hub_id(suite), "source": model.source}
    comparison["published"] = {
        "rate": model.rates[suite] / 100,
        "of": model.episodes,
        "interval": list(wilson(count, model.episodes)),
    }
    if ours:
        difference, *interval = independent_difference(ours["count"], ours["of"], count, model.episodes)
        comparison |= {"difference": difference, "interval": interval}
    protocol = results["protocol"]
    differs = differing_settings(model, suite, protocol["name"], protocol["env"], played, policy)
    return comparison | {"differs": differing_episodes(model, suite, task, ours) + differs}


def differing_episodes(model: PublishedModel, suite: str, task: Any, ours: dict[str, Any] | None) -> list[str]:
    """Differences in tasks and number of episodes. One seed of a published evaluation has at most `ONE_SEED`
    episodes."""
    whole, count = min(model.episodes, ONE_SEED), ours["of"] if ours else 0
    differences = [f"env.task={write_yaml(task)} here, {suite} there"] if task not in (suite, [suite]) else []
    return differences + ([f"{count} episodes here, {whole} there"] if count < whole else [])


def differing_before(played: Any, policy: Any) -> list[str]:
    """The settings of a planned evaluation that differ from the evaluation of `eval.reference`."""
    model, suite = reference_of(played.eval.reference, played.env.task)
    protocol = choose_protocol(env_class(played.env), played.env, played.eval.protocol)
    env = protocol.apply(played.env).model_dump(mode="json")
    return differing_settings(model, suite, protocol.name, env, played, policy)


def differing_settings(
    model: PublishedModel, suite: str, protocol_name: str, env_played: dict[str, Any], played: Any, policy: Any
) -> list[str]:
    """`env.image_size=128 here, 256 there` for every setting that differs from the published evaluation."""
    recipe = load([f"recipe={model.evaluate}", f"env.task={suite}"], entry="evaluate")
    assert recipe is not None, "it was asked for no help"
    published = recipe.config
    protocol = choose_protocol(env_class(published.env), published.env, published.eval.protocol)
    env = protocol.apply(published.env).model_dump(mode="json")
    wanted = settings(protocol.published_name, env, published.policy, published.eval.temperature) | model.options
    here = settings(protocol_name, env_played, policy, played.eval.temperature)
    if policy.name != published.policy.name:  # another family has other options
        wanted = {key: value for key, value in wanted.items() if not key.startswith("policy.") or key == "policy.name"}
    differs = [
        f"{key}={write_yaml(here.get(key))} here, {write_yaml(value)} there"
        for key, value in wanted.items()
        if here.get(key) != value
    ]
    return differs + statistics_of_another_suite(model, suite, policy)


def statistics_of_another_suite(model: PublishedModel, suite: str, policy: Any) -> list[str]:
    """A difference if `policy.statistics` belongs to another suite than the task."""
    name = getattr(policy, "statistics", None)
    its = str(name).removesuffix("_no_noops")
    return [f"policy.statistics={name} here, {suite} there"] if its in model.rates and its != suite else []


def settings(protocol: str, env: dict[str, Any], policy: Any, temperature: float) -> dict[str, Any]:
    """The settings that an evaluation's outcome depends on, besides weights and episodes, by key."""
    values_by_key = {"eval.protocol": protocol, "eval.temperature": temperature}
    for section, values in (("env", env), ("policy", policy.model_dump(mode="json"))):
        values_by_key |= {f"{section}.{key}": value for key, value in values.items() if key not in APART}
    return values_by_key | {"policy.name": policy.name}
