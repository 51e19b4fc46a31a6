"""Policies that make actions from noise by flow matching: Pi0, SmolVLA and other models with an action expert.

A family reads an observation once and computes the velocity of noisy actions at a time; the rest is here. The initial
noise is always random, also at temperature 0: `temperature` scales only the noise that RL adds in the steps. Only
played actions have log-probs. The value does not depend on noise or time.

Published folders of flow-matching policies: converts openpi's and lerobot's names of weights to ours, and writes
them back byte by byte.

Published files have unused weights, such as output layers for words. They are kept in a file beside our weights, not in
memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.arrays import tensor_of
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import EnvSpec, NoiseSpec, Observation, PolicyOutput
from embodied.policies.base import Scores
from embodied.policies.policy_folder import (
    CONFIG,
    OURS,
    TOKENIZER_FILES,
    copy_files,
    read_blobs,
    read_json,
    write_shards,
)
from embodied.policies.vla.config import FlowConfig
from embodied.policies.vla.layers import initial_weight
from embodied.policies.vla.lora import add_lora, initial_adapter, is_adapter, with_adapter_options
from embodied.policies.vla.policy import VLAPolicy
from embodied.policies.vla.statistics import (
    GRIPPERS,
    MEAN_STD,
    NORM_STATS,
    QUANTILES,
    SCALED,
    SCALES,
    STATS_FILES,
    STORED_GRIPPERS,
    Moments,
    Scale,
    choose_key,
    figures_of,
    read_figures,
    width_of,
)
from embodied.runtime.published_weights import Blob, read_safetensors, write_safetensors
from embodied.runtime.published_weights import tensor_of as tensor_of_blob

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
    weights = {name: tensor_of_blob(blob) for name, blob in source.unused.items()}
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


HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
MODEL = "model."  # prefix of the names of a published model's weights, here and in lerobot


class FlowPolicy(VLAPolicy):
    """Families implement `build`, `read`, `denoise` and `judged`, and describe their folders."""

    own_scales = SCALES
    settings: Any
    settings_of: ClassVar[Callable[..., FlowSettings]]  # arguments: config.json, the weights' names, where, kind
    own_name: ClassVar[Callable[[str], str | None]]  # our name of a published weight; None if it is unused
    presets: ClassVar[Mapping[str, dict[str, Any]]]
    model: nn.Module

    def __init__(self, config: FlowConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        config = self.config
        self.source = self.folder_of(config) if config.pretrained else None
        self.origin = self.source and self.source.path
        preset, kind = self.presets[config.preset], config.name
        self.settings = self.source.settings if self.source else self.settings_of(preset, (), "policy.preset", kind)
        if config.horizon:
            self.settings = replace(self.settings, horizon=config.horizon)
        self.check_cameras(config.cameras)
        self.views = list(config.cameras or spec.images)
        self.check_env()
        self.tokenizer = self.choose_tokenizer()
        self.exact = torch.float64 if config.dtype == "float64" else torch.float32
        self.action_scale, self.state_scale = Scale(spec.action.dim), Scale(spec.state_dim or 0)
        self.adopt_figures()
        with torch.device("meta"):
            self.build()
        if config.dtype == "bfloat16":
            self.halve()
        for name, child in self.named_children():
            if f"{name}." not in SCALES:
                child.to_empty(device="cpu")

    # Implemented by families

    def build(self) -> None:
        """Create `model` and `value_head`, freeze untrained weights, and call `add_parts`."""
        raise NotImplementedError

    def halve(self) -> None:
        """Convert the model's weights to half precision."""
        self.model.to(torch.bfloat16)

    def read(self, obs: Observation, known: dict[str, Any] | None = None, draws: Tensor | None = None) -> Any:
        """Computes the inputs shared by all steps: images and words, unless `frozen_features` are `known`, and the
        state. `draws` are random numbers for image augmentation."""
        raise NotImplementedError

    def denoise(self, seen: Any, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the expert's hidden states, with the H actions last, and the velocity [N, H, D] of points x at times
        [N]."""
        raise NotImplementedError

    def judged(self, seen: Any, hidden: Tensor | None) -> Tensor:
        """The features [N, D] of the value head, from the prefix and a step's hidden states, if any."""
        raise NotImplementedError

    def num_draws(self) -> int:
        """Number of random numbers for augmenting the images of an imitation item."""
        return 0

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        if is_adapter(name):
            return initial_adapter(name, shape, draw, self.config.lora_init)
        return initial_weight(name, shape, draw)

    # Construction

    def add_parts(self, hidden_dim: int, image_tokens: int, token_dim: int, adapted: str) -> None:
        """Create the noise head, the keyframe head, and the adapters of the model's part `adapted`."""
        config = self.config
        if self._joint:
            self.noise_head = NoiseHead(hidden_dim, self.settings.action_dim, *config.noise_range).to(self.exact)
        self.add_keyframe_head(len(self.views) * image_tokens, token_dim)
        if config.lora_rank:
            add_lora({f"{MODEL}{adapted}": getattr(self.model, adapted)}, config)
            self.model.to(self.exact)

    @classmethod
    def folder_of(cls, config: FlowConfig) -> FlowFolder:
        return FlowFolder.read(config.pretrained, config.name, cls.settings_of, cls.own_name)

    @classmethod
    def check_folder(cls, config: FlowConfig) -> None:
        published = cls.folder_of(config)
        if published.settings.tokenizer != "words":
            cls.tokenizers[0](published.path)
        figures_of(published.figures, config.pretrained, config.statistics)

    @classmethod
    def choices(cls, config: FlowConfig, task: str) -> dict[str, Any]:
        """The options that a published folder decides in evaluations on a benchmark's task."""
        published = cls.folder_of(config)
        figures, options = published.figures, cls.lerobots_own(published.settings.published)
        if config.statistics is not None or len(figures) == 1:
            return options
        near = [name for name in figures if task.partition("_")[0] in name]
        return options | {"statistics": near[0] if len(near) == 1 else None}

    @classmethod
    def lerobots_own(cls, published: dict[str, Any]) -> dict[str, Any]:
        """The options that a folder of lerobot's decides."""
        steps = published.get("n_action_steps")
        return {"chunk": steps} if steps and "type" in published else {}

    @classmethod
    def reads_state(cls, config: FlowConfig, settings: Any) -> bool:
        return True

    def state_room(self) -> int | None:
        """The largest state dimension of the networks; None: any."""
        return self.settings.state_dim

    @classmethod
    def numbers(cls, config: FlowConfig) -> tuple[int, int | None]:
        """The numbers of action and state dimensions of a published folder's model (state None: not used)."""
        published = cls.folder_of(config)
        figures = published.figures[choose_key(published.figures, config.statistics, config.pretrained)]
        felt = config.relative_actions or cls.reads_state(config, published.settings)
        return width_of(figures["actions"]), width_of(figures["state"]) if felt else None

    @classmethod
    def for_memory_estimate(cls, config: FlowConfig, spec: EnvSpec) -> FlowPolicy:
        without = with_adapter_options(config).model_copy(update={"pretrained": None, "statistics": None})
        return type(cls.__name__, (CountedFlow, cls), {})(without, spec)

    def read_folder(self) -> dict[str, Blob]:
        stored = self.source.weights if self.source else {}
        if self.config.statistics:  # statistics that replace our folder's
            stored = {name: blob for name, blob in stored.items() if not name.startswith(SCALES)}
        return stored

    def is_extra(self, name: str) -> bool:
        return not name.startswith(MODEL) or is_adapter(name)

    def check_env(self) -> None:
        """Refuse an env with more action or state numbers than the model supports."""
        super().check_env()
        config, spec, settings = self.config, self.spec, self.settings
        if spec.action.dim > settings.action_dim:
            raise ConfigError(
                f"this model has room for {settings.action_dim} action numbers, the env takes {spec.action.dim}"
            )
        if config.chunk > settings.horizon:
            raise ConfigError(
                f"policy.chunk={config.chunk} is more than the {settings.horizon} actions that the model predicts at "
                f"once; try policy.chunk={settings.horizon}"
            )
        if self.reads_state(config, settings) and not spec.state_dim:
            raise ConfigError(
                f"policy.name={config.name} needs the robot's state, but this env gives none; set env.state=proprio"
            )
        if (room := self.state_room()) is not None and (spec.state_dim or 0) > room:
            raise ConfigError(
                f"this model has room for {room} state numbers, the env gives {spec.state_dim}; set env.state=proprio"
            )
        if config.relative_actions > min(spec.state_dim or 0, spec.action.dim):
            raise ConfigError(
                f"policy.relative_actions={config.relative_actions} is more than the env's state ({spec.state_dim}) or "
                f"its actions ({spec.action.dim}) have"
            )

    def adopt_figures(self) -> None:
        """Read the statistics that normalise states and actions."""
        source, name = self.source, self.config.statistics
        if source and name is None and SCALED in source.weights:
            return  # our folders have them among the weights
        figures, where = figures_of(source.figures if source else {}, str(source and source.path), name)
        mode = self.settings.normalization
        eps = 1e-8 if "type" in self.settings.published else 1e-6  # lerobot's, openpi's
        for scale, part, kind in ((self.action_scale, "actions", "action"), (self.state_scale, "state", "state")):
            if figures:
                scale.adopt(figures[part], mode, eps, f"the {kind} statistics of {where}")

    @property
    def horizon(self) -> int:
        return self.settings.horizon

    def noise_spec(self) -> NoiseSpec:
        points = self.horizon * self.settings.action_dim
        return NoiseSpec("normal", points * (1 + self._noisy_steps()) + 1)

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        x, extra, first = self._split(tensor_of(noise, self.device))
        seen = self.read(obs)
        chain, densities, values = [x], [unit_density(x)] if self._joint else [], None
        for step in range(self.config.steps):
            k = torch.full((len(x),), step, device=x.device)
            hidden, velocity = self.denoise(seen, x, time_of(k, self.config.steps))
            values = self._value(seen, hidden) if values is None else values
            noisy = (k == first) | self._joint
            draws = extra[:, step if self._joint else 0]
            after = self._move(x, velocity, hidden, k, draws, temperature, noisy)
            density = log_density(after, *self._gaussian(x, velocity, hidden, k))
            densities.append(torch.where(noisy[:, None, None], density, 0.0))
            x = after
            chain.append(x)
        logprobs = torch.stack(densities).sum(0) / (len(densities) if self._joint else 1)
        return PolicyOutput(
            self._played(x, obs),
            self._scored(logprobs).cpu().numpy(),
            values.cpu().numpy(),
            self._remember(chain, first),
        )

    @torch.inference_mode()
    def value(self, obs: Observation) -> np.ndarray:
        return self._value(self.read(obs), None).cpu().numpy()

    def forward(self, inputs: dict[str, Any]) -> Scores:
        chain = tensor_of(inputs["chain"], self.device).to(self.exact)
        first = tensor_of(inputs["first"], self.device)
        seen = self.read(inputs["obs"], inputs)
        densities, entropies, values = [], [], None
        if self._joint:
            densities.append(unit_density(chain[:, 0]))
            entropies.append(normal_entropy(torch.ones_like(chain[:, 0])))
        for number in range(chain.shape[1] - 1):
            x, k = chain[:, number], first + number
            hidden, velocity = self.denoise(seen, x, time_of(k, self.config.steps))
            values = self._value(seen, hidden) if values is None else values
            mean, deviation = self._gaussian(x, velocity, hidden, k)
            densities.append(log_density(chain[:, number + 1], mean, deviation))
            entropies.append(normal_entropy(deviation))
        logprobs, entropy = (self._scored(torch.stack(parts).mean(0)) for parts in (densities, entropies))
        return Scores(logprobs, entropy, values)

    def imitation_noise(self) -> NoiseSpec:
        return NoiseSpec("normal", self.horizon * self.settings.action_dim + 1 + self.num_draws())

    def unit_state(self, state: Tensor) -> Tensor:
        return self.state_scale.to_unit(state)

    def imitate_actions(self, inputs: dict[str, Any], noise: np.ndarray) -> Tensor:
        """The squared error of the velocity at a random time [B, H, action_dim]."""
        numbers, draws = tensor_of(noise, self.device), None
        if more := self.num_draws():
            numbers, draws = numbers.tensor_split([numbers.shape[1] - more], dim=1)
            draws = uniform_of(draws)
        # From Beta(1.5, 1), above 0.001, by the inverse of t^1.5: times near 1 (noise) are trained more.
        time = uniform_of(numbers[:, -1]) ** (1 / 1.5) * 0.999 + 0.001
        start = numbers[:, :-1].view(len(numbers), self.horizon, -1).to(self.exact)
        actions = self._unit_actions(tensor_of(inputs["actions"], self.device), inputs["obs"])
        seen = self.read(inputs["obs"], draws=draws)
        t = column(time, start)
        _, velocity = self.denoise(seen, t * start + (1 - t) * actions, time)
        return (start - actions - velocity) ** 2

    # On disk

    def stored_names(self) -> dict[str, str]:
        return self.source.names

    def description(self) -> dict[str, Any]:
        """The published config plus our settings, so that the folder can be `policy.pretrained` again."""
        ours = super().description()
        if self.source:
            ours["policy"]["pretrained"] = "."
        if not self.source or self.config.statistics not in self.source.figures:
            ours["policy"]["statistics"] = None  # they are among the weights
        return layout_of(self.settings, self.source) | ours

    def write_folder(self, folder: Path, tensors=None, specs=None) -> None:
        super().write_folder(folder, tensors, specs)
        if self.source:
            save_beside(folder, self.source, whole=not self.left_out())

    def save_published(self, folder: Path | str, shard_bytes: int = 5 * 10**9) -> None:
        """Write the original layout, for other programs: without value head, adapters merged."""
        if not (self.source and self.source.layout):
            raise ConfigError("only a policy from a published folder can be saved as one; policy.pretrained is unset")
        weights = write_back(Path(folder), self.source, self.published_weights())
        write_shards(Path(folder), weights, shard_bytes)

    # Inside

    @property
    def _joint(self) -> bool:
        """True if every step is noisy and the log-prob is of all steps."""
        return self.config.exploration == "flow_noise"

    def _noisy_steps(self) -> int:
        return self.config.steps if self._joint else 1

    def _split(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the initial noise [N, H, D], the noise of each noisy step [N, S, H, D], and the noisy step [N]."""
        shape = (len(noise), 1 + self._noisy_steps(), self.horizon, self.settings.action_dim)
        points = noise[:, :-1].view(shape).to(self.exact)
        steps = self.config.steps
        first = (uniform_of(noise[:, -1]) * steps).long().clamp(max=steps - 1)
        return points[:, 0], points[:, 1:], first * 0 if self._joint else first

    def _unit_state(self, obs: Observation) -> Tensor:
        if not self.spec.state_dim:
            rows = len(next(iter(obs["images"].values())))
            return torch.zeros(rows, 0, dtype=torch.float64, device=self.device)
        return self.state_scale.to_unit(tensor_of(obs["state"], self.device))

    def _padded_state(self, state: Tensor) -> Tensor:
        """A state in the model's units, padded to its width."""
        return F.pad(state.to(self.exact), (0, self.settings.state_dim - state.shape[1]))

    def _gaussian(self, x: Tensor, velocity: Tensor, hidden: Tensor, k: Tensor, level: float = 1.0):
        """Mean and deviation after a noisy step, with `level` times the noise of training."""
        steps = self.config.steps
        if not self._joint:
            return sde_step(x, velocity, k, steps, self.config.noise_level * level)
        deviation = self.noise_head(hidden[:, -self.horizon :]).to(self.exact)
        return plain_step(x, velocity, steps), level * deviation

    def _move(self, x, velocity, hidden, k, draws, temperature: float, noisy: Tensor) -> Tensor:
        straight = plain_step(x, velocity, self.config.steps)
        mean, deviation = self._gaussian(x, velocity, hidden, k, temperature)
        return torch.where(noisy[:, None, None], mean + deviation * draws, straight)

    def _scored(self, numbers: Tensor) -> Tensor:
        """[N, H, D] -> [N, C, A]: the played actions."""
        return numbers[:, : self.config.chunk, : self.spec.action.dim]

    def _value(self, seen: Any, hidden: Tensor | None) -> Tensor:
        features = self.judged(seen, hidden).to(self.exact)
        return self.value_head(features.detach() if self.config.detach_value else features).squeeze(-1).to(self.exact)

    def _remember(self, chain: list[Tensor], first: Tensor) -> dict[str, np.ndarray]:
        """The points before and after the scored step, and that step."""
        points = torch.stack(chain, dim=1)
        if not self._joint:
            rows = torch.arange(len(points), device=points.device)
            points = torch.stack([points[rows, first], points[rows, first + 1]], dim=1)
        return {"chain": points.cpu().numpy(), "first": first.cpu().numpy()}

    def _played(self, x: Tensor, obs: Observation) -> np.ndarray:
        """Converts points in the model's units to actions in the env's units."""
        actions = self.action_scale.from_unit(self._scored(x))
        if count := self.config.relative_actions:
            actions[..., :count] += tensor_of(obs["state"], self.device)[:, None, :count]
        played = actions.cpu().numpy()
        played[..., -1] = GRIPPERS[self.config.gripper](played[..., -1])
        return played.astype(np.float32)

    def _unit_actions(self, actions: Tensor, obs: Observation) -> Tensor:
        """The reverse conversion [B, H, action_dim], padded with zeros."""
        actions = actions.to(torch.float64, copy=True)
        actions[..., -1] = STORED_GRIPPERS[self.config.gripper](actions[..., -1])
        if count := self.config.relative_actions:
            actions[..., :count] -= tensor_of(obs["state"], self.device)[:, None, :count]
        unit = self.action_scale.to_unit(actions).to(self.exact)
        return F.pad(unit, (0, self.settings.action_dim - unit.shape[-1]))


class CountedFlow(FlowPolicy):
    """A policy without files, for counting memory by shapes."""

    hashes_words = True

    def forward(self, inputs: dict[str, Any]) -> Scores:
        """Scores of a chain of the right shape."""
        rows, points = len(inputs["actions"]), self._noisy_steps() + 1
        chain = torch.empty(rows, points, self.horizon, self.settings.action_dim, device=self.device)
        return super().forward({**inputs, "chain": chain, "first": torch.empty(rows, device=self.device)})


# From noise (time 1) to actions (time 0) in steps of d = 1 / steps. With the velocity v = noise - actions, a point x at
# time t came from x1 = x + v (1 - t) and goes to x0 = x - v t.
# - plain:      mean x - d v, no noise.
# - flow_sde:   the same marginals with noise: sigma = level sqrt(t / (1 - t)), mean x - d v - sigma^2 d / (2 t) x1,
#               deviation sqrt(d) sigma. The first step, t = 1, takes the second's time in the denominator.
# - flow_noise: the plain mean, and a deviation that a small network has learned.


def time_of(step: Tensor, steps: int) -> Tensor:
    """The time [N] before a step [N]."""
    return 1 - step / steps


def plain_step(x: Tensor, v: Tensor, steps: int) -> Tensor:
    return x - v / steps


def sde_step(x: Tensor, v: Tensor, step: Tensor, steps: int, level: float) -> tuple[Tensor, Tensor]:
    """Mean and deviation [N, H, D] of flow_sde's step `step` [N]."""
    t = column(time_of(step, steps), x)
    below = column(1 - time_of(step.clamp(min=1), steps), x)  # 1 - t, of the second step for the first
    sigma, d = level * (t / below).sqrt(), 1 / steps
    mean = x - d * v - sigma**2 * d / (2 * t) * (x + v * (1 - t))
    return mean, (math.sqrt(d) * sigma).expand_as(x)


class NoiseHead(nn.Module):
    """flow_noise's learned deviation between `low` and `high`, on a logarithmic scale."""

    def __init__(self, dim: int, actions: int, low: float, high: float) -> None:
        super().__init__()
        self.range = (math.log(low), math.log(high))
        self.mlp = nn.Sequential(nn.Linear(dim, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, actions))

    def forward(self, hidden: Tensor) -> Tensor:
        low, high = self.range
        return (low + (high - low) * (self.mlp(hidden).tanh() + 1) / 2).exp()


def log_density(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    z = (x - mean) / deviation
    return -0.5 * z * z - deviation.log() - HALF_LOG_2PI


def unit_density(x: Tensor) -> Tensor:
    """Log-density of the initial noise."""
    return -0.5 * x * x - HALF_LOG_2PI


def normal_entropy(deviation: Tensor) -> Tensor:
    return deviation.log() + (0.5 + HALF_LOG_2PI)


def uniform_of(normal: Tensor) -> Tensor:
    """Converts standard normal to uniform numbers."""
    return torch.special.ndtr(normal.double())


def column(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.to(like.dtype)[:, None, None]
