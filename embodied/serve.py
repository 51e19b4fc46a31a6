"""Answer robots and other programs with a policy's actions: python -m embodied.serve checkpoint=RUN_DIR

The protocol is openpi's, so its client (the package openpi-client) and programs built on it work with every policy.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from embodied.config.cli import parse
from embodied.config.help import describe
from embodied.config.merge import COMMAND_LINE, Tree
from embodied.config.mistakes import config_error, explain
from embodied.config.schema import leaves, root
from embodied.core.errors import ConfigError
from embodied.run import launch
from embodied.serving.config import TOKEN, ServeConfig
from embodied.serving.protocol import check_packages

if TYPE_CHECKING:
    from embodied.policies.base import Policy

PROTOCOL = ("env.", "policy.")


def main(argv: list[str] | None = None) -> int:
    return launch.run(lambda: start(sys.argv[1:] if argv is None else argv))


def start(argv: list[str]) -> int:
    protocol = [word for word in argv if word.startswith(PROTOCOL)]
    config = read([word for word in argv if word not in protocol])
    if config is None:
        return 0
    check_packages()
    check_device(config.device)
    policy = load(config, protocol)
    asyncio.run(serve(policy, config))
    return 0


def read(argv: list[str]) -> ServeConfig | None:
    """The server's options; None when --help has answered already."""
    arguments = parse(argv, [])
    if "--help" in arguments.flags:
        print(usage())
        return None
    tree = Tree(arguments.values, dict.fromkeys(arguments.values, COMMAND_LINE), arguments.problems)
    if "checkpoint" not in arguments.values:
        tree.problems.append("which policy? python -m embodied.serve checkpoint=RUN_DIR")
    try:
        config = ServeConfig.model_validate(tree.values)
    except ValidationError as err:
        tree.problems += explain(err.errors(), root(ServeConfig), tree, incomplete=bool(tree.problems))
    if tree.problems:
        raise config_error(tree.problems)
    return config


def check_device(device: str) -> None:
    """Raise ConfigError where the GPU is not there."""
    if device == "cpu":
        return
    import torch

    if (count := torch.cuda.device_count()) <= int(device.partition(":")[2] or 0):
        raise ConfigError(f"device={device}: PyTorch finds {count} GPUs on this machine; try device=cpu")


def usage() -> str:
    lines = [
        "Answer robots and other programs with a policy's actions, by openpi's websocket protocol.",
        "",
        "usage: python -m embodied.serve checkpoint=... [key=value ...] [--help]",
        "       env.name=... env.task=... policy.KEY=...: how a model that others published is asked for actions",
        f"       {TOKEN}=SECRET in the environment makes clients show this token (openpi-client: api_key=SECRET)",
        "",
    ]
    return "\n".join([*lines, *(f"  {key:<16} {describe(field)}" for key, field, _ in leaves(root(ServeConfig)))])


def load(config: ServeConfig, protocol: list[str]) -> Policy:
    """The policy to serve. `protocol` are the arguments that configure a published model."""
    from embodied.policies import load_policy
    from embodied.policies.folder import published_family
    from embodied.run.hub import folder_of
    from embodied.run.policy_source import find

    here = folder_of(config.checkpoint)
    if published_family(here):
        return load_published(here, protocol)
    target = find(config.checkpoint)
    if target.config.name == "language":
        raise ConfigError(
            f"checkpoint={config.checkpoint} is a language model, and this server answers robots only so far; its "
            f"folder {target.folder} is one that transformers and vLLM read: vllm serve {target.folder}"
        )
    if protocol:
        raise ConfigError(f"{protocol[0]} has no effect: {config.checkpoint} says itself how it acts; leave it out")
    if target.folder is None:
        raise ConfigError(f"checkpoint={config.checkpoint} has no weights to serve; name a run or a policy folder")
    return load_policy(target.folder)


def load_published(folder: Path, protocol: list[str]) -> Policy:
    """A published model as its authors evaluate it on a benchmark, without the simulator; prints the protocol."""
    from embodied.config.recipe import load as load_recipe
    from embodied.policies import make_policy
    from embodied.run.policy_source import describe_published, find, published_spec

    loaded = load_recipe([f"checkpoint={folder}", *protocol], entry="evaluate")
    target = find(str(folder), loaded)
    print(f"protocol    {describe_published(target.config, loaded.config.env)}")
    return make_policy(target.config, published_spec(target.config, loaded.config.env), seed=0)


async def serve(policy: Policy, config: ServeConfig) -> None:
    """Serve until a signal asks to stop."""
    from embodied.serving.server import Answers, Server

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    answers = Answers(policy, config)
    about = answers.metadata()

    def ready(port: int) -> None:
        sees = ", ".join([*about["cameras"], *(["state"] if about["state_dim"] else [])]) or "nothing"
        actions = f"{about['action_chunk']} actions of {about['action_dim']} numbers"
        print(f"policy      {about['policy']}: sees {sees}; {actions}")
        print(f"clients     {'show the token in ' + TOKEN if config.token else 'of this machine, without a token'}")
        print(f"listening   ws://{config.host}:{port}", flush=True)

    try:
        await Server(answers, config).run(ready, stop)
    except OSError as err:
        cause = err.strerror or err
        raise ConfigError(
            f"host={config.host} port={config.port}: {cause}; choose others (port=0: a free one)"
        ) from None
    print("stopped", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
