"""Plan before you have the machine: python -m embodied.plan recipe=maniskill_ppo cluster=8xGPU profile=FILE

Reads the costs of a recipe's parts (a profile), tries every placement on a cluster, and prints the speed of each mode,
the winner, and why it wins. Nothing is started; neither torch nor a simulator is imported.

usage: python -m embodied.plan [recipe=NAME] [profile=FILE] [cluster=8xGPU] [out=FOLDER] [key=value ...] [--help]

  recipe    a name (python -m embodied.list recipes), or path/to/my.yaml; its newest profile of
            this machine
  program   a workflow of your own, my_module:MyLoop, with roles of its own (default: collect, update, publish)
  profile   a file written by `python -m embodied.profiling recipe=NAME`, or one of the package's own:
            published_maniskill_openvla, published_libero_openvla_oft,
            published_reasoning_8b
  cluster   8xGPU, 64x8xGPU, 16xCPU, or file.yaml with nodes; default: this machine, or
            all nodes of the Ray cluster that the recipe names (cluster.address)
  out       where plan.json and plan.html go; default: plans/PROFILE-CLUSTER in run.dir
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from embodied import assets, let_call
from embodied.config.command_line import from_python
from embodied.config.recipe import RunConfig, load
from embodied.config.sections import RunSection
from embodied.core.arrays import gather
from embodied.core.errors import ConfigError
from embodied.core.files import aligned, check_place
from embodied.core.options import LocalPath, Strict
from embodied.envs import env_class
from embodied.placement import PlacedRole, PlacementError, roles_of
from embodied.placement.dataflow import SCHEDULES
from embodied.placement.forecast import (
    Timeline,
    describe_lengths,
    equal_to_the_fastest,
    forecast,
    join_words,
    timeline_of,
    why_it_wins,
    why_not,
    why_not_apart,
    why_nothing_fits,
)
from embodied.placement.grammar import EMBODIED
from embodied.placement.iteration_cost import Choice
from embodied.placement.profile import Profile, read_profile
from embodied.placement.profile_planner import STAGES, Planner
from embodied.placement.schedule_overlap import overlaps
from embodied.placement.topology import DeviceClass, Topology, read_topology
from embodied.profiling import stored_profiles
from embodied.reporting.page import Block, Row, Rows, bullets, grid, page, rows_chart, section, short, table, write_page
from embodied.run import launch
from embodied.run.devices import discover, draws_on_gpus, known_drawing, machines, with_gpu_physics, with_known_renderer
from embodied.run.launch import program_of, proofs
from embodied.system.machine import under_load
from embodied.workflows import roles_of_run

MODES = ("collocated", "disaggregated", "hybrid", "custom")
NOT_PERIODIC = "its groups are not known, or not learned from in one gradient step"
FIRST = ("sim", "policy", "learner")  # roles with fixed colours in all charts
USAGE = __doc__ or ""
COLUMNS = (
    ("s/iteration", "seconds", "{:.4g}".format),
    ("measured", "measured_s", "{:.4g}".format),
    ("env steps/s", "env_steps_per_s", "{:.4g}".format),
    ("idle", "idle", "{:.0%}".format),
    ("layout", "in_words", str),
)


class Options(Strict):
    cluster: str | None = None
    profile: str | None = None
    out: LocalPath | None = None


@dataclass(frozen=True)
class Planned:
    profile: Profile
    topology: Topology
    planner: Planner
    modes: dict[str, Choice | None]  # with the schedule of the profile's dataflow
    schedules: dict[str, Choice | str]  # by schedule: the fastest layout, or the reason why there is none
    search_s: float
    draws: bool = False  # simulators on cores render on GPUs

    @property
    def ranked(self) -> dict[str, Choice]:
        """The modes that fit, the fastest first."""
        fitting = {mode: choice for mode, choice in self.modes.items() if choice}
        return dict(sorted(fitting.items(), key=lambda item: item[1].price.seconds))

    @property
    def winner(self) -> Choice:
        return next(iter(self.ranked.values()))

    @property
    def refused(self) -> dict[str, str]:
        """Reasons why other modes do not fit."""
        return {mode: why_not(self.planner, mode) for mode in MODES[:3] if self.modes.get(mode) is None}

    @property
    def equal(self) -> list[str]:
        """The modes that are predicted equally fast, the fastest first."""
        return equal_to_the_fastest({mode: choice.price.seconds for mode, choice in self.ranked.items()})

    @property
    def reasons(self) -> list[str]:
        """Why the fastest mode wins over slower ones."""
        slower = {mode: choice for mode, choice in self.modes.items() if choice and mode not in self.equal}
        return why_it_wins(self.winner, slower)

    @property
    def verdict(self) -> str:
        """Names the winning mode; modes that are predicted equal have no winner."""
        return f"{join_words(self.equal)} are predicted equal" if len(self.equal) > 1 else f"{self.equal[0]} wins"

    @cached_property
    def forecasts(self) -> dict[str, dict[str, Any]]:
        return {mode: self.forecast(choice) for mode, choice in self.ranked.items()}

    @cached_property
    def of_schedules(self) -> dict[str, dict[str, Any]]:
        """The forecasts of the fastest layouts of schedules."""
        return {name: self.forecast(choice) for name, choice in self.schedules.items() if not isinstance(choice, str)}

    def forecast(self, choice: Choice) -> dict[str, Any]:
        """What is predicted of a layout, and its measured seconds where it has been timed."""
        predicted = forecast(choice, self.topology, self.draws)
        return {**predicted, "measured_s": self.profile.measured_s(predicted)}


def main(argv: list[str] | None = None) -> int:
    return launch.run(compare_predictions, argv, USAGE)


def call(*words: str | Mapping[str, Any]) -> dict[str, Any]:
    """Plan from Python, like the command. Returns the content of plan.json: `embodied.plan("pointmass_ppo",
    "cluster=16xCPU")`."""
    return json.loads((compare_predictions(from_python(words)) / "plan.json").read_text())


def compare_predictions(argv: list[str]) -> Path:
    """Plan and print the result; returns the folder of the results."""
    named_program = [word for word in argv if word.startswith("program=")]
    program, argv = program_of(argv)
    options, rest = launch.own_options(Options, argv)
    try:
        config = recipe_of(options.profile, rest)
        roles = roles_of(roles_of_run(program, config) if config else program.roles)
        topology = read_topology(options.cluster) if options.cluster else machines(config) if config else discover()
        config = config and resolved(config, topology, named=bool(options.cluster))
        profile, name = find_profile(options.profile, config, [*named_program, *rest], topology, roles)
        where = stored_profiles.device_kinds(config, topology, roles) if config else None
        if why := why_not_measured(profile, topology, name, where):
            raise ConfigError(why)
        limits = (config.cluster.memory_gb, draws_on_gpus(config.env), config.algo.why_not_periodic()) if config else ()
        planned = plan(profile, topology, *limits)
    except PlacementError as err:
        raise ConfigError(str(err)) from None
    runs = config.run.dir if config else RunSection.model_fields["dir"].default
    out = check_place("out", options.out or runs / "plans" / f"{name}-{topology.name.replace(' ', '-')}")
    priced = drawing_price(planned, config, limits) if config else published_drawing_price(planned)
    print("\n".join([*describe(planned, name), *priced]))
    write(planned, name, out)
    print(f"\nplan        {out / 'plan.html'}, plan.json")
    return out


def drawing_price(planned: Planned, config: RunConfig, limits: tuple[Any, ...]) -> list[str]:
    """What the winner takes if GPUs draw the simulators' images and if cores do, where a probe on this machine timed
    both."""
    result = known_drawing(config.env, planned.topology)
    if result is None or not (result.on_gpus and result.software_s):
        return []
    more_s = (result.software_s - result.picture_s) * (1 if planned.draws else -1)
    memory_gb, draws, not_periodic = limits
    other = plan(
        stored_profiles.drawn_elsewhere(planned.profile, more_s), planned.topology, memory_gb, not draws, not_periodic
    )
    seconds = [planned.winner.price.seconds, other.winner.price.seconds][:: 1 if draws else -1]
    by = f"{seconds[0]:.4g} s/iteration with images from GPUs ({result.by}), {seconds[1]:.4g} with images from cores"
    return ["", f"drawing     {by}"]


def published_drawing_price(planned: Planned) -> list[str]:
    """What the winner takes by a published profile, and if its simulators' images took no time to draw."""
    if not (drawn_s := planned.profile.made.get("drawn_on_cores_s")):
        return []
    other = plan(stored_profiles.drawn_elsewhere(planned.profile, -drawn_s), planned.topology)
    seconds = f"{planned.winner.price.seconds:.4g} s/iteration with images from cores, {other.winner.price.seconds:.4g}"
    return ["", f"drawing     {seconds} if drawing took no time; images from GPUs are between these, and not measured"]


