"""What the modes mean on a machine's CPU cores when nothing has been measured yet.

collocated     one {sim + policy} per core, one {learner} per core; rollout and update take turns on all cores
disaggregated  sims, policies and learners on cores of their own
hybrid         sims on cores of their own; {policy + learner} on the rest
auto           collocated: on a CPU the simulator is the work, and idle cores are the loss
"""

from __future__ import annotations

from embodied.placement.grammar import PlacementError

Shares = list[tuple[int, ...]]
Groups = list[tuple[tuple[str, ...], Shares]]

ENVS_PER_SIM = 4  # fewer rows in a batched simulator cost almost as much as these
MOST_LEARNERS = 8  # more ranks of a small network exchange gradients longer than they compute them


def choose(mode: str, cores: tuple[int, ...], num_envs: int, stages: int) -> tuple[Groups, str]:
    """Roles and the cores of each host, and the reason where there was a choice."""
    if mode == "auto":
        return collocated(cores, num_envs, stages), "collocated: sims and learners take turns on all cores"
    return {"collocated": collocated, "disaggregated": disaggregated, "hybrid": hybrid}[mode](
        cores, num_envs, stages
    ), ""


def collocated(cores: tuple[int, ...], num_envs: int, stages: int) -> Groups:
    return [
        (("sim", "policy"), one_each(cores, num_sims(num_envs, stages, len(cores)))),
        (("learner",), one_each(cores, min(len(cores), num_envs, MOST_LEARNERS))),
    ]


def disaggregated(cores: tuple[int, ...], num_envs: int, stages: int) -> Groups:
    """A quarter of the cores learns, an eighth acts, the rest simulates; at least one core each."""
    need("disaggregated", "sims, policies and learners", 3, cores, "collocated" if len(cores) < 2 else "hybrid")
    learners, policies = max(1, len(cores) // 4), max(1, len(cores) // 8)
    rest = len(cores) - learners - policies
    sims = num_sims(num_envs, stages, rest)
    return [
        (("sim",), one_each(cores[:rest], sims)),
        (("policy",), one_each(cores[rest : rest + policies], min(policies, sims * stages))),
        (("learner",), one_each(cores[rest + policies :], min(learners, num_envs, MOST_LEARNERS))),
    ]


def hybrid(cores: tuple[int, ...], num_envs: int, stages: int) -> Groups:
    """A quarter of the cores, at least one, acts and learns; the rest simulates."""
    need("hybrid", "sims and {policy + learner}", 2, cores, "collocated")
    rest = len(cores) - max(1, len(cores) // 4)
    sims = num_sims(num_envs, stages, rest)
    learning = min(len(cores) - rest, num_envs, MOST_LEARNERS, sims * stages)
    return [(("sim",), one_each(cores[:rest], sims)), (("policy", "learner"), one_each(cores[rest:], learning))]


def need(mode: str, what: str, least: int, cores: tuple[int, ...], instead: str) -> None:
    if len(cores) < least:
        raise PlacementError(
            f"placement={mode} gives {what} cores of their own: that needs {least} cores, "
            f"this run may use {len(cores)}; try placement={instead}"
        )


def num_sims(num_envs: int, stages: int, most: int) -> int:
    """At most one per core and per ENVS_PER_SIM rows, and a number that gives all the same share."""
    return even_workers(num_envs, stages, max(1, min(most, num_envs // (stages * ENVS_PER_SIM))))


def even_workers(num_envs: int, stages: int, most: int) -> int:
    """The largest number of sim workers up to `most` for which every stage of every worker has as many envs."""
    return next((n for n in range(most, 0, -1) if num_envs % (n * stages) == 0), 1)


def one_each(cores: tuple[int, ...], hosts: int) -> Shares:
    return [(core,) for core in cores[:hosts]]
