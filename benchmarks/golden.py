"""Are losses unchanged bit for bit after a change of the code? python -m benchmarks.golden [--write] [--only NAME ...]

Trains a few iterations and compares losses, returns and weights with an earlier commit's in results/golden.json. The
recipes are copies in benchmarks/recipes, so that shipped ones may change. Times, and numbers that the earlier commit
did not log, are left out. Only valid for this kind of machine: another number of cores, another processor or other
packages change the last digits.

The entries of NEAR are not stored: they are compared with another entry of today, whose weights they must have but for
rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from benchmarks.common import PINNED, RESULTS, code_commit, machine, only_run, packages, read_metrics

FILE = RESULTS / "golden.json"
ONE_OF_EACH = 'placement={"sim,policy": "cpu:0", learner: "cpu:1"}'
WITH_CRITIC = 'placement={"sim,policy": "cpu:0", "learner,critic": "cpu:1"}'
WITH_JUDGE = 'placement={"sim,policy": "cpu:0", "learner,reward,judge": "cpu:1"}'
TWO_LEARNERS = 'placement={"sim,policy": "cpu:0", learner: "cpu:0-1*2"}'
ALL_APART = 'placement={sim: "cpu:0", policy: "cpu:1", learner: "cpu:0"}'
TWO_OF_EACH = 'placement={"sim,policy": "cpu:0-1*2", learner: "cpu:0-1*2"}'
ASYNC = ("pipeline.schedule=async", "run.iterations=4")
START = "sums_sft"  # the entry with whose policy the text recipes begin
# With a small adam_eps, Adam steps as far whatever a rounding error is divided by.
EXACT = ("policy.dtype=float64", "algo.adam_eps=0.1", "algo.lr=0.01", "algo.max_grad_norm=null", "algo.epochs=1")
# A GPT-2, since Llama's norms are in float32 whatever the policy's type; letters reward an untrained policy, too.
LETTERS = ("env.name=reverse_text", "env.task=letters", "policy.max_tokens=8", "policy.preset=tiny_gpt2")
LETTERS += ("env.num_envs=128", "algo.groups=16", "run.start_from=null")
NEAR_ENOUGH = 1e-10  # of the largest weight of a tensor


@dataclass(frozen=True)
class Entry:
    recipe: str
    overrides: tuple[str, ...] = ()
    starts: bool = False  # with the policy of START
    command: str = "train"


@dataclass(frozen=True)
class Near:
    entry: str
    overrides: tuple[str, ...]


ENTRIES = {
    "pointmass_ppo": Entry("pointmass_ppo", (TWO_OF_EACH,)),
    "pointmass_grpo": Entry("pointmass_grpo", (TWO_OF_EACH,)),
    "pointmass_ppo_openvla_tiny": Entry("pointmass_ppo_openvla_tiny"),
    "pointmass_ppo_pi0_tiny": Entry("pointmass_ppo_pi0_tiny"),
    "pointmass_grpo_openvla_oft_tiny": Entry("pointmass_grpo_openvla_oft_tiny"),
    "maniskill_ppo": Entry("maniskill_ppo"),
    "maniskill_grpo": Entry("maniskill_grpo"),
    "maniskill_ppo_rgb_privileged": Entry("maniskill_ppo_rgb_privileged", ("env.num_envs=16",)),
    "libero_ppo": Entry("libero_ppo"),
    "maniskill_ppo_disaggregated": Entry("maniskill_ppo", (ALL_APART,)),
    "maniskill_ppo_async": Entry("maniskill_ppo", (ONE_OF_EACH, *ASYNC)),
    "sums_sft": Entry("sums_sft", (ONE_OF_EACH, "sft.episodes=7200", "sft.steps=null"), command="sft"),
    "sums_grpo": Entry("sums_grpo", (ONE_OF_EACH,), starts=True),
    "sums_grpo_async": Entry("sums_grpo", (ONE_OF_EACH, *ASYNC), starts=True),
    "sums_grpo_two_learners": Entry("sums_grpo", (TWO_LEARNERS,), starts=True),
    "sums_ppo_critic": Entry("sums_ppo_critic", (WITH_CRITIC,), starts=True),
    "sums_judge": Entry("sums_judge", (WITH_JUDGE,), starts=True),
    "pointmass_grpo_exact": Entry(
        "pointmass_grpo", (ONE_OF_EACH, *EXACT, "env.dtype=float64", "algo.minibatch_size=null")
    ),
    "text_grpo_exact": Entry("sums_grpo", (ONE_OF_EACH, *EXACT, *LETTERS)),
}
PERIODIC = ("pipeline.schedule=periodic",)
NEAR = {  # with more overrides; two engines share the prompts by their room, so the clock decides who rounds with whom
    "pointmass_grpo_periodic": Near("pointmass_grpo_exact", PERIODIC),
    "text_grpo_periodic": Near("text_grpo_exact", PERIODIC),
    "text_grpo_two_of_each": Near("text_grpo_exact", (TWO_OF_EACH,)),
}
TIMES = re.compile(r"time/|memory/|train_s|faults/|.*_per_s$|text/mfu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make today's numbers the ones to keep")
    parser.add_argument("--only", nargs="*", default=[*ENTRIES, *NEAR], choices=[*ENTRIES, *NEAR], metavar="NAME")
    options = parser.parse_args()
    stored = json.loads(FILE.read_text())
    kept = stored["recipes"]
    with tempfile.TemporaryDirectory() as folder:
        learned = {name: learned_by(name, Path(folder)) for name in in_order(options.only)}
        apart = {name: distance(Path(folder), name, NEAR[name].entry) for name in learned if name in NEAR}
    own = {name: numbers for name, numbers in learned.items() if name in ENTRIES}
    if options.write:
        commit = code_commit()
        kept |= {name: {"commit": commit} | numbers for name, numbers in own.items()}
        about = {"machine": machine(), "packages": packages()}
        ordered = {name: kept[name] for name in ENTRIES if name in kept}
        FILE.write_text(json.dumps({"about": about, "recipes": ordered}, indent=1) + "\n")
        return
    problems = {name: difference(kept[name], known(numbers, kept[name])) for name, numbers in own.items()}
    for name, far in apart.items():
        print(f"{name}: {far:.1e} from {NEAR[name].entry}")
        problems[name] = "" if far < NEAR_ENOUGH else f"{far:.1e} is more than {NEAR_ENOUGH:.0e}"
    problems = {name: problem for name, problem in problems.items() if problem}
    for name, problem in problems.items():
        print(f"{name}: {problem}")
    if problems and (here := machine()["cpu"]) != (there := stored["about"]["machine"]["cpu"]):
        print(f"the stored numbers are of another processor: {there}, and this is {here}")
    print(f"{len(learned) - len(problems)} of {len(learned)} recipes learn what they did, bit for bit")
    raise SystemExit(bool(problems))


def in_order(asked: Collection[str]) -> list[str]:
    """The asked entries, with those that they need, which come first."""
    wanted = {*asked, *(NEAR[name].entry for name in asked if name in NEAR)}
    starts = {START for name in wanted if name in ENTRIES and ENTRIES[name].starts}
    return [name for name in (*ENTRIES, *NEAR) if name in wanted | starts]


def command_of(name: str, folder: Path) -> list[str]:
    """Trains an entry in a folder of its own under `folder`."""
    near = NEAR.get(name, Near(name, ()))
    entry = ENTRIES[near.entry]
    short = ["run.eval_every=null", "eval.episodes=2", "eval.videos=0", f"run.dir={folder / name}"]
    short += ["run.iterations=3"] * (entry.command == "train")
    short += [f"run.start_from={only_run(folder / START)}"] if entry.starts else []
    words = {word.partition("=")[0]: word for word in (*short, *entry.overrides, *near.overrides)}
    recipe = f"recipe={PINNED / entry.recipe}.yaml"
    return [sys.executable, "-m", f"embodied.{entry.command}", recipe, *words.values()]


def learned_by(name: str, folder: Path) -> dict:
    """Every iteration's numbers except times, and the checksum of the final weights."""
    subprocess.run(command_of(name, folder), check=True, timeout=900, stdout=subprocess.DEVNULL)
    return {
        "metrics": [
            {key: line[key] for key in sorted(line) if not TIMES.match(key)}
            for line in read_metrics(only_run(folder / name))
        ],
        "weights": hashlib.sha256(weights_of(folder / name).read_bytes()).hexdigest(),
    }


