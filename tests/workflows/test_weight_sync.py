"""Where a policy worker is decides how it gets at weights; one that lacks the current version acts no more."""

from types import SimpleNamespace

import pytest
from stepped import Run

from embodied.core.errors import WorkerFailed
from embodied.runtime.published_weights import Publication
from embodied.workflows.launched_workers import WeightSync

ARGUMENTS = (
    "recipe=pointmass_ppo env.num_envs=4 policy.hidden=[8] algo.rollout_decisions=4 algo.minibatch_size=16 "
    "faults.timeout_s=240 faults.hang_s=30 faults.max_restarts=0 run.iterations=9"
).split()
TOGETHER, APART = {"sim": "cpu:0", "policy,learner": "cpu:0"}, {"sim,policy": "cpu:0", "learner": "cpu:0"}


@pytest.mark.parametrize(
    ("backend", "placement", "route"),
    [("inline", APART, "shared"), ("local", TOGETHER, "shared"), ("local", APART, "snapshot")],
    ids=["inline", "together", "apart"],
)
def test_a_policy_acts_with_delivered_weights_only(tmp_path, backend, placement, route):
    with Run(tmp_path, *ARGUMENTS, placement=placement, backend=backend) as run:
        loop = run.loop
        assert loop.weight_sync.routes == [route]
        assert loop.iterate(0, 9)[1]["env_steps"] == 16 and loop.version == 1
        for handle in loop.weight_sync.reload([0]):  # as for one that was started again
            handle.wait()
        loop.iterate(1, 9)
        loop.learners.publish(3).wait()
        with pytest.raises(WorkerFailed, match="acts with version 2, but"):
            loop.iterate(2, 9)


class Readers:
    """Workers whose loads bring these versions; `asked` has by rank whether they were to load all weights."""

    def __init__(self, *came):
        self.came, self.workers, self.asked = came, [f"policy-{rank}" for rank in range(len(came))], {}

    def __len__(self):
        return len(self.came)

    def __getitem__(self, rank):
        def load_weights(publication, route, channel, whole):
            self.asked[rank] = whole
            return SimpleNamespace(succeeded=lambda: True, wait=lambda: [self.came[rank]])

        return SimpleNamespace(workers=[self.workers[rank]], load_weights=load_weights)


def test_a_reader_that_missed_the_previous_version_gets_all_weights():
    readers = Readers(2, 1, None)
    sharing = SimpleNamespace(takes_part=lambda worker: True, unbuilt=set())
    cluster = SimpleNamespace(channel=lambda name, home, capacity: name)
    sync, sent = WeightSync(cluster, readers, sharing, lambda reader: None), []
    sync.routes = ["buckets"] * 3

    def send(channels, whole, version, handles):
        sent.append(([channel.removesuffix("/0") for channel in channels], whole, version))

    for version in (2, 3):  # the first is new to all of them, and came only to the first
        sync.deliver(Publication(version, version - 1, "0" * 16, 1, -1, {}, {}, ()), send, lambda call: [])
    assert readers.asked == {0: False, 1: True, 2: True}
    assert sent[1:] == [(["weights-policy-0"], False, 3), (["weights-policy-1", "weights-policy-2"], True, 3)]
