"""Policies of published families: weights from a published folder or random ones, LoRA, and saving.

A policy trained with LoRA is saved without its frozen weights, with the name of its base folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.errors import CheckpointError
from embodied.policies.base import Policy, check_like
from embodied.policies.lora import (
    initial_adapter,
    is_adapter,
    merged_weights,
    save_adapters,
    scaling_of,
    set_magnitudes,
)
from embodied.policies.policy_folder import own_layer
from embodied.runtime.published_weights import Blob, blob_of, tensor_of


class PublishedPolicy(Policy):
    """Families implement `read_stored`, `start`, `stored_name` if names differ, and the other methods of a policy."""

    own_scales: tuple[str, ...] = ()  # name prefixes of buffers that are set while the policy is built
    origin: Path | None = None  # the published folder

    # Weights, by their names without adapters

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {own_layer(name): tensor for name, tensor in super().state_dict(*args, **kwargs).items()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((own_layer(name), parameter) for name, parameter in super().named_parameters(*args, **kwargs))

    def read_stored(self) -> dict[str, Blob]:
        """The published folder's weights; {} without a folder."""
        raise NotImplementedError

    def stored_name(self, stored: dict[str, Blob], name: str) -> str:
        """The name in `stored` of one of our weights."""
        return name

    def is_extra(self, name: str) -> bool:
        """True if a published folder may lack this weight."""
        raise NotImplementedError

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        """The initial numbers of a weight. They keep the scale of activations; position embeddings are as large as
        patch embeddings."""
        raise NotImplementedError

    @torch.no_grad()
    def initialise(self, rng: np.random.Generator) -> None:
        """Set published weights, if any, and draw the remaining ones."""
        draw = torch.Generator().manual_seed(int(rng.integers(2**62)))
        stored, weights = self.read_stored(), self.state_dict(keep_vars=True)
        where = {name: self.stored_name(stored, name) for name in weights}
        fresh = {name for name in weights if where[name] not in stored}
        lost = {where[name] for name in fresh if stored and not (self.is_extra(name) or is_adapter(name))}
        if odd := sorted(lost | (stored.keys() - set(where.values()))):
            adapters = "; it holds adapters: set policy.lora_rank as it was" if any(map(is_adapter, odd)) else ""
            raise CheckpointError(
                f"{self.origin}: its weights do not fit its config.json: {', '.join(odd[:4])}{adapters}"
            )
        for name, parameter in weights.items():
            if name not in fresh:
                check_like(name, published := tensor_of(stored[where[name]]), parameter)
                parameter.copy_(published)
            elif not name.startswith(self.own_scales):
                parameter.copy_(self._draw_weight(name, parameter.shape, draw))
        set_magnitudes(weights, fresh)

    def _draw_weight(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        if is_adapter(name):  # without effect at first
            return initial_adapter(name, shape, draw, self.config.lora_init)
        return self.start(name, shape, draw)

    def stored_weights(self) -> dict[str, Blob]:
        """Weights of the published folder for acting only; missing weights are zero."""
        stored, weights = self.read_stored(), {}
        for name, tensor in self.state_dict().items():
            blob = stored.get(self.stored_name(stored, name))
            start = tensor if name.startswith(self.own_scales) else torch.zeros_like(tensor)
            weights[name] = blob_of(start) if blob is None else blob
        return weights

    # On disk

    def stored_names(self) -> dict[str, str]:
        """Our name -> name in the published folder, for its weights."""
        raise NotImplementedError

    def left_out(self) -> dict[str, str]:
        """The weights that a saved policy omits."""
        if not (self.origin and self.config.lora_rank):
            return {}
        files = self.stored_names()
        frozen = (name for name, p in self.named_parameters() if not p.requires_grad)
        return {name: files[name] for name in frozen if name in files}

    def names_to_save(self) -> set[str]:
        return super().names_to_save() - self.left_out().keys()

    def description(self) -> dict[str, Any]:
        names = self.left_out()
        more = {"base": str(self.origin.resolve()), "base_names": names} if names else {}
        return super().description() | more

    def published_weights(self) -> dict[str, Tensor]:
        """All weights, adapters merged."""
        return dict(merged_weights(self.state_dict().items(), scaling_of(self.config)))

    def save_adapters(self, folder: Path | str) -> None:
        """Write the adapters as peft reads them."""
        trained = ((name, parameter.detach()) for name, parameter in self.named_parameters() if parameter.requires_grad)
        save_adapters(Path(folder), trained, self.config, str(self.origin))
