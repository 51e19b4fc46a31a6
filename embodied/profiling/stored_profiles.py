"""Finds the stored profile of a recipe, and the recipe's dataflow. Free of torch and simulators.

A profile is valid for recipes with equal costs: the same env, task, policy and algorithm on the same kind of processor,
with equal numbers of machines and devices. Numbers of envs, decisions, epochs and minibatches may differ: they belong
to the dataflow, not to the costs. An iteration of whole episodes (GRPO) counts as one round of all its groups, without
replaced groups.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from shlex import join
from typing import Any

from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError
from embodied.placement import PlacedRole, PlacementError, PlacementPlan, Topology
from embodied.placement.dataflow import Dataflow, Lengths, embodied_dataflow, lengths_from_json
from embodied.placement.forecast import forecast, why_nothing_fits
from embodied.placement.grammar import EMBODIED, extra_roles
from embodied.placement.iteration_cost import Choice
from embodied.placement.profile import NOTHING, Cost, Profile, fit, read_profile
from embodied.placement.profile_planner import Planner
from embodied.placement.topology import GB, DeviceClass, number
from embodied.run.devices import draws_on_gpus, networks_on, plan_of_map

AMOUNTS = {
    "env": ("num_envs", "stagger", "retries"),
    "algo": (
        *("rollout_decisions", "epochs", "minibatch_size", "lr", "value_lr", "critic_warmup", "lr_schedule"),
        *("groups", "group_size", "filter", "filter_low", "filter_high", "max_rounds", "max_empty"),
        *("filter_metric", "adam_betas", "weight_decay"),
        *("surplus", "clip", "ratio_cap", "importance_cap", "episode_mask_low", "episode_mask_high"),
    ),
}
PAYS = 0.05  # of an iteration; a smaller gain may be an error of the prices


def timed_recipe(config: RunConfig) -> RunConfig:
    """The recipe with the same work in every iteration, and rollouts and updates in turns: groups are played once and
    never dropped. The learning rate is zero, since a robot that learns to touch objects increases the simulator's
    work."""
    others = {"ppo": {"value_lr": 0.0}, "dagger": {}}
    same = {"lr": 0.0} | others.get(config.algo.name, {"filter": "none"})
    return config.with_values("algo", **same).with_values("pipeline", schedule="sync", async_level=1)


def dataflow_of(
    config: RunConfig,
    episode_decisions: float = 1.0,
    roles: Sequence[PlacedRole] = EMBODIED,
    lengths: Lengths | None = None,
) -> Dataflow:
    """The dataflow of an iteration of this recipe; `episode_decisions`: length of whole episodes, `lengths`: lengths of
    conversations."""
    algo, envs = config.algo, config.env.num_envs
    if not algo.whole_episodes:
        decisions = algo.rollout_decisions
        items = decisions * envs
    else:
        episodes = algo.groups * algo.group_size
        decisions = max(1, round(-(-episodes // envs) * episode_decisions))
        items = max(1, round(episodes * episode_decisions))
    minibatch = min(algo.minibatch_size or items, items)
    steps = items * config.policy.chunk
    encodes_once = not algo.whole_episodes and algo.epochs > 1  # with frozen parts of the policy; as rollouts come
    ahead = items if encodes_once else 0
    calls = algo.epochs * -(-items // minibatch)
    more = {role.name: role.streams for role in extra_roles(roles)}
    schedule = config.pipeline.schedule
    fields: dict[str, Any] = {"schedule": "sync" if schedule == "auto" else schedule, "lengths": lengths}
    fields |= {"level": config.pipeline.async_level, "policy_devices": config.policy.worker_gpus}
    if algo.whole_episodes and not algo.why_not_periodic():
        fields |= {"groups": algo.groups, "group_size": algo.group_size}
    return embodied_dataflow(envs, decisions, calls, minibatch, steps, ahead, config.merged_rows, more, **fields)


def drawn_elsewhere(profile: Profile, more_s: float) -> Profile:
    """The profile if another renderer drew, which takes `more_s` more seconds (or less) for an env row's decision."""

    def changed(cost: Cost) -> Cost:
        seconds = cost.seconds
        values = [max(value + more_s * size, 0.0) for size, value in zip(seconds.sizes, seconds.values)]
        return replace(cost, seconds=fit({size: [value] for size, value in zip(seconds.sizes, values)}))

    sims = {on: changed(cost) if on == "cpu" else cost for on, cost in profile.costs["sim"].items()}
    return replace(profile, costs={**profile.costs, "sim": sims})


