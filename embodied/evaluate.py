"""Evaluate a policy on a fixed episode list: python -m embodied.evaluate checkpoint=RUN_DIR eval.episodes=200

The same function evaluates during training, so a version gives the same episodes there and here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from embodied import commands
from embodied.checkpoints import locate, read_json
from embodied.config import RunConfig
from embodied.data import EnvSpec, Weights
from embodied.reporting.console import describe_results
from embodied.reporting.results import write_results
from embodied.reporting.stats import summarize
from embodied.run_folder import provenance


def main(argv: list[str] | None = None) -> int:
    return commands.run(lambda: start(sys.argv[1:] if argv is None else argv))


def start(argv: list[str]) -> int:
    """Find the policy, take env and protocol from its run's recipe, play the episodes, write and print the results."""
    loaded = commands.load(argv, entry="evaluate")
    if loaded is None:
        return 0
    target = find(loaded.checkpoint)
    config, plan = commands.planned(loaded.config, learn=False)
    if loaded.dry_run:
        print(commands.describe(config, plan, target.out))
        return 0
    out = fresh_folder(target.out)
    print(commands.describe(config, plan, out), flush=True)
    with commands.cluster(config, plan, out / "logs") as cluster:
        results = evaluate(config, cluster, target, out)
    print(describe_results(results))
    print(f"  results     {out / 'results.json'}")
    for video in sorted((out / "videos").glob("*.mp4"))[:3]:
        print(f"  video       {video}")
    return 0


@dataclass(frozen=True)
class Target:
    """What is evaluated and where the results go."""

    policy: Path
    version: int
    out: Path


def find(checkpoint: str) -> Target:
    policy, folder, run = locate(checkpoint)
    version = read_json(folder / "manifest.json")["version"] if folder else 0
    parent = (run or folder or policy.parent) / "eval"
    return Target(policy, version, parent / f"v{version:06d}-{policy.parent.name if not folder else 'evaluate'}")


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
    from embodied.policies.base import read_description, read_weights
    from embodied.workflows.embodied import EmbodiedLoop

    loop = EmbodiedLoop(config, cluster, learn=False)
    spec = loop.start()
    check_fits(read_description(target.policy)[1], spec)
    tensors = {name: tensor.numpy() for name, tensor in read_weights(target.policy).items()}
    loop.adopt(Weights(target.version, tensors))
    return play_and_write(loop, config, spec, out)


def play_and_write(loop, config: RunConfig, spec: EnvSpec, out: Path) -> dict:
    """The evaluation of the version that acts now: results.json, episodes.csv and videos in `out`."""
    episodes = loop.evaluate(out / "videos", config.eval.videos)
    protocol = {
        "env": config.env.model_dump(mode="json"),
        "eval": config.eval.model_dump(mode="json"),
        "backend": spec.backend,
        "max_episode_steps": spec.max_episode_steps,
    }
    results = {"policy_version": loop.version, "protocol": protocol, **summarize(episodes), "provenance": provenance()}
    write_results(out, results, episodes)
    return results
