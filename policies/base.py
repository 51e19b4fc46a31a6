"""The contract of every policy: act in the rollout, score in the learner, live in a folder.

`act` and `forward` must give equal log-probs for the same weights. A policy has no randomness of its own; the worker
passes noise that is keyed by episode and decision.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.arrays import host, num_rows
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import EnvSpec, NoiseSpec, Observation, PolicyOutput
from embodied.policies.policy_folder import CONFIG, WEIGHTS, checksums
from embodied.runtime.published_weights import Spec, blob_of, spec_of, write_safetensors

if TYPE_CHECKING:
    from embodied.runtime.device_graphs import CapturedGraphs

# Arrays from other processes are read-only, and policies never write to an observation.
warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)


@dataclass(frozen=True)
class Scores:
    """Log-probs, entropy and values of B stored decisions, with gradients."""

    logprobs: Tensor  # [B, C, A]
    entropy: Tensor  # [B, C, A]
    values: Tensor  # [B]
    own_loss: Tensor | None = None  # [B], an additional loss of the policy (`Policy.own_losses`)


class Policy(nn.Module):
    """A plug-in implements `act`, `value`, `forward` and `noise_spec`; saving and loading come from here."""

    speaks = False  # True: it answers text envs; an engine acts, and the policy scores whole conversations
    max_length: int | None = None  # the most tokens of a whole conversation
    any_image_size = False  # True: it resizes images itself
    takes_device_noise = False  # True: `act` takes noise as a tensor on its device
    is_recordable = False  # True: `act` on tensors may be captured as a graph, since it does not read their numbers
    reads_words = False  # True: `as_tensors` turns instructions to tensors
    gap_limits: tuple[float, float] = (math.inf, math.inf)  # nats by which log-probs of acting may differ from the
    # learner's in full and in half precision; beyond that the learner computes them again
    value_names: tuple[str, ...] = ()  # name prefixes of parameters that only predict values
    captured_graphs: CapturedGraphs | None = None  # of the policy's own decisions; a policy worker sets it
    own_losses: tuple[str, ...] = ()  # the name of `Scores.own_loss` in the metrics
    auxiliary_loss: str = ""  # the metrics' name of the second loss of `imitate`, if any

    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec

    @classmethod
    def check_folder(cls, config: Any) -> None:
        """Refuse a `policy.pretrained` folder without a model of this family; does not read weights."""

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def initialise(self, rng: np.random.Generator) -> None:
        """Draw the initial weights from this generator (never from torch's global one)."""
        raise NotImplementedError

    def noise_spec(self) -> NoiseSpec:
        """The noise of one decision."""
        raise NotImplementedError

    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        """Actions; `temperature` scales the noise: 1 samples, 0 takes the best actions. Log-probs are always for
        temperature 1."""
        raise NotImplementedError

    def act_on(self, obs: Observation) -> np.ndarray:
        """The best actions [N, C, A] for the observation of N env rows, as `VectorEnv.reset` returns it; `step_chunk`
        takes these actions."""
        if self.speaks:
            raise ConfigError("a language policy writes answers: python -m embodied.serve checkpoint=runs/NAME")
        noise = np.zeros((num_rows(obs), self.noise_spec().width))
        return host(self.act(obs, noise, temperature=0.0).actions)

    def best_actions(self, obs: Observation, noise: Tensor | None) -> Tensor:
        """For `embodied.export`: the actions [N, C, A] of `act` at temperature 0, by operations on tensors alone. `obs`
        holds tensors, and as instruction the two of `prompt_tokens`; `noise` is [N, `starting_noise`]."""
        raise NotImplementedError

    def before_export(self) -> None:
        """Called before `best_actions` is recorded, which cannot read numbers out of weights and buffers."""

    def prompt_tokens(self, texts: list[str], multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """The word ids [N, L] of these instructions, and their mask; L is a multiple of this number."""
        raise NotImplementedError

    @property
    def starting_noise(self) -> int:
        """How many numbers of a decision's noise, from the first on, its best actions depend on."""
        return 0

    def as_tensors(self, obs: Observation, device: torch.device | str | None = None) -> Observation:
        """The observation without texts, on this device or the policy's. Only for policies that read words."""
        raise NotImplementedError

    def value(self, obs: Observation) -> np.ndarray:
        """V(obs) [N], for bootstrapping."""
        raise NotImplementedError

    def forward(self, inputs: dict[str, Any]) -> Scores:
        """Score stored decisions: inputs holds "obs", "actions" [B, C, A] and what `act` put in `replay`."""
        raise NotImplementedError

    def pack(
        self, tokens: np.ndarray, mask: np.ndarray, lengths: np.ndarray, groups: np.ndarray, most: int
    ) -> list[list[int]]:
        """Returns the conversations, by number, of each pass of `forward`: at most `most` tokens, and whole groups if
        they fit. `tokens` and `mask` are [n], `lengths` and `groups` [R]."""
        raise NotImplementedError

    def pass_cost(self) -> tuple[float, ...]:
        """The cost of learning per item, per L^2 of a sequence of L items, and per place of a picture, in any unit, for
        balancing learner ranks. A robot's decisions all cost the same."""
        return 1.0, 0.0

    def take_work(self) -> tuple[int, float]:
        """Returns the tokens with gradients since the last call, and the multiplications of all passes (`pass_cost` for
        a forward pass, twice that for a backward pass). Only for policies that speak."""
        return 0, 0.0

    def exchange_size(self) -> tuple[int, int]:
        """The numbers per token that learners exchange in a joint forward pass, and the number of exchanges."""
        raise NotImplementedError

    def frozen_features(self, obs: Observation) -> dict[str, Tensor]:
        """Computes the features of frozen parts, [B, ...] each. An update of several epochs computes them once, and
        passes them to `forward` among the inputs."""
        return {}

    def cache_tensors(self) -> list[Tensor]:
        """Memory that acting keeps between decisions; its content may be discarded."""
        return []

    def row_bytes(self, words: int) -> int:
        """Bytes of that memory per env row, with `words` tokens besides image tokens."""
        return 0

    def counted_features(self, places: int) -> Tensor:
        """The vision tower's features of pictures with `places` places, on the meta device, for counting the memory of
        a backward pass."""
        raise NotImplementedError

    @property
    def horizon(self) -> int:
        """The number of demonstrated actions that it learns to predict from one observation."""
        return self.config.chunk

    def imitation_noise(self) -> NoiseSpec | None:
        """The noise of one item of imitation."""
        return None

    def imitate(self, inputs: dict[str, Any], noise: np.ndarray | None) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of demonstrated actions [B, horizon, A]: one for each number [B, horizon, A], or one for each item
        [B]; with `auxiliary_loss` also an auxiliary loss for each item [B]. `inputs` holds "obs", "actions", "mask" [B,
        horizon] of the existing actions, and, if there are states, the states of the next and the last keyframe,
        "keyframes" [B, 2, S]."""
        return -self.forward(inputs).logprobs

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by learning rate: "policy" and, if any, "value"."""
        named = list(self.named_parameters())
        value = [p for name, p in named if name.startswith(self.value_names)]
        policy = [p for name, p in named if not name.startswith(self.value_names)]
        return {"policy": policy} | ({"value": value} if value else {})

    def deviations(self) -> list[nn.Parameter]:
        """Parameters of the deviation of continuous actions."""
        return []

    def observation_moments(self, obs: Observation) -> np.ndarray | None:
        """Moments of a rollout's observations [T, N, ...], one row per env; None for policies that track none."""
        return None

    def merge_observation_moments(self, rows: np.ndarray) -> None:
        """Merge the moments of all ranks, in env order, after an update."""

    def end_step(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Called on all ranks after a gradient step; returns numbers for the log, the same names every time."""
        return {}

    def reference(self) -> Policy:
        """A copy of the policy for later comparisons. Untrained weights are shared, not copied."""
        frozen = [p for p in self.parameters() if not p.requires_grad]
        made = copy.deepcopy(self, {id(p): p for p in frozen})
        return made._apply(lambda tensor: tensor).requires_grad_(False)  # layers may want their weights side by side

    @classmethod
    def attention_heads(cls, config: Any) -> tuple[int, int]:
        """The numbers of attention heads and of key-value heads, for models whose passes several learners can run
        together."""
        raise NotImplementedError

    @classmethod
    def for_memory_estimate(cls, config: Any, spec: EnvSpec) -> Policy | None:
        """A policy of these sizes for counting memory, built without files; None for small policies."""
        return None

    def blocks(self) -> list[nn.Module]:
        """The large sequential parts (such as transformer blocks), for learners that shard, compile or recompute them
        one by one."""
        return []

    def save_pretrained(
        self,
        folder: Path | str,
        tensors: Iterable[tuple[str, Tensor]] | None = None,
        specs: Mapping[str, Spec] | None = None,
    ) -> None:
        """Write a folder for `load_policy`, with checksums. `tensors` yields the whole weights if this process has only
        shards; `specs` are their shapes and dtypes."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with checksums(folder):
            self.write_folder(folder, tensors, specs)

    def write_folder(
        self, folder: Path, tensors: Iterable[tuple[str, Tensor]] | None = None, specs: Mapping[str, Spec] | None = None
    ) -> None:
        """The files of `save_pretrained`; families add theirs."""
        state, saved = self.state_dict(), self.names_to_save()
        specs = specs or {name: spec_of(tensor) for name, tensor in state.items()}
        specs = {name: spec for name, spec in specs.items() if name in saved}
        whole = state.items() if tensors is None else tensors
        write_safetensors(folder / WEIGHTS, specs, ((name, blob_of(tensor)) for name, tensor in whole if name in saved))
        (folder / CONFIG).write_text(json.dumps(self.description(), indent=2) + "\n")

    def names_to_save(self) -> set[str]:
        """Names of the weights in a folder of this policy."""
        return set(self.state_dict())

    def description(self) -> dict[str, Any]:
        """The content of config.json."""
        return {"policy": self.config.model_dump(mode="json"), "env_spec": dataclasses.asdict(self.spec)}

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse weights of another policy."""
        if odd := sorted(self.state_dict().keys() ^ set(names)):
            raise CheckpointError(f"the weights do not belong to this policy: {', '.join(odd[:4])} differ")

    def use_weights(self, tensors: dict[str, Tensor]) -> None:
        """Use weights that another object updates: the same tensors if dtype and device match, otherwise copies."""
        weights = self.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, new in tensors.items():
                check_like(name, new, weights[name])
                if weights[name].dtype == new.dtype and weights[name].device == new.device:
                    weights[name].data = new
                else:
                    weights[name].copy_(new)

    def begin_with(self, tensors: dict[str, Any]) -> None:
        """Begin learning from another policy's weights; families define which weights may be missing or superfluous."""
        self.load_weights(tensors)

    def load_weights(self, tensors: dict[str, Any]) -> None:
        """Replace all weights; names and shapes must match."""
        self.check_names(tensors)
        with torch.no_grad():
            for name, tensor in self.state_dict(keep_vars=True).items():
                new = torch.tensor(np.asarray(tensors[name]))  # a copy: arrays of other processes are read-only
                check_like(name, new, tensor)
                tensor.copy_(new)


def check_like(name: str, new: Tensor, mine: Tensor) -> None:
    if new.is_floating_point() != mine.is_floating_point():
        dtype = str(new.dtype).removeprefix("torch.")
        raise CheckpointError(f"weight {name} is of type {dtype}: a quantised model has to be unpacked first")
    if mine.shape != new.shape:
        raise CheckpointError(f"weight {name} is {tuple(new.shape)} but this policy has {tuple(mine.shape)}")
