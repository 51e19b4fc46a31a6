"""Launches, builds and connects the workers of a workflow's roles, and brings them each version of the weights.

Training, evaluation and collecting demonstrations all have sims and policies. Learners and the user's own roles are
declared by the workflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.errors import ChannelClosed, StaleWeights, StepGivenUp
from embodied.core.types import EnvSpec
from embodied.envs import env_class
from embodied.run import devices
from embodied.runtime import Channel, Cluster, DeviceSharing, Handle, Timers, WorkerGroup, share_devices
from embodied.runtime.device_sharing import begin_beside_other_runs
from embodied.runtime.published_weights import Publication, Weights
from embodied.runtime.weights import NONE, WeightStore, new_name
from embodied.runtime.worker import machine
from embodied.workflows import ROLLOUT, UPDATE, EvaluationPlan, Role, check_roles
from embodied.workflows.rollout_manager import RolloutManager

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig

Ask = Callable[[Callable[[], Handle]], list]  # the results of a call, repeated after a worker was replaced
Send = Callable[[tuple[Channel, ...], bool, int, bool], object]  # puts buckets: of all tensors, or changed ones


class Workers:
    """The groups of a program by role, with `sims`, `policies` and `learners`: launched, built and connected."""

    def __init__(
        self,
        roles: tuple[Role, ...],
        config: RunConfig,
        cluster: Cluster,
        evaluation: EvaluationPlan,
        plays: bool = False,
        notify: Callable[[str], None] = lambda line: None,
        start_folder: Path | None = None,
    ) -> None:
        """Launch all groups, wait for the simulators, build policy and learner for their env spec, connect all.

        Sims play batches where the program `plays`, else evaluations only. `notify` gets a line per restarted worker or
        warning. `start_folder` holds the policy with the initial weights."""
        check_roles(roles)
        begin_beside_other_runs(cluster, config.cluster.memory_gb)
        self.roles, self.config, self.cluster = roles, config, cluster
        self.stages, self.notify = config.pipeline.stages if plays else 0, notify
        self.timers = Timers()
        self.tasks = env_class(config.env).tasks(config.env)
        self.evaluation = evaluation
        self.inbox = cluster.channel("reports", capacity=None)  # of sims
        self.groups = {
            role.name: cluster.launch(role.worker_for(config), role.name, *role.arguments(self)) for role in roles
        }
        self.sims, self.policies = self.groups["sim"], self.groups["policy"]
        self.spec: EnvSpec = self.sims.build().wait()[0]
        self._build(start_folder)
        self.device_sharing = self._share_devices()
        self.weight_sync = WeightSync(cluster, self.policies, self.device_sharing, lambda group: group.build(self.spec))
        self.rollouts = RolloutManager(self)

    @property
    def learners(self) -> WorkerGroup:
        """The learners' group. An evaluation has no learners and never uses this."""
        return self.groups["learner"]

    def torch_device(self, role: str) -> str:
        """The device of a role's networks: its hosts' GPUs, else cores."""
        on_gpus = {r for host in self.cluster.hosts if any("gpu:" in d for d in host.devices) for r in host.roles}
        return devices.torch_device("gpu" if role in on_gpus else "cpu")

    def _build(self, start_folder: Path | None) -> None:
        """Build policies and learners at the same time. If they share GPUs, build one after the other, since a policy's
        engine needs temporary memory."""
        builds = [self.policies.build(self.spec)]
        if "learner" in self.groups:
            if self._share_gpus:
                builds[0].wait()
            builds.append(self._build_learners(start_folder))
        for role in (role for role in self.roles if role.name in ("reference", "critic")):
            if self.config.shards_role(role.name, [host.roles for host in self.cluster.hosts]):
                self._share_rendezvous(self.groups[role.name])
        builds += [self.groups[role.name].build(self.spec, start_folder) for role in self.roles if role.builds]
        for build in builds:
            build.wait()

    @property
    def _share_gpus(self) -> bool:
        used = [
            {device for host in self.cluster.hosts if role in host.roles for device in host.devices if "gpu:" in device}
            for role in ("policy", "learner")
        ]
        return not used[0].isdisjoint(used[1])

    def _build_learners(self, start_folder: Path | None) -> Handle:
        learning = self._share_rendezvous(self.learners)
        snapshot = self._need_snapshot(learning, self.policies.process().wait())
        return self.learners.build(self.spec, new_name(), snapshot, start_folder, not self._acts_during_update)

    def _share_rendezvous(self, group: WorkerGroup) -> list[tuple[str, int]]:
        """Give ranks on several machines the address of rank 0's rendezvous; ranks on one machine use a file of the
        run. Returns the ranks' machines and processes."""
        processes = group.process().wait()
        if len(processes) > 1 and {place for place, _ in processes} != {machine()}:
            (address,) = group[0].listen(self.config.faults.timeout_s).wait()
            group.set_rendezvous(address).wait()
        return processes

    def _need_snapshot(self, learning: list[tuple[str, int]], acting: list[tuple[str, int]]) -> bool:
        """True if policies are in other processes than the learners, unless learner processes hold the GPU of
        learner-0."""
        gpus = {host.name: {device for device in host.devices if "gpu:" in device} for host in self.cluster.hosts}
        learner_gpus = gpus[self.learners.hosts[0]]
        shared = [learner_gpus and learner_gpus == gpus[host] for host in self.policies.hosts]
        pairs = zip(acting, shared, strict=True)
        return any(device not in learning and not (alike and device[0] == learning[0][0]) for device, alike in pairs)

    @property
    def _acts_during_update(self) -> bool:
        """True if policies act during updates: with their own weights, on devices that the learners do not hold."""
        return self.config.pipeline.lag > 0

    def _share_devices(self) -> DeviceSharing:
        """Let the roles' phases share devices. All groups are built, so their memory is allocated."""
        by_phase = {phase: [self.groups[r.name] for r in self.roles if r.phase == phase] for phase in (ROLLOUT, UPDATE)}
        phases = {phase: groups for phase, groups in by_phase.items() if groups}
        sharing = [self.groups[role.name] for role in self.roles if role.holds_policy and not self._acts_during_update]
        giving_way = [self.policies] if self._acts_during_update else []
        memory, training = self.config.cluster.memory_gb, (UPDATE,)
        return share_devices(self.cluster, phases, self.timers, memory, sharing, giving_way, [self.policies], training)

    def trajectory_channels(self) -> list[Channel]:
        """One unbounded trajectory channel to each learner; it holds at most a batch."""
        ranks = range(len(self.learners))
        return [self.cluster.channel(f"trajectories-{r}", home=self.learners[r], capacity=None) for r in ranks]

    def save(self) -> dict[str, np.ndarray]:
        """The arrays of `get_state` of all workers of `saved` roles, by worker name."""
        arrays: dict[str, np.ndarray] = {}
        for role in [role for role in self.roles if role.saved]:
            group = self.groups[role.name]
            with self.device_sharing.phase(role.phase):
                states = group.get_state().wait()
            for worker, state in zip(group.workers, states, strict=True):
                arrays |= {f"{worker}.{name}": array for name, array in state.items()}
        return arrays

    def restore(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restore the workers from `save`'s arrays; additional ranks get rank 0's arrays. Returns the unused arrays."""
        for role in [role for role in self.roles if role.saved]:
            group, first = self.groups[role.name], f"{role.name}-0."
            parts = [cut_names(state, f"{worker}.") or cut_names(state, first) for worker in group.workers]
            with self.device_sharing.phase(role.phase):
                group.set_state.each([(share,) for share in parts]).wait()
            state = {name: array for name, array in state.items() if not name.startswith(f"{role.name}-")}
        return state

    @contextmanager
    def ended_if_given_up(self) -> Iterator[None]:
        """If a rollout inside is given up, end the processes of its workers, which may not end their calls: learners
        need their devices, to save."""
        try:
            yield
        except StepGivenUp:
            for requests in self.rollouts.requests:  # of policy workers that share a learner's process
                with suppress(ChannelClosed):  # it has died
                    requests.put(None)
            self.cluster.give_up([self.groups[r.name] for r in self.roles if not r.saved and r.name != "learner"])
            raise

    def adopt(self, weights: Weights | None) -> None:
        """Act with weights from a checkpoint instead of a learner; None: with the run's initial weights."""
        with self.device_sharing.phase(ROLLOUT):
            if weights is None:
                weights = Weights(0, self.rollouts.ask(lambda: self.policies[0].initial_weights(self.spec))[0])
            self.rollouts.wait_and_replace(*self.weight_sync.adopt(weights, self.rollouts.ask))


def cut_names(arrays: dict[str, np.ndarray], start: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin with `start`, by the rest of their names."""
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


class WeightSync:
    """The driver's side of `runtime/weights.py`: every worker of a group loads the published version; restarted
    workers, and workers without their devices, get it later.

    A worker's first answer says how it gets weights; a replacement on the same host gets them in the same way.
    `deliver` makes a version the current one. When rollouts lag behind, `announce` begins to send it while the previous
    version acts.
    """

    def __init__(
        self,
        cluster: Cluster,
        readers: WorkerGroup,
        device_sharing: DeviceSharing,
        build: Callable[[WorkerGroup], Handle],
    ) -> None:
        """`build` builds a worker that was started again while it did not hold its device."""
        self.readers, self.device_sharing, self.build = readers, device_sharing, build
        self.cluster = cluster
        self.channels = [self._channels_to(readers[rank]) for rank in range(len(readers))]
        self.routes: list[str] = []
        self.loads: dict[int, Handle] = {}  # the last load of each worker
        self.brought: dict[int, int] = {}  # the version of that load
        self.fetching: set[int] = set()  # workers that fetch the next version
        self.current: Publication | None = None
        self.learned = NONE  # version of the trainer's weights: newer than the current version if rollouts lag
        self.send: Send | None = None
        self.store: WeightStore | None = None  # store of adopted weights
        self.times = (0.0, 0.0)  # start and end of the transfer of the current weights

    def _channels_to(self, reader: WorkerGroup) -> list[Channel]:
        """One per area of a version: a worker that reloads the current version does not read the next one."""
        (name,) = reader.workers
        return [self.cluster.channel(f"weights-{name}/{area}", home=reader, capacity=1) for area in range(2)]

    def add(self, route: str) -> None:
        """The group has one more reader, the last, which gets weights in this way."""
        self.channels.append(self._channels_to(self.readers[-1]))
        self.routes.append(route)

    def remove(self) -> None:
        """The last reader is leaving its group."""
        self.channels.pop()
        self.routes.pop()
        last = len(self.readers) - 1
        self.forget([last])
        self.fetching.discard(last)

    @property
    def version(self) -> int:
        if self.current is None:
            raise StaleWeights("no weights have been published yet")
        return self.current.version

    def announce(self, publication: Publication, send: Send) -> None:
        """Begin to send the next version to all workers that have the previous one, while they act with that."""
        self.fetching = {rank for rank in range(len(self.readers)) if self._holds(rank, publication.follows)}
        self._send(self.fetching, publication, send, whole=False)
        for rank, route, channel in self._places(self.fetching, publication):
            self.readers[rank].fetch_weights(publication, route, channel)

    def deliver(self, publication: Publication, send: Send, ask: Ask) -> list[Handle]:
        """Send a version to the workers, which use it from now on; workers without their devices get it in
        `catch_up`."""
        if not self.routes:
            self.routes = ask(lambda: self.readers.route(publication))
        self.current, self.send = publication, send
        self.times = (perf_counter(),) * 2
        ranks = [rank for rank, worker in enumerate(self.readers.workers) if self.device_sharing.takes_part(worker)]
        behind = [rank for rank in ranks if not self._holds(rank, publication.follows)]
        return self._load([r for r in ranks if r not in behind], whole=False) + self._load(behind, whole=True)

    def reload(self, ranks: Iterable[int]) -> list[Handle]:
        """Send all tensors of the current version to workers that have just been built."""
        return [] if self.current is None else self._load(list(ranks), whole=True)

    def forget(self, ranks: Iterable[int]) -> None:
        """Restarted workers that are not built yet have no version."""
        for rank in ranks:
            self.loads.pop(rank, None)
            self.brought.pop(rank, None)

    def catch_up(self, ranks: Iterable[int]) -> list[Handle]:
        """Send the current version to the workers among `ranks` that lack it."""
        return self.reload([rank for rank in ranks if self.brought.get(rank) != self.version])

    def adopt(self, weights: Weights, ask: Ask) -> list[Handle]:
        """Deliver weights of this process."""
        self.store = WeightStore({name: blob.spec for name, blob in weights.blobs.items()})
        return self.deliver(self.store.publish(weights.version, weights.blobs.items()), self.store.send_aside, ask)

    def load_s(self, rank: int) -> float:
        """Seconds of a worker's last load; 0 if it has not ended."""
        load = self.loads.get(rank)
        return load.seconds() if load and load.succeeded() else 0.0

    def _holds(self, rank: int, version: int) -> bool:
        """True if a worker is known to have this version; a worker that was still building may have missed it."""
        load = self.loads.get(rank)
        return load is not None and load.succeeded() and load.wait()[0] == version

    def _load(self, ranks: Iterable[int], whole: bool) -> list[Handle]:
        assert self.current is not None
        assert self.send is not None
        ranks, version = list(ranks), self.current.version
        fetching = set() if whole else self.fetching & {*ranks}
        self.fetching = self.fetching - {*ranks}
        self._send([rank for rank in ranks if rank not in fetching], self.current, self.send, whole)
        places = self._places(ranks, self.current)
        unbuilt = [rank for rank in ranks if self.readers.workers[rank] in self.device_sharing.unbuilt]
        builds = [self.build(self.readers[rank]) for rank in unbuilt]
        self.device_sharing.unbuilt -= {self.readers.workers[rank] for rank in unbuilt}
        new = {r: self.readers[r].load_weights(self.current, route, channel, whole) for r, route, channel in places}
        self.loads |= new
        self.brought |= dict.fromkeys(new, version)
        return [*builds, *new.values()]

    def _send(self, ranks: Iterable[int], publication: Publication, send: Send, whole: bool) -> None:
        """Begin to send to the workers among `ranks` that get weights through a channel."""
        places = self._places(ranks, publication)
        for way in ("buckets", "handles"):
            if channels := tuple(channel for _, route, channel in places if route == way):
                send(channels, whole, publication.version, way == "handles")

    def _places(self, ranks: Iterable[int], publication: Publication) -> list[tuple[int, str, Channel]]:
        return [(rank, self.routes[rank], self.channels[rank][publication.area]) for rank in ranks]
