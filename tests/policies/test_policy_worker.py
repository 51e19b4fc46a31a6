"""How a policy worker shows that it is alive."""

import threading

from embodied.policies.config import MLPConfig, OpenVLAConfig
from embodied.policies.worker import PolicyWorker


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
