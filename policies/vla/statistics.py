"""The ranges or moments of a model's training data, and the conversion between its units and the robot's.

For an unpublished model the ranges come from demonstrations, or are [-1, 1]. They are buffers of the policy, so they
are stored with its weights, from imitation to RL and acting.

Some families add a small number to the width of a range (`slack`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.arrays import host, tensor_of
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import reading
from embodied.core.types import EnvSpec
from embodied.policies.policy_folder import read_json
from embodied.runtime.published_weights import array_of, blob_of, read_safetensors, spec_of, write_safetensors
from embodied.runtime.published_weights import tensor_of as tensor_of_blob

BOUNDS = {"quantiles": ("q01", "q99"), "extremes": ("min", "max")}

GRIPPERS = {
    "as_is": lambda x: x,
    "libero": lambda x: -torch.sign(2 * x - 1),  # stored: 0 closed, 1 open; the robot closes with 1
    "bridge": lambda x: torch.where(x > 0.5, 1.0, -1.0),
}
STORED_GRIPPERS = {"as_is": lambda x: x, "libero": lambda x: (1 - x) / 2, "bridge": lambda x: (1 + x) / 2}  # and back
DATA_SET = Path("meta", "stats.json")  # in LeRobot's layout
COUNT = "python -m embodied.datasets.quantiles"
FEATURES = {"action": "action", "proprio": "observation.state"}
FIGURES = ("q01", "q99", "min", "max")
OWN = "own"
RANGES = "ranges."  # prefix of these buffers' names
Figures = dict[str, dict[str, Any]]  # "action" and "proprio" -> FIGURES -> numbers


@dataclass(frozen=True)
class Statistics:
    """The range that is scaled to [-1, 1]; numbers whose mask is False are not scaled. `slack` widens every range."""

    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray
    slack: float = 0.0

    @property
    def width(self) -> np.ndarray:
        return self.high - self.low + self.slack

    def from_unit(self, numbers: Tensor) -> Tensor:
        low, width, mask = (tensor_of(limits, numbers.device) for limits in (self.low, self.width, self.mask))
        return torch.where(mask, 0.5 * (numbers + 1) * width + low, numbers.double())

    def to_unit(self, numbers: Tensor) -> Tensor:
        """Scales to [-1, 1] with clipping; -1 if a range has no width."""
        width = np.where(self.width == 0, 1.0, self.width)
        low, width, mask = (tensor_of(limits, numbers.device) for limits in (self.low, width, self.mask))
        numbers = numbers.double()
        return torch.where(mask, 2 * (numbers - low) / width - 1, numbers).clamp(-1, 1)


def for_env(actions: Tensor, gripper: str) -> Tensor:
    """Actions [..., A] with the last number converted for the env."""
    return torch.cat([actions[..., :-1], GRIPPERS[gripper](actions[..., -1:])], dim=-1).to(torch.float32)


def choose_key(norm_stats: dict[str, Any], key: str | None, where: str) -> str:
    """The data set named `key`, which may be omitted if there is only one."""
    if key is None and len(norm_stats) > 1:
        raise ConfigError(
            f"{where} was trained on several data sets; choose one: policy.statistics="
            f"{'|'.join(sorted(norm_stats)[:8])}"
        )
    key = next(iter(norm_stats)) if key is None else key
    chosen = next((name for name in (key, f"{key}_no_noops") if name in norm_stats), None)
    if chosen is None:
        raise ConfigError(f"policy.statistics={key!r} is not in {where}; there are: {', '.join(sorted(norm_stats))}")
    return chosen


def statistics_of(
    norm_stats: dict[str, Any],
    key: str | None,
    where: str,
    part: str = "action",
    bounds: str = "quantiles",
    slack: float = 0.0,
) -> Statistics:
    """The ranges of the actions (or of another `part`) of the data set `key`."""
    data_set = choose_key(norm_stats, key, where)
    with reading(Path(f"{where}: the {part} statistics of {data_set}"), CheckpointError):
        numbers = norm_stats[data_set][part]
        low, high = (np.array(numbers[name], np.float64) for name in BOUNDS[bounds])
        mask = np.array(numbers.get("mask") or [True] * len(low), bool)
        if not low.shape == high.shape == mask.shape == (len(low),):
            sizes = f"{low.shape}, {high.shape} and {mask.shape}"
            raise ValueError(f"{' and '.join(BOUNDS[bounds])} and mask are of the sizes {sizes}")
        if not (np.isfinite(low) & np.isfinite(high) & (low <= high))[mask].all():
            raise ValueError(f"{low.tolist()} to {high.tolist()} is no range")
    return Statistics(low, high, mask, slack)


class Ranges(nn.Module):
    """The ranges of an unpublished model."""

    def __init__(self, figures: Figures) -> None:
        super().__init__()
        for feature, numbers in figures.items():
            for name in FIGURES:
                self.register_buffer(f"{feature}_{name}", torch.tensor(numbers[name], dtype=torch.float64))

    def norm_stats(self) -> dict[str, Figures]:
        """The ranges in the layout of published folders."""
        figures: Figures = {}
        for key, numbers in self.named_buffers():
            feature, _, name = key.rpartition("_")
            figures.setdefault(feature, {})[name] = host(numbers).tolist()
        return {OWN: figures}


def stated_ranges(published: dict[str, Any], asked: str | None, spec: EnvSpec) -> tuple[dict[str, Any], str | None]:
    """Returns the ranges by data set, and the chosen data set: `asked` is a published one, or the folder of a
    dataset."""
    folder = Path(asked) if asked and asked not in published and (not published or Path(asked).is_dir()) else None
    figures = dataset_ranges(folder, spec) if folder else {}
    if not published:
        return {OWN: figures or default_ranges(spec)}, None
    return (published | {folder.name: figures}, folder.name) if folder else (published, asked)


def default_ranges(spec: EnvSpec) -> Figures:
    """Default ranges: actions from -1 to 1, states within half a turn."""
    limits = {"action": (spec.action.dim, 1.0), "proprio": (spec.state_dim or 0, np.pi)}
    return {
        feature: {name: [limit if name in ("q99", "max") else -limit] * count for name in FIGURES}
        for feature, (count, limit) in limits.items()
    }


def dataset_ranges(folder: Path, spec: EnvSpec) -> Figures:
    """The statistics of a dataset's actions and states."""
    if not (folder / DATA_SET).is_file():
        raise ConfigError(no_statistics(folder))
    figures, wanted = default_ranges(spec), {"action": spec.action.dim, "proprio": spec.state_dim or 0}
    with reading(folder / DATA_SET, ConfigError, f"{COUNT} {quote(str(folder))} writes it"):
        stats = read_json(folder / DATA_SET)
        for feature, count in ((feature, count) for feature, count in wanted.items() if count):
            figures[feature] = {name: stats[FEATURES[feature]][name] for name in FIGURES}
            for name, numbers in figures[feature].items():
                if not np.isfinite(np.array(numbers, np.float64)).all():
                    raise ValueError(f"{name} of {FEATURES[feature]} is {numbers}")
                if len(numbers) != count:
                    raise ValueError(f"{FEATURES[feature]} has {len(numbers)} numbers, the env {count}")
    return figures


