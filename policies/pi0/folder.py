"""Published folders on disk: openpi's and lerobot's names of weights, read as ours and written back byte by byte.

What surprises: upstream ties the word embeddings to an unused output layer and files hold either name; and they hold an
unused output layer of the expert, which we keep in a file beside our weights instead of in memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.errors import CheckpointError
from embodied.policies.pi0.inputs import NORM_STATS, STATS_FILES, Figures, read_figures
from embodied.policies.pi0.network import WORDS
from embodied.policies.pi0.settings import Pi0Settings, settings_of
from embodied.policies.policy_folder import CONFIG, OURS, TOKENIZER_FILES, copy_files, read_blobs, read_json
from embodied.runtime.tensor_bytes import Blob, read_safetensors, tensor_of, write_safetensors

MODEL = "model."  # what our names, and lerobot's, begin with
SCALED = "action_scale.scale"  # a folder of ours has the figures among its weights
UNUSED = "unused.safetensors"
LAYOUT = "published_weights"  # in our config.json: the names and precisions of the folder that the weights came from
TIED = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
COMPANIONS = (*TOKENIZER_FILES, "policy_*.json", "policy_*.safetensors", *STATS_FILES)


@dataclass(frozen=True)
class PublishedPi0:
    """A folder whose description was read; bytes are read when they are used."""

    path: Path
    settings: Pi0Settings
    figures: dict[str, Figures]
    layout: dict[str, str]  # published name -> precision; empty for what nobody has published
    weights: dict[str, Blob]  # our names
    unused: dict[str, Blob]  # published names
    names: dict[str, str]  # our name -> that in the folder

    def __deepcopy__(self, _: dict) -> PublishedPi0:
        """Bytes in files are not copied into memory with a policy."""
        return self


def read_published(path: Path | str, kind: str) -> PublishedPi0:
    """`kind` is what the recipe takes it for."""
    path = Path(path)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} is not a folder of Pi0: {CONFIG} is missing")
    config, stored = read_json(path / CONFIG), read_blobs(path)
    layout = config.get(LAYOUT)
    if layout is None and "policy" not in config:
        layout = {name: blob.spec.dtype for name, blob in stored.items()}
        unused = {name: blob for name, blob in stored.items() if own_name(name) is None}
        names = {own_name(name): name for name in stored if name not in unused}
        weights = {own: stored[name] for own, name in names.items()}
    else:
        layout = layout or {}  # of what began with fresh weights
        unused = read_unused(path, config.get("base"), kind)
        weights, names = dict(stored), {name: name for name in stored}
    config = {key: value for key, value in config.items() if key not in (LAYOUT, *OURS)}
    settings = settings_of(config, layout or stored, str(path / CONFIG))
    if settings.kind != kind:
        raise CheckpointError(f"{path} holds a {settings.kind}, not a {kind}: policy.name={settings.kind}")
    figures = read_figures(path)
    if not figures and SCALED not in weights:
        raise CheckpointError(
            f"{path} has no statistics, without which states and actions have no units: assets/NAME/{NORM_STATS} "
            "(openpi) or the normalising step of policy_preprocessor.json (lerobot) is missing; copy it from where the "
            "model was trained"
        )
    return PublishedPi0(path, settings, figures, layout, weights, unused, names)


def read_unused(path: Path, base: str | None, kind: str) -> dict[str, Blob]:
    """Unused weights that a folder of ours keeps; a folder of adapters leaves them in the folder below."""
    if base:
        return read_published(base, kind).unused
    return read_safetensors(path / UNUSED) if (path / UNUSED).is_file() else {}


def own_name(published: str) -> str | None:
    """Our name of a published weight; None if it is unused."""
    name = published.removeprefix(MODEL)
    if name == EXPERT_HEAD:
        return None
    if name == TIED:
        name = WORDS
    return MODEL + name.replace(".vision_tower.vision_model.", ".vision_tower.").replace(
        ".vision_tower.", ".vision_tower.vision_model."
    )


def write_back(path: Path, source: PublishedPi0, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write the files that belong to the weights; -> the weights under published names, in the precision they had."""
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(source.settings.published, indent=2) + "\n", encoding="utf-8")
    copy_files(source.path, path, COMPANIONS)
    weights = {name: tensor_of(blob) for name, blob in source.unused.items()}
    weights |= {name: own[own_name(name)] for name in source.layout if name not in weights}
    return {name: weights[name].to(getattr(torch, dtype)) for name, dtype in source.layout.items()}


def save_beside(path: Path, source: PublishedPi0, whole: bool) -> None:
    """Write what a checkpoint needs besides config.json and weights, `whole` or only those that are trained."""
    copy_files(source.path, path, COMPANIONS)
    if whole and source.unused and source.path.resolve() != path.resolve():
        specs = {name: blob.spec for name, blob in source.unused.items()}
        write_safetensors(path / UNUSED, specs, source.unused.items())


def layout_of(settings: Pi0Settings, published: PublishedPi0 | None) -> dict[str, Any]:
    """The part of our config.json that describes the published model."""
    return settings.published | ({LAYOUT: published.layout} if published else {})
