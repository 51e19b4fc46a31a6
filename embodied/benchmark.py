"""Which placement is fastest here, for this recipe? python -m embodied.benchmark recipe=maniskill_ppo modes=all

Measures the parts (a profile) and predicts every mode and schedule from it; then runs all of them, in turns, and
compares predicted with measured. Modes that do not fit in memory are listed with the arithmetic.

usage: python -m embodied.benchmark recipe=NAME [modes=all] [key=value ...] [--help]

  recipe    a name (python -m embodied.list recipes), or path/to/my.yaml
  program   a workflow of your own, my_module:MyLoop, with roles of its own (default: collect, update, publish)
  modes     all, one of {modes}, {other} (the fastest way without a name), or a list of
            them (default all)
  schedules all, periodic or async, a list of them, or none: also the fastest placement under these (default
            all possible ones); modes always have pipeline.schedule=sync
  tasks     list of tasks to measure: tasks=[PushCube-v1,PickCube-v1] (default: the recipe's)
  num_envs  list of numbers of envs to measure: num_envs=[32,64] (default: the recipe's)
  rounds    timed iterations of every mode, in turns (default {rounds}, after {warm_up} to warm up)
  profile   stored = this recipe's newest on this machine, new = measure now (default: stored if there is one)
  seconds   about how long a new profile may take (default 60)
  out       the folder of bench.json and bench.html (default runs/bench/RECIPE-DATE)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PositiveFloat, PositiveInt

from embodied import let_call
from embodied.config.command_line import from_python
from embodied.config.recipe import RunConfig, load
from embodied.core.errors import ConfigError
from embodied.core.files import check_place
from embodied.core.options import LocalPath, Strict
from embodied.placement import PlacedRole, PlacementPlan, Topology, make_plan, roles_of
from embodied.placement.profile import read_profile, write_profile
from embodied.placement.reasons import why_not
from embodied.plan import plan
from embodied.profiling import stored_profiles
from embodied.profiling.measure import measure as measure_profile
from embodied.profiling.timed_run import Round, TimedRun, timed_forecast, typical
from embodied.records.progress import timestamp
from embodied.reporting.benchmark_page import describe, warnings, write_report
from embodied.run import launch
from embodied.run.devices import divides_requests, draws_on_gpus, host_plans, machines
from embodied.run.launch import program_of
from embodied.run.run_folder import provenance
from embodied.runtime.backend import reserved
from embodied.system.machine import LoadMeter, load_before
from embodied.workflows.rl_loop import EmbodiedLoop
from embodied.workflows.shipped_roles import roles_of_run

MODES = ("collocated", "disaggregated", "hybrid")
OTHER = "custom"  # the fastest layout without a mode's name
ROUNDS = 7
WARM_UP = 2
OVERLAPPING = ("periodic", "async")  # schedules with overlapping rollouts and updates, shown beside the modes
USAGE = (__doc__ or "").format(modes=", ".join(MODES), other=OTHER, rounds=ROUNDS, warm_up=WARM_UP)


def listed(value: Any) -> Any:
    """modes=all is a list, and so is modes=collocated,hybrid."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",")]
    return value if isinstance(value, list | tuple) else [value]


def every_mode(chosen: tuple[str, ...]) -> tuple[str, ...]:
    return (*MODES, OTHER) if "all" in chosen else chosen


def every_schedule(chosen: tuple[str, ...]) -> tuple[str, ...]:
    return OVERLAPPING if "all" in chosen else tuple(one for one in chosen if one != "none")


Mode: Any = Literal["all", "collocated", "disaggregated", "hybrid", "custom"]
Schedule: Any = Literal["all", "none", "periodic", "async"]


class Options(Strict):
    modes: Annotated[tuple[Mode, ...], BeforeValidator(listed), AfterValidator(every_mode)] = ("all",)
    schedules: Annotated[tuple[Schedule, ...], BeforeValidator(listed), AfterValidator(every_schedule)] = ("all",)
    tasks: Annotated[tuple[Any, ...], BeforeValidator(listed)] = ()
    num_envs: Annotated[tuple[PositiveInt, ...], BeforeValidator(listed)] = ()
    rounds: PositiveInt = ROUNDS
    profile: Literal["stored", "new"] | None = None
    seconds: PositiveFloat = 60.0
    out: LocalPath | None = None