def no_statistics(folder: Path) -> str:
    return (
        f"policy.statistics={folder} is neither a data set that the model knows (give policy.pretrained=FOLDER, a "
        f"model trained on it) nor a folder with {DATA_SET} (of LeRobot 2.1's datasets {COUNT} "
        f"{quote(str(folder))} writes it, and python -m embodied.collect makes datasets) or with {NORM_STATS}"
    )


# Flow matching normalises by affine scales: by mean and deviation, or from quantile to quantile, without clipping. The
# numbers come from a published folder (openpi's assets/NAME/norm_stats.json, lerobot's normalisation step), or from a
# dataset in LeRobot's layout.

MEAN_STD, QUANTILES = "mean_std", "quantiles"
SCALES = ("action_scale.", "state_scale.")  # prefix of these buffers' names
SCALED = "action_scale.scale"  # our folders have the numbers among their weights
NORM_STATS, STEPS = "norm_stats.json", "policy_preprocessor.json"
STATS_FILES = (NORM_STATS, f"assets/**/{NORM_STATS}", f"*/*/{NORM_STATS}")  # the last is RLinf's, ORG/NAME
WANTED = {"state": ("state", "observation.state"), "actions": ("actions", "action")}  # openpi's name, lerobot's
PICTURES = "observation.images."  # prefix of lerobot's names of cameras
ZERO = 1e-9  # tolerance: openpi's quantiles of constant zeros differ from zero by a histogram bin
Moments = dict[str, dict[str, list[float]]]  # "state" and "actions" -> "mean", "std", "q01", "q99" -> numbers


