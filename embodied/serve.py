"""Answer robots and other programs with a policy: python -m embodied.serve checkpoint=RUN_DIR

Robot policies speak the websocket protocols of openpi and vla-eval, so robots with openpi-client and the benchmarks of
vla-eval ask them; language models speak OpenAI's HTTP protocol.

usage: python -m embodied.serve checkpoint=... [key=value ...] [--help]
       env.name=... env.task=... policy.KEY=...: options of a published model that acts
       policy.max_running=... policy.max_length=... and the like: how a language model answers
       {token}=SECRET in the environment makes clients show this token (api_key=SECRET); only with one does
       a language model's server take new weights
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from embodied.config.answers import config_error, describe, explain
from embodied.config.command_line import parse
from embodied.config.read import COMMAND_LINE, Tree, leaves, root
from embodied.core.errors import ConfigError, naming
from embodied.core.options import SERVERS, WEBSOCKETS
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies.config import PLAYING, POLICY_CONFIGS
from embodied.policies.hub import folder_of, is_hub_id
from embodied.policies.language.config import LanguageConfig
from embodied.policies.policy_folder import published_family
from embodied.run import launch
from embodied.run.policy_source import SERVER, PolicySource, find, with_playing
from embodied.runtime.published_weights import array_of
from embodied.serving.config import TOKEN, ServeConfig

if TYPE_CHECKING:
    from embodied.policies.base import Policy
    from embodied.policies.language.policy import LanguagePolicy

PROTOCOL = ("env.", "policy.")
SERVING = ("max_tokens", "max_length", "max_running", "cache_gb", "chat", "dtype")  # a language model's options
ANY_TEXT = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, text=True)  # for models without an env


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv)


def start(argv: list[str]) -> None:
    protocol = [word for word in argv if word.startswith(PROTOCOL)]
    named = class_named(protocol)
    config = read([word for word in argv if word not in protocol])
    if config is None:
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check_device(config.device)
    if (language := find_language(config.checkpoint, named)) is not None:
        asyncio.run(serve_language(config, language, protocol))
    else:
        WEBSOCKETS.check("serving")
        asyncio.run(serve(load(config, protocol), config))


def read(argv: list[str]) -> ServeConfig | None:
    """The server's options; None when --help has answered already."""
    flags, values, problems = parse(argv, "checkpoint", has_recipes=False)
    if "--help" in flags:
        print(usage())
        return None
    tree = Tree(values, dict.fromkeys(values, COMMAND_LINE), problems)
    if "checkpoint" not in values and not problems:
        tree.problems.append("which policy? python -m embodied.serve checkpoint=RUN_DIR")
    try:
        config = ServeConfig.model_validate(tree.values)
    except ValidationError as err:
        tree.problems += explain(err.errors(), root(ServeConfig), tree, incomplete=bool(tree.problems))
    if tree.problems:
        raise config_error(tree.problems)
    return config


def check_device(device: str) -> None:
    """Raise ConfigError if the GPU does not exist."""
    if device == "cpu":
        return
    import torch

    if (count := torch.cuda.device_count()) <= int(device.partition(":")[2] or 0):
        raise ConfigError(f"device={device}: PyTorch finds {count} GPUs on this machine; try device=cpu")


def usage() -> str:
    keys = [f"  {key:<16} {describe(field)}" for key, field, _ in leaves(root(ServeConfig))]
    return "\n".join([(__doc__ or "").format(token=TOKEN), *keys])


def load(config: ServeConfig, protocol: list[str]) -> Policy:
    """The policy to serve. `protocol` are the arguments that configure a published model."""
    from embodied.config.recipe import load as load_recipe
    from embodied.policies import load_policy, make_policy
    from embodied.run.policy_source import describe_published, published_spec

    if published_family(here := folder_of(config.checkpoint)):  # as its authors evaluate it on a benchmark
        loaded = load_recipe([f"checkpoint={here}", *protocol], entry="evaluate")
        source = find(str(here), loaded)
        print(f"protocol    {describe_published(source.config, loaded.config.env)}")
        return make_policy(source.config, published_spec(source.config, loaded.config.env), seed=0)
    source = find(config.checkpoint, trusted=class_named(protocol))
    _, given, _ = parse(protocol, has_recipes=False)
    if odd := [key for key in given if key not in (*PLAYING, "policy.name")]:
        raise ConfigError(f"{odd[0]}={given[odd[0]]} has no effect: {config.checkpoint} has its own; leave it out")
    if source.folder is None:
        raise ConfigError(f"checkpoint={config.checkpoint} has no weights to serve; name a run or a policy folder")
    policy = load_policy(source.folder, source.config.name)
    changed = {key.removeprefix("policy."): value for key, value in given.items() if key in PLAYING}
    policy.config = with_playing(policy.config, changed)
    if "chunk" in changed:
        policy.check_env()  # its horizon may be shorter
    return policy