def with_memory(profile: Profile, machines: Topology, memory_gb: float | None) -> tuple[Profile, list[DeviceClass]]:
    """The profile with the counted memory of cores: the needs of policies and learners if `cluster.memory_gb` limits
    them, else only the simulators' memory. And the profile's devices with their memory under `cluster.memory_gb`."""
    costs = {name: dict(on) for name, on in profile.costs.items()}
    for name, on in costs.items():
        if "cpu" in on and (name == "sim") == (memory_gb is not None):
            on["cpu"] = replace(on["cpu"], bytes=NOTHING, offload_s=None, weight_bytes=0.0, split_bytes=0.0)
        elif "cpu" in on:
            on["cpu"] = replace(on["cpu"], item_bytes=0.0)
    limit = {} if memory_gb is None else {"memory_bytes": memory_gb * GB}
    classes = [replace(c, **limit) for c in machines.classes() if c.count and profile.knows(c)]
    return replace(profile, costs=costs), classes


def cost_key(config: RunConfig, roles: Sequence[PlacedRole] = EMBODIED) -> str:
    """A key that is equal for recipes with equal costs."""
    settings = config.model_dump(mode="json", include={"env", "policy", "algo", "learner"})
    free = {(section, key) for section, keys in AMOUNTS.items() for key in keys}
    if config.algo.name == "ppo" and not config.algo.kl_coef:  # without a reference
        free |= {("algo", key) for key in ("kl_coef", "kl_estimator", "kl_in")}
    if not config.algo.whole_episodes:
        free |= {("algo", key) for key in ("truncated", "overlong", "pools", "weighting")}
    settings = {
        section: {key: value for key, value in values.items() if (section, key) not in free}
        for section, values in settings.items()
    }
    more: list[Any] = sorted(role.name for role in extra_roles(roles))
    added = config.roles.model_dump(mode="json", exclude_defaults=True, exclude={"critic_lr", "reward_weight"})
    more += [added] if more and added else []  # a verifier costs less than a reward model in the same role
    return hashlib.sha256(json.dumps([settings, processor(), *more], sort_keys=True).encode()).hexdigest()[:12]


# The machines of a profile


def device_kinds(
    config: RunConfig, machines: Topology, roles: Sequence[PlacedRole] = EMBODIED
) -> dict[str, list[DeviceClass]]:
    """Role -> its kinds of devices, in all modes and in `auto`."""
    classes = [c for c in machines.classes() if c.count]
    cores, gpus = ([c for c in classes if c.kind == kind] for kind in ("cpu", "gpu"))
    networks = gpus if networks_on(config, machines) == "gpu" else cores
    sims = gpus if config.env.on_gpu else cores
    return {role.name: networks if role.network else sims for role in roles}


def device_counts(machines: Topology) -> dict[str, int]:
    """The number of devices by the kinds in profiles: {"gpu-H200": 1, "cpu": 16}."""
    return {str(c): c.count for c in machines.classes() if c.count}


def describe_devices(counts: Mapping[str, int], nodes: int = 1) -> str:
    """`1 GPU (H200) and 16 cores`; with several machines also their number."""
    parts = []
    for kind, count in counts.items():
        what, _, model = kind.partition("-")
        noun = {"cpu": "core", "gpu": "GPU"}.get(what, f"{what} device")
        parts.append(number(count, noun) + (f" ({model})" if model else ""))
    return " and ".join(parts) + (f" of {nodes} nodes" if nodes > 1 else "")


