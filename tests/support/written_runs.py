"""Folders of runs as training leaves them, small, for pages that read them."""

import json

from embodied.core.types import EpisodeResult
from embodied.records.results import write_results
from embodied.records.success_stats import summarize
from embodied.run.run_group import Member, RunGroup


def played(successes, task="reach", seed=0, **more):
    """An episode of each outcome."""
    return [
        EpisodeResult(seed + i, task, -1, seed + i, 10, float(bool(success)), bool(success), bool(success), **more)
        for i, success in enumerate(successes)
    ]


def write_evaluation(folder, episodes, version=5, videos=(), **protocol):
    protocol = {"name": "toy-v1", "env": {"name": "toy"}} | protocol
    results = {"policy_version": version, "protocol": protocol, **summarize(episodes), "provenance": {}}
    write_results(folder, results, episodes)
    for name in videos:
        (folder / "videos").mkdir(exist_ok=True)
        (folder / "videos" / name).write_bytes(b"m" * 10)
    return folder


def write_run(folder, episodes=(), rate=0.5, slow=2.0, config="algo: {name: ppo}", commit="abc", videos=(), **info):
    """A run of five iterations whose training success rises to `rate`, with an evaluation of these episodes."""
    folder.mkdir(parents=True)
    made = {"commit": commit, "packages": {}, "host": "desk", "platform": "Linux", "cores": 2}
    info = {"state": "finished", "started": "2026-01-01T10:20:30+00:00", "provenance": made} | info
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "config.yaml").write_text(config)
    rows = [
        {"iteration": i, "policy_version": i, "env_steps": 100 * i, "train_s": slow * i, "steps_per_s": 50.0}
        | {"success_once": rate * i / 5, "success_at_end": rate * i / 5, "return": rate * i, "recent_episodes": 20}
        for i in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if episodes:
        protocol = {"env": {"name": "toy", "num_envs": len(folder.name)}}
        write_evaluation(folder / "eval" / "v000005", episodes, videos=videos, **protocol)
    return folder


def write_group(parent, rates, swept="algo.lr", tasks=("reach",)):
    """A group of runs with these final rates: by setting, one of each seed; None has not begun."""
    members = []
    for value, of_seeds in rates.items():
        for seed, rate in enumerate(of_seeds):
            name, config = (
                f"{value}-{seed}",
                f"seed: {seed}\nrun: {{name: n{seed}}}\nalgo: {{lr: {value}, name: ppo}}\n",
            )
            if rate is not None:
                episodes = [one for task in tasks for one in played([i < 10 * rate for i in range(10)], task)]
                write_run(parent / name, episodes, rate, config=config)
            folder = f"../{name}" if rate is not None else ""
            members.append(Member({swept: value} if swept else {}, seed, "mark", folder))
    keys, command = (swept,) if swept else (), ("embodied.sweep", "x=1")
    group = RunGroup(parent / "group", "toy", {"recipe": "toy"}, keys, tuple(members), command)
    group.folder.mkdir(parents=True)
    group.write()
    return group