class Scale(nn.Module):
    """Converts: robot numbers are `unit * scale + shift`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(width, dtype=torch.float64))

    def adopt(self, figures: dict[str, list[float]], mode: str, eps: float, what: str) -> None:
        names = ("mean", "std") if mode == MEAN_STD else ("q01", "q99")
        if lost := [name for name in names if figures.get(name) is None]:
            raise CheckpointError(f"{what} lack {' and '.join(lost)}, by which this model is normalised")
        width, width_of_figures = len(self.shift), min(len(figures[name]) for name in names)
        if width and not width_of(figures) <= width <= width_of_figures:
            width_known = width_of_figures if width_of_figures < width else width_of(figures)
            raise ConfigError(f"{what} are of {width_known} numbers, the env has {width}")
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

    def figures(self, mode: str, eps: float) -> dict[str, Tensor]:
        """The numbers that `adopt` takes."""
        if mode == MEAN_STD:
            return {"mean": self.shift, "std": self.scale - eps}
        low = self.shift - self.scale
        return {"q01": low, "q99": low + 2 * self.scale - eps}


def write_scales(folder: Path, scales: Mapping[str, Scale], mode: str, eps: float) -> None:
    """Put these scales of states and actions into lerobot's normalising steps in a folder; files that have them stay.
    Refuses a folder of another layout with other statistics."""
    for file in folder.glob("policy_*.safetensors"):
        stored = {key: tensor_of_blob(blob).clone() for key, blob in read_safetensors(file).items()}
        before = {key: tensor.clone() for key, tensor in stored.items()}
        for feature, scale in scales.items():
            for name, numbers in scale.figures(mode, eps).items():
                if (tensor := stored.get(f"{WANTED[feature][1]}.{name}")) is not None:
                    tensor.view(-1)[: len(numbers)] = numbers.to(tensor)
        if any(not torch.equal(tensor, before[key]) for key, tensor in stored.items()):
            specs = {key: spec_of(tensor) for key, tensor in stored.items()}
            write_safetensors(file, specs, ((key, blob_of(tensor)) for key, tensor in stored.items()))
    if not any(are_of(figures, scales, mode, eps) for figures in read_figures(folder).values()):
        raise ConfigError(
            "the published layout would hold other statistics than policy.statistics, with which this policy was "
            "trained: policy.save_pretrained(folder) writes our layout"
        )


def are_of(figures: Moments, scales: Mapping[str, Scale], mode: str, eps: float) -> bool:
    """True if these scales are of these statistics."""
    again = {feature: Scale(len(scale.shift)) for feature, scale in scales.items()}
    for feature, scale in again.items():
        scale.adopt(figures[feature], mode, eps, feature)
    pairs = [
        (getattr(again[feature], name), getattr(scales[feature], name))
        for feature in scales
        for name in ("shift", "scale")
    ]
    return all(torch.allclose(ours, other, rtol=1e-5, atol=1e-6) for ours, other in pairs)


def read_figures(path: Path) -> dict[str, Moments]:
    """All statistics in a folder, by name; {} if there are none."""
    figures_by_name = {}
    for file in sorted({file for pattern in STATS_FILES for file in path.glob(pattern)}):
        name = str(file.parent.relative_to(path)).removeprefix("assets").strip("/.")
        figures_by_name[name or "own"] = _choose_figures(read_json(file).get("norm_stats", {}), file)
    if (path / STEPS).is_file():
        for file in _state_files(path / STEPS):
            figures_by_name["own"] = _from_step(file)
    if (path / "meta" / "stats.json").is_file():
        figures_by_name["own"] = _choose_figures(read_json(path / "meta" / "stats.json"), path / "meta" / "stats.json")
    return figures_by_name


def camera_order(config: dict[str, Any], folder: Path, cameras: Sequence[str]) -> list[str]:
    """These cameras in the order of the pictures in lerobot's config.json, by their own names or as the folder's
    preprocessor renames them, without cameras that the model does not know; all as they are if it knows none."""
    renamed: dict[str, str] = {}
    if (folder / STEPS).is_file():
        with reading(folder / STEPS, CheckpointError):
            for step in read_json(folder / STEPS).get("steps", []):
                if step.get("registry_name") == "rename_observations_processor":
                    renamed |= step.get("config", {}).get("rename_map", {})
    named = [name.removeprefix(PICTURES) for name in config.get("input_features") or () if name.startswith(PICTURES)]
    name_of = {renamed.get(PICTURES + camera, PICTURES + camera).removeprefix(PICTURES): camera for camera in cameras}
    return [name_of[name] for name in named if name in name_of] or [*cameras]


def figures_of(figures: dict[str, Moments], where: str, name: str | None) -> tuple[Moments | None, str]:
    """Returns the statistics `name` among those `figures` at `where`, or in a dataset's folder of this name, and their
    origin."""
    if name and name not in figures and (not figures or Path(name).is_dir()):
        figures, where, name = read_figures(Path(name)), name, None
        if not figures:
            raise ConfigError(no_statistics(Path(where)))
    return (figures[choose_key(figures, name, where)] if figures else None), where


def width_of(figures: dict[str, list[float]]) -> int:
    """The number of dimensions of the statistics, without padding zeros."""
    columns = [enumerate(column, 1) for column in figures.values()]
    return max((at for column in columns for at, number in column if abs(number) > ZERO), default=0)


def _state_files(path: Path) -> list[Path]:
    """The files of normalisation steps."""
    with reading(path, CheckpointError):
        steps = read_json(path).get("steps", [])
        files = [step.get("state_file") for step in steps if step.get("registry_name") == "normalizer_processor"]
        return [path.with_name(Path(file).name) for file in files if file]


def _from_step(path: Path) -> Moments:
    nested: dict[str, dict[str, Any]] = {}
    for key, blob in read_safetensors(path).items():
        feature, _, figure = key.rpartition(".")
        nested.setdefault(feature, {})[figure] = array_of(blob)
    return _choose_figures(nested, path)


def _choose_figures(figures: dict[str, Any], where: Path) -> Moments:
    chosen = {}
    with reading(where, CheckpointError):
        for ours, names in WANTED.items():
            found = figures[next((name for name in names if name in figures), names[0])]
            wanted = {key: found.get(key) for key in ("mean", "std", "q01", "q99")}
            chosen[ours] = {
                key: np.array(value, np.float64).flatten().tolist()
                for key, value in wanted.items()
                if value is not None
            }
    return chosen
