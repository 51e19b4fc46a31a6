"""Train a recipe with several settings: python -m embodied.sweep recipe=pointmass_ppo algo.lr=1e-4,3e-4,1e-3 seeds=0-2

Every setting, with each of its seeds, is an ordinary run in a process of its own; one page compares the settings.

usage: python -m embodied.sweep recipe=NAME KEY=A,B,C [KEY=A,B ...] [seeds=0-2] [key=value ...] [--dry-run | --help]

  recipe    a name (python -m embodied.list recipes), or path/to/my.yaml
  KEY=A,B   a key of the recipe with several values: every combination is a run. Commas inside brackets or quotes
            belong to a value: 'policy.hidden=[64,64],[256,256]'
  seeds     0-2 or 0,2,5: every setting with each of these seeds [0]
  at_once   number of simultaneous runs, each on its own cores and GPUs [as many as fit on the machine, by the
            plan of the first run]; shared: each run owns some devices and lends them while it has no work for them,
            as in embodied.share
  group     the folder that names the runs [the newest of the same command in run.dir, else a new one]
  program   a workflow of your own, my_module:MyLoop
  --dry-run print the runs, their states and the number of simultaneous runs, and stop

The same command again continues: finished runs stay, unfinished ones are resumed, missing ones begin; more values or
seeds are added to the same group. Keys and their meaning: python -m embodied.train --help
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from embodied import let_call
from embodied.config.command_line import FLAGS, SEVERAL, from_python, parse
from embodied.config.recipe import Loaded, RunConfig, load
from embodied.core.errors import ConfigError
from embodied.core.files import as_path, check_place
from embodied.core.yaml_text import read_yaml, write_yaml, yaml_problem
from embodied.placement import PlacementPlan, Topology
from embodied.placement.topology import number
from embodied.reporting.seed_sets_page import sets_of, summary
from embodied.run import launch
from embodied.run.devices import machines
from embodied.run.ending import Interruption
from embodied.run.launch import program_of
from embodied.run.memory_check import PROCESS_BYTES, needs
from embodied.run.policy_source import first_run
from embodied.run.rehearsal import check_before
from embodied.run.run_group import (
    GOING_ON,
    OVER,
    Member,
    RunGroup,
    describe_setting,
    find_group,
    lock_runs,
    read_group,
    recipe_mark,
)
from embodied.sharing.children import GroupChildren, Place
from embodied.sharing.lease_server import RecordedLeases
from embodied.sharing.runs import devices_of, own_devices, placement_for, reserve
from embodied.workflows import roles_of_run
from embodied.workflows.demonstrations import check_kept_data
from embodied.workflows.rl_loop import EmbodiedLoop

RATES = ("success_once", "success_at_end", "return")
USAGE = __doc__ or ""


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, USAGE)


def start(argv: list[str]) -> int:
    return run_several(argv, sweep=True)[0]


def call(*words: str | Mapping[str, Any]) -> RunGroup:
    """Run a sweep (or only several seeds) from Python, like the command. Returns the group with its runs, and with the
    rates of its page: `embodied.sweep("pointmass_ppo", "algo.lr=1e-4,1e-3", "seeds=0-2").rates`."""
    argv = from_python(words)
    _, folder = run_several(argv, sweep=True)
    assert folder is not None, "it is no dry run"
    group = read_group(folder)
    return replace(group, rates={one.label: {name: summary(one, name) for name in RATES} for one in sets_of(group)})


OWN, SHARED = tuple(SEVERAL), "shared"
NOT_SWEPT = ("recipe", "resume", "run.dir", "run.name", "program")  # keys that name one run
MOST = 1000  # runs of one command


@dataclass(frozen=True)
class Order:
    """A command line for several runs."""

    words: tuple[str, ...]  # arguments common to all runs
    flags: tuple[str, ...]
    asked: dict[str, Any]  # values of these arguments
    grid: dict[str, tuple[Any, ...]]  # swept key -> values
    seeds: tuple[int, ...]
    at_once: int | Literal["shared"] | None
    group: Path | None

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Every combination of the swept values."""
        return [dict(zip(self.grid, values)) for values in product(*self.grid.values())]

    def words_of(self, setting: dict[str, Any]) -> list[str]:
        """The arguments of a run with these values."""
        return [*self.words, *(f"{key}={write_yaml(value)}" for key, value in setting.items())]


# The command line