def class_named(protocol: list[str]) -> str | None:
    """The user's class of `policy.name=my_nets:Linear`."""
    return next((word.partition("=")[2] for word in protocol if word.startswith("policy.name=")), None)


async def serve_language(config: ServeConfig, source: PolicySource, words: list[str]) -> None:
    """Serve a language model until a signal asks to stop."""
    SERVERS.check("serving")
    from embodied.serving.language_server import LanguageServer, Origin

    if given := [key for key in config.of_robots if key in config.model_fields_set]:
        raise ConfigError(f"{given[0]} has no effect on a language model: every request sets it; leave it out")
    options = with_options(source.config, words)
    policy = load_language(options, source)
    version = source.weights.version if source.weights else 0
    name = config.checkpoint if is_hub_id(config.checkpoint) else source.name

    def ready(port: int) -> None:
        print(f"model       {name}, version {version}: {options.max_running} conversations at a time, of "
              f"{policy.max_length} tokens at most")  # fmt: skip
        token = f"show the token in {TOKEN}" if config.token else "of this machine, without a token; weights stay"
        print(f"clients     {token}")
        print(f"listening   http://{config.host}:{port}/v1", flush=True)

    await until_stopped(LanguageServer(policy, config, Origin(name, source.folder, version)), config, ready)


async def serve(policy: Policy, config: ServeConfig) -> None:
    """Serve until a signal asks to stop."""
    from embodied.serving.robot_server import Answers, PolicyServer

    answers = Answers(policy, config)
    metadata = answers.metadata()

    def ready(port: int) -> None:
        sees = ", ".join([*metadata["cameras"], *(["state"] if metadata["state_dim"] else [])]) or "nothing"
        actions = f"{metadata['action_chunk']} actions of {metadata['action_dim']} numbers"
        print(f"policy      {metadata['policy']}: sees {sees}; {actions}")
        print(f"clients     {'show the token in ' + TOKEN if config.token else 'of this machine, without a token'}")
        print(f"listening   ws://{config.host}:{port}", flush=True)

    await until_stopped(PolicyServer(answers, config), config, ready)


async def until_stopped(server: Any, config: ServeConfig, ready: Callable[[int], None]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        await server.run(ready, stop)
    except OSError as err:
        cause = err.strerror or err
        raise ConfigError(
            f"host={config.host} port={config.port}: {cause}; choose others (port=0: a free one)"
        ) from None
    print("stopped", flush=True)


def find_language(checkpoint: str, named: str | None = None) -> PolicySource | None:
    """The language model to serve; None for a robot policy. `named`: the user's class."""
    here = folder_of(checkpoint)
    family = published_family(here)
    if family and (options := POLICY_CONFIGS.get(family)) and options.speaks:
        return PolicySource(here.resolve().name, options(name=family, pretrained=str(here)), folder=here.resolve())
    if family:
        return None
    with naming("checkpoint"):
        source = find(checkpoint, trusted=named)
    return source if source.config.speaks else None


def with_options(config: LanguageConfig, words: list[str]) -> LanguageConfig:
    """The model's options, changed by these arguments."""
    _, values, _ = parse(words, has_recipes=False)
    if odd := [key for key in values if key.removeprefix("policy.") not in SERVING]:
        served_keys = ", ".join(f"policy.{key}" for key in SERVING)
        raise ConfigError(f"{odd[0]} has no effect in serving a language model; there are {served_keys}")
    changed = {key.removeprefix("policy."): value for key, value in values.items()}
    policy_options = {key: value for key, value in config.model_dump().items() if key not in SERVER}
    try:
        return LanguageConfig.model_validate(policy_options | changed)
    except ValidationError as err:
        raise ConfigError("; ".join(f"policy.{error['loc'][0]}: {error['msg']}" for error in err.errors())) from None


def load_language(config: LanguageConfig, source: PolicySource) -> LanguagePolicy:
    """The model with the weights of its folder."""
    from embodied.policies.language.policy import LanguagePolicy

    policy = LanguagePolicy(config, source.spec or ANY_TEXT)
    blobs = policy.read_weights(source.folder) if source.spec else policy.stored_weights()
    policy.load_weights({name: array_of(blob) for name, blob in blobs.items()})
    return policy


if __name__ == "__main__":
    raise SystemExit(main())
