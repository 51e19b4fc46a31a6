"""What becomes of a run whose simulator goes wrong: every fault, at every place, on every backend.

    python -m benchmarks.fault_table [--worker sim-0|policy-0] [--backends local,ray] [--faults hang] [--places rollout]

Each case is a short training run of the toy env with one fault planted in one of two sim workers (tests/faulty_env.py)
or in the policy worker (tests/faulty_policy.py).
It must end within its deadline, either recovered (all env steps, all episodes, one restart) or in a message that names
the worker, the cause and its log. Faults strike once; with --always they strike in every life of the worker as well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, code_commit, machine, markdown, write_json

sys.path.append(str(ROOT / "tests"))

DEADLINE_S = 400.0
HANG_S = 15.0
ITERATIONS, ENVS, DECISIONS, EPISODES = 3, 8, 16, 6
ARGUMENTS = {
    "recipe": "pointmass_ppo",
    "env.num_envs": ENVS,
    "env.max_episode_steps": 10,
    "algo.rollout_decisions": DECISIONS,
    "algo.minibatch_size": 32,
    "algo.epochs": 2,
    "run.iterations": ITERATIONS,
    "run.save_every": 1,
    "eval.episodes": EPISODES,
    "eval.videos": 0,
    "faults.hang_s": HANG_S,
    "faults.timeout_s": 120,
    "faults.max_restarts": 2,
}
# A host that is started again must not hold the learner; every other saved process makes the table shorter.
PLACEMENT = {
    "sim": "{sim: 'cpu:0-1*2', 'policy,learner': 'cpu:1'}",
    "policy": "{sim: 'cpu:0-1*2', policy: 'cpu:0', learner: 'cpu:1'}",
}

OUTPUTS = ("nan_observation", "nan_action", "inf_reward", "wrong_shape")
IN_A_POLICY = ("policy", "faulty_policy:FaultyPolicy")
FAULTY = {"sim": ("env", "faulty_env:FaultyEnv"), "policy": IN_A_POLICY, "learner": IN_A_POLICY}


@dataclass(frozen=True)
class Case:
    """A fault in a worker: of its env, or of its policy. `placement`: of the run, if not as in `PLACEMENT`."""

    fault: str
    place: str
    backend: str
    always: bool = False
    worker: str = "sim-0"
    placement: str = ""

    def arguments(self, folder: Path) -> dict:
        """Of the run."""
        plan = {"fault": self.fault, "place": self.place, "worker": self.worker}
        if not self.always:
            plan["once"] = folder / "struck"
        kwargs = ", ".join(f"{key}: {value}" for key, value in plan.items())
        role = self.worker.partition("-")[0]
        what, name = FAULTY[role]
        mine = {f"{what}.name": name, f"{what}.kwargs": f"{{{kwargs}}}", "cluster.backend": self.backend}
        return {**ARGUMENTS, "placement": self.placement or PLACEMENT[role], **mine}


@dataclass(frozen=True)
class Outcome:
    """`ended`: recovered, message, or what is wrong with it. `answer_s`: from the fault to the message, or until two
    more lines were told: the iteration that it struck has ended and another one, or the evaluation."""

    case: Case
    ended: str
    restarts: int
    seconds: float
    said: str  # the line about the restart or the end
    answer_s: float | None = None


def cases(worker: str, faults: list[str], places: list[str], backends: list[str], always: bool) -> list[Case]:
    """What is not an event but wrong output has no place in a constructor, which needs no second life to fail."""
    whats = [what for what in product(faults, places, backends) if what[1] != "constructor" or what[0] not in OUTPUTS]
    found = [Case(*what, worker=worker) for what in whats]
    if always:
        found += [Case(*what, True, worker) for what in whats if what[1] != "constructor"]
    return found


def play(case: Case, folder: Path) -> Outcome:
    """One run with this fault, and what came of it."""
    arguments = (f"{key}={value}" for key, value in case.arguments(folder).items())
    command = [sys.executable, "-m", "embodied.train", *arguments]
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = threading.Timer(DEADLINE_S, process.kill)
    deadline.start()
    told = [(time.time(), line) for line in process.stdout]
    process.wait()
    deadline.cancel()
    seconds, output = time.perf_counter() - started, "".join(line for _, line in told)
    if seconds >= DEADLINE_S:
        return Outcome(case, f"hung for {DEADLINE_S:g} s", 0, seconds, relative(output[-300:], folder))
    (run,) = (folder / "runs").iterdir()
    info = json.loads((run / "run.json").read_text())
    restarts = info.get("restarts", 0)
    again = next((i for i, (_, line) in enumerate(told) if " is started again " in line), None)
    answered = time.time() if process.returncode or again is None else told[again + 2][0]
    struck = folder / "struck"
    answer_s = round(answered - struck.stat().st_mtime, 1) if struck.exists() else None
    if process.returncode == 0:
        said = "" if again is None else relative(told[again][1].rstrip(), folder)
        return Outcome(case, problems(run, restarts) or "recovered", restarts, seconds, said, answer_s)
    said = output[output.rfind("\nerror: ") + 1 :].strip()
    role, _, rank = case.worker.partition("-")
    named = case.worker in said or re.search(rf"\b{role}\b[\w+]*-{rank}\.log", said)  # or another role of its process
    clear = process.returncode == 1 and named and ".log" in said and "Traceback" not in output
    ended = "message" if clear and info["state"] == "failed" else "unclear end"
    return Outcome(case, ended, restarts, seconds, relative(said, folder), answer_s)


def relative(said: str, folder: Path) -> str:
    """Without the folder of this case, which says nothing to whoever reads the table elsewhere."""
    return said.replace(f"{folder}/", "")


def play_in_a_folder(case: Case) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return play(case, Path(folder).resolve())


def problems(run: Path, restarts: int) -> str:
    """What is wrong with a run that ended well; empty if nothing is."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    results = json.loads(next((run / "eval").glob("v*/results.json")).read_text())["overall"]
    if restarts != 1:
        return f"{restarts} restarts"
    if rows[-1]["env_steps"] != ITERATIONS * ENVS * DECISIONS or any(row["faults/lost_decisions"] for row in rows):
        return f"{rows[-1]['env_steps']} env steps"
    if (results["episodes"], results["errors"]) != (EPISODES, 0):
        return f"{results['episodes']} episodes and {results['errors']} errors"
    return ""


