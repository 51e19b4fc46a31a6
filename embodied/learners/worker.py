"""The learner: one replica of the policy, its optimizer, and its part of what an iteration learns from.

Ranks see different items and take the same steps: gradients are sums over items divided by a count known before the
step, and everything that is normalised (advantages, observations, gradient norm) is normalised over all ranks. Of its
weights it publishes what training changes.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Set
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.config import AlgoConfig
from embodied.core.errors import CheckpointError, ConfigError, EmbodiedError
from embodied.core.types import BatchPart, EnvSpec, Trajectory
from embodied.learners.accumulation import Accumulation
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.rollout_buffer import Arrivals, ItemBatch, RolloutBuffer, step_items
from embodied.learners.sharding import form_shards, leave, load_whole, local_weights, shard, whole_tensors
from embodied.learners.token_batch import build_token_batch, packing_of
from embodied.learners.train_batch import RankBatch, build_rank_batch, moments_of
from embodied.learners.update import frozen_features, update_policy
from embodied.policies import check_methods, make_policy
from embodied.policies.base import Policy
from embodied.policies.policy_folder import read_blobs, read_weights
from embodied.runtime import Channel, Needs, Worker, served_while_busy
from embodied.runtime.collective import Alone, Collective, done_together, join
from embodied.runtime.device_memory import Computing, DeviceTensors, give_back_unused, num_bytes
from embodied.runtime.rendezvous import RendezvousAddress, listen
from embodied.runtime.tensor_bytes import ITEM_BYTES, blob_of, spec_of, tensor_of
from embodied.runtime.weights import Publication, WeightStore

MOVING_S = 3600.0  # at most, from or to a slow disk
ENCODED = 32  # items that frozen parts encode together: enough for their speed, few enough to begin early


class LearnerWorker(Worker):
    def __init__(
        self, policy, algo: AlgoConfig, config: LearnerConfig, seed: int, rendezvous, device: str = "cpu"
    ) -> None:
        self.policy_config = policy
        self.algo = algo
        self.config = config
        self.seed = seed
        self.rendezvous = rendezvous
        self.device = device
        self.collective: Collective = Alone()
        self.store: WeightStore | None = None
        self.computing = Computing()
        self.shares = False  # its weights are acted with in this process

    def listen(self, timeout_s: float) -> RendezvousAddress:
        """Rank 0: open the rendezvous for ranks on several machines."""
        self.server, self.rendezvous = listen(timeout_s)
        return self.rendezvous

    def set_rendezvous(self, address: RendezvousAddress) -> None:
        self.rendezvous = address

    def build(
        self, spec: EnvSpec, store: str, snapshot: bool, start: Path | None = None, in_turns: bool = True
    ) -> None:
        """The policy with its initial weights (the same on every rank), those of the policy folder `start` if there is
        one, and a fresh optimizer. Published weights are known under the name `store`. They need a snapshot if a worker
        in another process acts, and one with room for two versions if acting and updating do not take turns."""
        self.belongings = DeviceTensors(self.timers)
        self.policy = self.new_policy(spec, start)
        self.started = start is not None
        self.reference = self._copied_policy() if self.algo.kl_coef else None
        self.model = Model(self.policy, self.config, self.tick)
        self.packing = packing_of(self.policy, self.config, self.algo)
        specs = {name: spec_of(tensor) for name, tensor in self.policy.state_dict().items()}
        self.dtypes = {name: getattr(torch, spec.dtype) for name, spec in specs.items()}
        if self.config.shard:
            form_shards(self.rendezvous, self.rank, self.world_size, self.model.device)
            for model in filter(None, (self.model, self.reference)):
                shard(model.policy)
        self.collective = join(self.rendezvous, self, self.model.device)
        for model in filter(None, (self.model, self.reference)):
            model.collective = self.collective
        self.optimizer = PolicyOptimizer(self.policy, self.algo, self.collective, self.dtypes)
        weights = self.policy.state_dict()
        frozen = {name for name, p in self.policy.named_parameters() if not p.requires_grad}
        self.moving = weights.keys() - frozen  # what an update may change
        self.loaded = False  # since the last publication
        live = weights if in_turns and not self.config.shard else None
        snapshot = self.rank == 0 and (snapshot or live is None)
        changing = () if in_turns else self.moving
        self.store = WeightStore(specs, snapshot, live, store, changing)

    def _copied_policy(self) -> Model:
        """The policy as the run begins. Weights that are not trained are the policy's own, unless they are sharded."""
        policy = copy.deepcopy(self.policy).requires_grad_(False) if self.config.shard else self.policy.reference()
        return Model(policy, self.config, self.tick)

    def new_policy(self, spec: EnvSpec, start: Path | None) -> Policy:
        policy = make_policy(self.policy_config, spec, self.seed).eval()
        check_learns(policy)
        if start:
            policy.begin_with(read_weights(start))
        return policy.to(self.device)

    # Learning

    @done_together
    def learn(
        self, trajectories: Channel, batch: int, rows: range | None = None, version: int | None = None
    ) -> dict[str, float]:
        """Take this rank's units of a batch as they come, then do one update with all ranks. `rows` are its env rows,
        where these are units: what frozen parts make of them is computed as they come. With a `version`, gradients are
        added up unit by unit, all of which this version has played; the update is one step then."""
        self.model.first_backward, started = None, perf_counter()
        buffer = RolloutBuffer(min(self.config.micro_batch_size or ENCODED, ENCODED), self._horizon(rows))
        arrivals = Arrivals(trajectories, batch, buffer, self.timers, lambda: self._look(buffer, rows))
        if version is None:
            numbers = self._learn_together(arrivals)
        else:
            numbers = self._learn_one_by_one(arrivals, version)
        if self.model.first_backward is None:  # all items were other ranks'
            return numbers
        self.timers.mark("first backward", self.model.first_backward)
        waited_s = started + arrivals.end.seconds
        return numbers | {"time/first_backward_s": self.model.first_backward - waited_s}

    def _horizon(self, rows: range | None) -> int:
        return 0 if rows is None else self.algo.rollout_decisions

    def _look(self, buffer: RolloutBuffer, rows: range | None) -> None:
        """Encode what has come of these env rows."""
        if rows is not None and self._encodes_once():
            with self.timers.measure("look"):
                buffer.encode(self.model, np.array(rows))

    def _learn_together(self, arrivals: Arrivals) -> dict[str, float]:
        """Gather all units, then take the steps of all epochs."""
        sources: list[str] = []
        while (unit := arrivals.next()) is not None:
            sources += unit.sources
        buffer, end = arrivals.buffer, arrivals.end
        whole = buffer.trajectory(sources)
        share = self._prepared(whole, end.part)
        if self._encodes_once():
            with self.timers.measure("look"):
                share = share.with_replay(self._encoded(buffer, whole, share.batch))
        moments = None
        if not self.started:  # else the statistics that the weights were trained with stay
            moments = moments_of(whole, end.part.last - end.part.first, self.policy.observation_moments)
        with self.store.updating(), self.computing.measured():
            numbers = update_policy(self.model, self.optimizer, self.algo, share, self.seed, end.iteration, end.total)
            if moments is not None:
                self.policy.merge_observation_moments(np.concatenate(self.collective.gather(moments)))
        return numbers

    def _learn_one_by_one(self, arrivals: Arrivals, version: int) -> dict[str, float]:
        """Add up the gradients of units as they come, then take one step."""
        sums = Accumulation(self.model, self.algo, version, self.device, self.reference, self.packing)
        while (unit := arrivals.next()) is not None:
            group = arrivals.buffer.take(unit.sources)
            with self.computing.measured():
                sums.add(group, unit.advantages, unit.scores, unit.is_padding)
            if not self.started and not unit.is_padding:  # as in `_learn_together`
                sums.observe(group)
        with self.store.updating(), self.computing.measured():
            numbers = sums.step(self.optimizer, arrivals.end)
            sums.merge_moments(self.collective)
        return numbers

    def _prepared(self, whole: Trajectory, part: BatchPart) -> RankBatch:
        """Its items with their advantages: decisions, or tokens of conversations."""
        common = whole, part, self.algo, self.collective, self.model.dtype, self.device, self.reference
        return (
            build_rank_batch(*common) if self.packing is None else build_token_batch(*common, self.packing, self.model)
        )

    def _encoded(self, buffer: RolloutBuffer, whole: Trajectory, batch: ItemBatch) -> dict[str, Tensor]:
        """Frozen features of the items: of rollouts as they came, of whole episodes now."""
        if whole.values is None:
            return frozen_features(self.model, batch, step_items(self.algo, len(batch)))
        buffer.encode(self.model, whole.ids)
        return buffer.encoded(whole.ids)

    def _encodes_once(self) -> bool:
        """True if what frozen parts of the policy make of an observation is kept for all epochs."""
        return self.algo.epochs > 1 and not self.config.shard and self.packing is None

    # Memory

    def needs(self, shared: bool = False) -> Needs:
        """Weights, gradients, the optimizer's two averages of them, the reference, and what updates took besides;
        weights that others act with stay."""
        self.shares = shared
        weights, trained = num_bytes(self._weights()), num_bytes(self.optimizer.masters)
        aside = num_bytes(self.optimizer.masters_aside()) + num_bytes(self._reference())
        return Needs(weights + 3 * trained + aside + self.computing.num_bytes, weights if shared else 0)

    def onload(self) -> None:
        self.belongings.onload()

    def offload(self) -> None:
        if not self.belongings.away:
            self.optimizer.forget_gradients()
            weights = {} if self.shares else {"weights": self._weights()}
            more = {"reference": self._reference(), "optimizer": self.optimizer.tensors()}
            self.belongings.offload(weights | more)
            give_back_unused()

    def _weights(self) -> list[Tensor]:
        return local_weights(self.policy)

    def _reference(self) -> list[Tensor]:
        return local_weights(self.reference.policy) if self.reference else []

    # Weights and checkpoints

    @done_together
    def publish(self, version: int) -> Publication | None:
        """Make the current weights visible as this version. Rank 0 says where they are."""
        self._check_live()
        names = self.dtypes.keys() if self.store.version < 0 or self.loaded else self.moving
        tensors = self._whole(names)
        publication = self.store.publish(version, ((name, blob_of(tensor)) for name, tensor in tensors))
        self.loaded = False
        return None if self.rank else publication

    def _check_live(self) -> None:
        """Raise if a parameter no longer uses the memory that is shared with policy workers."""
        now = self.policy.state_dict()
        for name, tensor in (self.store.live or {}).items():
            if now[name].data_ptr() != tensor.data_ptr():
                raise EmbodiedError(
                    f"{type(self.policy).__name__} replaced its weight {name} by another tensor in an update; "
                    "change it in place, with copy_"
                )

    @served_while_busy
    def send_weights(self, channels: tuple[Channel, ...], whole: bool, version: int) -> None:
        """Begin to put a published version into these channels, beside an update in progress."""
        self.store.send_aside(channels, whole, version)

    @done_together
    def save(self, folder: Path) -> None:
        """The policy folder and the optimizer, into a checkpoint that is being written; rank 0 writes."""
        assert not self.belongings.away, "the weights are not on their device: nothing may be saved outside of its turn"
        try:
            with self.alive(MOVING_S):
                self._write(folder)
        except OSError as err:
            raise CheckpointError(
                f"the checkpoint could not be written: {err}; free some space or choose another run.dir"
            ) from None

    def _write(self, folder: Path) -> None:
        whole = self._whole(self.dtypes.keys())
        if self.rank == 0:
            self.policy.save_pretrained(folder / "policy", whole, self.store.specs)
        self.optimizer.save(folder / "learner", write=self.rank == 0)

    def _whole(self, names: Set[str]) -> Iterable[tuple[str, Tensor]]:
        """The weights and buffers of these names, one whole tensor at a time. Where they are sharded all ranks must
        take part, and those other than rank 0 end up with none."""
        if not self.config.shard:
            return ((name, tensor) for name, tensor in self.policy.state_dict().items() if name in names)
        tensors = whole_tensors(self.policy, self.dtypes, names)
        return deque(tensors, maxlen=0) if self.rank else tensors

    def load(self, checkpoint: Path) -> None:
        with self.alive(MOVING_S):
            load_whole(self.policy, {name: tensor_of(blob) for name, blob in read_blobs(checkpoint / "policy").items()})
            self.optimizer.load(checkpoint / "learner")
        self.loaded = True

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        if self.config.shard:
            leave()


def check_learns(policy: Policy) -> None:
    """Refuse a policy that cannot be scored, trained or moved to where it acts."""
    kind = type(policy)
    check_methods(kind, *(() if kind.speaks else ("value",)), "forward")
    if not any(True for _ in policy.parameters()):
        raise ConfigError(f"{kind.__name__} has no parameters, so there is nothing to train; evaluate it instead")
    for name, tensor in policy.state_dict().items():
        if not isinstance(tensor, Tensor) or spec_of(tensor).dtype not in ITEM_BYTES:
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(f"{kind.__name__} keeps {name}, which is {found}; weights are {', '.join(ITEM_BYTES)}")
