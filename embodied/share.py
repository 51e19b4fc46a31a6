"""Train several recipes at the same time on devices that they share: python -m embodied.share pointmass_ppo sums_grpo

Each is an ordinary run, with its own folder and log. A device belongs to one run, which uses it whenever it has work;
language runs generate on idle devices. Sharing does not change what a run learns.

usage: python -m embodied.share [key=value ...] RECIPE [key=value ...] RECIPE ... [--plan | --dry-run | --help]
       python -m embodied.share resume=FOLDER
       python -m embodied.share join=FOLDER RECIPE [key=value ...]

  RECIPE    a name (python -m embodied.list recipes), or path/to/my.yaml. Keys before the first
            recipe hold for all runs that do not set them, keys after a recipe for that run
  weights   1,2: the second run owns twice as many devices [equal]
  devices   shared devices: cpu:0-3, gpu:0,gpu:1 or node1/gpu:0 [all GPUs, or all cores if there are none]
  rule      lend: a device is lent while its run has no work for it; remaining: a device generates for the run with
            the most remaining work, regardless of its owner [lend]
  folder    the folder that names the runs [runs/share-DATE]
  resume    a folder of stopped runs: all unfinished runs continue
  join      a folder of current runs, to which this run is added
  --plan    predict the end of every run under each rule, by profiles (python -m embodied.profiling), and stop
  --dry-run print each run's devices, and stop

Ctrl-C saves and stops all runs, a second one stops at once. Keys and their meaning: python -m embodied.train --help
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from itertools import chain
from math import inf
from pathlib import Path
from shlex import quote
from typing import Any

from embodied import let_call
from embodied.config.command_line import from_python
from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import aligned, as_path, check_place, replace_text
from embodied.placement import PlacementError, Topology, roles_of
from embodied.placement.grammar import extra_roles, parse_devices
from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.placement_plan import hosts_on, node_of
from embodied.placement.topology import number
from embodied.plan import load_warning
from embodied.profiling import stored_profiles
from embodied.reporting.run_page import REPORT, report_or_say_why
from embodied.reporting.runs import Run, read_run
from embodied.run import launch
from embodied.run.devices import divides_requests, machines, networks_on
from embodied.run.ending import Interruption
from embodied.run.run_group import OVER, lock_runs
from embodied.sharing.page import PREDICTED, record_of
from embodied.sharing.run_turns import FORMAT, LEND_FACTOR, RECORD
from embodied.sharing.runs import (
    SharedChildren,
    SharedRuns,
    devices_of,
    load_run,
    planned,
    prepare,
    read_shared_runs,
)
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

USAGE = __doc__ or ""
OWN = ("weights", "devices", "rule", "folder", "resume", "join")
RULES = ("lend", "remaining")
ADD_S = 60.0  # timeout for an answer to join=


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, USAGE, lost=launch.UNSAVED)


def start(argv: list[str]) -> int:
    order = read_order(argv)
    if order.join:
        return ask_to_join(order.join, order.runs)
    if not (order.dry or order.plan):
        return run_all(begin(order))
    shared = read_shared_runs(order.resume) if order.resume else new_runs(order)
    predicted = describe_prediction(predict(shared, launch.say), shared.rule) if order.plan else ()
    launch.say("\n".join([*describe(shared), *predicted]))
    return 0


def call(*words: str | Mapping[str, Any]) -> dict[str, Run]:
    """Train several recipes on shared devices from Python, like the command. Returns the runs by name:
    `embodied.share("pointmass_ppo", "sums_grpo", {"env.num_envs": 64})`."""
    order = read_order(from_python(words))
    if order.join or order.dry or order.plan:
        raise ConfigError("join=, --plan and --dry-run are for the command line")
    shared = begin(order)
    run_all(shared)
    return {run.name: read_run(path) for run in shared.members if (path := shared.path(run))}


def begin(order: ShareOrder) -> SharedRuns:
    """The stopped or new runs of an order. The folder of new runs is made, and the runs are printed."""
    if order.resume:
        shared = read_shared_runs(order.resume)
    else:
        shared = new_runs(order)
        shared.folder.mkdir(parents=True)
        shared.write()
        write_prediction(shared)
    launch.say("\n".join([f"share       {shared.folder}", *describe(shared)]))
    return shared


@dataclass
class ShareOrder:
    """The options of one command line."""

    runs: list[list[str]] = field(default_factory=list)  # the arguments of each run
    weights: tuple[float, ...] = ()
    devices: str = ""
    rule: str = "lend"
    folder: Path | None = None
    resume: Path | None = None
    join: Path | None = None
    dry: bool = False
    plan: bool = False


def read_order(argv: Sequence[str]) -> ShareOrder:
    named, problems, words = launch.split_keys([word for word in argv if word not in ("--dry-run", "--plan")], OWN)
    order = ShareOrder(dry="--dry-run" in argv, plan="--plan" in argv)
    common: list[str] = []
    for word in words:
        name = word.removeprefix("recipe=")
        if word.startswith("recipe=") or not ("=" in word or word.startswith("-")):
            file = as_path(name)  # absolute, since join= and resume= may be used in another folder
            order.runs.append([f"recipe={file.absolute() if file.is_file() else name}"])
        else:
            (order.runs[-1] if order.runs else common).append(word)
    for run in order.runs:
        its = {word.partition("=")[0] for word in run}
        run += [word for word in common if word.partition("=")[0] not in its]
    for name in ("folder", "resume", "join"):
        setattr(order, name, as_path(str(named[name])) if name in named else None)
    order.devices, order.rule = str(named.get("devices", "")), str(named.get("rule", "lend"))
    if order.rule not in RULES:
        problems.append(f"rule={order.rule}: should be {' or '.join(RULES)}")
    order.weights = read_weights(named.get("weights"), len(order.runs), problems)
    if order.resume and (order.runs or common):
        problems.append(f"resume={order.resume} continues the runs of that folder; leave {words[0]} out")
    elif order.join and len(order.runs) != 1:
        problems.append(f"join={order.join} adds one run: join={order.join} pointmass_ppo, for example")
    elif not order.resume and not order.runs:
        problems.append("no recipe: name the runs, python -m embodied.share pointmass_ppo sums_grpo for example")
    if problems:
        raise ConfigError("\n".join(problems))
    return order


def read_weights(given: Any, count: int, problems: list[str]) -> tuple[float, ...]:
    if given is None:
        return (1.0,) * count
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
    try:
        weights = tuple(float(number) for number in parts)
    except (TypeError, ValueError):
        weights = ()
    if len(weights) != count or any(not 0 < weight < 1e6 for weight in weights):
        problems.append(f"weights={given}: should be a positive number for each of the {count} runs, weights=1,2")
        return (1.0,) * count
    return weights


def new_runs(order: ShareOrder) -> SharedRuns:
    """The runs of a command line, with their devices; nothing is started."""
    first = load_run(order.runs[0]).config
    topology = machines(first)
    devices = named_devices(order.devices, topology) if order.devices else devices_of(topology)
    folder = order.folder or first.run.dir / f"share-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.exists():
        raise ConfigError(f"folder={folder} exists; continue its runs: resume={folder}, or name another one")
    shared = SharedRuns(check_place("folder", folder), devices, order.rule)
    shared.members = tuple(prepare(shared, order.runs, order.weights, topology))
    return shared


def named_devices(text: str, topology: Topology) -> tuple[str, ...]:
    """The devices of devices=, with their names in gangs."""
    try:
        slots = [replace(slot, node=node_of(slot.node, topology).name) for slot in parse_devices(text)]
        return tuple(name for host in hosts_on((), slots, topology) for name in host.device_names)
    except PlacementError as err:
        raise ConfigError(f"devices={text}: {err}") from None


def describe(shared: SharedRuns) -> list[str]:
    """A line for each run."""
    lent = "idle ones are lent" if shared.rule == "lend" else "generation goes where most work is left"
    lines = [f"devices     {', '.join(shared.devices)}: {lent}"]
    for run in shared.members:
        where = f", placement {json.dumps(run.placement)}" if run.placement else ""
        lines.append(f"run         {run.name} owns {', '.join(run.own)}{where}")
    return lines


def write_prediction(shared: SharedRuns) -> None:
    """Write predicted.jsonl for the report, if all recipes have profiles."""
    try:
        lines = predict(shared, launch.say)[shared.rule]
    except ConfigError as err:
        launch.say(f"predicted   nothing: {str(err).splitlines()[0]}")
        return
    launch.say(f"predicted   {record_of(lines).makespan_s():.4g} s of training until all have ended")
    replace_text(shared.folder / PREDICTED, "".join(json.dumps(line) + "\n" for line in lines))


def run_all(shared: SharedRuns) -> int:
    """Run all unfinished runs until they end, and print how each ended."""
    with lock_runs(shared.folder, RECORD), Interruption() as interruption:
        children = SharedChildren(shared)
        try:
            children.run([run for run in shared.members if run.ended not in OVER], interruption)
        finally:
            code = say_how_it_ended(shared, interruption)
    return code


def say_how_it_ended(shared: SharedRuns, interruption: Interruption) -> int:
    left = [run for run in shared.members if run.ended not in OVER]
    launch.say(f"\n{len(shared.members) - len(left)} of {len(shared.members)} runs finished")
    for run in shared.members:
        launch.say(f"  {run.name}: {run.ended}{f' ({shared.path(run)})' if run.folder else ''}")
    report_or_say_why(shared.folder)
    launch.say(f"  report      {shared.folder / REPORT}")
    if left:
        launch.say(f"  continue    python -m embodied.share {quote(f'resume={shared.folder}')}")
    return interruption.exit_code if interruption.requested else int(bool(left))


def ask_to_join(folder: Path, runs: list[list[str]]) -> int:
    """Ask the running command of this folder to add another run."""
    path = read_shared_runs(folder).socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(ADD_S)
            asking.connect(path)
            asking.sendall(json.dumps({"do": "add", "n": 1, "words": runs[0]}).encode() + b"\n")
            answer = json.loads(asking.makefile("rb").readline() or b"{}")
    except (OSError, ValueError):
        first = f"python -m embodied.share {quote(f'resume={folder}')}"
        raise EmbodiedError(f"join={folder}: no command is running them; start them first: {first}") from None
    answer_text = str(answer.get("said", "error: it was not answered"))
    if answer_text.startswith("error: "):
        raise EmbodiedError(f"join={folder}: {answer_text.removeprefix('error: ')}")
    launch.say(answer_text)
    return 0


PRICED_RULES = ("serial", "split", "remaining", "lend")
ROUNDS = 30  # of the fixed point of durations and borrowed devices


@dataclass(frozen=True)
class RunCost:
    """The iterations of a run, in seconds by number of devices. A rollout generates on borrowed devices too; other
    phases work on the run's own devices."""

    iterations: int
    rollout_s: Callable[[int], float]
    update_s: Callable[[int], float]
    wait_s: float = 0.0  # of an iteration, without devices
    switch_s: float = 0.0  # for a policy worker to stop, and to load weights on another device
    weight: float = 1.0
    borrows: bool = True  # its rollout can be divided among devices
    stays: bool = False  # keeps its own devices until its batch is complete, because its simulators run there
    warnings: Sequence[str] = ()  # of the profile

    def iteration_s(self, devices: int) -> float:
        return self.rollout_s(devices) + self.update_s(devices) + self.wait_s

    def rollout_on(self, devices: float) -> float:
        """Seconds of a rollout on a mean number of devices, at the speed between whole numbers."""
        whole = int(devices)
        slower, faster = 1 / self.rollout_s(whole), 1 / self.rollout_s(whole + (devices > whole))
        return 1 / (slower + (devices - whole) * (faster - slower))


