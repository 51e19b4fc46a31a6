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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

from embodied import let_call
from embodied.config.command_line import from_python
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import as_path, check_place, replace_text
from embodied.placement import PlacementError, Topology
from embodied.placement.grammar import parse_devices
from embodied.reporting.run_page import REPORT, report_or_say_why
from embodied.reporting.runs import Run, read_run
from embodied.run import launch
from embodied.run.devices import machines
from embodied.run.ending import Interruption
from embodied.sharing.page import PREDICTED, record_of
from embodied.sharing.plan import describe_prediction, predict
from embodied.sharing.run_turns import RECORD
from embodied.sharing.runs import (
    SharedChildren,
    SharedRuns,
    devices_of,
    load_run,
    on_node,
    prepare,
    read_shared_runs,
)
from embodied.sweeps.run_group import OVER, lock_runs

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
    embodied.share("pointmass_ppo", "sums_grpo", {"env.num_envs": 64})."""
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
    own, problems, words = launch.split_keys([word for word in argv if word not in ("--dry-run", "--plan")], OWN)
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
        setattr(order, name, as_path(str(own[name])) if name in own else None)
    order.devices, order.rule = str(own.get("devices", "")), str(own.get("rule", "lend"))
    if order.rule not in RULES:
        problems.append(f"rule={order.rule}: should be {' or '.join(RULES)}")
    order.weights = read_weights(own.get("weights"), len(order.runs), problems)
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
        weights = tuple(float(part) for part in parts)
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
        slots = parse_devices(text)
    except PlacementError as err:
        raise ConfigError(f"devices={text}: {err}") from None
    nodes = {"": topology.nodes[0], **{node.name: node for node in topology.nodes}}
    devices = []
    for slot in slots:
        if (node := nodes.get(slot.node)) is None:
            raise ConfigError(
                f"devices={text}: {slot.node} is not there: {', '.join(filter(None, nodes)) or 'one machine'}"
            )
        known = {"cpu": range(node.cores), "gpu": [gpu.index for gpu in node.gpus]}
        for number in slot.devices:
            if number not in known.get(slot.kind, (number,)):
                has = f"{node.name or 'this machine'} has {node.cores} cores and {len(node.gpus)} GPUs"
                raise ConfigError(f"devices={text}: {slot.kind}:{number} is not there: {has}")
            core = node.core_numbers[number] if slot.kind == "cpu" else number
            devices.append(on_node(node, f"{slot.kind}:{core}"))
    return tuple(devices)


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


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
