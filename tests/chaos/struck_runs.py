"""Runs that are struck: processes are killed or stopped, or code goes wrong, and a run recovers or tells why not.

Every case is struck in an ordinary run of a shipped recipe (`chaos.gates`): processes are killed or stopped from
outside by their ids; exceptions, NaN, hangs and the like come from inside the env or the policy. A run that goes on is
struck again, in the next phase. A case has recovered if its process was started again, two iterations ended after that,
and the whole run finished with all its env steps and evaluation episodes and one restart per strike. Otherwise it must
end within a minute in a message that names the worker, the cause, its log, and how to resume.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos.fault_cases import HOSTS, MODES, RECOVERED, SCHEDULE_OPTIONS, SILENT, SYNC, TOLD, Case
from chaos.gates import HOLD
from chaos.strikes import Ended, StruckRun, TooLong

from embodied.config.recipe import load

HANG_S = 10.0
CONSTRUCTION_S = 60.0  # after which one that hangs ends the run
MOST_S = 60.0  # from a strike to the message that ends a run
PATIENCE_S = 240.0  # for anything else, on a machine that others use too
LONG_S = 5.0  # for which learners stay in a long_update after a strike
GATES = {  # phase -> who arrives there, and where; "own": the struck process itself, if it has such a worker
    "rollout": ("sim", "rollout"),
    "reset": ("sim", "reset"),
    "update": ("learner", "update"),
    "long_update": ("learner", "update"),
    "publish": ("driver", "publish"),
    "weights": ("policy", "weights"),
    "saving": ("driver", "save"),
    "evaluation": ("sim", "evaluation"),
    "rebuild": ("sim", "rollout"),
}


@dataclass(frozen=True)
class Outcome:
    """`seconds`: from the strike until two more iterations had ended, or until the command had."""

    case: Case
    ended: str  # as wanted, or what is wrong
    seconds: float | None = None
    said: str = ""  # the line about the restart, or the error


Keep = Callable[[Outcome], None]


def options(cases: list[Case]) -> dict[str, object]:
    """What such a run says beyond its recipe: enough iterations and restarts for all that is to come."""
    first = cases[0]
    found = {
        "cluster.backend": first.backend,
        "run.iterations": 12 + 4 * len(cases),
        "run.save_every": 1,
        "run.eval_every": 3,
        "eval.videos": 0,
        "eval.episodes": 50,
        "faults.max_restarts": 0 if "learner" in first.victim else 10 + 4 * len(cases),
    }
    if MODES[first.mode]:
        found["placement"] = MODES[first.mode]
    if first.schedule != SYNC:
        found |= {"pipeline.schedule": first.schedule, **SCHEDULE_OPTIONS.get(first.schedule, {})}
    if any(case.fault in SILENT for case in cases):
        found |= {"faults.hang_s": HANG_S, "faults.timeout_s": CONSTRUCTION_S if first.phase == "start" else 120}
    return found


# One strike


def strike(run: StruckRun, case: Case, turn: int) -> tuple[float, str]:
    """Strike one process or worker in this phase, one of another rank every turn; -> when, and its process's name."""
    role = case.victim.partition("+")[0] if "learner" not in case.victim else "learner"
    host = run.host_of(role, turn)
    roles, rank = host.rpartition("-")[0].split("+"), host.rpartition("-")[2]
    if case.inside:
        reached = run.arm(f"{role}-{rank}", case.phase, case.fault)
        run.wait(f"{case.phase} of {role}-{rank}", reached.exists, PATIENCE_S)
        run.open(reached)
        return time.monotonic(), host
    who, place = GATES[case.phase]
    arrives = who if who == "driver" else f"{who}-{rank if who in roles else 0}"
    reached, process = run.arm(arrives, place, HOLD), run.hosts()[host]
    run.wait(f"{arrives} at {place}", reached.exists, PATIENCE_S)
    os.kill(process, signal.SIGSTOP if case.fault == "sigstop" else signal.SIGKILL)
    at = time.monotonic()
    if case.phase == "long_update":
        time.sleep(LONG_S)
    if case.phase == "rebuild":
        strike_the_successor(run, host, role, process, lambda: run.open(reached))
    run.open(reached)
    return at, host


def strike_the_successor(run: StruckRun, host: str, role: str, process: int, go_on: Callable[[], None]) -> None:
    """Kill the process that takes this one's place while it constructs its worker."""
    building = run.arm(f"{role}-{host.rpartition('-')[2]}", "start", HOLD)
    go_on()
    run.wait("the successor's construction", building.exists, PATIENCE_S)
    successor = run.hosts()[host]
    assert successor != process
    os.kill(successor, signal.SIGKILL)
    run.open(building)


def recovered(run: StruckRun, case: Case, turn: int) -> Outcome:
    """Strike and wait until the run has gone on."""
    since = len(run.lines)
    at, _ = strike(run, case, turn)
    line = since - 1
    for _ in range(strikes(case)):
        line = run.said(" is started again ", line + 1, PATIENCE_S)
    said, after = run.lines[line].text, line
    for _ in range(2):
        after = run.said(r"^iteration \d+/", after + 1, PATIENCE_S)
    return Outcome(case, RECOVERED, round(run.lines[after].at - at, 1), run.relative(said))


def strikes(case: Case) -> int:
    return 2 if case.phase == "rebuild" else 1


# One run


