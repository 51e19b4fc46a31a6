"""What OpenVLA and Pi0 share as policies: cameras and instructions."""

from __future__ import annotations

from typing import Any

from embodied.core.errors import ConfigError
from embodied.core.types import Observation
from embodied.policies.published import PublishedPolicy


class VLAPolicy(PublishedPolicy):
    """A published policy that sees images and is given an instruction."""

    any_image_size = True
    value_names = ("value_head.",)

    def check_env(self) -> None:
        """Refuse an env in which no policy of these families can act."""
        config, spec = self.config, self.spec
        if spec.action.discrete:
            raise ConfigError(f"policy.name={config.name} makes continuous actions, but this env takes a choice")
        if not spec.instruction and config.instruction is None:
            raise ConfigError(
                f"policy.name={config.name} needs an instruction, but this env gives none; set "
                "policy.instruction='...', or env.instruction=true where the env has that option"
            )

    def check_cameras(self, chosen: tuple[str, ...], key: str = "policy.cameras") -> None:
        """Refuse cameras that the env does not have; `key` is the option that names them."""
        spec = self.spec
        if not spec.images:
            raise ConfigError(f"policy.name={self.config.name} needs images, but this env offers none; set env.cameras")
        if unknown := [name for name in chosen if name not in spec.images]:
            raise ConfigError(f"{key}={unknown[0]!r} is none of this env's cameras: {', '.join(spec.images)}")

    def instructions(self, obs: Observation, count: int) -> list[str]:
        """The instruction of each of `count` rows."""
        return obs["instruction"] if self.spec.instruction else [self.config.instruction] * count

    def description(self) -> dict[str, Any]:
        ours = super().description()
        ours["policy"] |= {"compile": False}  # how it acts here, not what it is
        return ours
