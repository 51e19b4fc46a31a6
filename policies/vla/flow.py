"""Policies that make actions from noise by flow matching: Pi0, SmolVLA and other models with an action expert.

A family reads an observation once and computes the velocity of noisy actions at a time; the rest is here. The initial
noise is always random, also at temperature 0: `temperature` scales only the noise that RL adds in the steps. Only
played actions have log-probs. The value does not depend on noise or time.

Published folders come from openpi or lerobot. Their weights get our names, and are written back byte by byte. Unused
weights, such as output layers for words, are kept in a file beside ours, not in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.arrays import host, map_obs, tensor_of
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import reading
from embodied.core.types import EnvSpec, NoiseSpec, Observation, PolicyOutput
from embodied.policies import policy_folder as files
from embodied.policies.base import Scores
from embodied.policies.lora import add_lora
from embodied.policies.vla import flow_network as networks
from embodied.policies.vla import statistics
from embodied.policies.vla.config import FlowConfig
from embodied.policies.vla.flow_network import Prefix
from embodied.policies.vla.image_processor import with_bars
from embodied.policies.vla.layers import allocate
from embodied.policies.vla.policy import VLAPolicy, check_sizes
from embodied.runtime.published_weights import Blob, read_safetensors, write_safetensors
from embodied.runtime.published_weights import tensor_of as tensor_of_blob

UNUSED = "unused.safetensors"
LAYOUT = "published_weights"  # key of our config.json: names and precisions of the original weights
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
MODEL = "model."  # prefix of the names of a published model's weights, here and in lerobot


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
    vision: networks.VisionSettings
    language: networks.StackSettings
    expert: networks.StackSettings
    vocab: int
    tokenizer: str = "folder"  # "folder": tokenizer.json; "words": words hashed to ids, for small models
    published: dict[str, Any] = field(default_factory=dict)  # the original config.json

    @property
    def image_tokens(self) -> int:
        """The number of tokens of an image."""
        return self.vision.patches

    @property
    def periods(self) -> tuple[float, float]:
        """The shortest and the longest period of the time's sines."""
        return self.published.get("min_period", 4e-3), self.published.get("max_period", 4.0)

    def check(self) -> None:
        """Refuse adapters, and invalid sizes."""
        if self.published.get("use_peft"):
            raise ValueError("use_peft=true: merge the adapters into the weights first")
        if not all(type(period) in (int, float) and 0 < period < math.inf for period in self.periods):
            raise ValueError(f"min_period and max_period should be positive numbers, not {self.periods}")
        check_sizes(self.horizon, self.action_dim, self.state_dim, self.max_tokens, self.language.depth)


def normalization_of(config: dict[str, Any], usual: str) -> str:
    """The normalisation in lerobot's config.json, or `usual`."""
    asked = config.get("normalization_mapping")
    modes = {str(asked.get(feature)).lower() for feature in ("STATE", "ACTION")} if asked else {usual}
    if modes not in ({statistics.MEAN_STD}, {statistics.QUANTILES}):
        methods = f"{statistics.MEAN_STD}, {statistics.QUANTILES}"
        raise ValueError(f"it normalises by {', '.join(sorted(modes))}; known: {methods}")
    return modes.pop()


