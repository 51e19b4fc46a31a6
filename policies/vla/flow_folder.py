"""Published folders of flow-matching policies: converts openpi's and lerobot's names of weights to ours, and writes
them back byte by byte.

Published files have unused weights, such as output layers for words. They are kept in a file beside our weights, not in
memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.errors import CheckpointError
from embodied.policies.policy_folder import CONFIG, OURS, TOKENIZER_FILES, copy_files, read_blobs, read_json
from embodied.policies.vla.statistics import MEAN_STD, NORM_STATS, QUANTILES, SCALED, STATS_FILES, Moments, read_figures
from embodied.runtime.tensor_bytes import Blob, read_safetensors, tensor_of, write_safetensors

UNUSED = "unused.safetensors"
LAYOUT = "published_weights"  # key of our config.json: names and precisions of the original weights
COMPANIONS = (*TOKENIZER_FILES, "policy_*.json", "policy_*.safetensors", *STATS_FILES)


@dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """Settings of all these models. `action_dim` and `state_dim` are the model's widths; a robot's actions and states
    are padded."""

    kind: str  # policy.name
    horizon: int
    action_dim: int
    state_dim: int
    max_tokens: int
    normalization: str
    tokenizer: str = "folder"  # "folder": tokenizer.json; "words": words hashed to ids, for small models
    published: dict[str, Any] = field(default_factory=dict)  # the original config.json

    @property
    def periods(self) -> tuple[float, float]:
        """The shortest and the longest period of the time's sines."""
        return self.published.get("min_period", 4e-3), self.published.get("max_period", 4.0)

    def check(self, where: str, *more: int) -> None:
        """Refuse adapters, and invalid sizes, including `more`."""
        if self.published.get("use_peft"):
            raise CheckpointError(f"{where} says use_peft=true: merge the adapters into the weights first")
        if not all(type(each) in (int, float) and 0 < each < math.inf for each in self.periods):
            raise CheckpointError(f"{where}: min_period and max_period should be positive numbers, not {self.periods}")
        counts = (self.horizon, self.action_dim, self.state_dim, self.max_tokens, *more)
        if odd := [number for number in counts if type(number) is not int or number < 1]:
            raise CheckpointError(f"{where}: its sizes should be whole numbers, one is {odd[0]!r}")


def normalization_of(config: dict[str, Any], usual: str, where: str) -> str:
    """The normalisation in lerobot's config.json, or `usual`."""
    asked = config.get("normalization_mapping")
    if not asked:
        return usual
    mapping = asked if isinstance(asked, dict) else {}
    modes = {str(mapping.get(part)).lower() for part in ("STATE", "ACTION")}
    if modes not in ({MEAN_STD}, {QUANTILES}):
        raise CheckpointError(f"{where} normalises by {', '.join(sorted(modes))}; known: {MEAN_STD}, {QUANTILES}")
    return modes.pop()


@dataclass(frozen=True)
class FlowFolder:
    """A published folder; the weights' bytes are read on access."""

    path: Path
    settings: Any
    figures: dict[str, Moments]
    layout: dict[str, str]  # published name -> precision; empty for unpublished models
    weights: dict[str, Blob]  # our names
    unused: dict[str, Blob]  # published names
    names: dict[str, str]  # our name -> name in the folder
    own_name: Callable[[str], str | None]

    def __deepcopy__(self, _: dict) -> FlowFolder:
        """Copies of a policy share it: bytes in files are not copied into memory."""
        return self

    @classmethod
    def read(
        cls, path: Path | str, kind: str, settings_of: Callable[..., Any], own_name: Callable[[str], str | None]
    ) -> FlowFolder:
        """`kind` is the recipe's policy.name."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise CheckpointError(f"{path} is not a folder of {kind}: {CONFIG} is missing")
        config, stored = read_json(path / CONFIG), read_blobs(path)
        layout = config.get(LAYOUT)
        if layout is None and "policy" not in config:
            layout = {name: blob.spec.dtype for name, blob in stored.items()}
            unused = {name: blob for name, blob in stored.items() if own_name(name) is None}
            names = {own_name(name): name for name in stored if name not in unused}
            weights = {own: stored[name] for own, name in names.items()}
        else:
            layout = layout or {}  # {} for fresh weights
            base = config.get("base")  # a folder of adapters has its unused weights in the base folder
            below = cls.read(base, kind, settings_of, own_name).unused if base else {}
            unused = below or (read_safetensors(path / UNUSED) if (path / UNUSED).is_file() else {})
            weights, names = dict(stored), {name: name for name in stored}
        config = {key: value for key, value in config.items() if key not in (LAYOUT, *OURS)}
        settings = settings_of(config, layout or stored, str(path / CONFIG))
        if settings.kind != kind:
            raise CheckpointError(f"{path} holds a {settings.kind}, not a {kind}: policy.name={settings.kind}")
        figures = read_figures(path)
        if not figures and SCALED not in weights:
            raise CheckpointError(
                f"{path} has no statistics, without which states and actions have no units: assets/NAME/{NORM_STATS} "
                "(openpi) or the normalising step of policy_preprocessor.json (lerobot) is missing; copy it from where "
                "the model was trained"
            )
        return cls(path, settings, figures, layout, weights, unused, names, own_name)


def write_back(path: Path, source: FlowFolder, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write the files that belong to the weights; returns the weights with published names and precisions."""
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(source.settings.published, indent=2) + "\n", encoding="utf-8")
    copy_files(source.path, path, COMPANIONS)
    weights = {name: tensor_of(blob) for name, blob in source.unused.items()}
    weights |= {name: own[source.own_name(name)] for name in source.layout if name not in weights}
    return {name: weights[name].to(getattr(torch, dtype)) for name, dtype in source.layout.items()}


def save_beside(path: Path, source: FlowFolder, whole: bool) -> None:
    """Write a checkpoint's other files besides config.json and weights; `whole`: the checkpoint has all weights, not
    only trained ones."""
    copy_files(source.path, path, COMPANIONS)
    if whole and source.unused and source.path.resolve() != path.resolve():
        specs = {name: blob.spec for name, blob in source.unused.items()}
        write_safetensors(path / UNUSED, specs, source.unused.items())


def layout_of(settings: FlowSettings, published: FlowFolder | None) -> dict[str, Any]:
    """The part of our config.json that describes the published model."""
    return settings.published | ({LAYOUT: published.layout} if published else {})
