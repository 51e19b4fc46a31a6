"""Checks that a language policy fits its env: text, pictures, engine and options. They run before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from embodied.config.recipe import RunConfig
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import as_path
from embodied.core.options import broken_rules, never_with, only_with
from embodied.envs import import_class, speaks
from embodied.run.memory_check import stored_weights

LARGE_MODEL = 3e9  # weights of a language model for which these are usually too large:
HIGHEST_LR, HIGHEST_EPS = 1e-5, 1e-7
PICTURES = (never_with({"policy.engine": "http"}, {}, "it passes no pictures on; try policy.engine=transformers"),)
LEARNING = (
    never_with(
        {"policy.weights": None},
        {"policy.engine": "http"},
        "the server needs the learned weights; set a folder that it sees as well, such as policy.weights=/dev/shm",
    ),
    never_with(
        "policy.temperature",
        {"policy.engine": ("vllm", "http")},
        "its log-probs are for temperature 1; try policy.engine=transformers, or policy.temperature=1",
    ),
)
ACTING = (never_with("env.side_by_side", {}, "only text envs hold conversations; leave it out"),)
TEXT = {"policy.speaks": True}
PLAYING = (
    never_with(
        "eval.overlay eval.cameras eval.mosaic eval.dataset",
        TEXT,
        "all conversations are written down anyway; leave it out",
    ),
    never_with("eval.top_p eval.top_k", {"eval.temperature": 0, **TEXT}, "it takes the likeliest token; leave it out"),
    only_with("eval.top_p eval.top_k", TEXT, "actions are no tokens; leave it out"),
    only_with("eval.samples", TEXT, "every episode begins in a state of its own; leave it out"),
)


def check_pictures(config: RunConfig, kind: Any) -> None:
    """Refuse a text-only model for an env with pictures, and options that do not work with pictures."""
    if not kind.shows_pictures(config.env):
        return
    policy, given = config.policy, f"env.name={config.env.name} shows pictures"
    if not policy.reads_pictures:
        keys = [key for key in ("pretrained", "preset", "name") if getattr(policy, key, None)]
        model = f"policy.{keys[0]}={getattr(policy, keys[0])}"
        raise ConfigError(
            f"{given}, and {model} reads only text; take a model that reads pictures (policy.preset=tiny_vl, or a "
            "folder of Qwen2.5-VL, Idefics3 or SmolVLM)"
        )
    refuse(f"{given}: {problem}" for problem in broken_rules(PICTURES, config))


def check_speech(config: RunConfig, kind: Any, learn: bool) -> None:
    """Refuse a robot policy for a text env, a language policy for a simulator, and options of the other kind."""
    refuse(config.language_gap(speaks(kind), "policy.name=language, or a checkpoint of such a policy"))
    refuse(broken_rules((*PLAYING, *(LEARNING if learn else ())), config))
    options = config.eval
    if options.episodes % options.samples:
        fit = max(options.episodes // options.samples, 1) * options.samples
        raise ConfigError(
            f"eval.episodes={options.episodes} counts all answers and is not a multiple of "
            f"eval.samples={options.samples}; try eval.episodes={fit}"
        )


def check_scorers(config: RunConfig) -> None:
    """Refuse a verifier that cannot be imported, and folders without a reward model or judge."""
    roles = config.roles
    if roles.verifier and not callable(verifier := import_class(roles.verifier, "roles.verifier")):
        raise ConfigError(f"roles.verifier={roles.verifier} is of type {type(verifier).__name__}, not a function")
    for key in ("reward_model", "judge"):
        name = getattr(roles, key)
        if name not in (None, "start") and not (as_path(name) / "config.json").is_file():
            raise CheckpointError(f"roles.{key}={name}: config.json is missing, so it is not a folder of a model")


def remarks(config: RunConfig, learns: bool) -> Iterator[str]:
    """Notes for the first screen about the model in a folder: its sliding window, and settings for its size."""
    policy, algo = config.policy, config.algo
    if window := policy.window:
        yield (
            f"layers of this model see {window} tokens (a sliding window): conversations end there, and longer prompts "
            f"are dropped; policy.max_length={window} or less says so, too"
        )
    if not (learns and policy.speaks and policy.published and policy.pretrained) or config.sft.data:
        return
    whole = not policy.lora_rank and not policy.train_layers
    better = {"lr": 1e-6} if whole and algo.lr > HIGHEST_LR else {}
    better |= {"adam_eps": 1e-8} if algo.adam_eps > HIGHEST_EPS else {}
    if better and (weights := stored_weights(as_path(policy.pretrained))) >= LARGE_MODEL:
        keys = " and ".join(f"algo.{key}={value:g} (now {getattr(algo, key):g})" for key, value in better.items())
        yield f"{weights / 1e9:.2g} billion weights learn in smaller steps than this recipe's: try {keys}"


def refuse(problems: Iterable[str]) -> None:
    if told := [*problems]:
        raise ConfigError("\n".join(told))
