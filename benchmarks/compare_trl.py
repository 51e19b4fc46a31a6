"""Our GRPO beside TRL's GRPOTrainer on sums: tokens per second, and seconds until half of the answers are right.

    .venv/bin/python -m pip install --target TRL --no-deps trl==1.16.0 datasets==5.2.0 dill==0.3.8 \\
        multiprocess==0.70.16 xxhash pandas==2.3.3 pytz
    python -m benchmarks.compare_trl --packages TRL [--start RUN] [--rounds 3] [--steps 60] [--processes 1 2]

Same start, prompts, group size, Adam and number of steps; a gradient step for each batch, the mean over its tokens,
without KL. All take turns, a run each; processes have one torch thread. The first steps of a run do not count as speed.
What differs: TRL also learns from groups whose answers are all alike, which have no gradient; ours leaves these out,
as shipped, and keeps them in runs of their own (algo.filter=none).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common

RECIPE, START, OURS, PEER = "sums_grpo", "sums_sft", "ours", "--peer"
ALL_GROUPS = "ours with all groups"
NEEDS = ("trl==1.16.0", "datasets==5.2.0", "dill==0.3.8", "multiprocess==0.70.16", "xxhash", "pandas==2.3.3", "pytz")
# What TRL has no option for, at the value at which both do the same.
ALIKE = ("algo.baseline=group", "algo.scale=none", "algo.weighting=decision", "algo.epochs=1", "algo.kl_coef=0")
LEFT_OUT, OVER, ENOUGH, TIMEOUT_S = 3, 10, 0.5, 3600.0  # steps that warm up; batches whose mean reward counts
HEADER = ["GRPO", "tokens/s", "seconds to half", "times as fast, by round"]
Step = tuple[float, float, float]  # of a gradient step with its batch: seconds, mean reward, tokens written


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--packages", type=Path, help="folder that TRL was installed in, with --target")
    ask.add_argument("--start", type=Path, help=f"run or policy to begin with; else {START} runs first")
    ask.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    ask.add_argument("--steps", type=int, default=60, help="gradient steps of each run")
    ask.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="of TRL")
    asked = ask.parse_args()
    env = common.peer_environment(asked.packages, NEEDS)
    print(common.machine(), common.code_commit(), NEEDS, flush=True)
    found: dict[str, list[list[Step]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = (asked.start or imitate(Path(folder))).resolve()
        for seed in range(asked.rounds):
            found.setdefault(OURS, []).append(our_run(start, seed, asked.steps))
            found.setdefault(ALL_GROUPS, []).append(our_run(start, seed, asked.steps, "algo.filter=none"))
            for count in asked.processes:
                found.setdefault(f"TRL, {count} processes", []).append(peer_run(start, seed, asked.steps, count, env))
            speeds = (f"{who} {tokens_per_s(runs[-1]):,.0f}" for who, runs in found.items())
            print(f"round {seed + 1}: " + ", ".join(speeds), flush=True)
    print(table(found))


def imitate(folder: Path) -> Path:
    command = [sys.executable, "-m", "embodied.sft", f"recipe={START}", f"run.dir={folder}", "eval.videos=0"]
    common.measure(command, common.environment(), TIMEOUT_S)
    return common.only_run(folder)


def our_run(start: Path, seed: int, count: int, *more: str) -> list[Step]:
    with tempfile.TemporaryDirectory() as folder:
        given = [f"seed={seed}", f"run.dir={folder}", f"run.start_from={start}", f"run.iterations={count}"]
        command = common.train_command(RECIPE, *ALIKE, *given, *more, "eval.episodes=2", "eval.videos=0")
        common.measure(command, common.environment(), TIMEOUT_S)
        return steps_of(common.read_metrics(common.only_run(Path(folder))))


def steps_of(rows: Sequence[dict]) -> list[Step]:
    """Our iterations; `train_s` counts them up."""
    ends = [0.0, *(row["train_s"] for row in rows)]
    return [(ends[i + 1] - ends[i], row["success_once"], row["engine/tokens"]) for i, row in enumerate(rows)]


def peer_run(start: Path, seed: int, count: int, processes: int, env: dict[str, str]) -> list[Step]:
    from embodied.run.run_folder import locate

    config = common.resolved(RECIPE, *ALIKE)
    asked = {"model": str(locate(str(start))[0]), "seed": seed, "steps": count, "processes": processes}
    asked |= {"algo": config["algo"], "max_tokens": config["policy"]["max_tokens"]}
    asked["prompts"] = prompts(seed, count * config["algo"]["groups"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asked.json").write_text(json.dumps(asked))
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
        common.measure([sys.executable, "-m", "benchmarks.compare_trl", PEER, folder], env | quiet, TIMEOUT_S)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    assert all(len(rank) == count for rank in ranks), f"TRL took {[*map(len, ranks)]} steps, ours {count}"
    return [joined(parts) for parts in zip(*ranks)]


def joined(parts: Sequence[Step]) -> Step:
    """A step that several processes took together, with a part of the batch each."""
    seconds, rewards, tokens = zip(*parts)
    return max(seconds), sum(rewards) / len(rewards), sum(tokens)


def prompts(seed: int, count: int) -> list[dict[str, str]]:
    """The prompts of a run's first groups, in order, each with its right answer."""
    from embodied.config.recipe import load
    from embodied.core.types import EpisodeList
    from embodied.envs import env_class

    config = load([f"recipe={RECIPE}"]).config.env
    kind = env_class(config)
    env, episodes = kind(config, kind.load(config)), EpisodeList(seed, "train", kind.tasks(config))
    return [{"prompt": env.reset(episode), "answer": env.solution()} for episode in episodes.first(count)]


