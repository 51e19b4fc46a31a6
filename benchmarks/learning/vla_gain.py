"""What RL adds to a small VLA that imitates, from camera images of a real simulator: PushCube-v1, or a carrot
that goes on a plate (whose files docs/bridge.md names).

    python -m benchmarks.learning.vla_gain oft [--seeds 0 1] [--resume]
    python -m benchmarks.learning.vla_gain pi0
    python -m benchmarks.learning.vla_gain carrot_pi0

Every seed collects demonstrations of the scripted expert, imitates them (a small OpenVLA-OFT or Pi0, fresh weights),
and goes on with GRPO; then start and result play the same 200 held-out episodes (600 of a carrot). control is seed 0's
start once more, two iterations with lr=0. With a carrot both also play what training did not show: other photographs,
things, plates, places, wordings. Writes results/vla_CASE/start-S.json, seed-S.json, splits-S.json and control.json as
each is done; --resume leaves out what was measured with the same code, recipe and start; of a start,
which takes the longest, the same recipe is enough.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, config_hash, environment, markdown, measure, resolved
from benchmarks.learning.grpo_gain import (
    CONTROL,
    Case,
    Trained,
    describe,
    gain,
    in_order,
    newest,
    report,
    settled,
    weights_digest,
)
from benchmarks.learning.seeds import EPISODES, EVAL_SEED, ONE_CORE, TIMEOUT_S, once, parser, program, rate
from benchmarks.learning.starts import imitate


@dataclass(frozen=True)
class Model:
    sft: str  # recipes
    grpo: str
    episodes: int = EPISODES  # held out, that tell the result from the start


RANGES = ["policy.statistics={demos}"]
CONTROLLED = 0  # the seed of the control run; a process that is asked for other seeds leaves it out
MODELS = {
    "oft": Model("pushcube_sft_openvla_oft_tiny", "pushcube_grpo_openvla_oft_tiny"),
    "pi0": Model("pushcube_sft_pi0_tiny", "pushcube_grpo_pi0_tiny"),
    "carrot_oft": Model("carrot_sft_openvla_oft_tiny", "carrot_grpo_openvla_oft_tiny", 3 * EPISODES),
    "carrot_pi0": Model("carrot_sft_pi0_tiny", "carrot_grpo_pi0_tiny", 3 * EPISODES),
}
SPLITS = [
    f"PutOnPlateInScene25{name}"
    for name in (
        *("Single-v1", "VisionImage-v1", "VisionTexture03-v1", "VisionTexture05-v1", "VisionWhole03-v1"),
        *("VisionWhole05-v1", "Carrot-v1", "MultiCarrot-v1", "Plate-v1", "MultiPlate-v1", "Instruct-v1"),
        *("Position-v1", "EEPose-v1", "PositionChangeTo-v1"),
    )
]
EACH = 50  # episodes of each


def main() -> None:
    ask = parser(__doc__, (0, 1))
    ask.add_argument("model", choices=MODELS)
    options = ask.parse_args()
    name, model, env, done = options.model, MODELS[options.model], environment(), []
    folder, runs = RESULTS / f"vla_{name}", ROOT / "runs" / f"vla_{name}"
    for seed in options.seeds:
        about = {"seed": seed, "config": config_hash(resolved(model.sft)), "eval_seed": EVAL_SEED}
        made = lambda seed=seed: imitate(model.sft, runs, f"start-{seed}", seed, RANGES, env)  # noqa: E731
        result = once(folder / f"start-{seed}.json", about, options.resume, made, any_code=True)
        print(f"start {seed}: {rate(result['success_once'])}", flush=True)
    plan = [(f"seed-{seed}", seed, ()) for seed in options.seeds]
    plan += [("control", CONTROLLED, CONTROL)] if CONTROLLED in options.seeds else []
    for label, seed, changes in plan:
        start, given = find_start(runs, seed), settled(changes)
        about = {"seed": seed, "config": config_hash(resolved(model.grpo, *given)), "start": weights_digest(start)}
        trained = Trained(Case(model.grpo, (), ""), runs, label, seed, start, given, model.episodes)
        result = once(folder / f"{label}.json", about, options.resume, lambda trained=trained: gain(trained, env))
        done.append((label, result))
        print(describe(label, result), flush=True)
        if name.startswith("carrot") and label != "control":
            played = lambda trained=trained: splits(trained, env)  # noqa: E731
            about |= {"after": weights_digest(newest_run(trained))}
            print(markdown(*table(once(folder / f"splits-{seed}.json", about, options.resume, played))), flush=True)
    print(report(done))


def newest_run(asked: Trained) -> Path:
    return newest(f"{asked.runs.name}/{asked.name}-*")


def splits(asked: Trained, env: dict) -> dict:
    """Success of start and result at each of the splits."""
    run = newest_run(asked)
    told = (f"recipe={asked.case.recipe}", f"run.dir={run / 'splits'}", f"env.task=[{','.join(SPLITS)}]")
    count = (f"eval.episodes={EACH * len(SPLITS)}", f"eval.seed={EVAL_SEED}", "eval.videos=0")
    measure(program("evaluate", f"checkpoint=[{asked.start},{run}]", *told, *count, *ONE_CORE), env, TIMEOUT_S)
    found = [json.loads((folder / "results.json").read_text()) for folder in in_order(run / "splits" / "compare")]
    return {
        task: dict(zip(("before", "after"), (one["per_task"][task]["success_once"] for one in found), strict=True))
        for task in SPLITS
    }


def table(found: dict) -> tuple[list[str], list[list[str]]]:
    rows = [[task, rate(found[task]["before"]), rate(found[task]["after"])] for task in SPLITS]
    return ["task", "start", "after GRPO"], rows


def find_start(runs: Path, seed: int) -> Path:
    found = newest(f"{runs.name}/start-{seed}-*")
    if found is None:
        raise SystemExit(f"{runs}/start-{seed}-* does not exist any more; measure it again without --resume")
    return found


if __name__ == "__main__":
    main()
