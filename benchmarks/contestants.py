"""The two sides of compare_sb3.py: one run of each, and how fast it was."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT, Cost, measure, only_run, read_metrics, train_command
from benchmarks.peers import peers_python
from benchmarks.sb3_settings import gradient_steps, sb3_settings

RECIPE = "maniskill_ppo"
# What stable-baselines3's side does: ManiSkill's own physics and observations, episodes that end with a success.
ALIKE = ("env.after_success=0", "env.retries=0", "env.relative_positions=false", "env.solver_iterations=null")
OURS, SHIPPED = "ours", "shipped"  # alike, and the recipe as a user gets it
OPTIONS = {OURS: ALIKE, SHIPPED: ()}
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Speed:
    """One run. Seconds are per iteration, the first left out."""

    steps_per_s: float
    rollout_s: float
    update_s: float
    wall_s: float  # of the whole command: start-up, training, closing
    peak_bytes: int
    parameters: int


def our_run(
    who: str, seed: int, steps: int, env: dict, evaluation: dict | None
) -> tuple[list[dict], list[dict], int, Cost]:
    """Rows of metrics, results of evaluations, number of parameters, cost."""
    with tempfile.TemporaryDirectory() as folder:
        told = [f"eval.episodes={evaluation['episodes']}"] if evaluation else ["eval.episodes=1"]
        told += [f"run.eval_every={evaluation['every']}"] if evaluation else []
        where = [f"run.dir={folder}", f"run.env_steps={steps}", f"seed={seed}", "eval.videos=0"]
        cost = measure(train_command(RECIPE, *OPTIONS[who], *where, *told), env, TIMEOUT_S)
        run = only_run(Path(folder))
        found = [json.loads(path.read_text()) for path in run.glob("eval/*/results.json")]
        return read_metrics(run), found, num_parameters(run), cost


def sb3_run(settings: dict, env: dict) -> tuple[dict, Cost]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        script = [str(peers_python()), str(ROOT / "benchmarks" / "sb3_ppo.py")]
        cost = measure([*script, json.dumps(settings), str(out)], env, TIMEOUT_S)
        return json.loads(out.read_text()), cost


def num_parameters(run: Path) -> int:
    """What is learned: the normaliser's moments are only counted."""
    from safetensors import safe_open

    newest = max(run.glob("checkpoints/v*/policy/model.safetensors"))
    with safe_open(newest, "np") as tensors:
        learned = [name for name in tensors.keys() if not name.startswith("normalizer.")]  # noqa: SIM118
        return sum(tensors.get_tensor(name).size for name in learned)


def our_speed(rows: list[dict], parameters: int, cost: Cost) -> Speed:
    first, last, timed = rows[0], rows[-1], rows[1:]
    train_s = last["train_s"] - first["train_s"]
    rollout_s = sum(row["time/rollout_s"] for row in timed)
    return Speed(
        steps_per_s=(last["env_steps"] - first["env_steps"]) / train_s,
        rollout_s=rollout_s / len(timed),
        update_s=(train_s - rollout_s) / len(timed),
        wall_s=cost.wall_s,
        peak_bytes=cost.peak_bytes,
        parameters=parameters,
    )


def sb3_speed(told: dict, settings: dict, cost: Cost) -> Speed:
    rollout_s, update_s = told["rollout_s"][1:], told["update_s"][1:]
    return Speed(
        steps_per_s=settings["items"] * len(update_s) / (sum(rollout_s) + sum(update_s)),
        rollout_s=sum(rollout_s) / len(rollout_s),
        update_s=sum(update_s) / len(update_s),
        wall_s=cost.wall_s,
        peak_bytes=cost.peak_bytes,
        parameters=told["parameters"],
    )


def one_speed(who: str | int, seed: int, steps: int, config: dict, env: dict) -> Speed:
    if who in OPTIONS:
        rows, _, parameters, cost = our_run(who, seed, steps, env, None)
        assert {row["train/epochs"] for row in rows} == {config["algo"]["epochs"]}
        return our_speed(rows, parameters, cost)
    settings = sb3_settings(config, who, seed, steps)
    told, cost = sb3_run(settings, env)
    wanted = settings["iterations"] * gradient_steps(config)
    assert told["gradient_steps"] == wanted, f"{told['gradient_steps']} gradient steps where ours takes {wanted}"
    assert told["torch_threads"] == 1
    return sb3_speed(told, settings, cost)