def weights_of(parent: Path) -> Path:
    return max(only_run(parent).glob("checkpoints/v*/policy/model.safetensors"))


def distance(folder: Path, name: str, other: str) -> float:
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    ours, theirs = (load_file(weights_of(folder / each)) for each in (name, other))
    return max(float(np.abs(ours[key] - array).max() / (np.abs(array).max() or 1.0)) for key, array in theirs.items())


def known(now: dict, kept: dict) -> dict:
    """The numbers of a recipe, without numbers that the stored ones lack."""
    names = {name for line in kept["metrics"] for name in line}
    return now | {"metrics": [{name: line[name] for name in line if name in names} for line in now["metrics"]]}


def difference(kept: dict, now: dict) -> str:
    """What has changed; "" if nothing has."""
    if len(kept["metrics"]) != len(now["metrics"]):
        return f"there are {len(now['metrics'])} iterations, and there were {len(kept['metrics'])}"
    for iteration, (before, after) in enumerate(zip(kept["metrics"], now["metrics"])):
        if keys := [key for key in before | after if before.get(key) != after.get(key)]:
            first = keys[0]
            return f"iteration {iteration}: {first} was {before.get(first)} and is {after.get(first)} (also {keys[1:]})"
    return "same metrics, other weights" if kept["weights"] != now["weights"] else ""


if __name__ == "__main__":
    main()