def read_order(argv: Sequence[str], sweep: bool) -> Order:
    """The parts of a command line; raises all its mistakes at once."""
    flags = tuple(FLAGS[word] for word in argv if word in FLAGS)
    argv = [word for word in argv if word not in FLAGS]
    own, problems, rest = launch.split_keys(argv, OWN)
    typed = {key: text for key, _, text in (word.partition("=") for word in argv if word.partition("=")[0] in OWN)}
    seeds: tuple[int, ...] = (0,) if sweep else ()
    if "seeds" in typed and not any(problem.startswith("seeds") for problem in problems):
        seeds = read_seeds(typed["seeds"], problems)
    at_once = own.get("at_once")
    if at_once not in (None, SHARED) and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        problems.append(f"at_once={at_once!r}: should be a whole number of runs, at_once=2 for example, or shared")
    if not sweep and "seeds" not in typed:
        problems.append(f"{' and '.join(f'{key}=' for key in own)} needs seeds=, for example seeds=0-4")
    grid, words = {}, []
    for word in rest:
        key, _, text = word.partition("=")
        values = split_values(text) if sweep else [text]
        if len(values) > 1 and key not in (*NOT_SWEPT, "seed"):
            grid[key] = read_values(key, values, problems)
        else:
            words.append(word)
            if len(values) > 1 and key != "seed":
                problems.append(f"{word}: {key} cannot be swept; give it one value")
    given = {word.partition("=")[0] for word in words}
    if "seed" in given:
        problems.append("seed= and seeds= are both there: write seeds=0-4, or seeds=3 for one")
    if "resume" in given:
        problems.append("resume=: the same command continues unfinished runs; leave resume= out")
    if sweep and not grid and "seeds" not in typed:
        problems.append("nothing is swept: give a key several values, for example algo.lr=1e-4,3e-4,1e-3")
    names = {key for key in grid if key in given}
    problems += [f"{key} is given twice" for key in sorted(names)]
    _, typed_values, _ = parse([word for word in words if "=" in word])
    if problems:
        raise ConfigError("\n".join(problems))
    group = as_path(str(own["group"])) if "group" in own else None
    return Order(tuple(words), flags, typed_values, grid, seeds, at_once, group)


def read_seeds(text: str, problems: list[str]) -> tuple[int, ...]:
    """0-4, 0,2,5 or both: 0-2,7."""
    seeds: list[int] = []
    for piece in text.strip().removeprefix("[").removesuffix("]").split(","):
        span = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", piece)
        if not span or int(span[2] or span[1]) < int(span[1]):
            problems.append(f"seeds={text}: should be numbers and ranges, seeds=0-4 or seeds=0,2,5")
            return ()
        first, last = int(span[1]), int(span[2] or span[1])
        if last - first >= MOST:
            problems.append(f"seeds={text}: at most {MOST} runs")
            return ()
        seeds += range(first, last + 1)
    if len({*seeds}) < len(seeds):
        problems.append(f"seeds={text}: a seed is given twice")
    return tuple(seeds)