# Inputs: a recipe, its profile, machines


def recipe_of(named: str | None, rest: list[str]) -> RunConfig | None:
    """The recipe, as it was measured; None if only a profile is given."""
    if not any(arg.startswith("recipe=") for arg in rest):
        if named is None or rest:
            raise ConfigError("nothing to plan: name a recipe (recipe=maniskill_ppo), or a profile; see --help")
        return None
    loaded = load(rest)
    if loaded is None:
        raise ConfigError("a plan predicts; python -m embodied.train --cfg shows the recipe")
    return loaded.config


def resolved(config: RunConfig, topology: Topology, named: bool) -> RunConfig:
    """The config with the env's open options decided as a run on these machines decides them."""
    config, _ = with_gpu_physics(config, topology, dry=True, named=named)
    kind = env_class(config.env)
    config = config.model_copy(update={"env": kind.resolve(kind.proven(config.env, proofs(config)))})
    return with_known_renderer(config, topology)


def find_profile(
    named: str | None,
    config: RunConfig | None,
    arguments: Sequence[str],
    topology: Topology,
    roles: Sequence[PlacedRole] = EMBODIED,
) -> tuple[Profile, str]:
    """The named profile, else this recipe's profile of equal machines, else its newest; and its name. With a recipe the
    profile gets the recipe's dataflow. `arguments`: of the recipe."""
    if config is None:
        return read_profile(packaged(named)), packaged(named).stem
    path = packaged(named) if named else stored_profiles.profile_for(config, topology, roles)[0]
    path = path or stored_profiles.newest_profile(config, arguments, roles)
    profile = stored_profiles.fitted_to(config, path, roles)
    return replace(profile, made={**profile.made, "arguments": [*arguments]}), path.stem  # of a new measurement


