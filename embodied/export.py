"""Write a policy as a program that needs no toolkit: python -m embodied.export checkpoint=RUN_DIR out=FOLDER

usage: python -m embodied.export checkpoint=... out=FOLDER [format=onnx|torch] [instructions=[...]] [key=value ...]
       out=FOLDER: a new folder for the program, its runner and a description
       format=onnx: for onnxruntime and numpy [the default]; format=torch: for torch, safetensors and numpy
       instructions=[TEXT, ...]: what the policy may be told, besides what its env's tasks say
       tolerance=1e-5: largest difference between an action of the program and one of the policy
       env.name=... env.task=... policy.KEY=... recipe=...: as in python -m embodied.evaluate

The policy first plays some decisions in its env. The program must give the same actions for what it saw there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from pydantic import Field

from embodied.config.command_line import stored_recipe
from embodied.config.recipe import Loaded, RunConfig, load
from embodied.core.arrays import host, is_text, map_obs, num_rows
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import as_path, check_place, whole_folder
from embodied.core.options import ONNX, Strict
from embodied.core.types import EnvSpec, EpisodeList, Observation
from embodied.envs import env_class, make_env
from embodied.envs.capabilities import choose_protocol
from embodied.evaluate import one_env_each
from embodied.policies import check_methods, make_policy
from embodied.push import ORIGIN, evaluation_of, origin_of
from embodied.records.progress import provenance
from embodied.run import launch
from embodied.run.policy_source import FROM, PolicySource, check_fits, find_all
from embodied.runtime.published_weights import array_of

if TYPE_CHECKING:
    from embodied.policies.base import Policy

FORMATS = ("onnx", "torch")
ROWS, DECISIONS, LATER = 2, 6, 1  # env rows, and what they play of the first tasks and of later ones


class Options(Strict):
    """The command's own options."""

    out: str | None = None
    format: Literal[FORMATS] = FORMATS[0]
    instructions: tuple[str, ...] = ()
    tolerance: float = Field(1e-5, gt=0)


class Decision(NamedTuple):
    """What the policy saw and did: the best actions [N, C, A]."""

    obs: Observation
    noise: np.ndarray
    actions: np.ndarray


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, usage=__doc__)


def start(argv: list[str]) -> None:
    options, rest = launch.own_options(Options, argv)
    if (loaded := load(rest, entry="evaluate")) is not None:
        export(loaded, options)


