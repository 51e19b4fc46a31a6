"""What a policy worker remembers from one rollout to the next."""

import threading

from embodied.core.types import ActRequest
from embodied.policies.config import MLPConfig, OpenVLAConfig
from embodied.policies.worker import PolicyWorker


def test_what_ended_a_rollout_begins_the_next_and_is_then_forgotten():
    worker, seen = PolicyWorker(MLPConfig(), seed=0), {"state": [1.0]}
    assert worker.completed(ActRequest("sim-0/0#1", 9, obs=seen, value_only=True)).obs is seen
    evaluating = ActRequest("sim-0/0#2", 1, obs={"state": [2.0]})
    assert worker.completed(evaluating) is evaluating
    follows = ActRequest("sim-0/0#3", 1, same_as=("sim-0/0#1", 9))
    assert worker.completed(follows).obs is seen
    assert worker.completed(follows) is None


def test_another_rollout_is_not_taken_for_the_last_one():
    worker = PolicyWorker(MLPConfig(), seed=0)
    worker.completed(ActRequest("sim-0/0#1", 9, obs={}, value_only=True))
    assert worker.completed(ActRequest("sim-0/0#4", 1, same_as=("sim-0/0#3", 9))) is None


def test_a_policy_that_compiles_is_not_taken_for_hung(monkeypatch):
    monkeypatch.setattr("embodied.runtime.worker.SIGN_S", 0.01)
    heard = threading.Event()
    for config, alive in ((OpenVLAConfig(name="openvla", compile=True), True), (MLPConfig(), False)):
        worker = PolicyWorker(config, seed=0)
        worker.tick = heard.set
        heard.clear()
        with worker._patience():
            assert heard.wait(10 if alive else 0.1) is alive
        heard.clear()
        assert not heard.wait(0.1), "it goes on when the work is done"
