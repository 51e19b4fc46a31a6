"""What an update saves that looks at images once for all its epochs, where what sees them is frozen.

Forward and backward passes over one batch of decisions, epoch by epoch, with what was seen kept and without. Rounds
alternate; seconds are of one thread's CPU time.

    python -m benchmarks.frozen_towers
    python -m benchmarks.frozen_towers --epochs 8
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from time import process_time

import numpy as np
import torch

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json
from embodied.core.arrays import text_arrays
from embodied.core.types import ActionSpec, EnvSpec
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model
from embodied.learners.train_batch import RankBatch, frozen_features
from embodied.policies import make_policy
from embodied.policies.config import OpenVLAConfig, OpenVLAOFTConfig, Pi0Config

SIDE, NUMBERS, FELT = 64, 7, 8
SPEC = EnvSpec(ActionSpec(NUMBERS), state_dim=FELT, images={"top": (SIDE, SIDE, 3)}, instruction=True)
FAMILIES = {
    "openvla": OpenVLAConfig(name="openvla", train="language"),
    "openvla_oft": OpenVLAOFTConfig(name="openvla_oft", train="language"),
    "pi0": Pi0Config(name="pi0", train="expert"),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--items", type=int, default=32, help="decisions of the batch")
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    found = {name: compare(config, given.items, given.epochs, given.rounds) for name, config in FAMILIES.items()}
    write_json(
        RESULTS / "frozen_towers.json",
        {**found, **vars(given), "commit": code_commit(), "packages": packages(), **machine()},
    )
    print(markdown([f"{given.epochs} epochs", "each looks", "looked once", "saved", "kept a decision"], table(found)))


def table(found: dict[str, dict]) -> list[list[str]]:
    rows = []
    for name, one in found.items():
        times = [f"{one[key] * 1e3:.0f} ms" for key in ("again", "once")]
        rows.append([name, *times, f"{one['saved']:.0%}", f"{one['kept_bytes'] / 1e3:.0f} kB"])
    return rows


def compare(config, items: int, epochs: int, rounds: int) -> dict[str, float]:
    policy = make_policy(config, SPEC, 0).eval()
    model, batch = Model(policy, LearnerConfig()), batch_of(policy, items)
    seconds: dict[str, list[float]] = {"again": [], "once": []}
    for _ in range(rounds + 1):
        for name, times in seconds.items():
            started = process_time()
            known = frozen_features(model, batch, items) if name == "once" else {}
            learn(model, replace(batch, replay=batch.replay | known), epochs)
            times.append(process_time() - started)
    again, once = (median(times[1:]) for times in seconds.values())
    known = frozen_features(model, batch, items)
    kept = sum(tensor.nbytes for tensor in known.values()) / items
    return {"again": again, "once": once, "saved": 1 - once / again, "kept_bytes": kept}


def learn(model: Model, batch: RankBatch, epochs: int) -> None:
    for _ in range(epochs):
        scores = model.score(batch.inputs(torch.arange(len(batch))))
        (scores.logprobs.mean() + scores.values.mean()).backward()


def batch_of(policy, rows: int) -> RankBatch:
    draw = np.random.default_rng(0)
    obs = {
        "images": {name: draw.integers(0, 256, (rows, *size), np.uint8) for name, size in SPEC.images.items()},
        "state": draw.normal(size=(rows, FELT)),
        "instruction": ["pick up the red cup and put it on the plate"] * rows,
    }
    spec = policy.noise_spec()
    noise = draw.random((rows, spec.width)) if spec.kind == "uniform" else draw.normal(size=(rows, spec.width))
    output = policy.act(obs, noise)
    played = {"mask": np.ones(output.actions.shape[:2], bool), "current": np.ones(rows, bool), "of": np.arange(rows)}
    arrays = {"actions": output.actions, "logprobs": output.logprobs} | played
    obs["images"] = {name: torch.from_numpy(image) for name, image in obs["images"].items()}
    obs["state"] = torch.from_numpy(obs["state"])
    replay = {name: torch.from_numpy(array) for name, array in output.replay.items()}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return RankBatch(obs=text_arrays(obs), replay=replay, numbers=np.arange(rows), **tensors)


if __name__ == "__main__":
    main()
