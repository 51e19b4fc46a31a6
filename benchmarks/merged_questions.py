"""What it gains that a policy worker answers the questions of several sims together.

Sims of one env each, in processes of their own, ask one policy worker: they play the same evaluation episodes, round
after round, answered one by one, together with what waits, and together with what comes within some milliseconds. The
rounds take turns in the same processes, and every round has to end as the others do. PointMass takes no time to
simulate, so the network is all there is to wait for: real simulators gain less. `cpu` is CPU time of the policy
worker's process, which other work on the machine does not lengthen much; networks compute with one thread.

    python -m benchmarks.merged_questions
    python -m benchmarks.merged_questions --sims 4 --rounds 9 --families openvla
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.common import RESULTS, code_commit, hosts, machine, markdown, packages, process_cpu_s, write_json
from embodied.config.recipe import load
from embodied.core.types import Merging, Recording
from embodied.policies.worker import PolicyWorker
from embodied.run import launch
from embodied.workflows.evaluator import Evaluator
from embodied.workflows.rl_loop import POLICY, SIM
from embodied.workflows.workers import Workers

STEPS = 12  # decisions of an episode
FAMILIES = {
    "openvla": ["policy.name=openvla"],
    "openvla_oft": ["policy.name=openvla_oft", "policy.chunk=4", "policy.proprio=true"],
    "pi0": ["policy.name=pi0", "policy.chunk=4"],
}
WAYS = {
    "alone": Merging(),
    "waiting": Merging(64),
    "within 5 ms": Merging(64, 0.005),
    "within 20 ms": Merging(64, 0.02),
}


class Switching(PolicyWorker):
    def merge(self, merging: Merging) -> None:
        self.merging = merging

    def acted(self) -> int:
        """How often, so far."""
        totals = self.timers.totals()
        return totals["act"].count if "act" in totals else 0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sims", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    given = arguments.parse_args()
    found = {name: compare(name, given.sims, given.rounds) for name in given.families}
    about = {"sims": given.sims, "rounds": given.rounds, "commit": code_commit(), "packages": packages(), **machine()}
    write_json(RESULTS / "merged_questions.json", {"families": found} | about)
    print(
        markdown(["", "answered", "decisions/s", "cpu a decision", "rows a call", "faster", "less cpu"], table(found))
    )


def table(found: dict[str, dict]) -> list[list[str]]:
    rows = []
    for family, ways in found.items():
        for way, one in ways.items():
            gains = [f"{ways['alone'][key] / one[key]:.2f}x" for key in ("wall_s", "cpu_s")]
            speed = f"{one['decisions'] / one['wall_s']:.0f}"
            cpu = f"{one['cpu_s'] / one['decisions'] * 1e3:.1f} ms"
            rows.append([family, way, speed, cpu, f"{one['decisions'] / one['calls']:.1f}", *gains])
    return rows


def compare(family: str, sims: int, rounds: int) -> dict[str, dict]:
    """Medians over the rounds of a way."""
    roles = (SIM, replace(POLICY, worker="benchmarks.merged_questions:Switching"))
    config, plan = launch.planned(load(arguments_of(family, sims)).config, learn=False)
    samples: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
    outcomes = set()
    with tempfile.TemporaryDirectory() as folder, launch.cluster(config, plan, Path(folder)) as cluster:
        workers = Workers(roles, config, cluster)
        workers.adopt(None)
        evaluator = Evaluator(workers)
        (process,) = [pid for name, pid in hosts(Path(folder)).items() if name.startswith("policy")]
        for _ in range(rounds + 1):
            for way, merging in WAYS.items():
                workers.policies.merge(merging).wait()
                started, cpu, acted = perf_counter(), process_cpu_s(process), workers.policies.acted().wait()[0]
                played = evaluator.play(evaluator.episodes, Recording())
                samples[way]["wall_s"].append(perf_counter() - started)
                samples[way]["cpu_s"].append(process_cpu_s(process) - cpu)
                samples[way]["calls"].append(workers.policies.acted().wait()[0] - acted)
                outcomes.add(tuple((one.index, one.length, one.success_once) for one in played))
    if len(outcomes) > 1:
        raise SystemExit(f"{family}: the episodes do not end alike")
    decisions = STEPS * len(outcomes.pop())
    return {
        way: {key: median(rounds[1:]) for key, rounds in one.items()} | {"decisions": decisions}
        for way, one in samples.items()
    }


def arguments_of(family: str, sims: int) -> list[str]:
    chunk = 1 if family == "openvla" else 4
    return [
        "recipe=pointmass_ppo_openvla_tiny",
        "algo.minibatch_size=8",
        *FAMILIES[family],
        f'placement={{sim: "fake:0-{sims - 1}", "policy,learner": "fake:{sims}"}}',
        f"env.num_envs={sims}",
        f"eval.episodes={2 * sims}",
        f"env.max_episode_steps={STEPS * chunk}",
        "eval.protocol=as-trained-v1",
        "env.on_success=continue",
    ]


if __name__ == "__main__":
    main()
