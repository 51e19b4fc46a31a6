"""The record of groups whose workers nobody has launched, to be asked what it deals, keeps and says."""

from types import SimpleNamespace

from embodied.workflows.collector import Batch
from embodied.workflows.group_collector import Groups


def idle_groups(config, tasks, text=False, sims=None, learners=1):
    """Begins its first batch; one sim would play, unless others are given."""
    about = {
        "sims": sims or OneSim([None]),
        "num_tasks": len(tasks),
        "wait_and_replace": lambda *calls, until=None: None,
    }
    rollouts = SimpleNamespace(weight_sync=SimpleNamespace(learned=0), **about)
    known = {"spec": SimpleNamespace(text=text, has_success=True), "learners": [None] * learners, "roles": ()}
    channels = {"trajectory_channels": lambda: [*range(learners)], "cluster": SimpleNamespace(channel=None)}
    groups = Groups(SimpleNamespace(config=config, tasks=tasks, rollouts=rollouts, **known, **channels))
    groups.batch = Batch(1, 0, [[] for _ in range(learners)])
    groups.begin()
    return groups


class OneSim(list):
    workers = ("sim-0",)