def why_it_does_not_count(profile: Profile, machines: Topology) -> str:
    """The reason why a profile is invalid on these machines; "" if it is valid."""
    made = profile.made
    measured, nodes = made.get("devices", {}), made.get("nodes", 1)
    if (measured, nodes) == (device_counts(machines), len(machines.nodes)):
        return ""
    devices = describe_devices(device_counts(machines), len(machines.nodes))
    has = "this run has" if len(machines.nodes) > 1 or nodes > 1 else "this machine has"
    return f"measured on {describe_devices(measured, nodes)}, {has} {devices}"


def profile_for(
    config: RunConfig, machines: Topology, roles: Sequence[PlacedRole] = EMBODIED
) -> tuple[Path | None, str]:
    """The newest stored profile that is valid for this recipe on these machines; else the reason why stored ones are
    invalid."""
    reason = ""
    for path in stored_profiles(config, roles):
        try:
            profile = read_profile(path)
            other = why_it_does_not_count(profile, machines)
            profile.check_speed(machines.classes())
        except PlacementError as err:
            other = str(err)
        if not other:
            return path, ""
        reason = reason or f"{path} does not count: {other}"
    return None, reason


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def profile_path(config: RunConfig, made: Mapping = {}, roles: Sequence[PlacedRole] = EMBODIED) -> Path:
    """The file name of a profile with this origin (`made`), different for other machines."""
    counts, nodes = made.get("devices", {}), made.get("nodes", 1)
    where = [f"{count}{kind}" for kind, count in counts.items()] + [f"{nodes}nodes"] * (nodes > 1)
    parts = [config.run.name or "run", *where, cost_key(config, roles)]
    return Path(config.run.dir) / "profiles" / f"{'-'.join(parts)}.json"


def stored_profiles(config: RunConfig, roles: Sequence[PlacedRole] = EMBODIED) -> list[Path]:
    """Profiles with this cost key from this processor, also of other recipes' names; the newest first."""
    paths = (Path(config.run.dir) / "profiles").glob(f"*-{cost_key(config, roles)}.json")
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def profiling_command(arguments: Sequence[str]) -> str:
    """The command that measures the recipe of these arguments."""
    return f"python -m embodied.profiling {join(arguments)}"


def command_of_profile(profile: Profile) -> str:
    """The command that measures this profile again, with the arguments of its measurement."""
    return profiling_command(profile.made.get("arguments") or [f"recipe={profile.made.get('recipe', 'NAME')}"])


def newest_profile(config: RunConfig, arguments: Sequence[str], roles: Sequence[PlacedRole] = EMBODIED) -> Path:
    """The newest profile of any machines. Raises ConfigError without one. `arguments`: of the recipe."""
    path = next(iter(stored_profiles(config, roles)), None)
    if path is None:
        raise ConfigError(
            "no profile of this recipe has been measured here; measure one (a minute), or name one with profile=FILE: "
            f"{profiling_command(arguments)}"
        )
    return path


def fitted_to(config: RunConfig, path: Path, roles: Sequence[PlacedRole] = EMBODIED) -> Profile:
    """The profile of this file with this recipe's dataflow."""
    profile = read_profile(path)
    if profile.made.get("key") != cost_key(config, roles):
        raise ConfigError(
            f"{path} was measured for {profile.made.get('recipe', 'another workload')}, whose env, policy, algorithm "
            "or processor costs something else; leave out profile=, or plan for the former without recipe="
        )
    lengths = profile.made.get("lengths")  # of conversations
    lengths = lengths and lengths_from_json(lengths)
    dataflow = dataflow_of(config, profile.made.get("episode_decisions", 1.0), roles, lengths)
    dataflow = replace(dataflow, edges=profile.dataflow.edges, fixed_s=profile.dataflow.fixed_s)
    return replace(profile, dataflow=dataflow)