def export(loaded: Loaded, options: Options) -> None:
    """Find the policy, play with it, write its program, compare both."""
    from embodied.policies.policy_folder import checksums

    if options.out is None:
        raise ConfigError("no folder is given: set out=FOLDER, a new folder")
    out = check_place("out", as_path(options.out), new=True)
    if options.format == "onnx":
        ONNX.check("format=onnx")
    source = one_policy(loaded)
    if loaded.dry_run:
        print(f"policy      {source.name}, a {source.config.name}, would be written to {out}")
        return
    policy, played = play(loaded.config, source, options.format)
    texts = instructions(policy, played, options.instructions)
    recipe = stored_recipe(source.folder) if source.folder else None
    evaluated = evaluation_of(source, recipe.parent if recipe else None)
    origin = origin_of(source, recipe, evaluated)
    origin["success"] += "\n\nThe checkpoint played these episodes, before the export." if evaluated else ""
    with whole_folder(out) as aside:
        with checksums(aside):
            largest = write(aside, options.format, policy, played, texts, source)
            (aside / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        if largest > options.tolerance:
            raise EmbodiedError(
                f"the program's actions differ by {largest:.1e} from the policy's; if they may, set "
                f"tolerance={2 * largest:.0e}, or try format={next(one for one in FORMATS if one != options.format)}"
            )
    rows = sum(num_rows(one.obs) for one in played)
    print(f"compared    {rows} decisions: actions differ by at most {largest:.1e} from the policy's")
    print(f"exported    {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    if recipe:
        print(f"evaluate    python -m embodied.evaluate checkpoint={quote(str(out))} recipe={quote(str(recipe))}")


def one_policy(loaded: Loaded) -> PolicySource:
    """The policy to export; refuses policies that no program can be made of."""
    source, *others = find_all(loaded)
    if others:
        raise ConfigError(f"checkpoint={list(loaded.checkpoints)}: one at a time")
    if source.config.speaks:
        raise ConfigError(
            f"{source.name} is a language model: other programs load its folder, {source.folder}, as it is"
        )
    if not source.config.sends_weights:
        raise ConfigError(f"{source.folder} was exported already: export the policy that it was, with another format")
    if source.folder is None:
        raise ConfigError(f"checkpoint={loaded.checkpoints[0]} has no weights to export; name a run or a policy folder")
    return source


def play(config: RunConfig, source: PolicySource, file_format: str) -> tuple[Policy, list[Decision]]:
    """The policy, and its first decisions in the first evaluation episodes of its tasks, `ROWS` of them at a time."""
    policy, played = None, []
    for config_of_env in one_env_each(config):
        config_of_env, _ = launch.planned(config_of_env.model_copy(update={"policy": source.config}), learn=False)
        kind = env_class(config_of_env.env)
        protocol = choose_protocol(kind, config_of_env.env, config_of_env.eval.protocol)
        options, tasks = protocol.apply(config_of_env.env), kind.tasks(config_of_env.env)
        episodes = EpisodeList(config_of_env.eval.seed, "eval", tasks, protocol.stored_states)
        with kind.explain_errors(options):
            env = make_env(options, ROWS)
        try:
            check_fits(source, options, env.env_spec)
            policy = policy or build(source, env.env_spec, file_format)
            for first in range(0, len(tasks), ROWS):
                obs, _ = env.reset(options={"episodes": episodes.at(np.arange(first, first + ROWS))})
                for decision in range(LATER if first else DECISIONS):
                    obs = env.step_chunk(played[-1].actions).obs if decision else obs
                    played.append(decide(policy, obs))
        finally:
            env.close()
    assert policy is not None, "an env has tasks"
    return policy, played


def build(source: PolicySource, spec: EnvSpec, file_format: str) -> Policy:
    """The policy with its weights. ONNX has them in float32, since onnxruntime computes little in bfloat16."""
    from embodied.policies import policy_class

    check_methods(policy_class(source.config.name), "best_actions")
    config, spec = source.config, source.spec or spec
    if file_format == "onnx" and config.dtype == "bfloat16":
        config = config.model_copy(update={"dtype": "float32"})
        print("note        it acted in bfloat16; its program computes in float32, with the same weights")
    weights, policy = source.weights_for(spec), make_policy(config, spec)
    assert weights is not None, "the policy has a folder"
    policy.load_weights({name: array_of(blob) for name, blob in weights.blobs.items()})
    return policy.eval()


def decide(policy: Policy, obs: Observation) -> Decision:
    obs = map_obs(lambda array: array if is_text(array) else host(array), obs)
    spec, draw = policy.noise_spec(), np.random.default_rng(0)
    shape = num_rows(obs), spec.width
    noise = draw.standard_normal(shape) if spec.kind == "normal" else draw.uniform(size=shape)
    return Decision(obs, noise, host(policy.act(obs, noise, temperature=0.0).actions))


def instructions(policy: Policy, played: list[Decision], more: tuple[str, ...]) -> list[str]:
    """What the policy may be told; nothing if it reads no words."""
    from embodied.policies.base import Policy

    reads = type(policy).prompt_tokens is not Policy.prompt_tokens
    if more and not (reads and policy.spec.instruction):
        raise ConfigError(f"instructions={[*more]} has no effect: this {policy.config.name} is told none; leave it out")
    if not (reads and policy.spec.instruction):
        return [policy.config.instruction] if reads else []
    return [*dict.fromkeys([*(text for decision in played for text in decision.obs["instruction"]), *more])]


def write(
    folder: Path, file_format: str, policy: Policy, played: list[Decision], texts: list[str], source: PolicySource
) -> float:
    """Write all files; returns the largest difference between an action of the program and one of the policy."""
    from embodied.policies import export_program

    program = export_program.describe(policy, played[0].obs, texts)
    noise = policy.noise_spec()
    ours = {"name": "exported", "pretrained": ".", "chunk": policy.config.chunk, "noise": [noise.kind, noise.width]}
    spec = asdict(replace(policy.spec, privileged_dim=None))
    version = source.weights.version if source.weights else 0
    origin = {**source.described(), "version": version, "format": file_format}
    origin |= {"folder": source.folder and source.folder.name}  # a program leaves this machine: no paths, no host
    origin |= {"provenance": {name: provenance()[name] for name in ("commit", "python", "packages", "time")}}
    description = {"policy": ours, "env_spec": spec, "program": program, FROM: origin}
    runner = export_program.write(folder, file_format, description, policy, played[0].obs)
    return max(
        difference(runner.act(decision.obs, decision.noise[:, : program["noise"]]), decision.actions)
        for decision in played
    )


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference between two actions, of numbers beyond 1 relative to them; infinite for NaN."""
    differences = np.abs(found - wanted) / np.maximum(1, np.abs(wanted))
    return float(np.nan_to_num(differences, nan=np.inf).max())


if __name__ == "__main__":
    raise SystemExit(main())