def play(cases: list[Case], keep: Keep) -> list[Case]:
    """Strike a run once for every case, or for as many as it survives; -> those that nothing was learned about."""
    with tempfile.TemporaryDirectory() as folder:
        with StruckRun(cases[0].recipe, options(cases), Path(folder).resolve()) as run:
            if cases[0].wanted == TOLD:
                keep(the_end(run, cases[0]))
                return []
            return a_story_of_strikes(run, cases, keep)


def a_story_of_strikes(run: StruckRun, cases: list[Case], keep: Keep) -> list[Case]:
    told: list[Outcome] = []
    try:
        run.said(r"^iteration 1/", 0, PATIENCE_S)
        for case in cases:
            if run.iteration() > options(cases)["run.iterations"] - 8:
                break
            told.append(recovered(run, case, len(told)))
        code = run.end(PATIENCE_S)
        problem = problems(run, sum(strikes(outcome.case) for outcome in told)) if code == 0 else run.error
    except (Ended, TooLong) as err:
        last = f"; last it said:\n{run.output[-1000:]}" if isinstance(err, TooLong) else ""
        if len(told) < len(cases):  # what was survived before counts only if the run finishes
            keep(Outcome(cases[len(told)], str(err).splitlines()[0][:300], None, f"{err}{last}"))
            return [case for number, case in enumerate(cases) if number != len(told)]
        problem = f"{err}{last}"
    for outcome in told:
        keep(Outcome(outcome.case, f"the run: {problem}", outcome.seconds, outcome.said) if problem else outcome)
    return cases[len(told) :]


def problems(run: StruckRun, restarts: int) -> str:
    """What is wrong with a run that ended well; empty if nothing is."""
    info = json.loads((run.path / "run.json").read_text())
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    if (info["state"], info.get("restarts", 0)) != ("finished", restarts):
        return f"{info['state']} with {info.get('restarts', 0)} restarts after {restarts} strikes"
    if [row["iteration"] for row in rows] != list(range(1, len(rows) + 1)):
        return "iterations are missing or there twice"
    lost = sum(row.get("faults/lost_decisions", 0) for row in rows)
    if "faults/lost_decisions" in rows[0] and rows[-1]["env_steps"] != len(rows) * per_iteration(run) - lost:
        return f"{rows[-1]['env_steps']} env steps in {len(rows)} iterations, {lost:g} lost"
    for path in run.path.glob("eval/v*/results.json"):
        found = json.loads(path.read_text())["overall"]
        if (found["episodes"], found["errors"]) != (50, 0):
            return f"{path.parent.name}: {found['episodes']} episodes and {found['errors']} errors"
    return ""


def per_iteration(run: StruckRun) -> int:
    config = load([f"recipe={run.recipe}"]).config
    return config.env.num_envs * config.algo.rollout_decisions


def the_end(run: StruckRun, case: Case) -> Outcome:
    """Strike what takes the run along, and see how it ends."""
    try:
        at, host = at_the_start(run, case) if case.phase == "start" else after_a_while(run, case)
        code = run.end(PATIENCE_S)
    except (Ended, TooLong) as err:
        return Outcome(case, f"before it was struck: {err}"[:300])
    seconds = round(time.monotonic() - at, 1)
    return Outcome(case, end_problem(run, case, host, code, seconds) or TOLD, seconds, run.error)


def at_the_start(run: StruckRun, case: Case) -> tuple[float, str]:
    """Strikes a worker while it is constructed."""
    role = "learner" if "learner" in case.victim else case.victim.partition("+")[0]
    recovering, ending = HOSTS[case.mode]
    host = next(f"{roles}-0" for roles in (*recovering, ending) if role in roles.split("+"))
    if role == "learner":  # as soon as it is there: it has no gate before that of its first update
        process = run.wait("the learner", lambda: run.hosts().get(host), PATIENCE_S)
        os.kill(process, signal.SIGKILL)
        return time.monotonic(), host
    reached = run.arm(f"{role}-0", "start", case.fault if case.inside else HOLD)
    run.wait("construction", reached.exists, PATIENCE_S)
    if not case.inside:
        os.kill(run.hosts()[host], signal.SIGKILL)
    run.open(reached)
    return time.monotonic(), host


def after_a_while(run: StruckRun, case: Case) -> tuple[float, str]:
    run.said(r"^iteration 2/", 0, PATIENCE_S)
    return strike(run, case, turn=1)


def end_problem(run: StruckRun, case: Case, host: str, code: int, seconds: float) -> str:
    """What is wrong with how it ended; empty if nothing is."""
    if code != 1 or "Traceback" in run.output:
        return f"exit code {code}: {run.error[:200]}"
    if json.loads((run.path / "run.json").read_text())["state"] != "failed":
        return "run.json does not say that it failed"
    roles, _, rank = host.rpartition("-")
    hung = case.fault in SILENT
    worker = rf"({roles.replace('+', '|')})-{rank}\b"
    if (
        not re.match(rf"error: (\S+ did not finish within .* on )?{worker}", run.error)
        or f"{host}.log" not in run.error
    ):
        return f"neither its name nor its log is told: {run.error[:200]}"
    cause = "hung|no sign of life|did not finish" if hung else "SIGKILL" if case.fault == "sigkill" else ": "
    if not re.search(cause, run.error):
        return f"the cause is not told: {run.error[:200]}"
    if case.phase != "start" and f"resume=runs/{run.path.name}" not in run.error:
        return f"how to resume is not told: {run.error[:200]}"
    most_s = MOST_S + (CONSTRUCTION_S if hung and case.phase == "start" else 0.0)
    return f"it took {seconds:.0f} s" if seconds > most_s else ""