# placement=auto


def plan_from_profile(
    config: RunConfig, machines: Topology, path: Path, roles: Sequence[PlacedRole] = EMBODIED
) -> tuple[RunConfig, PlacementPlan]:
    """The config with the plan's stages, granularity and schedule, and the plan, on all devices of the profile."""
    profile, asked = fitted_to(config, path, roles), config.pipeline.stages
    stages = (asked,) if asked > 1 else tuple(profile.made.get("stages", (1,)))
    profile, classes = with_memory(profile, machines, config.cluster.memory_gb)
    planner = Planner(profile.dataflow, profile, classes, stages)
    best = planner.fastest()
    if best is None:
        why = why_nothing_fits(planner)
        raise PlacementError(f"no plan fits by {path}; allow more memory, or name a placement\n{why}")
    if config.pipeline.schedule == "auto" and periodic_is_the_same(config):
        best = periodic_if_it_pays(planner, best)
    chosen, measured_s = forecast(best, machines, draws_on_gpus(config.env)), None
    if config.cluster.memory_gb is None:  # with a limit other memory counts than where it was timed without
        chosen, measured_s = fastest_timed(chosen, profile, classes, stages)
    plan = plan_of_map(config, chosen["placement"], machines, roles, chosen["stages"])
    reason = reason_for_placement(chosen, path, profile.made.get("date"), measured_s)
    pieces = config.pipeline.granularity or chosen["granularity"]
    config = config.with_values("pipeline", stages=chosen["stages"], granularity=pieces, schedule=chosen["schedule"])
    return config, replace(plan, mode="auto", reason=reason)


def periodic_is_the_same(config: RunConfig) -> bool:
    """True if periodic has the same result as sync: false if sync carries over groups that periodic discards."""
    algo = config.algo
    if not algo.whole_episodes:
        return False
    return algo.filter != "resample" or algo.surplus == "discard"


def periodic_if_it_pays(planner: Planner, best: Choice) -> Choice:
    """The fastest layout among schedules with the same result."""
    other = planner.with_schedule("periodic").fastest() if planner.dataflow.groups else None
    return other if other and other.price.seconds < (1 - PAYS) * best.price.seconds else best


def fastest_timed(
    best: Mapping[str, Any], profile: Profile, classes: Sequence[DeviceClass], stages: Sequence[int]
) -> tuple[Mapping[str, Any], float | None]:
    """The placement with the shortest measured iteration of the same work, if that of `best` has been measured, too;
    and its seconds. Else `best`: a measurement and a prediction do not compare."""
    if profile.measured_s(best) is None:
        return best, None
    room = {c.name: c.memory_bytes for c in classes}
    runs = [run for run in profile.runs if run["work"] == best["work"] and run["stages"] in stages]
    fitting = [run for run in runs if all(used <= room[name] for name, used in run["used_bytes"].items())]
    return min(((run, profile.measured_s(run)) for run in (best, *fitting)), key=lambda run: run[1])


def reason_for_placement(chosen: Mapping[str, Any], path: Path, date: str | None, measured_s: float | None) -> str:
    stages = f" with {chosen['stages']} stages" if chosen["stages"] > 1 else ""
    schedule = f"{chosen['schedule']}, " if chosen["schedule"] != "sync" else ""
    when = f"{datetime.fromisoformat(date):%d %b %Y}, " if date else ""
    how, sure = ("of those timed here", "measured") if measured_s else ("by the profile measured here", "expected")
    speed = chosen["env_steps_per_s"] * chosen["seconds"] / (measured_s or chosen["seconds"])
    return f"{schedule}{chosen['mode']}{stages}: the fastest {how} ({when}{path}), {speed:.0f} env steps/s {sure}"
