"""Launches, builds and connects the workers of a workflow's roles.

Training, evaluation and collecting demonstrations all have sims and policies. Learners and the user's own roles are
declared by the workflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.errors import ChannelClosed, StepGivenUp
from embodied.core.types import EnvSpec
from embodied.envs import env_class
from embodied.run import devices
from embodied.runtime import Channel, Cluster, DeviceSharing, Handle, Timers, WorkerGroup, share_devices
from embodied.runtime.device_sharing import begin_beside_other_runs
from embodied.runtime.weight_sync import Weights, WeightSync
from embodied.runtime.weights import new_name
from embodied.runtime.worker import machine
from embodied.workflows.contract import ROLLOUT, UPDATE, Role, check_roles
from embodied.workflows.evaluator import evaluation_plan
from embodied.workflows.rollout_manager import RolloutManager

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig


class Workers:
    """The groups of a program by role, with `sims`, `policies` and `learners`: launched, built and connected."""

    def __init__(
        self,
        roles: tuple[Role, ...],
        config: RunConfig,
        cluster: Cluster,
        plays: bool = False,
        notify: Callable[[str], None] = lambda line: None,
        start_folder: Path | None = None,
        eval_tasks: tuple[str, ...] = (),
    ) -> None:
        """Launch all groups, wait for the simulators, build policy and learner for their env spec, connect all.

        Sims play batches where the program `plays`, else evaluations only. `notify` gets a line per restarted worker or
        warning. `start_folder` holds the policy with the initial weights. `eval_tasks` are all tasks of the evaluation;
        this env plays some of them."""
        check_roles(roles)
        begin_beside_other_runs(cluster, config.cluster.memory_gb)
        self.roles, self.config, self.cluster = roles, config, cluster
        self.stages, self.notify = config.pipeline.stages if plays else 0, notify
        self.timers = Timers()
        self.tasks = env_class(config.env).tasks(config.env)
        num_sims = sum(host.roles.count("sim") for host in cluster.hosts)
        self.evaluation = evaluation_plan(config, self.tasks, eval_tasks or self.tasks, num_sims)
        self.inbox = cluster.channel("reports", capacity=None)  # of sims
        self.groups = {
            role.name: cluster.launch(role.worker_for(config), role.name, *role.arguments(self)) for role in roles
        }
        self.sims, self.policies = self.groups["sim"], self.groups["policy"]
        self.spec: EnvSpec = self.sims.spec().wait()[0]
        self._build(start_folder)
        self.device_sharing = self._share_devices()
        self.weight_sync = WeightSync(cluster, self.policies, self.device_sharing, lambda one: one.build(self.spec))
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
        learning = self.learners.process().wait()
        if len(learning) > 1 and {place for place, _ in learning} != {machine()}:  # else a file of the run is used
            (address,) = self.learners[0].listen(self.config.faults.timeout_s).wait()
            self.learners.set_rendezvous(address).wait()
        snapshot = self._need_snapshot(learning, self.policies.process().wait())
        return self.learners.build(self.spec, new_name(), snapshot, start_folder, not self._acts_during_update)

    def _need_snapshot(self, learning: list[tuple[str, int]], acting: list[tuple[str, int]]) -> bool:
        """True if policies are in other processes than the learners, unless learner processes hold the GPU of
        learner-0."""
        gpus = {host.name: {each for each in host.devices if "gpu:" in each} for host in self.cluster.hosts}
        own = gpus[self.learners.hosts[0]]
        shared = [own and own == gpus[host] for host in self.policies.hosts]
        pairs = zip(acting, shared, strict=True)
        return any(each not in learning and not (alike and each[0] == learning[0][0]) for each, alike in pairs)

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
                group.set_state.each([(part,) for part in parts]).wait()
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
            self.rollouts.finish_calls(*self.weight_sync.adopt(weights, self.rollouts.ask))


def cut_names(arrays: dict[str, np.ndarray], start: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin with `start`, by the rest of their names."""
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
