"""What must fit together where envs and policies speak, or show and see pictures. Found before anything starts."""

from __future__ import annotations

from typing import Any

from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError
from embodied.envs import speaks


def check_pictures(config: RunConfig, kind: Any) -> None:
    """Refuse a policy that reads text alone for an env that shows pictures, and what is not done with pictures."""
    policy, given = config.policy, f"env.name={config.env.name} shows pictures"
    if policy.reads_pictures and policy.engine == "vllm" and policy.pretrained:
        raise ConfigError(
            "policy.engine=vllm: models that see are run by our own engine alone; set policy.engine=transformers"
        )
    if not kind.shows_pictures(config.env):
        return
    if not policy.reads_pictures:
        keys = [key for key in ("pretrained", "preset", "name") if getattr(policy, key, None)]
        model = f"policy.{keys[0]}={getattr(policy, keys[0])}"
        raise ConfigError(
            f"{given}, and {model} reads text alone; take a model that sees (policy.preset=tiny_vl, or a folder of "
            "Qwen2.5-VL, Idefics3 or SmolVLM)"
        )
    if policy.engine != "transformers":
        raise ConfigError(
            f"{given}, which policy.engine={policy.engine} does not pass on; set policy.engine=transformers"
        )
    if config.learner.sequence_degree != 1:
        raise ConfigError(
            f"{given}, and learners that divide a pass exchange tokens alone: learner.sequence_degree="
            f"{config.learner.sequence_degree}; try learner.sequence_degree=1"
        )


def check_speech(config: RunConfig, kind: Any) -> None:
    """Refuse a policy of actions for an env that speaks, and the other way round; and what only answers have."""
    text, options = speaks(kind), config.eval
    try:
        config.check_speech(text, "policy.name=language, or a checkpoint of such a policy")
    except ValueError as err:
        raise ConfigError(str(err)) from None
    recorded = ("overlay", "cameras", "mosaic", "dataset")
    if text and (given := [f"eval.{name}=true" for name in recorded if getattr(options, name)]):
        raise ConfigError(
            f"{' and '.join(given)} has no effect with env.name={config.env.name}: a text env has nothing to record, "
            "and all its conversations are written down anyway; leave it out"
        )
    if options.episodes % options.samples:
        fit = max(options.episodes // options.samples, 1) * options.samples
        raise ConfigError(
            f"eval.episodes={options.episodes} counts all answers and is not a multiple of "
            f"eval.samples={options.samples}; try eval.episodes={fit}"
        )
    usual = {"top_p": 1.0, "top_k": 0}
    drawn = [f"eval.{name}={getattr(options, name)}" for name in usual if getattr(options, name) != usual[name]]
    if drawn and (not text or options.temperature == 0):
        why = "eval.temperature=0 takes the likeliest token" if text else f"env.name={config.env.name} has no tokens"
        raise ConfigError(f"{' and '.join(drawn)} has no effect, since {why}; leave it out")
    if options.samples > 1 and not text:
        raise ConfigError(
            f"eval.samples={options.samples} is for text envs: with env.name={config.env.name} every episode begins "
            "in a state of its own; leave it out"
        )
