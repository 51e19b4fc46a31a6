"""Our GRPO beside TRL's GRPOTrainer, in one run: same task, start, prompts, group size, Adam and number of steps.

    python -m venv TRL && TRL/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.19.0 "numpy>=2"
    python -m benchmarks.compare_trl --trl-python TRL/bin/python [--start RUN] [--rounds 3] [--steps 60]

Rounds go round the contestants: ours, TRL with one and two torch threads, and TRL in two processes of one thread. All
take one gradient step per batch, the mean over its tokens, without KL. The first steps of each run are left out of
tokens per second; `seconds to` counts all steps until the mean reward of the last ten batches is high enough. What
differs: TRL also counts, with no gradient, groups whose answers are all alike; ours leaves these out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import (
    RESULTS,
    ROOT,
    code_commit,
    environment,
    machine,
    markdown,
    measure,
    only_run,
    packages,
    read_metrics,
    resolved,
    train_command,
    write_json,
)
from benchmarks.learning.grpo_gain import newest, weights_digest
from benchmarks.learning.seeds import program

RECIPE, START = "sums_grpo", "sums_sft"
OURS = "ours"
TRL = {  # its ways of using two cores: torch threads and processes
    "TRL, 1 thread": (1, 1),
    "TRL, 2 threads": (2, 1),
    "TRL, 2 processes": (1, 2),
}
LEFT_OUT, OVER = 3, 10  # steps that warm up; batches whose mean reward counts
TIMEOUT_S = 1800.0
SAME_ONLY_AT = {  # options that TRL has no counterpart for, and the value at which both mean the same
    "env.name": "sums",
    "policy.engine": "transformers",
    "policy.dtype": "float32",
    "algo.name": "grpo",
    "algo.baseline": "group",
    "algo.scale": "none",
    "algo.weighting": "decision",
    "algo.epochs": 1,
    "algo.minibatch_size": None,
    "algo.kl_coef": 0.0,
    "algo.lr_schedule": "linear",
    "pipeline.schedule": "sync",
}


@dataclass(frozen=True)
class Step:
    """A gradient step with the batch before it."""

    seconds: float
    reward: float  # mean of the batch
    tokens: float  # that the policy wrote


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--trl-python", type=Path, required=True, help="the python of an environment that has TRL")
    ask.add_argument(
        "--start", type=Path, help="run or policy to begin with; else the newest of sums_sft, or a new one"
    )
    ask.add_argument("--rounds", type=int, default=3, help="runs of every contestant")
    ask.add_argument("--steps", type=int, default=60, help="gradient steps of each run")
    ask.add_argument("--reward", type=float, default=0.5, help="mean reward of ten batches that is to be reached")
    options = ask.parse_args()
    config, env, where = resolved(RECIPE), environment() | {"OMP_WAIT_POLICY": "PASSIVE"}, machine()
    start = (options.start or find_start(env)).resolve()
    found: dict[str, list[list[Step]]] = {}
    for seed in range(options.rounds):
        for who in (OURS, *TRL):
            steps, about = (
                our_steps(seed, start, options.steps, env)
                if who == OURS
                else their_steps(options.trl_python, who, trl_settings(config, seed, start, options.steps), env)
            )
            assert len(steps) == options.steps, f"{who} took {len(steps)} steps"
            found.setdefault(who, []).append(steps)
            print(f"round {seed + 1}  {who}: {tokens_per_s(steps):,.0f} tokens/s", flush=True)
    content = {
        "commit": code_commit(),
        "machine": where,
        "packages": packages(),
        "trl_packages": about["packages"],
        "config": config,
        "start": weights_digest(start),
        "reward": options.reward,
        "steps": {who: [[vars(step) for step in run] for run in runs] for who, runs in found.items()},
    }
    write_json(RESULTS / "compare_trl.json", content)
    print(report(found, options.reward))


def find_start(env: dict) -> Path:
    """The newest policy that imitated sums, made where there is none."""
    runs = ROOT / "runs" / "compare_trl"
    if newest(f"compare_trl/{START}-*") is None:
        measure(program("sft", f"recipe={START}", f"run.dir={runs}", f"run.name={START}"), env, TIMEOUT_S)
    return newest(f"compare_trl/{START}-*")


def our_steps(seed: int, start: Path, count: int, env: dict) -> tuple[list[Step], dict]:
    with tempfile.TemporaryDirectory() as folder:
        given = [f"seed={seed}", f"run.dir={folder}", f"run.start_from={start}", f"run.iterations={count}"]
        measure(train_command(RECIPE, *given, "eval.episodes=2", "eval.videos=0"), env, TIMEOUT_S)
        return steps_of(read_metrics(only_run(Path(folder)))), {}


def steps_of(rows: Sequence[dict]) -> list[Step]:
    """Our iterations; `train_s` counts them up."""
    ends = [0.0, *(row["train_s"] for row in rows)]
    return [Step(ends[at + 1] - ends[at], row["success_once"], row["engine/tokens"]) for at, row in enumerate(rows)]


def their_steps(python: Path, who: str, settings: dict, env: dict) -> tuple[list[Step], dict]:
    threads, processes = TRL[who]
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "settings.json", Path(folder) / "out"
        asked.write_text(json.dumps(settings | {"threads": threads, "processes": processes}))
        command = [str(python), str(ROOT / "benchmarks" / "trl_grpo.py"), str(asked), str(out)]
        quiet = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        measure(command, env | quiet, TIMEOUT_S)
        told = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(processes)]
    assert {one["processes"] for one in told} == {processes}
    assert {one["torch_threads"] for one in told} == {threads}
    assert {one["gradient_steps"] for one in told} == {settings["steps"]}
    return joined([one["rows"] for one in told]), told[0]


def joined(ranks: Sequence[Sequence[dict]]) -> list[Step]:
    """The steps that several processes took together, a part of each batch each."""
    return [
        Step(
            max(part["seconds"] for part in parts),
            sum(part["reward"] for part in parts) / len(parts),
            sum(part["tokens"] for part in parts),
        )
        for parts in zip(*ranks, strict=True)
    ]


def trl_settings(config: dict, seed: int, start: Path, steps: int) -> dict:
    """What trl_grpo.py is asked to do. Raises ValueError where the two would not do the same."""
    from embodied.run.checkpoints import locate

    check_comparable(config)
    algo = config["algo"]
    return {
        "model": str(locate(str(start))[0]),
        "seed": seed,
        "steps": steps,
        "batch": algo["groups"] * algo["group_size"],
        "group_size": algo["group_size"],
        "max_tokens": config["policy"]["max_tokens"],
        "lr": algo["lr"],
        "adam_betas": algo["adam_betas"],
        "adam_eps": algo["adam_eps"],
        "max_grad_norm": algo["max_grad_norm"],
        "prompts": prompts(seed, steps * algo["groups"]),
        "more": {},
    }


def check_comparable(config: dict) -> None:
    wrong = [
        f"{key}={have}, comparable only at {wanted}"
        for key, wanted in SAME_ONLY_AT.items()
        if (have := config[key.split(".")[0]][key.split(".")[1]]) != wanted
    ]
    if wrong:
        raise ValueError("this recipe cannot be compared with TRL:\n" + "\n".join(wrong))


def prompts(seed: int, count: int) -> list[dict[str, str]]:
    """The prompts of a run's first groups, in order, each with its right answer."""
    from embodied.config.recipe import load
    from embodied.core.types import EpisodeList

    config = load([f"recipe={RECIPE}"]).config.env
    env = new_env(config)
    episodes = EpisodeList(seed, "train", type(env).tasks(config))
    return [{"prompt": env.reset(episodes[group]), "answer": env.solution()} for group in range(count)]