def table(outcomes: list[Outcome]) -> str:
    head = ["fault", "strikes", "place", "backend", "outcome", "restarts", "seconds"]
    rows = [
        [
            outcome.case.fault,
            "always" if outcome.case.always else "once",
            outcome.case.place,
            outcome.case.backend,
            outcome.ended,
            str(outcome.restarts),
            f"{outcome.seconds:.1f}",
        ]
        for outcome in outcomes
    ]
    return markdown(head, rows)


def main() -> None:
    from faulty_env import FAULTS, OF_A_POLICY, PLACES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="local,ray")
    parser.add_argument("--worker", default="sim-0", choices=["sim-0", "policy-0"])
    parser.add_argument("--faults")
    parser.add_argument("--places")
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--at-once", type=int, default=1, help="cases: most of their time is waiting")
    parser.add_argument("--out", type=Path, help="default: fault_table-ROLE.json among the results")
    chosen = parser.parse_args()
    role = chosen.worker.partition("-")[0]
    faults = chosen.faults.split(",") if chosen.faults else {"sim": FAULTS, "policy": OF_A_POLICY}[role]
    of_a_policy = [place for place in PLACES if place != "reset"]
    places = chosen.places.split(",") if chosen.places else {"sim": PLACES, "policy": of_a_policy}[role]
    out = chosen.out or RESULTS / f"fault_table-{role}.json"
    about = {
        "at_once": chosen.at_once,
        "machine": machine(),
        "commit": code_commit(),
        "deadline_s": DEADLINE_S,
        "hang_s": HANG_S,
    }
    outcomes = []
    wanted = cases(chosen.worker, faults, places, chosen.backends.split(","), chosen.always)
    with ThreadPoolExecutor(chosen.at_once) as pool:
        for outcome in pool.map(play_in_a_folder, wanted):
            outcomes.append(outcome)
            print(f"{table([outcome]).splitlines()[-1]} {outcome.said.splitlines()[:1]}", flush=True)
            write_json(out, {**about, "outcomes": [asdict(outcome) for outcome in outcomes]})
    print(f"\n{table(outcomes)}")
    if bad := [outcome for outcome in outcomes if outcome.ended not in ("recovered", "message")]:
        raise SystemExit(f"{len(bad)} of {len(outcomes)} cases ended badly")


if __name__ == "__main__":
    main()
