"""The language model that a server answers with: where it is, and its options. Free of torch until it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from embodied.config.cli import parse
from embodied.core.errors import ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies.config import LanguageConfig
from embodied.policies.folder import published_family
from embodied.run.hub import folder_of
from embodied.run.policy_source import SERVER, Target, find
from embodied.runtime.tensor_bytes import array_of

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

SERVING = ("max_tokens", "max_length", "max_running", "cache_gb", "chat", "dtype")  # options that the command line has
ANY_TEXT = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, text=True)  # of a model that was made for none


def find_language(checkpoint: str) -> Target | None:
    """The language model that is to be served; None where it is a policy of actions."""
    here = folder_of(checkpoint)
    if (family := published_family(here)) == "language":
        return Target(here.resolve().name, LanguageConfig(name="language", pretrained=str(here)), folder=here.resolve())
    if family or (target := find(checkpoint)).config.name != "language":
        return None
    return target


def with_options(config: LanguageConfig, words: list[str]) -> LanguageConfig:
    """The model's options as these arguments change them."""
    values = parse(words, []).values
    if odd := [key for key in values if key.removeprefix("policy.") not in SERVING]:
        known = ", ".join(f"policy.{key}" for key in SERVING)
        raise ConfigError(f"{odd[0]} has no effect in serving a language model; there are {known}")
    changed = {key.removeprefix("policy."): value for key, value in values.items()}
    own = {key: value for key, value in config.model_dump().items() if key not in SERVER}
    try:
        return LanguageConfig.model_validate(own | changed)
    except ValidationError as err:
        raise ConfigError("; ".join(f"policy.{one['loc'][0]}: {one['msg']}" for one in err.errors())) from None


def load_language(config: LanguageConfig, target: Target) -> LanguagePolicy:
    """The model with the weights of its folder."""
    from embodied.policies.folder import read_weights
    from embodied.policies.language.policy import LanguagePolicy

    if target.spec is None:
        policy = LanguagePolicy(config, ANY_TEXT)
        policy.load_weights({name: array_of(blob) for name, blob in policy.stored_weights().items()})
    else:
        policy = LanguagePolicy(config, target.spec)
        policy.load_weights(read_weights(target.folder))
    return policy
