"""Published models: their hub ids, the recipes that evaluate and train them, and their published rates.

The data are in assets/published_models.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from embodied import assets
from embodied.config.yaml_values import read_yaml, write_yaml
from embodied.core.errors import ConfigError, nearest

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
    suites = {one.partition("/")[0] for one in ([task] if isinstance(task, str) else task)}
    if len(suites) > 1 or not suites <= model.rates.keys():
        raise ConfigError(
            f"eval.reference={name} has published rates for env.task={'|'.join(model.rates)}, and here is "
            f"{write_yaml(task)}"
        )
    return model, suites.pop()