def run_cost(config: RunConfig, arguments: Sequence[str], own: int, runs: int, weight: float = 1.0) -> RunCost:
    """The cost of a run by the newest valid profile of its recipe on this machine. `arguments`: of the run. `own`: the
    number of the run's own devices. The cores beside GPUs are divided among `runs` runs."""
    topology, name = machines(config), config.run.name
    roles = roles_of(roles_of_run(EmbodiedLoop, config))
    advice = f"measure it (a minute): {stored_profiles.profiling_command(arguments)}"
    path, why = stored_profiles.profile_for(config, topology, roles)
    if path is None:
        raise ConfigError(f"{name}: {why or 'it has not been measured here'}; {advice}")
    profile = stored_profiles.fitted_to(config, path, roles)
    profile, classes = stored_profiles.with_memory(profile, topology, config.cluster.memory_gb)
    if profile.missing(classes, stored_profiles.device_kinds(config, topology, roles)):
        raise ConfigError(f"{name}: {path} was measured on other devices; {advice}")
    flow = profile.dataflow.with_schedule("sync")
    pricer = Pricer(flow, profile, classes)
    kinds = {c.kind: c for c in classes}
    shared = kinds[networks_on(config, topology)]
    home = shared if config.env.on_gpu else kinds["cpu"]
    sims = own if home is shared else max(1, home.count // runs)

    more = tuple(role.name for role in extra_roles(roles))  # these roles stay on the run's own devices

    @cache
    def seconds(phase: int, count: int) -> float:
        """Seconds of the rollout (0), or of other roles and the update (1)."""
        players = Zone(("sim",), home.name, sims), Zone(("policy",), shared.name, count)
        between = ((Zone(more, shared.name, own),),) if more else ()
        layers = players, *between, (Zone(("learner",), shared.name, count),)
        rollout, *rest = pricer.price(Layout(layers, config.pipeline.stages)).layers
        return rollout if phase == 0 else sum(rest)

    if not all(seconds(phase, own) < inf for phase in (0, 1)):
        raise ConfigError(
            f"{name} does not fit on {number(own, 'device')} by {path}; let fewer runs share, or by weights="
        )
    call, run, divides = pricer.cost("policy", shared.name), config.run, divides_requests(config)
    return RunCost(
        run.iterations or max(1, (run.env_steps or 1) // flow.env_steps),
        lambda count: seconds(0, count),
        lambda count: seconds(1, count),
        flow.fixed_s,
        float(call.seconds.at(flow["policy"].items)) + float(profile.sync.copy_s.at(1)),
        weight,
        borrows=divides,
        stays=home is shared or not divides,
        warnings=load_warning(profile),
    )


def predict(shared: SharedRuns, warn: Callable[[str], object] = lambda line: None) -> dict[str, list[dict[str, Any]]]:
    """The course of the runs under each rule, as lines of share.jsonl. Raises ConfigError if a run has not been
    measured."""
    configs = {run.name: planned(run, load_run(run.words))[0] for run in shared.members}  # of which profiles are
    own = {run.name: run.own for run in shared.members}
    every = tuple(dict.fromkeys(chain.from_iterable(own.values())))

    def costs(owned: Mapping[str, Sequence[str]], runs: int) -> dict[str, RunCost]:
        return {
            run.name: run_cost(configs[run.name], run.words, len(owned[run.name]), runs, run.weight)
            for run in shared.members
        }

    together, alone = costs(own, len(own)), costs(dict.fromkeys(own, every), 1)
    for line in dict.fromkeys(line for cost in together.values() for line in cost.warnings):
        warn(line)
    return {
        rule: course(alone, dict.fromkeys(own, every), rule) if rule == "serial" else course(together, own, rule)
        for rule in PRICED_RULES
    }


def course(costs: Mapping[str, RunCost], own: Mapping[str, Sequence[str]], rule: str) -> list[dict[str, Any]]:
    """The predicted course of runs on their `own` devices, as lines of share.jsonl. Between two ends of runs, every run
    has its mean speed."""
    devices, now, lines = tuple(dict.fromkeys(chain.from_iterable(own.values()))), 0.0, []
    lines += [{"format": FORMAT, "rule": rule, "devices": devices, "started": ""}]
    lines += [{"at": 0.0, "run": run, "joins": {"weight": cost.weight, "own": own[run]}} for run, cost in costs.items()]
    left = {run: float(cost.iterations) for run, cost in costs.items()}
    while left:
        active = {run: costs[run] for run in [*left][: 1 if rule == "serial" else None]}
        seconds = iteration_seconds(active, own, len(devices), rule)
        span = min(left[run] * seconds[run] for run in active)
        for device in devices:
            owners = [run for run in active if device in own[run]]
            takers = owners or [run for run in active if active[run].borrows and rule != "split"]
            for place, run in enumerate(takers):
                at, end = (now + span * border / len(takers) for border in (place, place + 1))
                lines += [{"at": at, "device": device, "run": run, "phase": "rollout"}]
                lines += [{"at": end, "device": device, "run": None, "phase": None}]
        now += span
        left = {run: iterations - (span / seconds[run] if run in active else 0) for run, iterations in left.items()}
        for run in [run for run in left if left[run] < 1e-9 * costs[run].iterations]:
            del left[run]
            lines += [{"at": now, "run": run, "progress": None}, {"at": now, "run": run, "ends": "finished"}]
    return sorted(lines, key=lambda line: line.get("at", 0.0))


def iteration_seconds(
    costs: Mapping[str, RunCost], own: Mapping[str, Sequence[str]], devices: int, rule: str
) -> dict[str, float]:
    """The mean seconds of an iteration of each run while all of these go on, with `devices` in all. The durations
    decide how long devices can be borrowed, and the borrowed devices decide the durations: a fixed point."""
    whole = {run: cost.iteration_s(len(own[run])) for run, cost in costs.items()}
    if rule not in ("remaining", "lend"):
        return whole
    rollout = {run: cost.rollout_s(len(own[run])) for run, cost in costs.items()}
    for _ in range(ROUNDS):
        generating = {run: rollout[run] / whole[run] for run in costs}
        counts = {run: generates_on(run, costs, own, devices, rule, generating, whole) for run in costs}
        rollout = {run: cost.rollout_on(counts[run]) for run, cost in costs.items()}
        for run, cost in costs.items():
            neighbours = [other for other in costs if {*own[run]} & {*own[other]}]  # they take turns on a device
            turns_s = sum(rollout[other] + costs[other].update_s(len(own[other])) for other in neighbours)
            seconds = rollout[run] + cost.update_s(len(own[run])) + cost.wait_s
            whole[run] = (whole[run] + max(seconds, turns_s if len(neighbours) > 1 else 0.0)) / 2
    return whole


def generates_on(
    run: str,
    costs: Mapping[str, RunCost],
    own: Mapping[str, Sequence[str]],
    devices: int,
    rule: str,
    generating: Mapping[str, float],
    whole: Mapping[str, float],
) -> float:
    """The mean number of devices on which a run generates. `generating`: each run's share of its time in rollouts."""
    mine, others = len(own[run]), [other for other in costs if other != run and costs[other].borrows]
    if not costs[run].borrows:
        return mine
    if rule == "remaining":  # all devices without an update or a fixed rollout, divided by remaining work
        kept = sum(
            len(own[other])
            * ((cost.update_s(len(own[other])) if cost.borrows else whole[other] - cost.wait_s) / whole[other])
            for other, cost in costs.items()
            if other != run
        )
        work = {
            other: costs[other].rollout_s(len(own[other])) * len(own[other]) * costs[other].weight for other in costs
        }
        rivals = sum(work[other] * generating[other] for other in others)
        share = (devices - kept) * work[run] / (work[run] + rivals)
        return min(devices, max(share, mine if costs[run].stays else 1))
    free = devices - len({device for run_id in costs for device in own[run_id]})
    idle = sum(
        len(own[other]) * (cost.wait_s - cost.switch_s) / whole[other]
        for other, cost in costs.items()
        if not {*own[other]} & {*own[run]} and cost.wait_s > LEND_FACTOR * cost.switch_s
    )
    return min(devices, mine + (free + idle) / (1 + sum(generating[other] for other in others)))


def describe_prediction(predicted: Mapping[str, Sequence[Mapping[str, Any]]], rule: str) -> list[str]:
    """A line for each rule: the makespan, and every run's end and share of the devices' time. `rule` is the chosen
    one."""
    records = {name: record_of(lines) for name, lines in predicted.items()}
    serial = records["serial"].makespan_s()
    head = ["predicted", "makespan", "x serial", *(f"{name} ends (share)" for name in records[rule].runs)]
    rows = []
    for name, record in records.items():
        makespan, used = record.makespan_s(), record.device_seconds()
        whole = len(record.devices) * makespan or 1.0
        ends = [f"{run.ended_s:.4g} s ({used[run.name] / whole:.0%})" for run in record.runs.values()]
        rows.append([f"{name}{' *' if name == rule else ''}", f"{makespan:.4g} s", f"{serial / makespan:.2f}", *ends])
    return aligned(head, rows)


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
