"""What the modes mean on a machine when nothing has been measured yet: on its cores, or on its GPUs where the networks
compute there. Simulators that are not simulated on a GPU stay on the cores.

collocated     one {sim + policy} per core or GPU, one {learner} per core or GPU; rollout and update take turns on all
disaggregated  sims, policies and learners on cores or GPUs of their own
hybrid         sims on cores or GPUs of their own; {policy + learner} on the rest
auto           collocated: on a CPU the simulator is the work, and idle cores are the loss; and with one GPU there is no
               other
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


def need(mode: str, what: str, least: int, devices: tuple[int, ...], instead: str, kind: str = "cores") -> None:
    if len(devices) < least:
        raise PlacementError(
            f"placement={mode} gives {what} {kind} of their own: that needs {least} {kind}, "
            f"this run may use {len(devices)}; try placement={instead}"
        )


def num_sims(num_envs: int, stages: int, most: int) -> int:
    """At most one per core and per ENVS_PER_SIM rows, and a number that gives all the same share."""
    return even_workers(num_envs, stages, max(1, min(most, num_envs // (stages * ENVS_PER_SIM))))


def even_workers(num_envs: int, stages: int, most: int) -> int:
    """The largest number of sim workers up to `most` for which every stage of every worker has as many envs."""
    return next((n for n in range(most, 0, -1) if num_envs % (n * stages) == 0), 1)


def one_each(cores: tuple[int, ...], hosts: int) -> Shares:
    return [(core,) for core in cores[:hosts]]


# On GPUs: a map from roles to devices, as the grammar has it


def on_gpus(mode: str, gpus: int, cores: int, num_envs: int, stages: int, gpu_sims: bool) -> tuple[dict[str, str], str]:
    """-> also the reason where there was a choice."""
    if mode == "auto":
        return on_gpus("collocated", gpus, cores, num_envs, stages, gpu_sims)[
            0
        ], "collocated: all take turns on all GPUs"
    if mode == "collocated":
        acting = cards(0, even_workers(num_envs, stages, gpus))
        return {"sim,policy": acting, "learner": cards(0, min(gpus, num_envs))}, ""
    sims, first = gpu_sim_workers(mode, gpus, num_envs, stages) if gpu_sims else (num_sims(num_envs, stages, cores), 0)
    home = cards(0, sims) if gpu_sims else workers_on_cores(sims)
    rest = gpus - first
    if mode == "hybrid":
        return {"sim": home, "policy,learner": cards(first, min(rest, num_envs, sims * stages))}, ""
    if rest < 2:
        need("disaggregated", "policies and learners", 2, tuple(range(rest)), "hybrid", "GPUs")
    policies = min(rest // 2, sims * stages)
    return {"sim": home, "policy": cards(first, policies), "learner": cards(first + policies, rest - policies)}, ""


def gpu_sim_workers(mode: str, gpus: int, num_envs: int, stages: int) -> tuple[int, int]:
    """How many simulators, and the first GPU that is not theirs. A sim worker keeps `stages` policies busy."""
    if mode == "hybrid":
        need(mode, "sims and {policy + learner}", 2, tuple(range(gpus)), "collocated", "GPUs")
        most = -(-gpus // (1 + stages))
    else:
        need(mode, "sims, policies and learners", 3, tuple(range(gpus)), "hybrid" if gpus > 1 else "collocated", "GPUs")
        most = max(1, gpus // 4)
    sims = even_workers(num_envs, stages, most)
    return sims, sims


def cards(first: int, count: int) -> str:
    return f"gpu:{first}" if count == 1 else f"gpu:{first}-{first + count - 1}"


def workers_on_cores(count: int) -> str:
    return "cpu:0" if count == 1 else f"cpu:0-{count - 1}*{count}"
