"""TRL's GRPOTrainer on sums, as its documentation would have you run it on a machine without a GPU.

Run by compare_trl.py in TRL's own environment: python benchmarks/trl_grpo.py SETTINGS.json OUT. Each of its processes
writes OUT.RANK; they meet in a file and talk over the loopback. Nothing of ours is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


def rewards(completions: list[str], answer: list[str], **_) -> list[float]:
    """1 for what stands before the end of the line, if it is right."""
    return [float(said.split("\n", 1)[0].strip() == right) for said, right in zip(completions, answer)]


def make_trainer(settings: dict, folder: str, rows: list[dict]):
    """A trainer that notes, in `rows`, what each step took and got."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    batch: dict = {}

    def noted(completions, completion_ids, **known) -> list[float]:
        found = rewards(completions, **known)
        batch.update(rewards=found, tokens=sum(map(len, completion_ids)))
        return found

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__) -> None:
            batch.setdefault("started", time.perf_counter())

        def on_step_end(self, *_, **__) -> None:
            now = time.perf_counter()
            reward = sum(batch["rewards"]) / len(batch["rewards"])
            rows.append({"seconds": now - batch["started"], "reward": reward, "tokens": batch["tokens"]})
            batch["started"] = now  # what lies between two steps belongs to the second

    config = GRPOConfig(
        output_dir=folder,
        max_steps=settings["steps"],
        seed=settings["seed"],
        per_device_train_batch_size=settings["batch"] // settings["processes"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_tokens"],
        learning_rate=settings["lr"],
        adam_beta1=settings["adam_betas"][0],
        adam_beta2=settings["adam_betas"][1],
        adam_epsilon=settings["adam_eps"],
        weight_decay=0.0,
        max_grad_norm=settings["max_grad_norm"],
        lr_scheduler_type="linear",
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings["more"],
    )
    torch.set_num_threads(settings["threads"])
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        reward_funcs=noted,
        args=config,
        train_dataset=Dataset.from_list(settings["prompts"]),
        callbacks=[Clock()],
    )


def train(settings: dict, rank: int, out: str) -> None:
    import torch

    torch.set_num_threads(settings["threads"])
    if (processes := settings["processes"]) > 1:
        torch.distributed.init_process_group("gloo", f"file://{out}.store", rank=rank, world_size=processes)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(settings, folder, rows)
        trainer.train()
    found = {
        "rows": rows,
        "gradient_steps": trainer.state.global_step,
        "processes": trainer.accelerator.num_processes,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "torch_threads": torch.get_num_threads(),
        "packages": {name: version(name) for name in ("trl", "torch", "transformers")},
    }
    Path(f"{out}.{rank}").write_text(json.dumps(found))


def main(asked: str, out: str) -> int:
    settings = json.loads(Path(asked).read_text())
    if "RANK" in os.environ or settings["processes"] == 1:
        train(settings, int(os.environ.get("RANK", "0")), out)
        return 0
    ranks = []
    for rank in map(str, range(settings["processes"])):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(settings["processes"])}
        alone = {
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "ACCELERATE_USE_CPU": "1",
        }
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **place, **alone}))
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
