"""Are losses unchanged bit for bit after a change of the code? python -m benchmarks.golden [--write]

Trains a few iterations of shipped recipes on two learners and compares losses, returns and weights with an earlier
commit's in results/golden.json. Times, and numbers that the earlier commit did not log, are left out. Only valid for
this kind of machine: another number of cores, another processor or other packages change the last digits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS, code_commit, machine, packages, train_command

FILE = RESULTS / "golden.json"
TWO_LEARNERS = """placement={"sim,policy": "cpu:0-1*2", learner: "cpu:0-1*2"}"""  # elsewhere this is the default
RECIPES = {
    "pointmass_ppo": (TWO_LEARNERS,),
    "pointmass_grpo": (TWO_LEARNERS,),
    "pointmass_ppo_openvla_tiny": (),
    "pointmass_ppo_pi0_tiny": (),
    "pointmass_grpo_openvla_oft_tiny": (),
    "maniskill_ppo": (),
    "maniskill_grpo": (),
    "maniskill_ppo_rgb_privileged": ("env.num_envs=16",),
    "libero_ppo": (),
}
TIMES = ("time/", "memory/", "train_s", "steps_per_s", "faults/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make today's numbers the ones to keep")
    parser.add_argument("--only", nargs="*", default=list(RECIPES), choices=RECIPES)
    options = parser.parse_args()
    learned = {recipe: learned_by(recipe) for recipe in options.only}
    kept = json.loads(FILE.read_text())["recipes"]
    if options.write:
        about = {"commit": code_commit(), "machine": machine(), "packages": packages()}
        FILE.write_text(json.dumps({"about": about, "recipes": kept | learned}, indent=1) + "\n")
        return
    differing = [recipe for recipe, numbers in learned.items() if known(numbers, kept[recipe]) != kept[recipe]]
    for recipe in differing:
        print(f"{recipe}: {difference(kept[recipe], known(learned[recipe], kept[recipe]))}")
    print(f"{len(learned) - len(differing)} of {len(learned)} recipes learn what they did, bit for bit")
    raise SystemExit(bool(differing))


def learned_by(recipe: str) -> dict:
    """Every iteration's numbers except times, and the checksum of the final weights."""
    with tempfile.TemporaryDirectory() as folder:
        short = ("run.iterations=3", "run.eval_every=null", "eval.episodes=2", "eval.videos=0")
        command = train_command(recipe, *short, *RECIPES[recipe], f"run.dir={folder}")
        subprocess.run(command, check=True, timeout=900, stdout=subprocess.DEVNULL)
        (run,) = Path(folder).iterdir()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        weights = max(run.glob("checkpoints/v*/policy/model.safetensors"))
        return {
            "metrics": [{key: line[key] for key in sorted(line) if not key.startswith(TIMES)} for line in lines],
            "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
        }


def known(now: dict, kept: dict) -> dict:
    """The numbers of a recipe, without numbers that the stored ones lack."""
    names = {name for line in kept["metrics"] for name in line}
    return now | {"metrics": [{name: line[name] for name in line if name in names} for line in now["metrics"]]}


def difference(kept: dict, now: dict) -> str:
    for iteration, (before, after) in enumerate(zip(kept["metrics"], now["metrics"])):
        if keys := [key for key in before | after if before.get(key) != after.get(key)]:
            first = keys[0]
            return f"iteration {iteration}: {first} was {before.get(first)} and is {after.get(first)} (also {keys[1:]})"
    return "same metrics, other weights" if kept["weights"] != now["weights"] else "other iterations"


if __name__ == "__main__":
    main()
