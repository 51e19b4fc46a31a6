"""Explains in words why a layout is fast, why it beats another one, and why a mode is impossible, with the
arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from embodied.placement.iteration_cost import Choice, Pricer
from embodied.placement.layout import LOOP, Layout, named
from embodied.placement.profile_planner import Planner
from embodied.placement.schedule_overlap import overlaps
from embodied.placement.timeline import timeline_of

GB = 1e9
SMALL = 0.01  # share of an iteration; smaller differences are not mentioned


def phases(pricer: Pricer, layout: Layout) -> dict[str, float]:
    """Seconds of the parts of an iteration. Parts that overlap in time all count."""
    seconds: dict[str, float] = {}
    for layer in layout.layers:
        at = {name: (zone, zone.devices) for zone in layer for name in zone.components}
        for node in pricer.dataflow.order:
            if node[0] in at:
                work = float(pricer.node_seconds(node, at, layout.stages)) * pricer.dataflow.passes
                name = (
                    "rollout" if len(node) > 1 else "update" if pricer.dataflow.is_learner(node[0]) else "+".join(node)
                )
                seconds[name] = seconds.get(name, 0.0) + work
                if pricer.dataflow[node[0]].ahead:
                    seconds["encoding"] = seconds.get("encoding", 0.0) + float(pricer.encoding_seconds(node[0], at))
                swap = sum(pricer.swap_seconds(node, at, layout.swapped, which) for which in ("onload_s", "offload_s"))
                seconds["swap"] = seconds.get("swap", 0.0) + swap
        seconds["weights"] = seconds.get("weights", 0.0) + float(pricer.sync_seconds(at, layout.stages))
    seconds["rest"] = pricer.dataflow.fixed_s
    return seconds


def describe_layout(layout: Layout, pricer: Pricer) -> str:
    """The layout in words, with the number of workers of roles that do not use all devices of their zone."""
    parts = [str(layout)]
    for layer in layout.layers:
        at = {name: (zone, zone.devices) for zone in layer for name in zone.components}
        counts = {name: int(pricer.count(name, at, layout.stages)) for name in at}
        parts += [f"{name} on {count}" for name, count in counts.items() if count < at[name][1]]
    if layout.stages > 1:
        parts.append(f"{layout.stages} stages")
    if layout.chunks > 1:
        parts.append(f"streamed in {layout.chunks} parts")
    if layout.swapped:
        parts.append(f"swapping {' and '.join(sorted(layout.swapped))}")
    return ", ".join(parts)


def equal_to_the_fastest(seconds: Mapping[str, float]) -> list[str]:
    """The names of the fastest mode and of modes that are not noticeably slower."""
    ranked = sorted(seconds, key=lambda name: seconds[name])
    return [name for name in ranked if seconds[name] <= (1 + SMALL) * seconds[ranked[0]]]


def join_words(names: Sequence[str]) -> str:
    """a, b and c"""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def why_it_wins(winner: Choice, others: Mapping[str, Choice]) -> list[str]:
    """A line for each other mode: how much slower it is, and in which part of the iteration."""
    winner_phases = phases(winner.pricer, winner.layout)
    lines = []
    for mode, other in sorted(others.items(), key=lambda item: item[1].price.seconds):
        theirs = phases(other.pricer, other.layout)
        seconds = winner.price.seconds
        gains = {name: theirs.get(name, 0.0) - winner_phases.get(name, 0.0) for name in {**winner_phases, **theirs}}
        parts = [
            f"{name} {winner_phases.get(name, 0.0):.3g} s instead of {theirs.get(name, 0.0):.3g} s"
            for name, gain in sorted(gains.items(), key=lambda item: -abs(item[1]))
            if abs(gain) > SMALL * seconds
        ]
        overlap = other.price.seconds - seconds - sum(gains.values())
        if abs(overlap) > SMALL * seconds:
            parts.append(f"{abs(overlap):.3g} s {'more' if overlap > 0 else 'less'} of it at the same time")
        ahead = other.price.seconds / seconds - 1
        what = ", ".join(parts) or "every part takes as long"
        lines.append(f"{ahead:.0%} faster than {mode}: {what}" if ahead > SMALL else f"as fast as {mode}: {what}")
    return lines


def describe_lengths(pricer: Pricer, layout: Layout) -> list[str]:
    """How much longer engines and learners take because of unequal answer lengths; [] if lengths are equal."""
    if (lengths := pricer.dataflow.lengths) is None:
        return []
    lines = []
    for layer in layout.layers:
        at = {name: (zone, zone.devices) for zone in layer for name in zone.components}
        for name in at:
            count, on = int(pricer.count(name, at, layout.stages)), pricer.classes[at[name][0].device_class]
            if (ratios := pricer.dataflow.learner_ratios(on.count)) is not None and pricer.dataflow.is_learner(name):
                lines.append((name, count, ratios[count]))
            elif pricer.asker_for(name) not in (None, name):
                lines.append((name, count, pricer.unequal(name, at, layout.stages)))
    longer = " and ".join(f"{name} on {count} {float(ratio):.2f} times" for name, count, ratio in lines)
    return [f"answers of {lengths.answers[0]:,} to {lengths.answers[-1]:,} tokens take {longer} as long as equal ones"]


def why_not_apart(planner: Planner) -> str:
    """Why learners cannot have devices of their own, with the arithmetic."""
    schedule = f"with pipeline.schedule={planner.dataflow.schedule} learners and other roles need separate devices"
    if (devices := sum(c.count for c in planner.classes)) < 2:
        return f"{schedule}, 2 at least, and there is {devices}"
    runs_on = planner.pricer.runs_on()
    for c in planner.classes:
        if c.count < 2 and runs_on.get("learner") == runs_on.get("policy") == {c.name}:
            return f"{schedule}, and there is {c.count} of {c}"
    return f"{schedule}, with memory for {planner.dataflow.level + 1} batches where it is async"


def why_not(planner: Planner, mode: str) -> str:
    """Why no layout of this mode fits, with the arithmetic."""
    if overlaps(planner.dataflow) and mode in ("collocated", "hybrid"):
        return f"with pipeline.schedule={planner.dataflow.schedule} learners take no turns with other roles on a device"
    devices = sum(c.count for c in planner.classes)
    names = named(planner.dataflow.by_name)
    if mode == "hybrid" and names != LOOP:
        return "it is for simulators apart from policies and learners"
    apart = {"disaggregated": names, "hybrid": ("sim", "policy and learner")}.get(mode, ())
    if devices < len(apart):
        return f"{', '.join(apart)} need {len(apart)} devices of their own, and there are {devices}"
    runs_on = planner.pricer.runs_on()
    for c in planner.classes:
        bound = [part for part in apart if all(runs_on[name] == {c.name} for name in part.split(" and "))]
        if c.count < len(bound):
            return f"{', '.join(bound)} need {len(bound)} of {c} of their own, and there is {c.count}"
    roomy = [replace(c, memory_bytes=float("inf")) for c in planner.classes]
    free = Planner(planner.dataflow, planner.pricer.profile, roomy, planner.stages).modes().get(mode)
    if free is None:
        return "no component's work divides among workers that way; " + envs_hint(planner)
    used = free.price.used_bytes
    over = {c.name: (used[c.name], c.memory_bytes) for c in planner.classes if used[c.name] > c.memory_bytes}
    lack = [f"{needed / GB:.3g} GB on each {name}, which has {has / GB:.3g} GB" for name, (needed, has) in over.items()]
    return f"the fastest, {free.layout}, needs {' and '.join(lack)}" if lack else "its layouts do not fit in memory"


def why_nothing_fits(planner: Planner) -> str:
    """Why there is no layout at all: a line for each mode."""
    if overlaps(planner.dataflow):
        return f"{why_not_apart(planner)}; try pipeline.schedule=sync"
    return "\n".join(f"{mode}: {why_not(planner, mode)}" for mode in ("collocated", "disaggregated", "hybrid"))


def envs_hint(planner: Planner) -> str:
    envs = {c.name: c.items for c in planner.dataflow.components if c.even}
    return ", ".join(f"{name} has {items} envs" for name, items in envs.items()) or "see the profile"


def mean_idle(pricer: Pricer, layout: Layout) -> float:
    """The mean idle share of all devices of the classes in use."""
    timeline, used = timeline_of(pricer, layout), {zone.device_class for zone in layout.zones}
    classes = [c for name, c in pricer.classes.items() if name in used]
    return sum(timeline.idle_share(c.name, c.count) * c.count for c in classes) / sum(c.count for c in classes)
