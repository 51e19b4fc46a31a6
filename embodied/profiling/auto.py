"""`placement=auto`: the fastest plan by the profile that was measured on such machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from embodied.config.recipe import RunConfig
from embodied.placement import PlacementError, PlacementPlan, Role, Topology, make_plan
from embodied.placement.deploy import as_placement, granularity
from embodied.placement.grammar import EMBODIED
from embodied.placement.planner import Choice, Planner
from embodied.placement.profile import read_profile
from embodied.placement.reasons import why_not
from embodied.profiling.store import counted, fitted_to, limited
from embodied.run.devices import draws_on_gpus


def plan_from_profile(
    config: RunConfig, machines: Topology, path: Path, roles: Sequence[Role] = EMBODIED
) -> tuple[RunConfig, PlacementPlan]:
    """The config with the plan's stages and granularity, and the plan, on all devices that the profile knows."""
    memory_gb = config.cluster.memory_gb
    profile = counted(fitted_to(config, read_profile(path), path, roles), memory_gb)
    asked = config.pipeline.stages
    stages = (asked,) if asked > 1 else tuple(profile.made.get("stages", (1,)))
    classes = limited((c for c in machines.classes() if c.count and profile.knows(c)), memory_gb)
    planner = Planner(profile.dataflow, profile, classes, stages)
    best = planner.best()
    if best is None:
        reasons = [f"{mode}: {why_not(planner, mode)}" for mode in ("collocated", "hybrid")]
        raise PlacementError("\n".join([f"no plan fits by {path}; allow more memory, or name a placement", *reasons]))
    placement = as_placement(planner.pricer, best.layout, machines, draws_on_gpus(config.env))
    plan = make_plan(placement, machines, config.env.num_envs, best.layout.stages, roles=roles)
    pieces = config.pipeline.granularity or granularity(best.layout, profile.dataflow)
    pipeline = config.pipeline.model_copy(update={"stages": best.layout.stages, "granularity": pieces})
    reason = why(best, profile.dataflow.env_steps, path, profile.made.get("date"))
    return config.model_copy(update={"pipeline": pipeline}), replace(plan, mode="auto", reason=reason)


def why(best: Choice, env_steps: int, path: Path, date: str | None) -> str:
    stages = f" with {best.layout.stages} stages" if best.layout.stages > 1 else ""
    when = f"{datetime.fromisoformat(date):%d %b %Y}, " if date else ""
    return (
        f"{best.layout.mode}{stages}: the fastest by the profile measured here ({when}{path}), "
        f"{env_steps / best.price.seconds:.0f} env steps/s expected"
    )