@dataclass(frozen=True)
class FlowFolder:
    """A published folder; the weights' bytes are read on access."""

    path: Path
    settings: Any
    figures: dict[str, statistics.Moments]
    layout: dict[str, str]  # published name -> precision; empty for unpublished models
    weights: dict[str, Blob]  # our names
    unused: dict[str, Blob]  # published names
    names: dict[str, str]  # our name -> name in the folder

    def __deepcopy__(self, _: dict) -> FlowFolder:
        """Copies of a policy share it: bytes in files are not copied into memory."""
        return self

    @classmethod
    def read(
        cls, path: Path, kind: str, settings_of: Callable[..., Any], own_name: Callable[[str], str | None]
    ) -> FlowFolder:
        """`kind` is the recipe's policy.name."""
        if not (path / files.CONFIG).is_file():
            raise CheckpointError(f"{path} is not a folder of {kind}: {files.CONFIG} is missing")
        config, stored = files.read_json(path / files.CONFIG), files.read_blobs(path)
        layout = config.get(LAYOUT)
        if layout is None and "policy" not in config:
            layout = {name: blob.spec.dtype for name, blob in stored.items()}
            unused = {name: blob for name, blob in stored.items() if own_name(name) is None}
            names = {own_name(name): name for name in stored if name not in unused}
        else:
            layout = layout or {}  # {} for fresh weights
            base = config.get("base")  # a folder of adapters has its unused weights in the base folder
            unused = cls.read(Path(base), kind, settings_of, own_name).unused if base else {}
            if not unused and (path / UNUSED).is_file():
                unused = read_safetensors(path / UNUSED)
            names = {name: name for name in stored}
        config = {key: value for key, value in config.items() if key not in (LAYOUT, *files.OURS)}
        with reading(path / files.CONFIG, CheckpointError):
            settings = settings_of(config, layout or stored)
            settings.check()
        if settings.kind != kind:
            raise CheckpointError(f"{path} holds a {settings.kind}, not a {kind}: policy.name={settings.kind}")
        figures = statistics.read_figures(path)
        if not figures and statistics.SCALED not in names:
            raise CheckpointError(
                f"{path} has no statistics, without which states and actions have no units: "
                f"assets/NAME/{statistics.NORM_STATS} (openpi) or the normalising step of policy_preprocessor.json "
                "(lerobot) is missing; copy it from where the model was trained"
            )
        weights = {our_name: stored[name] for our_name, name in names.items()}
        return cls(path, settings, figures, layout, weights, unused, names)


