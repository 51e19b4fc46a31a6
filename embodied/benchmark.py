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
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, PositiveFloat, PositiveInt

from embodied import let_call
from embodied.config.command_line import from_python
from embodied.config.recipe import RunConfig, load
from embodied.core.errors import ConfigError
from embodied.core.files import aligned, check_place
from embodied.core.options import LocalPath, Strict
from embodied.placement import PlacedRole, PlacementPlan, Topology, roles_of
from embodied.placement.forecast import equal_to_the_fastest, join_words, why_not
from embodied.placement.profile import read_profile, write_profile
from embodied.plan import plan
from embodied.profiling import stored_profiles
from embodied.profiling.measure import measure as measure_profile
from embodied.profiling.timed_run import Round, TimedRun, timed_forecast, typical
from embodied.records.progress import provenance, timestamp
from embodied.reporting import page
from embodied.reporting.sections import pieces_of, worker_rows
from embodied.run import launch
from embodied.run.devices import draws_on_gpus, host_plans, machines, plan_of_map
from embodied.run.launch import program_of
from embodied.runtime.backend import reserve_devices
from embodied.system.machine import LoadMeter, load_before, under_load
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

MODES = ("collocated", "disaggregated", "hybrid")
OTHER = "custom"  # the fastest layout without a mode's name
ROUNDS = 7
WARM_UP = 2
OVERLAPPING = ("periodic", "async")  # schedules with overlapping rollouts and updates, shown beside the modes
USAGE = (__doc__ or "").format(modes=", ".join(MODES), other=OTHER, rounds=ROUNDS, warm_up=WARM_UP)


def as_list(value: Any) -> Any:
    """modes=all is a list, and so is modes=collocated,hybrid."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",")]
    return value if isinstance(value, list | tuple) else [value]


def every_mode(chosen: tuple[str, ...]) -> tuple[str, ...]:
    return (*MODES, OTHER) if "all" in chosen else chosen


def every_schedule(chosen: tuple[str, ...]) -> tuple[str, ...]:
    return OVERLAPPING if "all" in chosen else tuple(schedule for schedule in chosen if schedule != "none")


Mode: Any = Literal["all", "collocated", "disaggregated", "hybrid", "custom"]
Schedule: Any = Literal["all", "none", "periodic", "async"]


class Options(Strict):
    modes: Annotated[tuple[Mode, ...], BeforeValidator(as_list), AfterValidator(every_mode)] = ("all",)
    schedules: Annotated[tuple[Schedule, ...], BeforeValidator(as_list), AfterValidator(every_schedule)] = ("all",)
    tasks: Annotated[tuple[Any, ...], BeforeValidator(as_list)] = ()
    num_envs: Annotated[tuple[PositiveInt, ...], BeforeValidator(as_list)] = ()
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
    return launch.run(compare_placements, argv, USAGE)


def call(*words: str | Mapping[str, Any]) -> dict[str, Any]:
    """Benchmark from Python, like the command. Returns the content of bench.json: `embodied.benchmark("pointmass_ppo",
    "seconds=30")`."""
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
            stack.callback(reserve_devices(address, hosts))
        timed_runs = {
            mode: stack.enter_context(TimedRun(*placements, folder / "logs" / mode, program, reserves=False))
            for mode, placements in planned.items()
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
    return changed, plan_of_map(config, expected["placement"], topology, roles, expected["stages"])


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


COLUMNS: page.Columns = (  # titles and keys name the kind of device
    ("steps/s", "env_steps_per_s", "{:.0f}".format),
    ("per {device}", "env_steps_per_s_and_{device}", "{:.0f}".format),
    ("rollout s", "rollout_s", "{:.3f}".format),
    ("update s", "update_s", "{:.3f}".format),
    ("weights s", "publish_s", "{:.3f}".format),
    ("idle", "idle", "{:.0%}".format),
    ("MB", "peak_bytes", lambda num_bytes: f"{num_bytes / 1e6:.0f}"),
    ("backward s", "first_backward_s", "{:.3f}".format),
    ("predicted s", "predicted_s", "{:.3f}".format),
    ("measured s", "measured_s", "{:.3f}".format),
    ("error", "error", "{:+.0%}".format),
    ("spread", "spread", "{:.0%}".format),
)


def row_of(result: Any, mode: str) -> dict[str, float | None]:
    """Medians over the rounds of a mode."""
    rounds, expected, typical = result.rounds[mode], result.expected[mode], result.typical(mode)
    seconds = [r.seconds for r in rounds]
    steps = median(r.env_steps / r.seconds for r in rounds)
    low, high = np.percentile(seconds, [25, 75])
    return {
        "env_steps_per_s": steps,
        f"env_steps_per_s_and_{unit(result)[0].lower()}": steps / unit(result)[1],
        **{key: getattr(typical, key) for key in ("rollout_s", "update_s", "publish_s", "first_backward_s")},
        "idle": result.idle[mode],
        "peak_bytes": result.peak_bytes[mode],
        "predicted_s": expected["seconds"],
        "measured_s": typical.seconds,
        "error": expected["seconds"] / typical.seconds - 1,
        "spread": float((high - low) / typical.seconds) if len(seconds) > 1 else None,
    }


def unit(result: Any) -> tuple[str, int]:
    """The kind and number of devices by which throughput is divided: GPUs if any were used, else cores."""
    gpus = sum(count for kind, count in result.devices.items() if kind.startswith("gpu"))
    return ("GPU", gpus) if gpus else ("core", result.devices["cpu"])


def shown_table(result: Any) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table."""
    device = unit(result)[0]
    columns = [(title.format(device=device), key.format(device=device.lower()), text) for title, key, text in COLUMNS]
    return page.grid("mode", columns, rows_of(result))


