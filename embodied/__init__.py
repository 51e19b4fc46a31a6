"""Embodied Loop: simulator-in-the-loop reinforcement learning for robot policies.

    import embodied

    run = embodied.train("pointmass_ppo", "env.num_envs=64")  # arguments of the command line; returns its folder
    results = embodied.evaluate(run, "eval.episodes=200")
    actions = embodied.load_policy(run).act_on(obs)  # obs: observations of an env (docs/own_policy.md)
    group = embodied.sweep("pointmass_ppo", "algo.lr=3e-4,1e-3", "seeds=0-2")  # its runs and rates (docs/comparing.md)
    runs = embodied.share("pointmass_ppo", "sums_grpo")  # by name (docs/sharing.md)
    data = embodied.collect("pointmass_ppo", "out=demos/reach")  # a dataset (docs/demonstrations.md)
    clone = embodied.sft("pointmass_ppo", "sft.data=demos/reach")
    found = embodied.check("env.name=my_envs:Reach")  # observations, actions, contract (docs/own_task.md)
    page = embodied.report(run, clone)  # the path of a page that compares them
    bench = embodied.benchmark("pointmass_ppo", "seconds=30")
    plan = embodied.plan("pointmass_ppo", "cluster=16xCPU")

Below are the classes for your own workflows (docs/workflows.md), envs and policies; `embodied.envs` and
`embodied.policies` have more. Everything is imported on first use.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from embodied.config.recipe import load_recipe as load_recipe
    from embodied.core.errors import EmbodiedError as EmbodiedError
    from embodied.core.types import EnvSpec as EnvSpec
    from embodied.core.types import Trajectory as Trajectory
    from embodied.envs.vector_env import VectorEnv as VectorEnv
    from embodied.placement import make_plan as make_plan
    from embodied.policies.base import Policy as Policy
    from embodied.reporting.runs import read_run as read_run
    from embodied.run.devices import discover as discover
    from embodied.run.devices import host_plans as host_plans
    from embodied.run.policy_source import load_policy as load_policy
    from embodied.runtime import Channel as Channel
    from embodied.runtime import Cluster as Cluster
    from embodied.runtime import Worker as Worker
    from embodied.workflows import Role as Role
    from embodied.workflows.relay import RelayWorker as RelayWorker
    from embodied.workflows.rl_loop import EmbodiedLoop as EmbodiedLoop

_COMMANDS = (  # modules that can be called
    *("train", "sft", "evaluate", "collect", "check"),
    *("sweep", "share", "report", "benchmark", "plan"),
)
_NAMES = {  # by module, as above
    "config.recipe": "load_recipe",
    "core.errors": "EmbodiedError",
    "core.types": "EnvSpec Trajectory",
    "envs.vector_env": "VectorEnv",
    "placement": "make_plan",
    "policies.base": "Policy",
    "reporting.runs": "read_run",
    "run.devices": "discover host_plans",
    "run.policy_source": "load_policy",
    "runtime": "Channel Cluster Worker",
    "workflows": "Role",
    "workflows.relay": "RelayWorker",
    "workflows.rl_loop": "EmbodiedLoop",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = [*_COMMANDS, *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _COMMANDS:
        return import_module(f"embodied.{name}")
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"embodied.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"embodied has no {name}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.call(*arguments, **options)


def let_call(command: str) -> None:
    """Make this command's module callable, as its function `call`: embodied.train("pointmass_ppo")."""
    if command != "__main__":
        sys.modules[command].__class__ = _CallableModule


def _is_starting() -> bool:
    """True if Python is about to run one of our commands: `python -m embodied.train`, or `embodied train`."""
    words = sys.orig_argv
    named = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    ours = any(name == "embodied" or name.startswith("embodied.") for name in named)
    return (sys.argv[:1] == ["-m"] and ours) or os.path.basename(sys.argv[0] if sys.argv else "") == "embodied"


def _say_what_is_missing(kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
    """Print a line instead of a traceback if a file of ours imports a missing package."""
    last = trace
    while last and last.tb_next:
        last = last.tb_next
    ours = last and last.tb_frame.f_code.co_filename.startswith(os.path.dirname(__file__) + os.sep)
    if isinstance(err, ModuleNotFoundError) and ours and not str(err.name).startswith("embodied"):
        print(
            f"error: {err.name} is not installed for {sys.executable}; make setup installs it in .venv", file=sys.stderr
        )
    else:
        sys.__excepthook__(kind, err, trace)


if _is_starting():
    sys.excepthook = _say_what_is_missing
if _is_starting() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    from embodied.core.errors import stop_at_once

    signal.signal(signal.SIGINT, stop_at_once)  # while a command is imported; later `launch.run` handles Ctrl-C