class FlowPolicy(VLAPolicy):
    """Families implement `read`, `suffix` and `value_features`, and describe their folders and networks."""

    own_scales = statistics.SCALES
    gap_limits = (0.001, 0.4)  # of densities, whose rounding makes 5e-6 and 0.2
    companions = (*files.TOKENIZER_FILES, "policy_*.json", "policy_*.safetensors", *statistics.STATS_FILES)
    settings: Any
    settings_of: ClassVar[Callable[..., FlowSettings]]  # arguments: config.json, the weights' names, policy.name
    own_name: ClassVar[Callable[[str], str | None]]  # our name of a published weight; None if it is unused
    presets: ClassVar[Mapping[str, dict[str, Any]]]
    network: ClassVar[type[networks.FlowNetwork]]
    padding: ClassVar[Mapping[str, bool]] = {}  # how images become square (`with_bars`)
    critic: ClassVar[tuple[int, ...]] = (512, 256, 128)  # hidden layers of the value head
    model: Any

    def __init__(self, config: FlowConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        config = self.config
        self.settings = (
            self.source.settings if self.source else self.settings_of(self.presets[config.preset], (), config.name)
        )
        if config.horizon:
            self.settings = replace(self.settings, horizon=config.horizon)
        self.check_cameras(config.cameras)
        self.views = [*config.cameras] or [*spec.images]
        if self.source and not config.cameras:
            self.views = statistics.camera_order(self.settings.published, self.source.path, self.views)
        self.check_env()
        self.choose_tokenizer()
        self.exact = torch.float64 if config.dtype == "float64" else torch.float32
        self.action_scale, self.state_scale = statistics.Scale(spec.action.dim), statistics.Scale(spec.state_dim or 0)
        self.adopt_figures()
        with torch.device("meta"):
            self.build()
        if config.dtype == "bfloat16":
            self.use_half_precision()
        for name, child in self.named_children():
            if f"{name}." not in statistics.SCALES:
                allocate(child)

    # Implemented by families

    def read(self, obs: Observation, encoded: dict[str, Any] | None = None, draws: Tensor | None = None) -> Prefix:
        """Computes what all steps share: images and words, unless these frozen features are `encoded`, and the state.
        `draws` are random numbers for image augmentation."""
        raise NotImplementedError

    def value_features(self, seen: Prefix, hidden: Tensor | None) -> Tensor:
        """The features [N, D] of the value head, from a step's hidden states, if any."""
        raise NotImplementedError

    def num_draws(self) -> int:
        """Number of random numbers for augmenting the images of an imitation item."""
        return 0

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        return networks.initial_weight(name, shape, draw)

    # Construction

    def build(self) -> None:
        """Create the network, its heads and adapters, and freeze untrained weights."""
        config, settings = self.config, self.settings
        self.model = self.network(settings).to(self.exact)
        self.value_head = networks.value_head(self.judged_dim(), self.critic).to(self.exact)
        if config.train == "expert":
            self.model.vlm.requires_grad_(False)
        if self._joint:
            head = networks.NoiseHead(settings.expert.dim, settings.action_dim, *config.noise_range)
            self.noise_head = head.to(self.exact)
        self.add_keyframe_head(len(self.views) * settings.image_tokens, settings.language.dim)
        if config.lora_rank:
            add_lora({f"{MODEL}{self.model.part}": getattr(self.model, self.model.part)}, config)
            self.model.to(self.exact)

    def judged_dim(self) -> int:
        """The width of the value head's input."""
        return self.settings.language.dim

    def use_half_precision(self) -> None:
        """Convert the model's weights to half precision."""
        self.model.to(torch.bfloat16)

    @classmethod
    def folder_of(cls, config: FlowConfig) -> FlowFolder:
        return FlowFolder.read(Path(config.pretrained), config.name, cls.settings_of, cls.own_name)

    @classmethod
    def check_statistics(cls, folder: FlowFolder, config: FlowConfig) -> None:
        config.check_chunk(folder.settings.horizon)
        statistics.figures_of(folder.figures, config.pretrained, config.statistics)

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
        steps = published.get("num_steps") or published.get("num_inference_steps")  # SmolVLA's name, and Pi0's
        stated = {"chunk": published.get("n_action_steps"), "steps": steps}
        return {key: value for key, value in stated.items() if value} if "type" in published else {}

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
        figures = published.figures[statistics.choose_key(published.figures, config.statistics, config.pretrained)]
        felt = config.relative_actions or cls.reads_state(config, published.settings)
        return statistics.width_of(figures["actions"]), statistics.width_of(figures["state"]) if felt else None

    def read_folder(self) -> dict[str, Blob]:
        stored = self.source.weights if self.source else {}
        if self.config.statistics:  # statistics that replace our folder's
            stored = {name: blob for name, blob in stored.items() if not name.startswith(statistics.SCALES)}
        return stored

    def is_extra(self, name: str) -> bool:
        return not name.startswith(MODEL)

    def check_env(self) -> None:
        """Refuse an env with more action or state numbers than the model supports."""
        super().check_env()
        config, spec, settings = self.config, self.spec, self.settings
        if spec.action.dim > settings.action_dim:
            raise ConfigError(
                f"this model has room for {settings.action_dim} action numbers, the env takes {spec.action.dim}"
            )
        config.check_chunk(settings.horizon)
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
        if source and name is None and statistics.SCALED in source.weights:
            return  # our folders have them among the weights
        figures, where = statistics.figures_of(source.figures if source else {}, str(source and source.path), name)
        mode = self.settings.normalization
        for scale, feature, kind in ((self.action_scale, "actions", "action"), (self.state_scale, "state", "state")):
            if figures:
                scale.adopt(figures[feature], mode, self._eps, f"the {kind} statistics of {where}")

    @property
    def horizon(self) -> int:
        return self.settings.horizon

    def noise_spec(self) -> NoiseSpec:
        points = self.horizon * self.settings.action_dim
        return NoiseSpec("normal", points * (1 + self._noisy_steps()) + 1)

    def vision_encoder(self) -> nn.Module:
        return self.model.to_words

    def blocks(self) -> list[nn.Module]:
        return self.model.blocks()

    def denoise(self, seen: Prefix, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the expert's hidden states, with the H actions last, and the velocity [N, H, D] of points x at times
        [N]."""
        hidden = self.for_acting(self.network.suffix)(self.model, seen, x, time)
        return hidden, self.model.velocity(hidden).to(self.exact)

    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        with torch.inference_mode("previous" not in obs), torch.no_grad():
            return self._act(obs, noise, temperature)

    def _act(self, obs: Observation, noise: np.ndarray, temperature: float) -> PolicyOutput:
        before, inputs = self._before(obs), {"obs": self.as_tensors(obs), "noise": tensor_of(noise, self.device)}
        work = partial(self._decide, temperature, before)
        made = map_obs(host, work(**inputs) if before else self.compute(("act", temperature), work, inputs))
        actions, logprobs, values = (made.pop(name) for name in ("actions", "logprobs", "values"))
        return PolicyOutput(actions, logprobs, values, made)

    def _decide(
        self, temperature: float, before: tuple[Tensor, Tensor] | None, obs: Observation, noise: Tensor
    ) -> dict[str, Tensor]:
        x, extra, first = self._split(noise)
        seen = self.read(obs)
        chain, densities, values = [x], [unit_density(x)] if self._joint else [], None
        for step in range(self.config.steps):
            k = torch.full((len(x),), step, device=x.device)
            time = time_of(k, self.config.steps)
            move = partial(networks.continuing, self.denoise, *before) if before else self.denoise
            hidden, velocity = move(seen, x, time)
            values = self._value(seen, hidden) if values is None else values
            noisy = (k == first) | self._joint
            draws = extra[:, step if self._joint else 0]
            after = self._move(x, velocity, hidden, k, draws, temperature, noisy)
            density = log_density(after, *self._gaussian(x, velocity, hidden, k))
            densities.append(torch.where(noisy[:, None, None], density, 0.0))
            x = after
            chain.append(x)
        logprobs = torch.stack(densities).sum(0) / (len(densities) if self._joint else 1)
        made = {"actions": self._env_actions(x, obs), "logprobs": self._played_numbers(logprobs), "values": values}
        return made | self._remember(chain, first)

    def _before(self, obs: Observation) -> tuple[Tensor, Tensor] | None:
        """The actions that a chunk should continue, in the model's units and filled up to a chunk, and their weights;
        None if there are none."""
        if "previous" not in obs:
            return None
        actions, weights = (tensor_of(obs["previous"][field], self.device) for field in ("actions", "weights"))
        missing = self.horizon - actions.shape[1]
        unit = F.pad(self._unit_actions(actions, obs), (0, 0, 0, missing))
        return unit, F.pad(weights.to(self.exact), (0, missing))[..., None]

    @property
    def starting_noise(self) -> int:
        return self.horizon * self.settings.action_dim

    def best_actions(self, obs: Observation, noise: Tensor | None) -> Tensor:
        x, seen, steps = noise.unflatten(1, (self.horizon, -1)).to(self.exact), self.read(obs), self.config.steps
        for step in range(steps):
            time = time_of(torch.full((x.shape[0],), step, device=x.device), steps)
            x = plain_step(x, self.denoise(seen, x, time)[1], steps)
        return self._env_actions(x, obs)

    def judge(self, obs: Observation) -> dict[str, Tensor]:
        return {"values": self._value(self.read(obs), None)}

    def forward(self, inputs: dict[str, Any]) -> Scores:
        if self.is_counted:
            shape = (len(inputs["actions"]), self._noisy_steps() + 1, self.horizon, self.settings.action_dim)
            inputs = {"chain": torch.empty(shape), "first": torch.empty(shape[:1])} | inputs
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
        logprobs, entropy = (self._played_numbers(torch.stack(parts).mean(0)) for parts in (densities, entropies))
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
        return self.settings.published | ({LAYOUT: self.source.layout} if self.source else {}) | ours

    def write_folder(self, folder: Path, tensors=None, specs=None) -> None:
        super().write_folder(folder, tensors, specs)
        if not self.source:
            return
        unused = self.source.unused
        if unused and not self.left_out() and self.source.path.resolve() != folder.resolve():
            specs = {name: blob.spec for name, blob in unused.items()}
            write_safetensors(folder / UNUSED, specs, unused.items())

    def save_published(self, folder: Path | str, shard_bytes: int = 5 * 10**9) -> None:
        """Write the original layout, for other programs: without value head, adapters merged."""
        source = self.source
        if not (source and source.layout):
            raise ConfigError("only a policy from a published folder can be saved as one; policy.pretrained is unset")
        published, weights = self.published_weights(), {}
        for name, dtype in source.layout.items():
            tensor = tensor_of_blob(source.unused[name]) if name in source.unused else published[self.own_name(name)]
            weights[name] = tensor.to(getattr(torch, dtype))
        self.write_published(Path(folder), source.settings.published, weights, shard_bytes)
        scales = {"state": self.state_scale, "actions": self.action_scale}
        statistics.write_scales(Path(folder), scales, self.settings.normalization, self._eps)

    # Inside

    @property
    def _eps(self) -> float:
        """What lerobot and openpi add to deviations and ranges."""
        return 1e-8 if "type" in self.settings.published else 1e-6

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

    def _pixels(self, obs: Observation) -> Tensor:
        """Pixels of all cameras [N, cameras, 3, S, S], from -1 to 1."""
        frames = [tensor_of(obs["images"][view], self.device) for view in self.views]
        grey = [with_bars(frame, self.settings.vision.image_size, **self.padding) for frame in frames]
        return torch.stack([view / 255 * 2 - 1 for view in grey], dim=1)

    def _unit_state(self, obs: Observation) -> Tensor:
        if not self.spec.state_dim:
            rows = next(iter(obs["images"].values())).shape[0]
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
        deviation = self.noise_head(hidden[:, -self.horizon :].to(self.exact))
        return plain_step(x, velocity, steps), level * deviation

    def _move(self, x, velocity, hidden, k, draws, temperature: float, noisy: Tensor) -> Tensor:
        straight = plain_step(x, velocity, self.config.steps)
        mean, deviation = self._gaussian(x, velocity, hidden, k, temperature)
        return torch.where(noisy[:, None, None], mean + deviation * draws, straight)

    def _played_numbers(self, numbers: Tensor) -> Tensor:
        """[N, H, D] -> [N, C, A]: the played actions."""
        return numbers[:, : self.config.chunk, : self.spec.action.dim]

    def _value(self, seen: Prefix, hidden: Tensor | None) -> Tensor:
        features = self.value_features(seen, hidden).to(self.exact)
        return self.value_head(features.detach() if self.config.detach_value else features).squeeze(-1).to(self.exact)

    def _remember(self, chain: list[Tensor], first: Tensor) -> dict[str, Tensor]:
        """The points before and after the scored step, and that step."""
        points = torch.stack(chain, dim=1)
        if not self._joint:
            rows = torch.arange(len(points), device=points.device)
            points = torch.stack([points[rows, first], points[rows, first + 1]], dim=1)
        return {"chain": points, "first": first}

    def _env_actions(self, x: Tensor, obs: Observation) -> Tensor:
        """Converts points in the model's units to actions in the env's units."""
        actions = self.action_scale.from_unit(self._played_numbers(x))
        if count := self.config.relative_actions:
            begin = tensor_of(obs["state"], self.device)[:, None, :count]
            actions = torch.cat([actions[..., :count] + begin, actions[..., count:]], dim=-1)
        return statistics.for_env(actions, self.config.gripper)

    def _unit_actions(self, actions: Tensor, obs: Observation) -> Tensor:
        """The reverse conversion [B, H, action_dim], padded with zeros."""
        actions = actions.to(torch.float64, copy=True)
        actions[..., -1] = statistics.STORED_GRIPPERS[self.config.gripper](actions[..., -1])
        if count := self.config.relative_actions:
            actions[..., :count] -= tensor_of(obs["state"], self.device)[:, None, :count]
        unit = self.action_scale.to_unit(actions).to(self.exact)
        return F.pad(unit, (0, self.settings.action_dim - unit.shape[-1]))


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