def rows_of(result: Any) -> dict[str, dict[str, float | None]]:
    rows = {mode: row_of(result, mode) for mode in result.rounds}
    return dict(sorted(rows.items(), key=lambda item: item[1]["measured_s"] or 0.0))


# In words


def describe(result: Any) -> list[str]:
    """The table, and its conclusions."""
    lines = ["", f"{result.task}, {result.num_envs} envs, {result.where}; medians of {num_rounds(result)} rounds"]
    lines += aligned(*shown_table(result))
    lines += [f"{mode:<13}  {layout_of(result, mode)}" for mode in rows_of(result)]
    lines += [f"{mode:<13}  not run: {reason}" for mode, reason in result.refused.items()]
    return [*lines, *conclusions(result)]


def layout_of(result: Any, mode: str) -> str:
    """The roles on each device, and the share of time in which each role's workers were busy."""
    busy = ", ".join(f"{role} {share:.0%}" for role, share in result.typical(mode).busy.items())
    return f"{result.expected[mode]['in_words']}; at work: {busy}"


def conclusions(result: Any) -> list[str]:
    """The conclusions: modes that are predicted equal, whether the measured order is the predicted one, the mode of
    placement=auto compared with the fastest, and the gain of other schedules."""
    measured = list(rows_of(result))
    expected = [mode for mode in result.expected if mode in result.rounds]
    others = [mode for mode in expected if result.expected[mode].get("schedule", "sync") != "sync"]
    modes = [mode for mode in measured if mode not in others]
    lines = []
    if len(modes) > 1:
        seconds = {mode: result.expected[mode]["seconds"] for mode in expected if mode in modes}
        equal = equal_to_the_fastest(seconds)
        equals = f"{join_words(equal)} are predicted equal; " if len(equal) > 1 else ""
        ordered = len(equal) < len(modes) and in_predicted_order(modes, seconds)
        order = "the order of modes is the predicted one; " if ordered else ""
        auto = next(iter(seconds))
        beside = next(mode for mode in modes if mode != auto) if modes[0] == auto else modes[0]
        taken = f"placement=auto takes {auto}{', one of them' if equals else ''}"
        compared = compare_with_fastest(result, auto, beside)
        lines.append(f"{equals}{order}{taken}{compared}: {speed_up_in_words(result, auto, beside)}")
    if modes:
        lines += [f"pipeline.schedule={one}: {speed_up_in_words(result, one, modes[0])}" for one in others]
    return lines