def new_env(config: Any) -> Any:
    """The text env of these options."""
    from embodied.envs import env_class

    kind = env_class(config)
    return kind(config, kind.load(config))


def tokens_per_s(steps: Sequence[Step]) -> float:
    timed = steps[LEFT_OUT:]
    return sum(step.tokens for step in timed) / sum(step.seconds for step in timed)


def seconds_to(steps: Sequence[Step], reward: float) -> float | None:
    """Seconds of all steps until the mean of the last ten batches is so high; None: never."""
    for at in range(OVER, len(steps) + 1):
        if sum(step.reward for step in steps[at - OVER : at]) / OVER >= reward:
            return sum(step.seconds for step in steps[:at])
    return None


def report(found: dict[str, list[list[Step]]], reward: float) -> str:
    """A table of medians, and the ratios to TRL at its best."""
    speeds = {who: median(map(tokens_per_s, runs)) for who, runs in found.items()}
    reached = {who: [seconds_to(run, reward) for run in runs] for who, runs in found.items()}
    header = ["GRPO", "tokens/s", "s a step", f"seconds to {reward:.0%}"]
    rows = [
        [
            who,
            f"{speeds[who]:,.0f}",
            f"{median(step.seconds for run in runs for step in run[LEFT_OUT:]):.3f}",
            ", ".join("never" if at is None else f"{at:.1f}" for at in reached[who]),
        ]
        for who, runs in found.items()
    ]
    best = max((who for who in found if who != OURS), key=speeds.__getitem__)
    lines = [f"ours / {best}: {speeds[OURS] / speeds[best]:.2f}x tokens/s"]
    if all(at is not None for who in (OURS, best) for at in reached[who]):
        lines.append(f"{median(reached[best]) / median(reached[OURS]):.2f}x as fast to {reward:.0%}")
    return f"{markdown(header, rows)}\n\n{', '.join(lines)}"


if __name__ == "__main__":
    main()
