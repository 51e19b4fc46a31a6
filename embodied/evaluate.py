"""Evaluate a policy on a fixed episode list: python -m embodied.evaluate checkpoint=RUN_DIR eval.episodes=200

The same function evaluates during training, so a version gives the same episodes there and here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embodied import commands
from embodied.checkpoints import locate, name_of, read_json
from embodied.config import RunConfig, load
from embodied.data import EnvSpec
from embodied.errors import ConfigError
from embodied.reporting.console import describe_results
from embodied.reporting.report import report_or_say_why
from embodied.reporting.results import write_results
from embodied.reporting.stats import summarize
from embodied.run_folder import provenance

if TYPE_CHECKING:
    from embodied.workflows.delivery import Weights
    from embodied.workflows.embodied import EmbodiedLoop

BUILT_IN = {"random": "embodied.policies.simple:RandomPolicy", "zero": "embodied.policies.simple:ZeroPolicy"}


def main(argv: list[str] | None = None) -> int:
    return commands.run(lambda: start(sys.argv[1:] if argv is None else argv))


def start(argv: list[str]) -> int:
    """Find the policy, take env and protocol from its run's recipe, play the episodes, write and print the results."""
    loaded = load(argv, entry="evaluate")
    if loaded is None:
        return 0
    target = find(loaded.checkpoint, loaded.config)
    config, plan = commands.planned(loaded.config.model_copy(update={"policy": target.config}), learn=False)
    if loaded.dry_run:
        print(commands.describe(config, plan, target.out))
        return 0
    out = fresh_folder(target.out)
    print(commands.describe(config, plan, out), flush=True)
    with commands.cluster(config, plan, out / "logs") as cluster:
        results = evaluate(config, cluster, target, out)
    print(describe_results(results))
    print(f"  results     {out / 'results.json'}")
    print(f"  report      {out / 'report.html'}")
    for video in sorted((out / "videos").glob("*.mp4"))[:3]:
        print(f"  video       {video}")
    return 0


@dataclass(frozen=True)
class Target:
    """What is evaluated, and where the results go."""

    config: object  # of the policy
    spec: EnvSpec | None  # the env it was made for
    weights: Weights | None  # None: it needs none
    out: Path


def find(checkpoint: str, config: RunConfig) -> Target:
    from pydantic import TypeAdapter

    from embodied.policies.config import ExternalPolicyConfig, PolicyConfig
    from embodied.policies.folder import read_blobs, read_description
    from embodied.workflows.delivery import Weights

    if checkpoint in BUILT_IN or (":" in checkpoint and not Path(checkpoint).exists()):
        name = BUILT_IN.get(checkpoint, checkpoint)
        label = checkpoint if checkpoint in BUILT_IN else name.partition(":")[2]
        return Target(ExternalPolicyConfig(name=name), None, None, config.run.dir / f"evaluate-{label}")
    policy, folder, run = locate(checkpoint)
    raw, spec = read_description(policy)
    version = read_json(folder / "manifest.json")["version"] if folder else 0
    parent = (run or policy.parent) / "eval"
    out = parent / f"{name_of(version)}-evaluate" if folder else parent / policy.name
    described = TypeAdapter(PolicyConfig).validate_python(raw)
    return Target(described, spec, Weights(version, read_blobs(policy)), out)


def fresh_folder(path: Path) -> Path:
    """This folder, or with a number where earlier results are: nothing is overwritten."""
    for attempt in range(1, 10_000):
        candidate = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            continue
    raise FileExistsError(path)


def evaluate(config: RunConfig, cluster, target: Target, out: Path) -> dict:
    """Load the weights into fresh workers and play."""
    from embodied.workflows.embodied import EmbodiedLoop

    loop = EmbodiedLoop(config, cluster, learn=False, tell=lambda line: print(line, flush=True))
    spec = loop.start()
    if target.spec is not None and (target.spec.action, target.spec.state_dim) != (spec.action, spec.state_dim):
        raise ConfigError(
            f"this policy was made for {target.spec.state_dim} state numbers and {target.spec.action}, but "
            f"{config.env.name} {config.env.task} has {spec.state_dim} and {spec.action}"
        )
    loop.adopt(target.weights)
    return play_and_write(loop, config, out)


def play_and_write(loop: EmbodiedLoop, config: RunConfig, out: Path) -> dict:
    """The evaluation of the version that acts now: results.json, episodes.csv and videos in `out`."""
    episodes = loop.evaluate(out / "videos", config.eval.videos)
    protocol = {
        "name": loop.protocol.name,
        "rules": loop.protocol.rules,
        "env": loop.eval_env.model_dump(mode="json"),
        "eval": config.eval.model_dump(mode="json"),
        "backend": loop.eval_spec.backend,
        "max_episode_steps": loop.eval_spec.max_episode_steps,
    }
    results = {"policy_version": loop.version, "protocol": protocol, **summarize(episodes), "provenance": provenance()}
    write_results(out, results, episodes)
    report_or_say_why(out)
    return results


if __name__ == "__main__":
    raise SystemExit(main())