@dataclass
class Result:
    """One task with one number of envs."""

    task: str
    num_envs: int
    devices: dict[str, int]  # usable devices, by kind
    nodes: int
    expected: dict[str, dict[str, Any]]  # by mode, fastest first
    refused: dict[str, str]
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)  # traces of one more iteration, by mode
    others: float | None = None  # cores kept busy by other programs meanwhile
    profile: dict[str, Any] = field(default_factory=dict)  # origin of the profile: method, date and load

    @property
    def where(self) -> str:
        return stored_profiles.describe_devices(self.devices, self.nodes)

    def typical(self, mode: str) -> Round:
        return typical(self.rounds[mode])


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, USAGE)


def start(argv: list[str]) -> None:
    compare_placements(argv)


def call(*words: str | Mapping[str, Any]) -> dict[str, Any]:
    """Benchmark from Python, like the command. Returns the content of bench.json: embodied.benchmark("pointmass_ppo",
    "seconds=30")."""
    return json.loads((compare_placements(from_python(words)) / "bench.json").read_text())


def compare_placements(argv: list[str]) -> Path:
    """Measure, plan, time; returns the folder of the results."""
    named_program = [word for word in argv if word.startswith("program=")]
    program, argv = program_of(argv)
    options, rest = launch.own_options(Options, argv)
    configs = variants(options, rest)
    folder = new_folder(options.out, configs[0][1])
    header: dict[str, Any] = {"recipe": configs[0][1].run.name, "rounds": options.rounds, "warm_up": WARM_UP}
    header |= {"date": timestamp(), "processor": stored_profiles.processor(), **provenance()}
    header["load"] = {"before": load_before()}
    results = [benchmark(config, [*named_program, *words], options, folder, program) for words, config in configs]
    others = [result.others for result in results if result.others is not None]
    header["load"]["during"] = {"others": max(others, default=None), "average": round(os.getloadavg()[0], 2)}
    write_report(results, header, folder)
    for result in results:
        print("\n".join(describe(result)))
    for line in warnings(results, header):
        print(f"\nwarning     {line}")
    print(f"\nresults     {folder / 'bench.html'}, bench.json")
    return folder


def benchmark(
    config: RunConfig,
    arguments: Sequence[str],
    options: Options,
    folder: Path,
    program: type[EmbodiedLoop] = EmbodiedLoop,
) -> Result:
    level = config.pipeline.async_level
    config, _ = launch.planned(stored_profiles.timed_recipe(config), roles=roles_of_run(program, config))
    topology = machines(config)
    path = profile_of(config, arguments, options, topology, program)
    profile = stored_profiles.fitted_to(config, path, roles_of(roles_of_run(program, config)))
    profile = replace(profile, dataflow=replace(profile.dataflow, level=level))
    limits = config.cluster.memory_gb, draws_on_gpus(config.env), config.algo.why_not_periodic()
    planned = plan(profile, topology, *limits)
    chosen = {mode: choice for mode in options.modes if (choice := planned.modes.get(mode))}
    missing = [mode for mode in options.modes if mode not in chosen and mode != OTHER]  # custom may be absent
    refused = {mode: why_not(planned.planner, mode) for mode in missing}
    for schedule in options.schedules:
        planned_choice = planned.schedules[schedule]
        if isinstance(planned_choice, str):
            refused[schedule] = planned_choice
        else:
            chosen[schedule] = planned_choice
    if not chosen:
        raise ConfigError("\n".join(f"{mode}: {reason}" for mode, reason in refused.items()))
    fastest_first = sorted(chosen.items(), key=lambda item: item[1].price.seconds)
    expected = {name: planned.forecast(choice) for name, choice in fastest_first}
    used = {str(c): c.count for c in planned.planner.classes}
    result = Result(str(config.env.task), config.env.num_envs, used, len(topology.nodes), expected, refused)
    result.profile = dict(profile.made)
    name = f"expected-{len(list(folder.glob('expected-*.json')))}.json"
    (folder / name).write_text(json.dumps({"task": result.task, **asdict(result)}, indent=1) + "\n")
    what = f"{result.task}, {result.num_envs} envs on {result.where}"
    print(f"\n{what}: expected, written to {folder / name} before anything is measured")
    for mode, forecast in expected.items():
        print(f"  {mode:<14}{forecast['env_steps_per_s']:>9.0f} env steps/s   {forecast['in_words']}")
    meter = LoadMeter()
    run_all(config, topology, options.rounds, result, folder, program)
    result.others = None if config.cluster.backend == "ray" else meter.load_of_others()  # Ray's workers would count
    stored = read_profile(path)
    timed = [timed_forecast(forecast, result.rounds[mode]) for mode, forecast in expected.items()]
    write_profile(replace(stored, runs=[*stored.runs, *timed]), path)
    return result


