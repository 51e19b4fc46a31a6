"""The contract of every policy: act in the rollout, score in the learner, live in a folder.

`act` and `forward` must agree: the log-probs stored at act time are those `forward` gives for the same weights. A
policy owns no randomness; the worker hands it noise that is keyed by episode and decision.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.data import EnvSpec, NoiseSpec, Observation, PolicyOutput
from embodied.errors import CheckpointError
from embodied.policies.folder import CONFIG, WEIGHTS


@dataclass(frozen=True)
class Scores:
    """What the learner needs of B stored decisions, with gradients."""

    logprobs: Tensor  # [B, C, A]
    entropy: Tensor  # [B, C, A]
    values: Tensor  # [B]


class Policy(nn.Module):
    """A plug-in implements `act`, `value`, `forward` and `noise_spec`; saving and loading come from here."""

    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec

    def initialise(self, rng: np.random.Generator) -> None:
        """Draw the initial weights from this generator (never from torch's global one)."""
        raise NotImplementedError

    def noise_spec(self) -> NoiseSpec:
        raise NotImplementedError

    def act(self, obs: Observation, noise: np.ndarray, greedy: bool = False) -> PolicyOutput:
        raise NotImplementedError

    def value(self, obs: Observation) -> np.ndarray:
        """V(obs) [N], for bootstrapping."""
        raise NotImplementedError

    def forward(self, inputs: dict[str, Any]) -> Scores:
        """Score stored decisions: inputs holds "obs", "actions" [B, C, A] and what `act` put in `replay`."""
        raise NotImplementedError

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by learning rate: "policy" and, where it has weights of its own, "value"."""
        return {"policy": list(self.parameters())}

    def observation_moments(self, obs: Observation) -> np.ndarray | None:
        """Moments of a rollout's observations [T, N, ...], one row per env; None for policies that track none."""
        return None

    def merge_observation_moments(self, rows: np.ndarray) -> None:
        """Merge the moments of all ranks, in env order, after an update."""

    def save_pretrained(self, folder: Path | str) -> None:
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.detach().contiguous() for k, v in self.state_dict().items()}, folder / WEIGHTS)
        description = {"policy": self.config.model_dump(mode="json"), "env_spec": dataclasses.asdict(self.spec)}
        (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n")

    def load_weights(self, tensors: dict[str, Any]) -> None:
        """Replace all weights; names and shapes must match."""
        with torch.no_grad():
            own = self.state_dict(keep_vars=True)
            if own.keys() != tensors.keys():
                odd = sorted(own.keys() ^ tensors.keys())
                raise CheckpointError(f"the weights do not belong to this policy: {', '.join(odd[:4])} differ")
            for name, mine in own.items():
                new = torch.tensor(np.asarray(tensors[name]))  # a copy: arrays of other processes are read-only
                if mine.shape != new.shape:
                    raise CheckpointError(
                        f"weight {name} is {tuple(new.shape)} but this policy has {tuple(mine.shape)}"
                    )
                mine.copy_(new)
