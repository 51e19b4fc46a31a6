"""Which workflow a command runs: ours, or one of the user's own that program=my_module:MyLoop names."""

from __future__ import annotations

from embodied.config.recipe import RunConfig
from embodied.envs import import_class
from embodied.envs.own_modules import own_modules


def program_of(argv: list[str], usual: type) -> tuple[type, list[str]]:
    """The workflow that program=my_module:MyLoop names, `usual` without it, and the other arguments."""
    named = [arg.partition("=")[2] for arg in argv if arg.startswith("program=")]
    rest = [arg for arg in argv if not arg.startswith("program=")]
    return (import_class(named[-1], "program") if named else usual), rest


def command_of(program: type) -> str:
    """The words after `python -m embodied.` that run this workflow, and resume what it has run."""
    named = f" program={program.__module__}:{program.__qualname__}" * is_own(program)
    return f"{program.command}{named}"


def is_own(program: type) -> bool:
    """Whether a workflow is the user's."""
    return not program.__module__.startswith("embodied.")


def modules_of(config: RunConfig, program: type | None) -> list[str]:
    """The user's modules that a run imports, which nodes of a Ray cluster may lack."""
    found = own_modules(config.env) + [config.policy.name.partition(":")[0]] * (":" in config.policy.name)
    return [*found, program.__module__] if program and is_own(program) else found
