"""Checks of a dry run, for envs, policies and folders that would end a run at its start. Torch and simulators are only
imported if the recipe needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.config.recipe import RunConfig
from embodied.core.errors import MissingAsset
from embodied.core.plugins import ENGINE_CLASSES, PACKAGE
from embodied.envs import env_class, make_env
from embodied.policies import policy_class
from embodied.run.own_objects import names_own_objects, try_own_objects
from embodied.run.policy_source import PolicySource, check_fits, trained_in

if TYPE_CHECKING:
    from embodied.core.types import EnvSpec


def rehearse(config: RunConfig, *sources: PolicySource, examples: Any = None, imitators: int = 0) -> None:
    """Build the env and open the policies' classes and folders, to find their errors in a dry run. `imitators`: the
    number of learners that imitate `examples`, config.sft or algo.imitation. An env for GPUs of other machines is built
    on cores; if its files are missing on this machine, the check is left to the other machines."""
    policies = [source.config for source in sources] or [config.policy]
    for policy in policies:
        rehearse_policy(policy)
    kind, env = env_class(config.env), config.env
    env = kind.on_cores(env) if config.cluster.machines and env.on_gpu else env
    if config.cluster.machines and files_missing_here(config):
        return
    if names_own_objects(config, policies):
        try_own_objects(config, env, policies)
    else:
        kind.rehearse(env)
    if any(policy.sees for policy in policies) and not env.observed_images:  # only the built env knows its images
        shown = built_spec(env).images
        for policy in policies:
            policy.check_images(shown)
    check_all_fit([source for source in sources if not trained_in(source, env)], env)
    if examples and examples.data is not None and not kind.speaks:
        from embodied.workflows.demonstrations import check_dataset

        check_dataset(examples, built_spec(env), imitators)


def check_all_fit(sources: list[PolicySource], env: Any) -> None:
    """Build this env, and refuse policies made for other observations or actions."""
    if made := [source for source in sources if source.spec and not source.config.speaks]:
        spec = built_spec(env)
        for source in made:
            check_fits(source, env, spec)


def rehearse_policy(policy: Any) -> None:
    """Refuse a class or another package's engine that cannot be imported, and a folder without a model of the policy's
    family."""
    if ":" in policy.name:
        policy_class(policy.name)
    elif policy.published and not policy.speaks and policy.pretrained and Path(policy.pretrained).is_dir():
        policy_class(policy.name).check_folder(policy)
    elif policy.speaks and ENGINE_CLASSES.entry(policy.engine).package != PACKAGE:
        ENGINE_CLASSES[policy.engine]


def built_spec(env: Any) -> EnvSpec:
    """The spec of an env, which is built for it."""
    kind = env_class(env)
    with kind.explain_errors(env):
        made = make_env(env.model_copy(update={"task": kind.tasks(env)[0]}), 1)
        try:
            return made.env_spec
        finally:
            made.close()


def files_missing_here(config: RunConfig) -> str:
    """The env's files that this machine lacks, as text; empty if nothing is missing."""
    try:
        env_class(config.env).check(config.env)
    except MissingAsset as err:
        return str(err)
    return ""
