"""Checks of a dry run, for envs, policies and folders that would end a run at its start. Torch and simulators are only
imported if the recipe needs them.

Each object of the user's own (env, reward, text env, verifier, policy) is made once, in a child process. A crash or an
endless loop there ends the child alone. `try_own_objects` starts `python -m embodied.run.rehearsal FILE` with the
options as JSON. The child writes into FILE what it is doing, and last the mistake.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError, EmbodiedError, MissingAsset
from embodied.core.plugins import ENGINE_CLASSES, PACKAGE
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class, import_class, make_env
from embodied.envs.config import EnvConfig
from embodied.envs.own_modules import explain_errors, names_a_class, own_modules
from embodied.policies import make_policy, policy_class
from embodied.policies.config import PolicyConfig
from embodied.run.policy_source import BUILT_IN, PolicySource, check_fits, same_env, trained_in

if TYPE_CHECKING:
    from embodied.core.types import EnvSpec

GYM = "gym:"  # begins the name of a registered Gymnasium env
MISTAKE = "error: "  # begins the last line of the child's file


def names_own_objects(config: RunConfig, policies: Sequence[Any]) -> bool:
    """True if code that is not ours makes the env or a policy, or scores: the user's, or of a registered Gymnasium
    env."""
    own_env = config.env.name.startswith(GYM) or own_modules(config.env)
    return bool(own_env or config.roles.verifier or own_policies(policies))


def own_policies(policies: Sequence[Any]) -> list[Any]:
    return [policy for policy in policies if ":" in policy.name and policy.name not in BUILT_IN.values()]


def try_own_objects(config: RunConfig, env: Any, policies: Sequence[Any]) -> None:
    """Raise ConfigError with the first mistake in the user's objects; `env` is the env's section, resolved."""
    if (names_a_class(env.name) or env.name.startswith(GYM)) and not any(
        policy.speaks for policy in policies
    ):  # ours may not fit its observations
        made = [policy for policy in policies if policy.few_weights < np.inf]
    else:
        made = own_policies(policies)
    asked = {"env": env.model_dump(mode="json"), "policies": [policy.model_dump(mode="json") for policy in made]}
    asked["verifier"] = config.roles.verifier
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "told"
        answer.write_text("importing your modules")
        try:
            child = subprocess.run(
                [sys.executable, "-m", __name__, str(answer)],
                input=json.dumps(asked),
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=config.cluster.start_s,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                check=False,
            )
        except subprocess.TimeoutExpired:
            limit = f"cluster.start_s={config.cluster.start_s:g} seconds"
            raise ConfigError(f"not finished after {limit}, while {answer.read_text()}") from None
        said = answer.read_text()
    if said.startswith(MISTAKE):
        raise ConfigError(said.removeprefix(MISTAKE))
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [""])[-1]
        code = child.returncode
        how = f"died with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ConfigError(f"the process {how} while {said}{f': {last}' * bool(last)}")


def main(answer: Path) -> None:
    asked = json.loads(sys.stdin.read())
    env = TypeAdapter(EnvConfig).validate_python(asked["env"])
    policies = [TypeAdapter(PolicyConfig).validate_python(policy) for policy in asked["policies"]]
    try:
        kind = env_class(env)
        task = kind.tasks(env)[0]
        answer.write_text(f"building and stepping env.name={env.name} env.task={task}")
        env = env.model_copy(update={"task": task})
        if kind.speaks:
            converse(kind, env, policies, answer, asked["verifier"])
        else:
            play(kind, env, policies, answer)
    except EmbodiedError as err:
        answer.write_text(f"{MISTAKE}{err}")


def play(kind: Any, env: Any, policies: Sequence[Any], answer: Path) -> None:
    """Build an env of one row and step it, which calls the reward; then act with the policies."""
    with kind.explain_errors(env):
        made = make_env(kind.plain_config(env), 1)
        made.try_out()
    for policy in policies:
        answer.write_text(f"making policy.name={policy.name} and asking it for an action")
        with explain_errors(f"policy.name={policy.name}", "be made or act"):
            made.step_chunk(make_policy(policy, made.env_spec, 0).act_on(made.reset(seed=0)[0]))
    made.close()


def converse(kind: Any, env: Any, policies: Sequence[Any], answer: Path, verifier: str | None) -> None:
    """Begin a held-out conversation, answer once, and let the verifier score that."""
    from embodied.envs.text.rewards import RewardSum
    from embodied.envs.text.text_env import checked_said
    from embodied.envs.text.text_worker import as_text

    with kind.explain_errors(env):
        shared = kind.load(env)
        try:
            conversation = kind(env, shared)
            said = conversation.reset(EpisodeSpec(kind.tasks(env)[0], 0, 0, 0))
            checked_said(said, kind, kind.shows_pictures(env))
            conversation.step("")
            if rewards := env.rewards:
                answer.write_text(f"calling env.rewards={[reward.name for reward in rewards]}")
                RewardSum(rewards).of_conversation(as_text(said), "", conversation.solution)
        finally:
            kind.unload(shared)
    if verifier:
        answer.write_text(f"calling roles.verifier={verifier}")
        with explain_errors(f"roles.verifier={verifier}", "score an answer"):
            float(import_class(verifier, "roles.verifier")(as_text(said), ""))
    for policy in policies:
        answer.write_text(f"making policy.name={policy.name}")
        with explain_errors(f"policy.name={policy.name}", "be made"):
            make_policy(policy, kind.env_spec(env), 0)


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
    if examples and kind.speaks:
        check_text(env, examples, imitators)
    elif examples and examples.data is not None:
        from embodied.workflows.demonstrations import check_dataset

        check_dataset(examples, built_spec(env), imitators, config.policy)


def check_before(config: RunConfig, examples: Any, imitators: int) -> None:
    """Refuse a dataset that does not fit before a run has a folder. An env is built for it, unless the dataset was
    collected in one with these options."""
    from embodied.workflows.demonstrations import check_dataset, env_of

    kind, env = env_class(config.env), config.env
    if kind.speaks:
        return check_text(env, examples, imitators)
    if examples.data is None or config.cluster.joined:
        return
    if getattr(env, "privileged", False) or not same_env(env_of(examples.data), env):
        check_dataset(examples, built_spec(kind.on_cores(env)), imitators, config.policy)


def check_text(env: Any, examples: Any, imitators: int) -> None:
    """Refuse fewer examples than learners that imitate them."""
    from embodied.learners.examples import check_shares
    from embodied.workflows.demonstrations import count_items

    check_shares(count_items(env, examples), "examples", imitators)


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