def in_predicted_order(measured: Sequence[str], seconds: dict[str, float]) -> bool:
    """True if no mode was faster than a mode predicted to be faster; modes predicted equal may be in any order."""
    return not any(
        seconds[slow] > seconds[quick]
        and slow not in equal_to_the_fastest({quick: seconds[quick], slow: seconds[slow]})
        for place, slow in enumerate(measured)
        for quick in measured[place + 1 :]
    )


def compare_with_fastest(result: Any, one: str, fastest_other: str) -> str:
    """Compares this mode with the fastest other mode; no winner is named if the intervals overlap."""
    low, _, high = paired_ratio(result.rounds[one], result.rounds[fastest_other])
    return ", the fastest here" if low > 1 else ", not the fastest here" if high < 1 else ", not apart from the fastest"


def speed_up_in_words(result: Any, one: str, other: str) -> str:
    """The speed-up of one mode over another, with its interval, in words."""
    low, middle, high = paired_ratio(result.rounds[one], result.rounds[other])
    interval = f"95% interval {low:.2f} to {high:.2f}, {num_rounds(result)} paired rounds"
    several = num_rounds(result) > 1
    return f"{middle:.2f} times as fast as {other} ({interval if several else 'one round, which has no interval'})"


def paired_ratio(ours: Sequence[Any], others: Sequence[Any]) -> tuple[float, float, float]:
    """The ratio of two modes' median throughputs, as in the table, with its 95% bootstrap interval over paired rounds.
    A single round has no interval."""
    mine, theirs = (np.array([r.env_steps / r.seconds for r in rounds]) for rounds in (ours, others))
    middle = float(np.median(mine) / np.median(theirs))
    if len(mine) == 1:
        return 0.0, middle, math.inf
    picks = np.random.default_rng(0).integers(0, len(mine), (2000, len(mine)))
    ratios = np.median(mine[picks], axis=1) / np.median(theirs[picks], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), middle, float(high)


def num_rounds(result: Any) -> int:
    return len(next(iter(result.rounds.values())))


# The page


def write_report(results: Sequence[Any], header: dict[str, Any], folder: Path) -> None:
    tables = [{**asdict(result), "table": rows_of(result), "verdict": conclusions(result)} for result in results]
    (folder / "bench.json").write_text(json.dumps({"about": header, "results": tables}, indent=1, default=str) + "\n")
    page.write_page(folder / "bench.html", benchmark_page(results, header))


def benchmark_page(results: Sequence[Any], header: dict[str, Any]) -> page.Block:
    parts = [page.section("Measured", measurement(results, header), chart(results))]
    for result in results:
        plans = [f"{mode}: {layout_of(result, mode)}" for mode in result.expected]
        refused = [f"{mode} was not run: {reason}" for mode, reason in result.refused.items()]
        traced = [bar for mode, path in result.traces.items() for bar in timeline(mode, Path(path))]
        blocks = [
            page.table(*shown_table(result)),
            *[page.text(line, note=False) for line in conclusions(result)],
            page.bullets([*plans, *refused]),
            *traced,
        ]
        parts.append(page.section(f"{result.task}, {result.num_envs} envs, {result.where}", *blocks))
    return page.page(f"Placements of {header['recipe']}", parts, problems=warnings(results, header))


