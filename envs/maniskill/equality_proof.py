"""Checks whether batched physics equals single envs for a task: plays both, compares and times them, and stores the
result.

`BATCHED_TASKS` has the result for ManiSkill's own tasks; for other tasks `python -m embodied.check`, or the first
training within a minute, writes a proof beside the profiles. A proof is valid for the source of the task (its classes,
own robots, `env.modules`), the versions of the simulator, and the options that change simulation or rewards.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import EmbodiedError
from embodied.core.types import EpisodeSpec
from embodied.envs.maniskill.bridge import is_bridge
from embodied.envs.maniskill.bridge.bridge_expert import FASTEST, FASTEST_TURN
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.maniskill.tasks import BATCHED_GAIN, find_task, is_listed, to_prove
from embodied.envs.own_modules import file_name, line_of
from embodied.envs.vector_env import VectorEnv

RESULT = "docs/results.md"
ROWS, TOLERANCE = 6, 1e-4
TIMED_ROWS, TIMED_STEPS = 32, 20
DECIDES = ("task", "control_mode", "reward_mode", "robot", "modules", "object_set", "solver_iterations")
OURS = ("mani_skill", "embodied")


@dataclass(frozen=True)
class Proof:
    equal: bool
    problem: str  # why batched physics cannot be used; "" if it is equal
    worst: dict[str, float]  # the largest differences
    speedup: float | None  # batched to single, at TIMED_ROWS rows on this machine
    date: str
    drawn_alone: bool = False  # initial states are drawn row by row


def compare(env_class: type[VectorEnv], config: ManiSkillConfig) -> tuple[dict[str, Any], list[VectorEnv]]:
    """Returns the largest differences over whole episodes in ROWS rows: all rows together, then two rows that begin
    while other rows continue. Also returns the envs, the batched one first."""
    if is_bridge(config.task):  # otherwise random actions mean a metre, which is out of reach: the arm would never move
        config = config.model_copy(update={"action_units": (FASTEST, FASTEST_TURN)})
    both = [config.model_copy(update={"backend": name, "on_success": "continue"}) for name in ("cpu_batched", "cpu")]
    envs = [env_class(options, ROWS) for options in both]
    worst = {"initial": 0.0, "state": 0.0, "reward": 0.0, "success": 0}
    rng = np.random.default_rng(0)
    limit = envs[0].env_spec.max_episode_steps
    play(envs, range(ROWS), 100, limit, rng, worst)
    play(envs, range(ROWS), 200, limit // 3, rng, worst)
    play(envs, (1, ROWS - 1), 300, limit, rng, worst)
    figures = [worst["initial"], worst["state"], worst["reward"]]
    worst["equal"] = bool(np.isfinite(figures).all() and max(figures) < TOLERANCE and not worst["success"])
    return worst, envs


def play(envs: list[VectorEnv], rows: Any, seed: int, steps: int, rng: Any, worst: dict[str, Any]) -> None:
    """Begin episodes in these rows, take random actions in all rows, and record the largest differences."""
    mask = np.isin(np.arange(ROWS), list(rows))
    episodes = [EpisodeSpec("", -1, seed + row, row) if mask[row] else None for row in range(ROWS)]
    a, b = (env.reset(options={"reset_mask": mask, "episodes": episodes})[0]["state"] for env in envs)
    worst["initial"] = larger(worst["initial"], a[mask], b[mask])
    for _ in range(steps):
        actions = rng.uniform(-1, 1, (ROWS, 1, envs[0].env_spec.action.dim)).astype(np.float32)
        a, b = (env.step_chunk(actions) for env in envs)
        live = a.mask[:, 0] & b.mask[:, 0]
        if not live.any():
            break
        worst["state"] = larger(worst["state"], a.obs["state"][live], b.obs["state"][live])
        worst["reward"] = larger(worst["reward"], a.rewards[live], b.rewards[live])
        worst["success"] += 0 if a.success is None else int((a.success != b.success)[live].sum())
        worst["success"] += int((a.terminated != b.terminated)[live].sum())


def larger(worst: float, one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference so far, relative for numbers above 1."""
    return float(np.maximum(worst, (np.abs(one - other) / np.maximum(1.0, np.abs(one))).max(initial=0.0)))


def prove_equal(env_class: type[VectorEnv], config: ManiSkillConfig, folder: Path) -> tuple[Proof, Path]:
    """Compare and time, and store the result in this folder."""
    from embodied.envs.env_checker import check_vector_env

    worst, speedup, problem, drawn_alone = {}, None, "", False
    try:
        worst, (batched, single) = compare(env_class, config)
        drawn_alone = not batched.envs[0].draws_together
        problem = "" if worst.pop("equal") else f"it differs: {figures(worst)}"
        if not problem:
            check_vector_env(batched, atol=TOLERANCE)
        speedup = round(speed(env_class(batched.config, TIMED_ROWS)) / speed(single), 2)
    except EmbodiedError as err:
        problem = f"it fails: {err}"
    except Exception as err:
        problem = f"it fails: {type(err).__name__}: {err}{line_of(err)}"
    proof = Proof(not problem, " ".join(problem.split()), worst, speedup, str(date.today()), drawn_alone)
    return proof, keep(proof, config, folder)


