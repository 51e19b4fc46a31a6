"""What RL adds to a small VLA that imitates, from camera images of a real simulator: PushCube-v1, or a carrot
that goes on a plate (whose files docs/bridge.md names).

    python -m benchmarks.learning.vla_gain oft [--seeds 0 1] [--resume]
    python -m benchmarks.learning.vla_gain pi0
    python -m benchmarks.learning.vla_gain carrot_pi0

Every seed collects demonstrations of the scripted expert, imitates them (a small OpenVLA-OFT or Pi0, fresh weights),
and goes on with GRPO; then start and result play the same 200 held-out episodes. control is
seed 0's start once more, two iterations with lr=0. Writes results/vla_CASE/start-S.json, seed-S.json and
control.json as each is done; --resume leaves out what was measured with the same code, recipe and start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, config_hash, environment, resolved
from benchmarks.learning.grpo_gain import (
    CONTROL,
    Case,
    Trained,
    describe,
    gain,
    newest,
    report,
    settled,
    weights_digest,
)
from benchmarks.learning.seeds import EVAL_SEED, once, parser, rate
from benchmarks.learning.starts import imitate


@dataclass(frozen=True)
class Model:
    sft: str  # recipes
    grpo: str


RANGES = ["policy.statistics={demos}"]
CONTROLLED = 0  # the seed of the control run; a process that is asked for other seeds leaves it out
MODELS = {
    "oft": Model("pushcube_sft_openvla_oft_tiny", "pushcube_grpo_openvla_oft_tiny"),
    "pi0": Model("pushcube_sft_pi0_tiny", "pushcube_grpo_pi0_tiny"),
    "carrot_oft": Model("carrot_sft_openvla_oft_tiny", "carrot_grpo_openvla_oft_tiny"),
    "carrot_pi0": Model("carrot_sft_pi0_tiny", "carrot_grpo_pi0_tiny"),
}


def main() -> None:
    ask = parser(__doc__, (0, 1))
    ask.add_argument("model", choices=MODELS)
    options = ask.parse_args()
    name, model, env, done = options.model, MODELS[options.model], environment(), []
    folder, runs = RESULTS / f"vla_{name}", ROOT / "runs" / f"vla_{name}"
    for seed in options.seeds:
        about = {"seed": seed, "config": config_hash(resolved(model.sft)), "eval_seed": EVAL_SEED}
        made = lambda seed=seed: imitate(model.sft, runs, f"start-{seed}", seed, RANGES, env)  # noqa: E731
        result = once(folder / f"start-{seed}.json", about, options.resume, made)
        print(f"start {seed}: {rate(result['success_once'])}", flush=True)
    plan = [(f"seed-{seed}", seed, ()) for seed in options.seeds]
    plan += [("control", CONTROLLED, CONTROL)] if CONTROLLED in options.seeds else []
    for label, seed, changes in plan:
        start, given = find_start(runs, seed), settled(changes)
        about = {"seed": seed, "config": config_hash(resolved(model.grpo, *given)), "start": weights_digest(start)}
        trained = Trained(Case(model.grpo, (), ""), runs, label, seed, start, given)
        result = once(folder / f"{label}.json", about, options.resume, lambda trained=trained: gain(trained, env))
        done.append((label, result))
        print(describe(label, result), flush=True)
    print(report(done))


def find_start(runs: Path, seed: int) -> Path:
    found = newest(f"{runs.name}/start-{seed}-*")
    if found is None:
        raise SystemExit(f"{runs}/start-{seed}-* does not exist any more; measure it again without --resume")
    return found


if __name__ == "__main__":
    main()
