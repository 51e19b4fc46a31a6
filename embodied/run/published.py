"""Models as others publish them, evaluated without a run of ours.

The recipe `<env>_published_<family>` holds the protocol under which such models are evaluated; what only the folder can
say (its statistics, its parts) is chosen here. All of it is printed in keys that the command line can set.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.config.cli import write_yaml
from embodied.config.recipe import COMMAND_LINE, Loaded
from embodied.core.errors import ConfigError
from embodied.envs import env_class

if TYPE_CHECKING:
    from embodied.core.types import EnvSpec
    from embodied.workflows.weight_sync import Weights


def policy_of(folder: Path, loaded: Loaded) -> Any:
    """The recipe's policy with this folder's weights, and what the folder and the task decide."""
    from embodied.policies import policy_class

    config = loaded.config.policy
    if not hasattr(config, "pretrained"):
        raise ConfigError(f"{folder} holds a published model; a recipe for it has policy.name=openvla or another VLA")
    config = config.model_copy(update={"pretrained": str(folder)})
    chosen = policy_class(config.name).choices(config, env_class(loaded.config.env).tasks(loaded.config.env)[0])
    asked = {key.removeprefix("policy.") for key, where in loaded.sources.items() if where == COMMAND_LINE}
    return config.model_copy(update={key: value for key, value in chosen.items() if key not in asked})


def spec_of(config: Any, env: Any) -> EnvSpec:
    """What such a model sees and writes, told by the recipe and the folder alone: no simulator is asked."""
    from embodied.core.types import ActionSpec, EnvSpec
    from embodied.policies import policy_class

    written, felt = policy_class(config.name).numbers(config)
    shape = (env.image_size, env.image_size, 3)
    cameras = getattr(config, "cameras", None) or (config.camera,)
    return EnvSpec(ActionSpec(written), state_dim=felt, images=dict.fromkeys(cameras, shape), instruction=True)


def weights_of(config: Any, spec: EnvSpec) -> Weights:
    """Of the folder, in the order and under the names of the policy that acts in this env."""
    from embodied.policies import make_policy
    from embodied.workflows.weight_sync import Weights

    return Weights(0, make_policy(config, spec).stored_weights())


def describe(config: Any, env: Any) -> str:
    """How the model is shown the world and how its answers are taken, for the first screen."""
    told = [f"policy.{key}={write_yaml(value)}" for key, value in unusual(config) if key not in ("name", "pretrained")]
    told += [f"env.{key}={write_yaml(value)}" for key, value in unusual(env) if key not in ("name", "task", "num_envs")]
    return "\n            ".join([f"as {config.name} models are published, from {config.pretrained}:", *told])


def unusual(config: Any) -> list[tuple[str, Any]]:
    """Options that differ from their default."""
    fields = type(config).model_fields
    return [(key, value) for key, value in config if value != fields[key].get_default(call_default_factory=True)]
