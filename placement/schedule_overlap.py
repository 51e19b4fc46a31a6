"""The effect of a schedule on an iteration: when an update begins, and what overlaps.

    sync      rollout, then update, then new weights
    periodic  learners take groups of episodes as they are finished; one step after the last; then new weights
    async     learners update on an earlier batch while this one is collected, and new weights travel meanwhile

Learners that work during the rollout have their own devices, in the only layer of a layout. An iteration takes as long
as the longer side under async. Under periodic, with a rollout of R seconds, an update of U, and equally many groups at
the end of each of W waves of episodes, it takes max(R + U / W, R / W + U). The sides slow each other down
(`Cost.alone`) only while both work. With a lag of k versions and P seconds for new weights, an async iteration also
takes at least P and (R + U + P) / (k + 1): a rollout waits for the weights of the update that is k + 1 rollouts older.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from embodied.placement.dataflow import Dataflow, shares_by_time
from embodied.placement.layout import Layer
from embodied.placement.profile import Array, max_of
from embodied.placement.topology import DeviceClass

TINY = 1e-300  # seconds; avoids a division by 0
ROUNDING = 1e-12  # of a sum of shares


class Pricer(Protocol):
    """What is asked of `iteration_cost.Pricer`."""

    dataflow: Dataflow
    classes: dict[str, DeviceClass]
    cost: Any
    count: Any
    slowdowns: Any


def overlaps(dataflow: Dataflow) -> bool:
    """True if learners work during the rollout."""
    return dataflow.schedule != "sync"


def has_learner_devices(dataflow: Dataflow, layer: Layer) -> bool:
    """True if the schedule needs no separate learner devices, or the layer has them."""
    return not overlaps(dataflow) or all(len({*map(dataflow.is_learner, zone.components)}) == 1 for zone in layer)


def is_learner_node(dataflow: Dataflow, node: int) -> bool:
    """True if a node of the order is on the learners' side."""
    return any(map(dataflow.is_learner, dataflow.order[node]))


def held_items(dataflow: Dataflow) -> int:
    """Decisions in the batches that learners hold under async: those collected ahead and the current one. 0 with other
    schedules."""
    if dataflow.schedule != "async":
        return 0
    batch = max((c.calls * c.items for c in dataflow.components if c.splits), default=1) * dataflow.passes
    return (dataflow.level + 1) * batch


def waits_for_all(dataflow: Dataflow) -> bool:
    """True if there are components between sims and learners: by themselves they process all groups at once."""
    learner = next(i for i in range(len(dataflow.order)) if is_learner_node(dataflow, i))
    return any(len(dataflow.order[i]) == 1 for i in dataflow.sources[learner])


