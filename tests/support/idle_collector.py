"""A collector of groups whose workers nobody has launched, to be asked what it deals, keeps and says."""

from types import SimpleNamespace

from embodied.workflows.group_collector import GroupCollector


def idle_collector(config, tasks, learners=1, text=False):
    """One sim and so many learners would work for it."""
    rollouts = SimpleNamespace(sims=OneSim([None]))
    groups = {"rollouts": rollouts, "learners": [None] * learners, "trajectory_channels": list, "roles": ()}
    about = {"spec": SimpleNamespace(text=text, has_success=True), "journal": None}
    cluster = SimpleNamespace(watch=lambda channel: None, channel=None)
    return GroupCollector(SimpleNamespace(config=config, tasks=tasks, cluster=cluster, **groups, **about))


class OneSim(list):
    workers = ("sim-0",)
