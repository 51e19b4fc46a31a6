"""What becomes of a run whose policy worker or learner rank is killed, in every mode, while it does its own work.

    python -m benchmarks.kill_table [--modes hybrid] [--backends local,ray] [--out FILE]

The cases of `fault_table` with SIGKILL alone: while a worker is constructed, while a policy worker acts or takes new
weights, while a learner computes a gradient or publishes. There are two learner ranks, and in one process with them two
policy workers; devices are `fake` where two cores are not enough. From the kill to the message, or until the iteration
after it has ended, it may take 60 s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from benchmarks.common import RESULTS, code_commit, machine, markdown, write_json
from benchmarks.fault_table import Case, Outcome, play_in_a_folder

MOST_S = 60.0
MODES = {
    "collocated": "collocated",
    "disaggregated": "{sim: 'fake:0', policy: 'fake:1', learner: 'fake:2-3'}",
    "hybrid": "{sim: 'fake:0-1', 'policy,learner': 'fake:2-3'}",
    "map": "{'sim,policy': 'cpu:0', learner: 'cpu:0-1*2'}",
}
PLACES = {"policy-0": ("constructor", "rollout", "weights"), "learner-1": ("constructor", "update", "weights")}
WORDS = {"constructor": "init", "rollout": "acting", "update": "update", "weights": "weight sync"}


def cases(modes: Sequence[str], backends: Sequence[str]) -> dict[tuple[str, Case], str]:
    """(mode, case) -> how it must end. A worker that dies in its constructor fails the run, and so does a learner; a
    policy in a learner's process dies with it."""
    found = {}
    for backend, mode, (worker, places) in product(backends, modes, PLACES.items()):
        for place in places:
            recovers = worker == "policy-0" and place != "constructor" and mode != "hybrid"
            case = Case("sigkill", place, backend, worker=worker, placement=MODES[mode])
            found[mode, case] = "recovered" if recovers else "message"
    return found


def problem(outcome: Outcome, wanted: str) -> str:
    """What is wrong with it; empty if nothing is."""
    if outcome.ended != wanted:
        return f"{outcome.ended} instead of {wanted}"
    if outcome.answer_s is None:
        return "the fault never struck"
    return f"{outcome.answer_s:g} s" if outcome.answer_s > MOST_S else ""


def played(path: Path) -> list[dict]:
    """The outcomes that are there already; those of other modes and backends are kept."""
    return json.loads(path.read_text())["outcomes"] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--backends", default="local,ray")
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_table.json")
    chosen = parser.parse_args()
    wanted = cases(chosen.modes.split(","), chosen.backends.split(","))
    about = {"machine": machine(), "commit": code_commit()}
    again = {(mode, case.backend) for mode, case in wanted}
    outcomes = [one for one in played(chosen.out) if (one["mode"], one["case"]["backend"]) not in again]
    rows, bad = [], []
    for (mode, case), ending in wanted.items():
        outcome = play_in_a_folder(case)
        told = problem(outcome, ending)
        took = "" if outcome.answer_s is None else f"{outcome.answer_s:.1f}"
        rows.append([mode, case.backend, case.worker, WORDS[case.place], told or outcome.ended, took])
        print(" ".join(rows[-1]), "|", outcome.said.splitlines()[:1], flush=True)
        outcomes.append({"mode": mode, "problem": told, **asdict(outcome), **about})
        bad += [told] if told else []
        longest = max(each["answer_s"] or 0 for each in outcomes)
        write_json(chosen.out, {"most_s": MOST_S, "longest_s": longest, "outcomes": outcomes})
    print("\n" + markdown(["mode", "backend", "worker", "killed in", "outcome", "after s"], rows))
    print(f"the longest took {longest:.1f} s")
    if bad:
        raise SystemExit(f"{len(bad)} of {len(rows)} ended badly")


if __name__ == "__main__":
    main()