def waves_of(dataflow: Dataflow, num_envs: int, sims: int) -> list[dict[int, int]]:
    """Returns for each group a map from sim to the wave (from 1) in which it ends its last episode of the group. Sims
    play contiguous equal shares of the episodes in order; a free row takes the next episode.

    Two groups of four on two sims of two rows: each sim plays a group in two waves, [{0: 2}, {1: 2}].
    """
    episodes, rows = dataflow.groups * dataflow.group_size, max(num_envs // sims, 1)
    borders = [episodes * sim // sims for sim in range(sims + 1)]
    waves: list[dict[int, int]] = [{} for _ in range(dataflow.groups)]
    for sim in range(sims):
        for place, episode in enumerate(range(borders[sim], borders[sim + 1])):
            waves[episode // dataflow.group_size][sim] = place // rows + 1
    return waves


@cache
def shares_of_waves(dataflow: Dataflow, num_envs: int, at_once: bool = False) -> np.ndarray:
    """[num_envs + 1, waves] The share of finished groups at the end of each wave, for 0, 1, 2, ... sims. In a wave each
    env row plays an episode; with `at_once` there is one wave."""
    most = 1 if at_once else -(-dataflow.groups * dataflow.group_size // num_envs)
    shares = np.zeros((num_envs + 1, most))
    for sims in range(1, num_envs + 1):
        if num_envs % sims == 0:
            for waves in waves_of(dataflow, num_envs, sims):
                shares[sims, min(max(waves.values()), most) - 1] += 1 / dataflow.groups
    return shares


def waiting_groups(pricer: Pricer, at: Mapping, stages: int, by_units: bool) -> Array:
    """[..., parts] The share of unfinished groups at the end of each of equally long parts of a rollout. `by_units`:
    components between sims and learners process every group by itself."""
    dataflow, at_once = pricer.dataflow, not by_units and waits_for_all(pricer.dataflow)
    asker = next(c for c in dataflow.components if c.splits)
    if at_once or (engine := engine_of(dataflow)) is None:
        shares = shares_of_waves(dataflow, asker.items, at_once)[pricer.count(asker.name, at, stages)]
    else:
        most = pricer.classes[at[engine][0].device_class].count
        shares = shares_by_time(dataflow.lengths, dataflow.groups, dataflow.group_size, most)
        shares = shares[pricer.count(engine, at, stages)]
    return 1 - np.cumsum(shares, axis=-1)


def engine_of(dataflow: Dataflow) -> str | None:
    """The component whose answers differ in length, so that a group ends with its last answer; else None."""
    if dataflow.lengths is None or dataflow.groups * dataflow.group_size == 1:
        return None
    asker = next(c for c in dataflow.components if c.splits)
    return next(name for node in dataflow.order for name in node if asker.name in node and name != asker.name)


def overlapped(
    dataflow: Dataflow,
    rollout: Sequence[Array],
    update: Sequence[Array],
    terms: Mapping[tuple, Array],
    arrivals: Sequence[Sequence[Array]] | None = None,
) -> Array:
    """Seconds of rollout and update on separate devices, and of the weight sync. Both are (seconds while both work,
    seconds alone), and so are `arrivals` (`learned_waves`)."""
    possible = np.isfinite(rollout[0]) & np.isfinite(update[0])  # otherwise a zone is too small for a worker
    rollout, update = ([np.where(possible, seconds, 0.0) for seconds in side] for side in (rollout, update))
    if dataflow.schedule == "async":
        circle_s = (rollout[1] + update[1] + terms["weights",]) / (dataflow.level + 1)
        spent = max_of(side_by_side(rollout, update), terms["weights",], circle_s)
    else:
        if arrivals:
            arrivals = [[np.where(possible, seconds, 0.0) for seconds in side] for side in arrivals]
        waves, end = learned_waves(rollout, update, terms["waiting",], arrivals)
        spent = np.maximum(waves[-1][1], end) + terms["tail",] + terms["weights",]
    return np.where(possible, spent, np.inf)


def tail_seconds(pricer: Pricer, at: Mapping, stages: int, beside: bool = False) -> Array:
    """Seconds of an update over groups that occur once, after the last group."""
    name = learner_of(pricer.dataflow)
    cost = pricer.cost(name, at[name][0].device_class)
    once = cost.exchange_s.at(pricer.count(name, at, stages)) + cost.fixed_s
    return once * pricer.slowdowns((name,), at, stages, beside)[name]


def learner_of(dataflow: Dataflow) -> str:
    """The component that learns from groups."""
    return next(c.name for c in dataflow.components if dataflow.is_learner(c.name))


def side_by_side(first: Sequence[Array], second: Sequence[Array]) -> Array:
    """Seconds until both of two sides have ended that begin together. Each is given as (seconds while both work,
    seconds alone).

    Worked example: 6 and 3 s while both work, 4 and 2 s alone. After 3 s half of the longer side is left, which takes 2
    s.
    """
    short = np.minimum(first[0], second[0])
    return max_of(*(while_both(*side, short) for side in (first, second)))


def learned_waves(
    rollout: Sequence[Array], update: Sequence[Array], waiting: Array, arrivals: Sequence[Sequence[Array]] | None = None
) -> tuple[list[tuple[Array, Array]], Array]:
    """Start and end of the update on the groups of each wave, which begins when they arrive, and the end of the
    rollout. `rollout` and `update` are (seconds while both work, seconds alone); `arrivals` are the seconds at which
    each wave's groups arrive, also (while both work, alone). By default these are the ends of equally long waves.

    Four waves of 1 s with a quarter of the groups each and an update of 2 s: the last quarter begins at 4 s and takes
    0.5 s. An update of 8 s would begin at 1 s and end at 9 s.
    """
    most = waiting.shape[-1]
    if arrivals is None:
        arrivals = [[seconds * ((wave + 1) / most) for wave in range(most)] for seconds in rollout]
    now, left, waves = 0.0, 1.0, []
    earlier: Array = 0.0  # from the first groups on both work: the seconds by which that is earlier than in `arrivals`
    for wave, (both, alone) in enumerate(zip(*arrivals, strict=True)):
        earlier = np.where(left < 1 - ROUNDING, earlier, both - alone)
        share, left = left - waiting[..., wave], waiting[..., wave]
        begin = np.where(share > ROUNDING, np.maximum(now, both - earlier), now)
        now = begin + while_both(share * update[0], share * update[1], rollout[0] - earlier - begin)
        waves.append((begin, now))
    return waves, rollout[0] - earlier


def while_both(both: Array, alone: Array, left: Array) -> Array:
    """Seconds of work that takes `both` seconds while the other side works (`left` seconds more) and `alone` seconds
    afterwards."""
    beside = np.clip(left, 0.0, both)
    rest = 1 - beside / np.maximum(both, TINY)
    return beside + rest * alone