def why_not_measured(
    profile: Profile, topology: Topology, name: str, where: Mapping[str, Sequence[DeviceClass]] | None = None
) -> str:
    """Names the measurements that this profile lacks for these machines; "" if it lacks none. `where`: the devices of
    each role of the recipe."""
    classes = [c for c in topology.classes() if c.count]
    missing = gather((str(on), role) for role, on in profile.missing(classes, where))
    if not missing:
        return ""
    lacks = "; ".join(f"{join_words(roles)} on {kind}" for kind, roles in missing.items())
    measured_kinds = ", ".join(sorted({kind for on in profile.costs.values() for kind in on}))
    if measured := profile.made.get("devices"):
        measured_kinds = stored_profiles.describe_devices(measured)
    lines = [
        f"{name} was measured on {measured_kinds}; {topology.name} would need unmeasured costs: {lacks}",
        f"measure it on a machine with {join_words([*missing])}: {stored_profiles.command_of_profile(profile)}",
    ]
    if all("cpu" in on for on in profile.costs.values()) and topology.cores:
        lines.append(f"or plan for its cores alone: cluster={topology.cores}xCPU")
    return "\n".join(lines)


def packaged(name: str) -> Path:
    """The path of a profile: a file, or the name of a packaged profile."""
    inside = Path(assets.__file__).parent / "profiles" / f"{name}.json"
    return inside if inside.is_file() else Path(name)


# The search


def plan(
    profile: Profile,
    topology: Topology,
    memory_gb: float | None = None,
    draws: bool = False,
    not_periodic: str = NOT_PERIODIC,
) -> Planned:
    """The fastest layout of every mode and of every schedule, on the kinds of devices in the profile. `not_periodic`:
    the reason why learners cannot process groups during the rollout, if any."""
    profile, classes = stored_profiles.with_memory(profile, topology, memory_gb)
    if homeless := [name for name in profile.costs if not any(profile.cost(name, c) for c in classes)]:
        kinds = ", ".join(sorted({kind for name in homeless for kind in profile.costs[name]}))
        have = ", ".join(str(c) for c in topology.classes())
        raise PlacementError(
            f"the profile has costs on {kinds} for {', '.join(homeless)}, this cluster has {have}; measure them on "
            f"such a machine: {stored_profiles.command_of_profile(profile)}"
        )
    profile.check_speed(classes)
    stages = profile.made.get("stages") or STAGES
    started = time.perf_counter()
    planner = Planner(profile.dataflow, profile, classes, stages)
    modes = planner.modes()
    schedules = {schedule: fastest_under(planner, schedule, modes) or not_periodic for schedule in SCHEDULES}
    search_s = time.perf_counter() - started
    if not any(modes.values()):
        raise PlacementError(f"nothing fits on this cluster\n{why_nothing_fits(planner)}")
    return Planned(profile, topology, planner, modes, schedules, search_s, draws)


