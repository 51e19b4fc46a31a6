"""Makes each object of the user's own once, in a child process, to find their mistakes in a dry run: env, reward, text
env, verifier, policy. A crash or an endless loop there ends the child alone.

`try_own_objects` starts `python -m embodied.run.own_objects FILE` with the options as JSON. The child writes into FILE
what it is doing, and last the mistake.
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
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class, import_class, make_env
from embodied.envs.config import EnvConfig
from embodied.envs.own_modules import explain_errors, names_a_class, own_modules, try_out
from embodied.policies import make_policy
from embodied.policies.config import PolicyConfig

GYM = "gym:"  # begins the name of a registered Gymnasium env
MISTAKE = "error: "  # begins the last line of the child's file


def names_own_objects(config: RunConfig, policies: Sequence[Any]) -> bool:
    """True if code that is not ours makes the env or a policy, or scores: the user's, or of a registered Gymnasium
    env."""
    own_env = config.env.name.startswith(GYM) or own_modules(config.env)
    return bool(own_env or config.roles.verifier or own_policies(policies))


def own_policies(policies: Sequence[Any]) -> list[Any]:
    return [policy for policy in policies if ":" in policy.name]


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
        try_out(made)
    for policy in policies:
        answer.write_text(f"making policy.name={policy.name} and asking it for an action")
        with explain_errors(f"policy.name={policy.name}", "be made or act"):
            made.step_chunk(make_policy(policy, made.env_spec, 0).act_on(made.reset(seed=0)[0]))
    made.close()


def converse(kind: Any, env: Any, policies: Sequence[Any], answer: Path, verifier: str | None) -> None:
    """Begin a held-out conversation, answer once, and let the verifier score that."""
    from embodied.envs.text.rewards import RewardSum, as_text
    from embodied.envs.text.text_env import checked_said

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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
