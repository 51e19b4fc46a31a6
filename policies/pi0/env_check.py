"""Whether an env offers what Pi0 needs, and what to set where it does not."""

from __future__ import annotations

from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec
from embodied.policies.config import Pi0Config
from embodied.policies.pi0.settings import Settings


def views_of(config: Pi0Config, spec: EnvSpec) -> list[str]:
    """The env's cameras in the model's order."""
    if not spec.images:
        raise ConfigError(f"policy.name={config.name} needs images, but this env offers none; set env.cameras")
    if odd := [view for view in config.cameras if view not in spec.images]:
        raise ConfigError(f"policy.cameras: {', '.join(odd)} is none of this env's cameras: {', '.join(spec.images)}")
    return list(config.cameras or spec.images)


def check_env(config: Pi0Config, spec: EnvSpec, settings: Settings) -> None:
    name = config.name
    if spec.action.discrete:
        raise ConfigError(f"policy.name={name} makes continuous actions, but this env takes a choice")
    if spec.action.dim > settings.action_dim:
        raise ConfigError(
            f"this model has room for {settings.action_dim} action numbers, the env takes {spec.action.dim}"
        )
    if config.chunk > settings.horizon:
        raise ConfigError(
            f"policy.chunk={config.chunk} is more than the {settings.horizon} actions that the model predicts at once; "
            f"try policy.chunk={settings.horizon}"
        )
    if not spec.instruction and config.instruction is None:
        raise ConfigError(
            f"policy.name={name} needs an instruction, but this env gives none; set policy.instruction='...', "
            "or env.instruction=true where the env has that option"
        )
    told = not settings.adaptive or config.state_in_prompt
    if told and not spec.state_dim:
        raise ConfigError(f"policy.name={name} needs the robot's state, but this env gives none; set env.state=proprio")
    if not settings.adaptive and spec.state_dim > settings.state_dim:
        raise ConfigError(
            f"this model has room for {settings.state_dim} state numbers, the env gives {spec.state_dim}; "
            "set env.state=proprio"
        )
    if config.relative_actions > min(spec.state_dim or 0, spec.action.dim):
        raise ConfigError(
            f"policy.relative_actions={config.relative_actions} is more than the env's state ({spec.state_dim}) or its "
            f"actions ({spec.action.dim}) have"
        )