def tokens_per_s(steps: Sequence[Step]) -> float:
    seconds, _, tokens = zip(*steps[LEFT_OUT:])
    return sum(tokens) / sum(seconds)


def seconds_to_half(steps: Sequence[Step]) -> float | None:
    """Seconds of all steps until half of the last ten batches' answers were right; None: never."""
    seconds, rewards, _ = zip(*steps)
    enough = (at for at in range(OVER, len(steps) + 1) if sum(rewards[at - OVER : at]) >= ENOUGH * OVER)
    return next((sum(seconds[:at]) for at in enough), None)


def table(found: dict[str, list[list[Step]]]) -> str:
    """Medians; the last column is beside TRL with its best number of processes, round by round."""
    speeds = {who: [tokens_per_s(run) for run in runs] for who, runs in found.items()}
    best = max((who for who in found if who.startswith("TRL")), key=lambda who: median(speeds[who]))
    rows = []
    for who, runs in found.items():
        reached = ("never" if at is None else f"{at:.1f}" for at in map(seconds_to_half, runs))
        ratios = sorted(one / other for one, other in zip(speeds[who], speeds[best]))
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([who, f"{median(speeds[who]):,.0f}", ", ".join(reached), spread])
    return common.markdown(HEADER, rows)


def peer(folder: Path) -> None:
    """TRL, in processes of its own that meet in a file and talk over the loopback; each writes its steps."""
    asked = json.loads((folder / "asked.json").read_text())
    if "RANK" in os.environ or asked["processes"] == 1:
        rank = int(os.environ.get("RANK", "0"))
        (folder / f"{rank}.json").write_text(json.dumps(train(asked, rank, folder)))
        return
    place = {"WORLD_SIZE": str(asked["processes"]), "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for, and not used: ranks meet in a file
    command = [sys.executable, "-m", "benchmarks.compare_trl", PEER, str(folder)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(asked["processes"])
    ]
    if sum(abs(rank.wait(TIMEOUT_S)) for rank in ranks):
        raise SystemExit("a process of TRL failed")


def train(asked: dict, rank: int, folder: Path) -> list[Step]:
    """TRL's GRPOTrainer, as its documentation would have you run it on a machine without a GPU."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps, algo, count = [], asked["algo"], asked["processes"]
    batch: dict[str, Any] = {}

    def rewards(completions: list[str], completion_ids: list, answer: list[str], **_: Any) -> list[float]:
        batch.update(rewards=right(completions, answer), tokens=sum(map(len, completion_ids)))
        return batch["rewards"]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            batch.setdefault("began", time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            steps.append((now - batch["began"], sum(batch["rewards"]) / len(batch["rewards"]), batch["tokens"]))
            batch["began"] = now  # what lies between two steps belongs to the second

    torch.set_num_threads(1)
    if count > 1:
        torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    same = {"adam_epsilon": algo["adam_eps"], "max_grad_norm": algo["max_grad_norm"], "learning_rate": algo["lr"]}
    same |= dict(zip(("adam_beta1", "adam_beta2"), algo["adam_betas"])) | {"weight_decay": 0.0, "beta": 0.0}
    same |= {"loss_type": "dapo", "scale_rewards": "none", "lr_scheduler_type": "linear", "shuffle_dataset": False}
    same |= {"num_generations": algo["group_size"], "max_completion_length": asked["max_tokens"]}
    same |= {"ddp_find_unused_parameters": False}  # every parameter has a gradient: searching costs TRL time
    quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    config = GRPOConfig(
        str(folder / f"trl-{rank}"),
        max_steps=asked["steps"],
        seed=asked["seed"],
        per_device_train_batch_size=algo["groups"] * algo["group_size"] // count,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        **same,
        **quiet,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked["model"], padding_side="left"),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(asked["prompts"]),
        callbacks=[Clock()],
    ).train()
    return steps


def right(completions: list[str], answers: list[str]) -> list[float]:
    """1 for what stands before the end of the line, if it is right."""
    return [float(said.split("\n", 1)[0].strip() == answer) for said, answer in zip(completions, answers)]


if __name__ == "__main__":
    peer(Path(sys.argv[2])) if sys.argv[1:2] == [PEER] else main()
