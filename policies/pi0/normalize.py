"""States and actions in the model's units and back: by mean and deviation (Pi0) or from quantile to quantile (Pi0.5).

The figures are found in a published folder (openpi's assets/NAME/norm_stats.json, lerobot's normalising step), or in
any dataset in LeRobot's layout. They become buffers of the policy and so travel with its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.errors import CheckpointError, ConfigError
from embodied.policies.folder import read_json
from embodied.policies.pi0.settings import MEAN_STD
from embodied.policies.vla.statistics import choose_key
from embodied.runtime.tensor_bytes import array_of, read_safetensors

NORM_STATS, STEPS = "norm_stats.json", "policy_preprocessor.json"
WANTED = {"state": ("state", "observation.state"), "actions": ("actions", "action")}  # openpi's name, lerobot's
ZERO = 1e-9  # openpi's quantiles of zeros are about as far from zero as its histogram is fine
Figures = dict[str, dict[str, list[float]]]  # "state" and "actions" -> "mean", "std", "q01", "q99" -> numbers


class Scale(nn.Module):
    """Numbers of a robot are `unit * scale + shift`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(width, dtype=torch.float64))

    def adopt(self, figures: dict[str, list[float]], mode: str, eps: float, what: str) -> None:
        names = ("mean", "std") if mode == MEAN_STD else ("q01", "q99")
        if lost := [name for name in names if figures.get(name) is None]:
            raise CheckpointError(f"{what} lack {' and '.join(lost)}, by which this model is normalised")
        width, known = len(self.shift), min(len(figures[name]) for name in names)
        if width and not width_of(figures) <= width <= known:
            found = known if known < width else width_of(figures)
            raise ConfigError(f"{what} are of {found} numbers, the env has {width}")
        one, two = (torch.tensor(figures[name][:width], dtype=torch.float64) for name in names)
        scale = two + eps if mode == MEAN_STD else (two - one + eps) / 2
        if not (one.isfinite() & scale.isfinite() & (scale > 0)).all():
            raise CheckpointError(f"{what} are damaged: {' and '.join(names)} are {one.tolist()} and {two.tolist()}")
        self.shift.copy_(one if mode == MEAN_STD else one + scale)
        self.scale.copy_(scale)

    def to_unit(self, numbers: Tensor) -> Tensor:
        return (numbers.to(torch.float64) - self.shift) / self.scale

    def from_unit(self, unit: Tensor) -> Tensor:
        return unit.to(torch.float64) * self.scale + self.shift


def read_figures(path: Path) -> dict[str, Figures]:
    """All that a folder holds, by name; empty where it holds none."""
    found = {}
    for file in sorted([*path.glob(NORM_STATS), *path.glob(f"assets/**/{NORM_STATS}")]):
        name = str(file.parent.relative_to(path)).removeprefix("assets").strip("/.")
        found[name or "own"] = _chosen(read_json(file).get("norm_stats", {}), file)
    if (path / STEPS).is_file():
        for file in _state_files(path / STEPS):
            found["own"] = _from_step(file)
    if (path / "meta" / "stats.json").is_file():
        found["own"] = _chosen(read_json(path / "meta" / "stats.json"), path / "meta" / "stats.json")
    return found


def figures_of(found: dict[str, Figures], where: str, name: str | None) -> tuple[Figures | None, str]:
    """The figures `name` of those `found` at `where`, or of a dataset's folder of this name, and whose they are."""
    if name and name not in found and Path(name).is_dir():
        found, where, name = read_figures(Path(name)), name, None
        if not found:
            raise CheckpointError(
                f"policy.statistics={where} holds neither meta/stats.json nor norm_stats.json; of LeRobot 2.1's "
                f"datasets python -m embodied.datasets.figures {where} writes the former"
            )
    if not found and name:
        raise ConfigError(f"policy.statistics={name}: there is no such folder")
    return (choose(found, name, where) if found else None), where


def choose(found: dict[str, Figures], name: str | None, where: str) -> Figures:
    """The figures of the data set `name`, which may be left out where there is only one."""
    return found[choose_key(found, name, where)]


def width_of(figures: dict[str, list[float]]) -> int:
    """How many numbers the figures describe, without the zeros that fill them up to a model's width."""
    columns = [enumerate(column, 1) for column in figures.values()]
    return max((at for column in columns for at, number in column if abs(number) > ZERO), default=0)


def _state_files(path: Path) -> list[Path]:
    """Files of the steps that normalise."""
    try:
        steps = read_json(path).get("steps", [])
        files = [step.get("state_file") for step in steps if step.get("registry_name") == "normalizer_processor"]
        return [path.with_name(Path(file).name) for file in files if file]
    except (TypeError, AttributeError):
        raise CheckpointError(f"{path} is damaged: it holds no list of steps") from None


def _from_step(path: Path) -> Figures:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, which holds the figures that {STEPS} normalises by")
    nested: dict[str, dict[str, Any]] = {}
    for key, blob in read_safetensors(path).items():
        feature, _, figure = key.rpartition(".")
        nested.setdefault(feature, {})[figure] = array_of(blob)
    return _chosen(nested, path)


def _chosen(figures: dict[str, Any], where: Path) -> Figures:
    chosen = {}
    for ours, names in WANTED.items():
        name = next((name for name in names if name in figures), None)
        if name is None:
            raise CheckpointError(f"{where} has no figures of {' or '.join(names)}")
        try:
            chosen[ours] = {
                key: np.array(value, np.float64).flatten().tolist()
                for key, value in figures[name].items()
                if key in ("mean", "std", "q01", "q99") and value is not None
            }
        except (TypeError, ValueError, AttributeError) as err:
            raise CheckpointError(f"{where} is damaged: its figures of {name} cannot be read ({err})") from None
    return chosen
