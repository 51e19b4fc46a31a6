"""A run with known delays that shares devices: `benchmarks.sharing --real` starts a process of it for every run.

It requests devices from the parent like every run (`DeviceSharing`, `SharedLeases`). Its conversations are the
replay's, in real time on its current devices.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

from benchmarks.shared_replay import TimedConversations
from embodied.runtime import Cluster, DeviceSharing, HostPlan, Timers, Worker, share_devices
from embodied.runtime.device_sharing import begin_beside_other_runs

LOOK_S = 0.01


class Nobody(Worker):
    """A worker that holds devices without work."""


class DelayedRun:
    """`scale`: real seconds per second of the run. `switch_s`: seconds to stop on a device, and to wake on a borrowed
    one."""

    def __init__(self, sharing: DeviceSharing, places: dict[str, str], own: list[str], told: dict[str, Any]) -> None:
        self.sharing, self.places, self.own = sharing, places, own
        self.scale, (self.drain_s, self.wake_s) = told["scale"], told["switch_s"]
        self.begins: dict[str, float] = {}  # worker with a device -> time when it begins to work
        self.stops: dict[str, float] = {}  # leaving worker -> time when it releases the device

    def iterate(self, batch: TimedConversations, wait_s: float, update_s: float) -> None:
        with self.sharing.phase("rollout"):
            self.begins, self.stops = {}, {}
            then = time.monotonic()
            while batch.progress < 1:
                now = time.monotonic()
                batch.pass_time((now - then) / self.scale)
                then = now
                self.come_and_go(now)
                batch.work_on([self.places[w] for w, at in self.begins.items() if at <= now and w not in self.stops])
                self.sharing.report_progress(batch.progress)
                idle = () if batch.has_more() else {*self.places.values()} - batch.busy()
                self.sharing.report_idle([worker for worker, device in self.places.items() if device in idle])
                time.sleep(min(LOOK_S, batch.next_s() * self.scale))
            self.sharing.report_idle(())
        time.sleep(wait_s * self.scale)
        with self.sharing.phase("update"):
            time.sleep(update_s * self.scale)
        self.sharing.clear_progress()

    def come_and_go(self, now: float) -> None:
        for worker, device in self.places.items():
            takes_part = self.sharing.takes_part(worker)
            if takes_part and worker not in self.begins:
                self.begins[worker] = now + self.wake_s * self.scale * (device not in self.own)
            elif not takes_part and worker in self.begins:
                self.stops.setdefault(worker, now + self.drain_s * self.scale)
        for worker in [worker for worker, until in self.stops.items() if until <= now]:
            del self.stops[worker], self.begins[worker]
        self.sharing.leave(self.begins)


def main() -> None:
    told = json.loads(sys.argv[1])
    devices, own = told["devices"], told["own"]
    hosts = [HostPlan("sim-0", ("sim",)), HostPlan("learner-0", ("learner",), devices=tuple(own))]
    hosts += [HostPlan(f"policy-{i}", ("policy",), devices=(device,)) for i, device in enumerate(devices)]
    with Cluster("inline", hosts, timeout_s=600) as cluster:
        begin_beside_other_runs(cluster, None)
        launch = partial(cluster.launch, Nobody)
        sims, learners, policies = launch("sim"), launch("learner"), launch("policy")
        phases = {"rollout": [sims, policies], "update": [learners]}
        sharing = share_devices(cluster, phases, Timers(), borrowing=[policies], training=["update"])
        run = DelayedRun(sharing, dict(zip(policies.workers, devices)), own, told)
        time.sleep(max(0.0, told["start_at"] - time.time()))
        for lengths in told["lengths"]:
            run.iterate(TimedConversations(lengths, told["slots"]), told["wait_s"], told["update_s"] / len(own))


if __name__ == "__main__":
    main()