# The runs that are timed


def run_all(
    config: RunConfig, topology: Topology, rounds: int, result: Result, folder: Path, program: type[EmbodiedLoop]
) -> None:
    """Start all modes, then run them in turns, so that a slow minute of the machine affects all of them."""
    roles = roles_of(roles_of_run(program, config))
    planned = {mode: runnable(config, expected, topology, roles) for mode, expected in result.expected.items()}
    with ExitStack() as stack:
        if address := config.cluster.joined:  # all modes are alive together, so the devices are reserved once
            hosts = [host for _, plan in planned.values() for host in host_plans(plan)]
            stack.callback(reserved(address, hosts))
        timed_runs = {
            mode: stack.enter_context(TimedRun(*each, folder / "logs" / mode, program, reserves=False))
            for mode, each in planned.items()
        }
        order = list(timed_runs)
        for turn in range(rounds + WARM_UP):
            for mode in order[turn % len(order) :] + order[: turn % len(order)]:
                done = timed_runs[mode].iterate()
                if turn >= WARM_UP:
                    result.rounds.setdefault(mode, []).append(done)
            print(f"round {turn + 1} of {rounds + WARM_UP}{' (warm-up)' if turn < WARM_UP else ''}", flush=True)
        for mode, timed_run in timed_runs.items():
            result.peak_bytes[mode] = timed_run.peak_bytes()
            result.idle[mode] = timed_run.idle(result.rounds[mode], sum(result.devices.values()))
            result.traces[mode] = str(timed_run.traced(new_trace(folder, mode)))


def new_trace(folder: Path, mode: str) -> Path:
    """trace-hybrid.json; for a second task or number of envs trace-hybrid-2.json."""
    number = 1 + len(list(folder.glob(f"trace-{mode}*.json")))
    return folder / (f"trace-{mode}.json" if number == 1 else f"trace-{mode}-{number}.json")


def runnable(
    config: RunConfig, expected: dict[str, Any], topology: Topology, roles: Sequence[PlacedRole]
) -> tuple[RunConfig, PlacementPlan]:
    """The recipe under this placement and schedule."""
    keys = ("stages", "granularity", "schedule", "async_level")
    changed = config.with_values("pipeline", **{key: expected[key] for key in keys})
    changed = changed.model_copy(update={"placement": expected["placement"]})
    shares = (config.env.num_envs, expected["stages"])
    return changed, make_plan(expected["placement"], topology, *shares, roles=roles, shared=divides_requests(config))


def profile_of(
    config: RunConfig, arguments: Sequence[str], options: Options, topology: Topology, program: type[EmbodiedLoop]
) -> Path:
    """The stored profile of these machines, or a new one. `arguments`: of the recipe."""
    roles = roles_of(roles_of_run(program, config))
    path, why_none = stored_profiles.profile_for(config, topology, roles) if options.profile != "new" else (None, "")
    if path is not None:
        print(f"profile     {path}, measured {read_profile(path).made.get('date', 'earlier')}")
        return path
    if options.profile == "stored":
        reason = why_none or "none has been measured for this recipe here"
        raise ConfigError(f"profile=stored, but {reason}; try profile=new")
    if why_none:
        print(f"profile     {why_none}")
    profile = measure_profile(config, arguments, options.seconds, print, program)
    path = stored_profiles.profile_path(config, profile.made, roles)
    write_profile(profile, path)
    return path


# The command's own words


def variants(options: Options, rest: list[str]) -> list[tuple[list[str], RunConfig]]:
    """The arguments and the recipe for each task and number of envs."""
    tasks = [f"env.task={task}" for task in options.tasks] or [""]
    sizes = [f"env.num_envs={n}" for n in options.num_envs] or [""]
    arguments = [[*rest, *filter(None, pair)] for pair in product(tasks, sizes)]
    recipes = [(words, load(words)) for words in arguments]
    if not all(loaded for _, loaded in recipes):
        raise ConfigError("a benchmark measures; python -m embodied.train --cfg shows the recipe")
    return [(words, loaded.config) for words, loaded in recipes if loaded]


def new_folder(out: Path | None, config: RunConfig) -> Path:
    from datetime import datetime

    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = check_place("out", out) if out else Path(config.run.dir) / "bench" / f"{config.run.name}-{stamp}"
    if (folder / "bench.json").exists():
        raise ConfigError(f"out={folder} has results already; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