def keep(proof: Proof, config: ManiSkillConfig, folder: Path) -> Path:
    path = proof_path(config, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"task": config.task, "versions": versions(), **asdict(proof)}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


PROVE = """import sys
from pathlib import Path
from embodied.envs import env_class
from embodied.envs.maniskill.config import ManiSkillConfig
config = ManiSkillConfig.model_validate_json(sys.argv[1])
from embodied.envs.maniskill.equality_proof import prove_equal
prove_equal(env_class(config), config, Path(sys.argv[2]))
"""


def prove_within(limit_s: float, config: ManiSkillConfig, folder: Path) -> Proof:
    """The same without images, in a separate process with a time limit. The result is stored in any case."""
    plain = config.model_copy(update={"cameras": (), "privileged": False, "image_fov": None, "image_region": None})
    command = [sys.executable, "-c", PROVE, plain.model_dump_json(), str(folder.absolute())]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(limit_s)
        problem = f"the process that looked ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"to find out took more than {limit_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if (proof := read_proof(config, folder)) is None:
        proof = Proof(False, f"{problem}; {to_prove(config)} takes its time", {}, None, str(date.today()))
        keep(proof, config, folder)
    return proof


def figures(worst: dict[str, float]) -> str:
    text = ", ".join(f"{name} {worst[name]:.1e}" for name in ("initial", "state", "reward"))
    return f"{text}, {worst['success']} other ends or successes"


def speed(env: VectorEnv) -> float:
    """Env steps per second."""
    env.reset(seed=0)
    actions = np.zeros((env.num_envs, TIMED_STEPS, env.env_spec.action.dim), np.float32)
    env.step_chunk(actions[:, :2])
    env.reset(seed=0)
    started = time.perf_counter()
    steps = sum(int(env.step_chunk(actions[:, t : t + 1]).mask.sum()) for t in range(TIMED_STEPS))
    return steps / (time.perf_counter() - started)


def read_proof(config: ManiSkillConfig, folder: Path) -> Proof | None:
    """The proof of this task; None if there is none or the task has changed."""
    path = proof_path(config, folder)
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Proof(**{name: record[name] for name in Proof.__dataclass_fields__ if name in record})
    except (ValueError, LookupError, TypeError):
        return None


def proof_path(config: ManiSkillConfig, folder: Path) -> Path:
    settings = config.model_dump(mode="json", include=set(DECIDES))
    settings["task"] = name = find_task(config.task).uid  # its class and its name denote the same task
    digest = hashlib.sha256(json.dumps([settings, versions()], sort_keys=True).encode())
    for path in sources(config):
        digest.update(path.read_bytes())
    return folder / f"physics-{file_name(name)}-{digest.hexdigest()[:12]}.json"


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("mani_skill", "sapien", "torch")}


def sources(config: ManiSkillConfig) -> list[Path]:
    """The source files of the task: of its classes, of robots outside ManiSkill, of `env.modules`."""
    paths = {*files(find_task(config.task).cls)}
    from mani_skill.agents.registration import REGISTERED_AGENTS

    for spec in REGISTERED_AGENTS.values():
        if spec.agent_cls.__module__.partition(".")[0] not in OURS:
            paths |= {*files(spec.agent_cls)}
    paths |= {Path(inspect.getfile(importlib.import_module(name))) for name in config.modules}
    return sorted(paths)


def files(cls: type) -> Iterator[Path]:
    for base in cls.__mro__:
        path = getattr(sys.modules.get(base.__module__), "__file__", None)
        if path and base.__module__.partition(".")[0] != "builtins":
            yield Path(path)


def cost_of_single(config: ManiSkillConfig, proofs: Path) -> str:
    """Says how much slower single envs are than a batch, if measured."""
    proof = None if is_listed(config) else read_proof(config, proofs)
    if proof is None:
        gain = (
            "single envs, one after the other; on PushCube-v1 batched physics is "
            f"{BATCHED_GAIN} times as fast ({RESULT})"
        )
        if is_listed(config):
            return f"{gain}, and this task has it: env.backend=auto"
        return f"{gain}. It is used where it was found equal: {to_prove(config)} finds out"
    if proof.equal:
        return f"single envs; batched physics is equal here and {proof.speedup} times as fast: env.backend=auto"
    times = f"would be {proof.speedup} times as fast, but" if proof.speedup else "cannot be used:"
    return f"single envs, one after the other: batched physics {times} {proof.problem} ({proof.date})"