def fastest_under(planner: Planner, schedule: str, modes: dict[str, Choice | None]) -> Choice | str:
    """The fastest layout under this schedule, or the reason why there is none ("" if none is known). Under the
    profile's own schedule it is the fastest mode."""
    dataflow = planner.dataflow
    if schedule == "periodic" and not dataflow.groups:
        return ""
    if schedule == dataflow.schedule:
        fastest = min(filter(None, modes.values()), key=lambda choice: choice.price.seconds, default=None)
    else:
        planner = planner.with_schedule(schedule)
        fastest = planner.fastest()
    return fastest or why_not_apart(planner)


# The result in words, as a drawing, as JSON and as a page


def describe(planned: Planned, name: str) -> list[str]:
    lines = [
        f"profile     {name}: {planned.profile.made.get('name', '')}".rstrip(": "),
        f"cluster     {planned.topology.name}: {'; '.join(planned.topology.describe())}",
        *load_warning(planned.profile),
        f"search      {planned.search_s * 1000:.0f} ms",
        "",
        *aligned(*grid("mode", COLUMNS, planned.forecasts)),
        *[f"{mode:<15}does not fit: {reason}" for mode, reason in planned.refused.items()],
        "",
        *aligned(*grid("schedule", COLUMNS, planned.of_schedules)),
        *[f"{one:<10}no plan: {why}" for one, why in planned.schedules.items() if isinstance(why, str)],
    ]
    left = [c.name for c in planned.topology.classes() if c.count and c.name not in planned.planner.pricer.classes]
    lines += [f"nothing of this recipe runs on {one} (learner.device, env.backend)" for one in left if one != "cpu"]
    lines += [
        "",
        planned.verdict,
        *(f"  {line}" for line in (*planned.reasons, *describe_lengths(planned.planner.pricer, planned.winner.layout))),
    ]
    winner = planned.forecast(planned.winner)
    cut = f" pipeline.granularity={winner['granularity']}" if winner["granularity"] else ""
    if overlaps(planned.profile.dataflow):
        cut = f" pipeline.schedule={winner['schedule']}"
    return [*lines, "", f"placement='{json.dumps(winner['placement'])}' pipeline.stages={winner['stages']}{cut}"]


def load_warning(profile: Profile) -> list[str]:
    """Says that a profile was measured while other programs kept the machine busy."""
    cores = profile.made.get("devices", {}).get("cpu", 1)
    busy = under_load(profile.made.get("busy") or {}, cores)
    again = f"measure it again: {stored_profiles.command_of_profile(profile)}"
    why = f"warning     the profile was measured under load: {busy}. Its predictions may be off; {again}"
    return [why] if busy else []


def write(planned: Planned, name: str, out: Path) -> None:
    """plan.json, and the page with its charts."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(as_json(planned, name), indent=1) + "\n")
    write_page(out / "plan.html", plan_page(planned, name))


def as_json(planned: Planned, name: str) -> dict:
    no_plan = {schedule: {"refused": why} for schedule, why in planned.schedules.items() if isinstance(why, str)}
    fields = {"profile": name, "cluster": planned.topology.name}
    fields |= {"winner": planned.equal[0] if len(planned.equal) == 1 else None, "equal": planned.equal}
    fields |= {"modes": planned.forecasts, "schedules": planned.of_schedules | no_plan}
    return fields | ({"refused": planned.refused} if planned.refused else {})


def plan_page(planned: Planned, name: str) -> Block:
    drawn = {
        f"{mode}: {planned.forecasts[mode]['in_words']}": timeline_of(choice.pricer, choice.layout)
        for mode, choice in planned.ranked.items()
    }
    return page(
        f"Plan of {name} on {planned.topology.name}",
        [
            section("Predicted", table(*grid("mode", COLUMNS, planned.forecasts))),
            section("Under each schedule", table(*grid("schedule", COLUMNS, planned.of_schedules))),
            section("Why", bullets(planned.reasons)),
            section("An iteration", draw(drawn)),
        ],
        f"{planned.profile.made.get('name', name)}, on {planned.topology.name}",
        heading=planned.verdict,
    )


def draw(timelines: dict[str, Timeline]) -> Block:
    """Charts with a row for every range of devices that do the same, and a colour per component, on a common time
    axis."""
    longest = max(timeline.seconds for timeline in timelines.values()) or 1.0
    charts = []
    for title, timeline in timelines.items():
        rows = []
        for devices, spans in timeline.rows().items():
            bars: dict[str, list] = defaultdict(list)
            for span in spans:
                bars[span.what].append((span.start_s, span.end_s))
            rows.append(Row(devices, bars))
        charts.append(Rows(f"{title}; {short(timeline.seconds)} s", rows, longest, timeline.seconds))
    return rows_chart("what every device does", charts, "seconds of an iteration", names=FIRST)


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