def measurement(results: Sequence[Any], header: dict[str, Any]) -> page.Block:
    """Date, machine, code, load and profiles of this measurement."""
    machine = [header.get("host"), header.get("processor"), results[0].where if results else "", header.get("platform")]
    facts = {
        "recipe": header["recipe"],
        "date": header.get("date", ""),
        "commit": header.get("commit"),
        "machine": ", ".join(str(text) for text in machine if text),
        "load": load_in_words(header.get("load", {})),
        "command": " ".join(map(str, header.get("command", []))),
    }
    for result in results:
        name = f"profile of {result.task}, {result.num_envs} envs" if len(results) > 1 else "profile"
        facts[name] = profile_in_words(result.profile)
    return page.facts_table(facts)


def load_in_words(load: dict[str, Any]) -> str:
    """The cores that other programs kept busy before and during the measurement, and the load averages."""
    return "; ".join(
        f"{when}: other programs kept {cores_in_words(value.get('others'))} busy, load average {value.get('average')}"
        for when, value in load.items()
    )


def cores_in_words(others: float | None) -> str:
    return "an unknown number of cores" if others is None else f"{others:.2f} cores"


def profile_in_words(profile: dict[str, Any]) -> str:
    busy = profile.get("busy") or {}
    load = ", ".join(f"{cores_in_words(busy[when])} {when}" for when in ("before", "during") if when in busy)
    parts = [
        f"measured {profile['date']}" if "date" in profile else "",
        f"of commit {profile['commit']}" if profile.get("commit") else "",
        f"on {profile['name']}" if "name" in profile else "",
        f"other programs kept busy {load}" if load else "load unknown",
    ]
    return ", ".join(filter(None, parts))


def warnings(results: Sequence[Any], header: dict[str, Any]) -> list[str]:
    """Warns of measurements that were taken under load."""
    cores, lines = header.get("cores", 1), []
    load = {when: value.get("others") for when, value in header.get("load", {}).items()}
    if busy := under_load(load, cores):
        lines.append(f"this benchmark was measured under load: {busy}. Measure again when the machine is quiet.")
    for result in results:
        if busy := under_load(result.profile.get("busy") or {}, cores):
            lines.append(
                f"the profile that predicts {result.task}, {result.num_envs} envs was measured under load: {busy}. "
                "What it predicts may be off: profile=new measures it again."
            )
    return lines


def timeline(mode: str, path: Path) -> list[page.Block]:
    """The timeline of one iteration of a mode, and its memory moves."""
    spans, note = pieces_of(path)
    if not spans:
        return note
    begin = min(span.start_s for span in spans)
    moves = [
        [f"{span.start_s - begin:.3f} s", span.worker, span.name, f"{1e3 * (span.end_s - span.start_s):.2f} ms"]
        for span in sorted(spans, key=lambda span: span.start_s)
        if span.name.startswith(("offload ", "onload "))
    ]
    moved = page.table(["at", "worker", "memory", "took"], moves, numeric=False)
    drawn = worker_rows(spans, f"{mode}: one iteration, piece by piece")
    return [drawn, moved if moves else page.text(f"{mode}: no memory moved.", note=False)]


def chart(results: Sequence[Any]) -> page.Block:
    """Bars of env steps per second, predicted above measured, whiskers over the middle half of the rounds."""
    charts = []
    for result in results:
        rows, speeds = [], []
        for mode in rows_of(result):
            expected = result.expected[mode]["env_steps_per_s"]
            low, middle, high = np.percentile([r.env_steps / r.seconds for r in result.rounds[mode]], [25, 50, 75])
            measured = page.Row("", {"measured": [(0, middle)]}, whisker=(low, high))
            rows += [page.Row(mode, {"predicted": [(0, expected)]}), measured, page.Row("", {})]
            speeds += [expected, high]
        charts.append(page.Rows(f"{result.task}, {result.num_envs} envs", rows[:-1], max(speeds)))
    return page.rows_chart("predicted and measured throughput", charts, "env steps/s")


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