def split_values(text: str) -> list[str]:
    """The values between commas that are not inside brackets or quotes: `[8,8],[16]` are two."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        elif sign == "," and not depth:
            parts.append("")
            continue
        parts[-1] += sign
    return parts


def read_values(key: str, values: list[str], problems: list[str]) -> tuple[Any, ...]:
    """The values of a swept key, each once."""
    typed: dict[str, str] = {}  # as YAML -> as typed
    for text in map(str.strip, values):
        try:
            meant = write_yaml(read_yaml(text)) if text else ""
        except Exception as err:
            problems.append(f"{key}={text}: the value is not YAML ({yaml_problem(err)})")
            continue
        if not text:
            problems.append(f"{key}={','.join(values)}: a value between commas is empty; null sets a key to nothing")
        elif meant in typed:
            problems.append(f"{key}: {typed[meant]} and {text} are the same value")
        typed[meant] = text
    return tuple(map(read_yaml, typed))


def load_all(order: Order) -> dict[str, Loaded]:
    """The recipe of every setting, by its description; raises all mistakes at once."""
    recipes, problems = {}, []
    for setting in order.settings:
        try:
            loaded = load(order.words_of(setting))
        except ConfigError as err:
            problems += str(err).splitlines()
            continue
        assert loaded is not None, "it was asked for no help"
        recipes[describe_setting(setting)] = loaded
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return recipes


def members_of(order: Order, recipes: dict[str, Loaded]) -> tuple[Member, ...]:
    """All runs: every setting with the first seed, then with the next."""
    marks = {name: recipe_mark(loaded.config) for name, loaded in recipes.items()}
    members = [
        Member(setting, seed, marks[describe_setting(setting)]) for seed in order.seeds for setting in order.settings
    ]
    if len(members) > MOST:
        raise ConfigError(
            f"{len(order.settings)} settings x {len(order.seeds)} seeds = {len(members)} runs; at most {MOST}"
        )
    return tuple(members)


# How many at once


def runs_at_once(plan: PlacementPlan, topology: Topology, memory: float) -> tuple[int, str]:
    """The number of runs that the machine holds at the same time, and the limiting resource. `memory`: bytes of one
    run."""
    node = topology.nodes[0]
    if len(topology.nodes) > 1:
        return 1, f"a run uses all {len(topology.nodes)} machines of the cluster"
    cores, cards = held_by(plan)
    room = {
        number(len(cores), "core"): (len(cores), node.cores, f"of {node.cores}"),
        number(len(cards), "GPU"): (len(cards), len(node.gpus), f"of {len(node.gpus)}"),
        f"{memory / 1e9:.1f} GB": (memory, node.memory_bytes, f"of {node.memory_bytes / 1e9:.0f}"),
    }
    least = min(room, key=lambda name: room[name][1] // room[name][0] if room[name][0] else float("inf"))
    needed, has, of = room[least]
    return max(1, int(has // needed)) if needed else 1, f"a run takes {least} {of}"


def held_by(plan: PlacementPlan) -> tuple[set[int], set[str]]:
    """The cores and GPUs of a run."""
    cards = {device for host in plan.hosts for device in host.devices if device.startswith("gpu:")}
    return {core for host in plan.hosts for core in host.cores}, cards


def memory_of(loaded: Loaded, plan: PlacementPlan, topology: Topology) -> float:
    """Bytes of host memory for a run: its counted memory and its processes."""
    counted = [need.whole for need in needs(loaded.config, plan, topology) if not need.device]
    return max(counted, default=0.0) + PROCESS_BYTES * (1 + len(plan.hosts))


def decide(order: Order, recipes: dict[str, Loaded], plan: PlacementPlan) -> tuple[int, str]:
    """The number of simultaneous runs, and the reason. Raises ConfigError if `at_once` does not fit the machine."""
    loaded = next(iter(recipes.values()))
    topology = machines(loaded.config)
    most, why = runs_at_once(plan, topology, memory_of(loaded, plan, topology))
    if start := shared_start(order, recipes):
        most, why = 1, f"their start, a run of {start}, is made by the first of them"
        if order.at_once not in (None, 1):
            raise ConfigError(f"at_once={order.at_once}: {why}; leave at_once out, or train the start before")
    if order.at_once is None:
        return most, why
    if isinstance(order.at_once, str):  # shared
        return places_that_share(plan, topology, memory_of(loaded, plan, topology))
    asked, node = order.at_once, topology.nodes[0]
    if asked > 1 and len(topology.nodes) > 1:
        raise ConfigError(f"at_once={asked}: {why}; leave at_once out")
    if asked > node.cores:
        raise ConfigError(
            f"at_once={asked} needs a core for each run, and there are {node.cores}; try at_once={node.cores}"
        )
    cores, cards = held_by(plan)
    if cards and asked > len(node.gpus):
        raise ConfigError(f"at_once={asked} needs a GPU for each run, and there are {len(node.gpus)}")
    if plan.mode == "explicit" and asked > 1 and (share := node.cores // asked) < len(cores):
        raise ConfigError(
            f"at_once={asked} leaves each run {number(share, 'core')}, and placement names {len(cores)}; "
            f"try at_once={max(1, node.cores // len(cores))}, or placement=auto"
        )
    return asked, f"as at_once says; {why}"


def places_that_share(plan: PlacementPlan, topology: Topology, memory: float) -> tuple[int, str]:
    """The number of simultaneous runs that share all devices, and the reason. Each owns at least one device, and all
    fit into memory."""
    if plan.mode == "explicit":
        raise ConfigError("at_once=shared places the runs itself; leave placement or at_once=shared out")
    devices, fit = devices_of(topology), max(1, int(sum(node.memory_bytes for node in topology.nodes) // memory))
    return min(len(devices), fit), f"they share {number(len(devices), 'device')}; a run takes {memory / 1e9:.1f} GB"


def share_devices(folder: Path, first: Loaded, count: int) -> tuple[RecordedLeases, list[Place]]:
    """The leases of all devices, and the places of `count` runs that lend devices to each other."""
    topology = machines(first.config)
    devices = devices_of(topology)
    owns = own_devices(devices, [1.0] * count)
    places = [
        Place(own=own, placement=placement_for(first.config, topology, devices, owns, place))
        for place, own in enumerate(owns)
    ]
    free = reserve(first.config, devices)
    return RecordedLeases(
        folder, devices, "lend", lambda words: "error: these runs are seeds or settings", free
    ), places


def shared_start(order: Order, recipes: dict[str, Loaded]) -> str:
    """The recipe of a common start that the first run still has to train; else empty. Runs of different seeds have
    separate starts."""
    starting = [one for one in order.settings if recipes[describe_setting(one)].config.run.start_from]
    for seed, setting in product(order.seeds, starting if len(order.settings) > 1 else ()):
        loaded = load([*order.words_of(setting), f"seed={seed}"])
        if loaded and (first := first_run(loaded)) and not first.folder:
            return first.recipe
    return ""


def divide_machine(topology: Topology, count: int) -> list[Place]:
    """The places of `count` simultaneous runs on cores and GPUs of their own; a single run has all."""
    if count == 1:
        return [Place()]
    numbers = topology.nodes[0].core_numbers
    cards = [gpu.cuda_name for gpu in topology.nodes[0].gpus]
    size, more = len(numbers) // count, len(cards) // count
    return [Place(numbers[i * size : (i + 1) * size], ",".join(cards[i * more : (i + 1) * more])) for i in range(count)]


# Running them


def check_data_once(plans: Sequence[tuple[RunConfig, PlacementPlan]]) -> None:
    """Refuse demonstrations of algo.imitation that do not fit, once instead of in every run."""
    checked: list[Any] = []
    for config, plan in plans:
        asked = config.env, config.policy, config.algo.imitation
        if config.algo.imitation and asked not in checked:
            check_kept_data(config)
            check_before(config, config.algo.imitation, plan.count("learner"))
            checked.append(asked)


def run_several(argv: Sequence[str], sweep: bool = False) -> tuple[int, Path | None]:
    """Run a command line. Returns the exit code and the group's folder (None after --dry-run or --cfg)."""
    order = read_order(argv, sweep)
    program, words = program_of(list(order.words))
    alone = replace(order, words=tuple(words))
    if program is not EmbodiedLoop and order.at_once == SHARED:
        raise ConfigError("at_once=shared is for the roles of embodied.train; leave program= or at_once= out")
    recipes = load_all(alone)
    first = next(iter(recipes.values()))
    if "--cfg" in order.flags:
        load([*alone.words_of(order.settings[0]), "--cfg"])
        return 0, None
    dry = "--dry-run" in order.flags
    plans = [launch.planned(one.config, dry=dry, roles=roles_of_run(program, one.config)) for one in recipes.values()]
    config, plan = plans[0]
    check_data_once(plans)
    at_once, why = decide(alone, recipes, plan)
    wanted = RunGroup(
        Path(),
        first.name,
        order.asked,
        tuple(sorted(order.grid)),
        members_of(order, recipes),
        ("embodied.sweep" if sweep else "embodied.train", *(word for word in argv if word not in FLAGS)),
    )
    group, new = find_group(first.config.run.dir, wanted, order.group)
    check_place("group", group.folder)
    todo = [member for member in group.members if member.key in {one.key for one in wanted.members}]
    states = {member.key: group.state(member) for member in todo}
    at_once = max(1, min(at_once, sum(state not in OVER for state in states.values())))
    sharing = at_once > 1 and order.at_once == SHARED
    on = "devices that they lend to each other" if sharing else "cores of its own"
    how = "one after another" if at_once == 1 else f"{at_once} at once, each on {on}"
    for line in describe(group, new, todo, states, f"{how} ({why})"):
        launch.say(line)
    if dry:
        print(f"\nthe first of them:\n{launch.describe(config, plan)}")
        return 0, None
    group.folder.mkdir(parents=True, exist_ok=True)
    with lock_runs(group.folder), Interruption() as interruption:
        group.write()
        leases, places = None, divide_machine(machines(first.config), 1 if sharing else at_once)
        if sharing:
            leases, places = share_devices(group.folder / "sharing", first, at_once)
        hang_s = first.config.faults.hang_s
        children = GroupChildren(group, order.words, first.config.run.dir, places, hang_s, leases)
        children.run([member for member in todo if states[member.key] not in (*OVER, GOING_ON)], interruption)
        code = children.say_results(todo, interruption)
    return code, group.folder


def describe(group: RunGroup, new: bool, todo: Sequence[Member], states: dict[str, str], how: str) -> list[str]:
    """A few lines on existing runs and the next ones."""
    counts = {state: [*states.values()].count(state) for state in dict.fromkeys(states.values())}
    existing = ", ".join(f"{count} {state}" for state, count in counts.items() if not new)
    settings, seeds = (len({getattr(member, name) for member in todo}) for name in ("setting", "seed"))
    what = f"{settings} settings x {number(seeds, 'seed')} = " if settings > 1 else ""
    return [
        f"group       {group.folder}{'' if new else ', which exists already'}",
        f"runs        {what}{number(len(todo), 'run')}{f': {existing}' if existing else ''}",
        f"            {how}",
    ]


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
