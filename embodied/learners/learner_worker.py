"""The learner: one replica of the policy, its optimizer, and its part of an iteration's data.

Ranks process different items and take the same steps: gradients are sums over items divided by a count over all ranks,
and advantages, observations and the gradient norm are normalised over all ranks. The learner publishes the trained
weights.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.config import AlgoConfig
from embodied.core.arrays import Observation, is_tensor, map_obs
from embodied.core.errors import CheckpointError, ConfigError, EmbodiedError
from embodied.core.types import Array, EnvSpec, Trajectory, Unit, join_units
from embodied.learners.config import LearnerConfig
from embodied.learners.model import KEPT_BYTES, Model, PolicyOptimizer, load_whole, local_weights
from embodied.learners.train_batch import (
    REFERENCE,
    RankBatch,
    RolloutBuffer,
    build_batch,
    frozen_features,
    items_of,
    logprobs_of,
    samples_per_step,
    trained_items,
)
from embodied.learners.update import PolicySteps, check_divisor, check_version, update_policy
from embodied.policies import check_methods, make_policy
from embodied.policies.base import Policy
from embodied.policies.policy_folder import AVERAGE, POLICY, read_blobs, read_weights
from embodied.runtime import Channel, Needs, Worker, served_while_busy
from embodied.runtime.collective import Alone, Collective, RankGroup, connect_gpus, form_groups, join
from embodied.runtime.device_memory import Computing, DeviceTensors, give_back_unused, gpu_id, num_bytes
from embodied.runtime.published_weights import ITEM_BYTES, Publication, blob_of, spec_of, tensor_of
from embodied.runtime.rendezvous import RendezvousAddress, listen
from embodied.runtime.weights import WeightStore

MOVING_S = 3600.0  # time limit of a transfer from or to a slow disk
SIDES = {"cuda": 4096}  # side of the matrices whose product measures a device's peak rate
TRIES = 5  # of that product
ENCODED = 32  # items encoded together by frozen parts: enough for speed, few enough to begin early


class LearnerWorker(Worker):
    def __init__(
        self,
        policy,
        algo: AlgoConfig,
        config: LearnerConfig,
        seed: int,
        rendezvous,
        device: str = "cpu",
        reference_apart: bool = False,
    ) -> None:
        """`reference_apart`: a separate role has added the reference's log-probs to the data."""
        self.policy_config = policy
        self.algo = algo
        self.config = config
        self.seed = seed
        self.rendezvous = rendezvous
        self.device = device
        self.has_reference = bool(self.algo.kl_coef) and not reference_apart
        self.collective: Collective = Alone()
        self.store: WeightStore | None = None
        self.computing = Computing()
        self.shares_storage = False  # True: policy workers of this process act with its weights

    def listen(self, timeout_s: float) -> RendezvousAddress:
        """Rank 0: open the rendezvous for ranks on several machines."""
        self.server, self.rendezvous = listen(timeout_s)
        return self.rendezvous

    def set_rendezvous(self, address: RendezvousAddress) -> None:
        self.rendezvous = address

    def build(
        self, spec: EnvSpec, store: str, snapshot: bool, start: Path | None = None, in_turns: bool = True
    ) -> None:
        """Build the policy, with the weights of the folder `start` or with equal initial weights on every rank, and a
        new optimizer. `store`: the name of the published weights. They need a `snapshot` if a worker of another process
        acts, with room for two versions if acting and updating overlap."""
        self.belongings = DeviceTensors(self.timers)
        self.policy = self.new_policy(spec, start)
        self.started = start is not None
        self.reference = self._copied_policy() if self.has_reference else None
        self.model = Model(self.policy, self.config, self.tick)
        self.throughput = Throughput(self.model)
        self.observed: list[tuple[np.ndarray, np.ndarray]] = []  # ids of sequences, moments of their observations
        specs = {name: spec_of(tensor) for name, tensor in self.policy.state_dict().items()}
        self.dtypes = {name: getattr(torch, spec.dtype) for name, spec in specs.items()}
        if self.config.shard:
            from embodied.learners.sharding import form_shards, shard

            form_shards(self.rendezvous, self.rank, self.world_size, self.model.device)
            for model in filter(None, (self.model, self.reference)):
                shard(model.policy)
        self.gpus = connect_gpus(self.rendezvous, self, self.model.device, self.config.shard)
        groups = self._groups()
        if groups:
            from embodied.learners.divided_passes import PassTable

        self.collective = join(self.rendezvous, self, self.gpus)
        for model in filter(None, (self.model, self.reference)):
            model.collective = self.collective
            if groups:
                model.table = PassTable(groups, self.config, self.collective, self.rank, model.policy)
        self.optimizer = PolicyOptimizer(self.policy, self.algo, self.collective, self.dtypes)
        weights = self.policy.state_dict()
        frozen = {name for name, p in self.policy.named_parameters() if not p.requires_grad}
        self.moving = weights.keys() - frozen  # names of trained weights
        self.loaded = False  # True: weights were loaded since the last publication
        live = weights if in_turns and not self.config.shard else None
        snapshot = self.rank == 0 and (snapshot or live is None)
        changing = () if in_turns else self.moving
        gpu = gpu_id() if live is not None and self.rank == 0 else ""
        self.store = WeightStore(specs, snapshot, live, store, changing, gpu)

    def _groups(self) -> dict[int, RankGroup]:
        """This rank's groups of ranks that run passes together, by their number of ranks."""
        if self.config.sequence_degree == 1 or self.world_size == 1:
            return {}
        degrees = self.config.degrees(self.world_size, self.policy.attention_heads(self.policy_config))
        return form_groups(self.rendezvous, self, [d for d in degrees if d > 1], self.gpus)

    def _copied_policy(self) -> Model:
        """A copy of the initial policy. It shares untrained weights with the policy, unless they are sharded."""
        policy = copy.deepcopy(self.policy).requires_grad_(False) if self.config.shard else self.policy.reference()
        return Model(policy, self.config, self.tick)

    def new_policy(self, spec: EnvSpec, start: Path | None) -> Policy:
        policy = make_policy(self.policy_config, spec, self.seed).eval()
        check_learns(policy)
        if start:
            policy.begin_with(read_weights(start))
        return policy.to(self.device)

    # Learning

    def learn(
        self,
        trajectories: Channel,
        batch: int,
        version: int,
        rows: np.ndarray | None = None,
        begins_early: bool = False,
        sends_early: bool = False,
    ) -> dict[str, float]:
        """Receive this rank's units of a batch, then do one update with all ranks, from this version of the weights.
        `rows`: this rank's env rows, if env rows are the units; frozen parts encode their observations on arrival. With
        `begins_early`, gradients of units are accumulated on arrival, and there is one step. With `sends_early`, units
        arrive while sims still play."""
        self._restore_gpus()
        self.model.first_backward, started = None, perf_counter()
        horizon = 0 if rows is None else self.algo.rollout_decisions
        self.kept_bytes, self.encoded = 0, set[str]()  # features of whole episodes: their size and names
        buffer = RolloutBuffer(min(self.config.micro_batch_size or ENCODED, ENCODED), horizon)
        units, steps = [], PolicySteps(self.model, self.optimizer, self.algo)
        encode = partial(self._encode_arrived, buffer, rows, sends_early and not begins_early)
        if begins_early:
            check_divisor(self.model, self.algo)
        for unit in buffer.units(trajectories, batch, self.timers, encode):
            if not begins_early:
                units.append(unit)
                continue
            played = buffer.take(unit.sources)
            with self.computing.measured(), self.throughput.measured():
                check_version(played, version)
                steps.add_all(build_batch(played, unit, version, self.algo, Alone(), self.model, self.reference))
            self._observe(played, unit)
        if not begins_early:
            with self.throughput.measured():
                share = self._gathered(buffer, join_units(units), version)
        with self.store.updating(), self.computing.measured(), self.throughput.measured():
            if begins_early:
                numbers = steps.step_once(buffer.end)
            else:
                numbers = update_policy(self.model, self.optimizer, self.algo, share, self.seed, buffer.end)
            self._merge_observed()
            if self.optimizer.keeps_mean:
                self.optimizer.add_to_mean(1 / min(buffer.end.iteration + 1, self.algo.average))
        numbers |= self.throughput.numbers(self.collective)
        if self.model.first_backward is None:  # all items belong to other ranks
            return numbers
        self.timers.mark("first backward", self.model.first_backward)
        waited_s = started + buffer.end.seconds
        return numbers | {"time/first_backward_s": self.model.first_backward - waited_s}

    def _restore_gpus(self) -> None:
        """Make new NCCL communicators if a rank has freed its own. All ranks take part."""
        if self.gpus is not None:
            self.gpus.restore(self.collective)

    def _encode_arrived(self, buffer: RolloutBuffer, rows: np.ndarray | None, sends_early: bool, source: str) -> None:
        """Encode the received data of these env rows; if whole episodes come early, compute columns for those of this
        source."""
        if rows is not None and self._encodes_once():
            with self.timers.measure("encode"):
                buffer.encode(self.model, rows)
        elif rows is None and sends_early and not self.config.in_step:
            with self.timers.measure("encode"), self.computing.measured():
                played = buffer.whole[source]
                buffer.whole[source] = replace(played, replay=played.replay | self._columns(played))

    def _columns(self, played: Trajectory) -> dict[str, Any]:
        """What no gradient step changes: features of frozen parts while all fit into memory, and the reference's
        log-probs."""
        trained = trained_items(played, self.algo, self.policy.speaks)
        batch, columns = items_of(played, self.algo, self.model, trained), {}
        if self._encodes_once() and self.kept_bytes <= KEPT_BYTES:
            columns = frozen_features(self.model, batch, ENCODED)
            self.kept_bytes += num_bytes(columns.values())
            self.encoded = {*columns}
        if self.reference and REFERENCE not in played.replay:
            columns[REFERENCE] = logprobs_of(self.reference, batch, self.algo).cpu().numpy()
        return columns

    def _gathered(self, buffer: RolloutBuffer, unit: Unit, version: int) -> RankBatch:
        """All units of this rank with their advantages and frozen features. Rollouts are already encoded; whole
        episodes are encoded now."""
        played = buffer.take(unit.sources)
        self._observe(played, unit)
        share = build_batch(played, unit, version, self.algo, self.collective, self.model, self.reference)
        if not self._encodes_once() or (self.encoded and self.encoded <= share.replay.keys()):
            return share
        with self.timers.measure("encode"):
            if buffer.features:
                features = buffer.encoded(played.ids)
            else:
                features = frozen_features(self.model, share, samples_per_step(self.algo, len(share)))
        return replace(share, replay=share.replay | features)

    def _encodes_once(self) -> bool:
        """True if frozen features are kept for all epochs."""
        return self.algo.epochs > 1 and not self.config.shard and not self.policy.speaks

    def _observe(self, played: Trajectory, unit: Unit) -> None:
        """Keep the moments of observations for the policy's normaliser, unless the policy started from trained
        weights."""
        if self.started or unit.is_padding:
            return
        moments = moments_of(played, self.policy.observation_moments)
        if moments is not None:
            self.observed.append((played.ids, moments))

    def _merge_observed(self) -> None:
        """Update the policy's statistics with the observations of all ranks, in the order of sequences."""
        observed, self.observed = self.observed, []
        ids, rows = (
            map(np.concatenate, zip(*observed, strict=True)) if observed else (np.zeros(0, np.int64), np.zeros(0))
        )
        shapes = self.collective.gather(np.array([len(rows), *rows.shape[1:]]))
        shape = next((shape[1:] for shape in shapes if shape[0]), None)
        if shape is not None:
            ids = np.concatenate(self.collective.gather(ids))
            rows = np.concatenate(self.collective.gather(rows.reshape(len(rows), *shape)))
            self.policy.merge_observation_moments(rows[np.argsort(ids)])

    @served_while_busy
    def divides(self) -> tuple[tuple[int, ...], tuple[float, float, float]] | None:
        """The numbers of ranks that may compute a sequence together, and the `ExchangeCosts`; None if ranks compute
        alone."""
        table = self.model.table
        return None if table is None else ((*table.degrees,), astuple(table.exchange))

    @served_while_busy
    def pass_cost(self) -> tuple[float, ...]:
        """`Policy.pass_cost`, for distributing units over ranks."""
        return self.policy.pass_cost()

    # Memory

    def needs(self, shared: bool = False) -> Needs:
        """Bytes of weights, gradients, the optimizer's two averages, the mean of weights, the reference, communicators,
        and other memory of updates; weights shared with policy workers are not offloaded."""
        self.shares_storage = shared
        weights, trained = num_bytes(self._weights()), num_bytes(self.optimizer.masters)
        aside = num_bytes(self.optimizer.masters_aside()) + num_bytes(self._reference())
        aside += self.gpus.memory.num_bytes if self.gpus else 0
        trained *= 4 if self.optimizer.keeps_mean else 3
        return Needs(weights + trained + aside + self.computing.num_bytes, weights if shared else 0)

    def onload(self) -> None:
        self.belongings.onload()

    def offload(self) -> None:
        if not self.belongings.away:
            if not self.shares_storage:
                self.store.keep()
            self.optimizer.forget_gradients()
            self.model.graphed = None
            weights = {} if self.shares_storage else {"weights": self._weights()}
            more = {"reference": self._reference(), "optimizer": self.optimizer.tensors()}
            self.belongings.offload(weights | more)
            if self.gpus is not None:
                self.gpus.free()
            give_back_unused()

    def _weights(self) -> list[Tensor]:
        return local_weights(self.policy)

    def _reference(self) -> list[Tensor]:
        return local_weights(self.reference.policy) if self.reference else []

    # Weights and checkpoints

    def publish(self, version: int, mean: bool = False) -> Publication | None:
        """Publish the current weights as this version, or the `mean` of the last ones, until the weights are published
        again. Rank 0 returns the description of the version."""
        self._check_live()
        if mean != self.optimizer.mean_shown:
            with self.store.updating():
                self.optimizer.show_mean(mean)
        names = self.dtypes.keys() if self.store.version < 0 or self.loaded else self.moving
        tensors = self._whole_tensors(names)
        publication = self.store.publish(version, ((name, blob_of(tensor)) for name, tensor in tensors), names)
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
    def send_weights(self, channels: tuple[Channel, ...], whole: bool, version: int, handles: bool = False) -> None:
        """Begin to send a published version through these channels, also during an update. `handles`: for readers on
        this learner's GPU."""
        self.store.send_aside(channels, whole, version, handles)

    def save(self, folder: Path) -> None:
        """Write the policy folder, the optimizer's state and perhaps a policy folder with the mean of the last weights
        into an unfinished checkpoint. Rank 0 writes; of a sharded optimizer all ranks write."""
        assert not self.belongings.away, "the weights are not on their device: nothing may be saved outside of its turn"
        try:
            with self.alive(MOVING_S):
                self._write(folder)
        except OSError as err:
            raise CheckpointError(
                f"the checkpoint could not be written: {err}; free some space or choose another run.dir"
            ) from None

    def _write(self, folder: Path) -> None:
        shown = self.optimizer.mean_shown  # in an evaluation
        self.optimizer.show_mean(False)
        self._write_policy(folder / POLICY, self._whole_tensors(self.dtypes.keys()))
        self.optimizer.save(folder / "learner", self.rank)
        if self.optimizer.keeps_mean and self.config.shard:  # gathered from the parameters, which nobody else reads
            self.optimizer.show_mean(True)
            self._write_policy(folder / AVERAGE, self._whole_tensors(self.dtypes.keys()))
        elif self.optimizer.keeps_mean:
            means, weights = self.optimizer.means(), self.policy.state_dict()
            tensors = ((name, means.get(name, tensor).to(tensor.dtype)) for name, tensor in weights.items())
            self._write_policy(folder / AVERAGE, tensors)
        self.optimizer.show_mean(shown)

    def _write_policy(self, folder: Path, whole: Iterable[tuple[str, Tensor]]) -> None:
        if self.rank == 0:
            self.policy.save_pretrained(folder, whole, self.store.specs)

    def _whole_tensors(self, names: Set[str]) -> Iterable[tuple[str, Tensor]]:
        """The weights and buffers of these names, one whole tensor at a time. If they are sharded, all ranks must take
        part, and only rank 0 gets them."""
        if not self.config.shard:
            return ((name, tensor) for name, tensor in self.policy.state_dict().items() if name in names)
        from embodied.learners.sharding import whole_tensors

        tensors = whole_tensors(self.policy, self.dtypes, names)
        return deque(tensors, maxlen=0) if self.rank else tensors

    def load(self, checkpoint: Path) -> None:
        with self.alive(MOVING_S):
            load_whole(self.policy, {name: tensor_of(blob) for name, blob in read_blobs(checkpoint / POLICY).items()})
            self.optimizer.load(checkpoint / "learner")
        self.loaded = True

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        if self.config.shard:
            from embodied.learners.sharding import leave

            leave()


def check_learns(policy: Policy) -> None:
    """Refuse a policy that cannot be trained, scored or sent to policy workers."""
    kind = type(policy)
    check_methods(kind, *(() if kind.speaks else ("value",)), "forward")
    if not any(True for _ in policy.parameters()):
        raise ConfigError(f"{kind.__name__} has no parameters, so there is nothing to train; evaluate it instead")
    for name, tensor in policy.state_dict().items():
        if not isinstance(tensor, Tensor) or spec_of(tensor).dtype not in ITEM_BYTES:
            kind_of_tensor = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(
                f"{kind.__name__} keeps {name}, which is {kind_of_tensor}; weights are {', '.join(ITEM_BYTES)}"
            )


class Throughput:
    """The training speed of a language model: tokens a second, and MFU, the share of its devices' peak rate.

    MFU counts two operations for each product of the forward pass and four of the backward pass, also for frozen
    weights. Recomputed activations do not count. A device's peak rate is measured once, as the best rate of a matrix
    product.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.seconds, self.peak = model, 0.0, 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        started = perf_counter()
        yield
        self.seconds += perf_counter() - started

    def numbers(self, collective: Collective) -> dict[str, float]:
        """Numbers for the log over all ranks since the last call; all ranks take part. {} for robot policies."""
        if not self.model.policy.speaks:
            return {}
        tokens, products = self.model.policy.take_work()
        if not self.peak:
            dtype = (
                torch.bfloat16 if self.model.config.precision == "bf16" else next(self.model.policy.parameters()).dtype
            )
            self.peak = peak_rate(self.model.device, dtype)
        of_rank = np.array([[tokens, 2.0 * products, self.peak, self.seconds]])
        self.seconds = 0.0
        rows = np.concatenate(collective.gather(of_rank))
        trained, operations, peak, _ = rows.sum(axis=0).tolist()
        longest = float(rows[:, 3].max())
        if not trained:
            return {}
        return {"text/trainer_tokens_per_s": trained / longest, "text/mfu": operations / longest / peak}


@torch.no_grad()
def peak_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of a product of two large matrices, the best of several tries."""
    side = SIDES.get(device, 512)
    matrix, best = torch.full((side, side), 0.01, dtype=dtype, device=device), float("inf")
    for _ in range(TRIES):
        started = perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for a GPU
        best = min(best, perf_counter() - started)
    return 2.0 * side**3 / best


def moments_of(trajectory: Trajectory, moments: Callable[[Observation], np.ndarray | None]) -> np.ndarray | None:
    """The observation moments, a row per sequence; None for policies without an observation normaliser."""
    rows: dict[int, np.ndarray] = {}
    starts = np.cumsum(trajectory.lengths) - trajectory.lengths
    for length in np.unique(trajectory.lengths):
        alike = np.flatnonzero(trajectory.lengths == length)
        at = (starts[alike, None] + np.arange(length)).ravel()
        rows_of = slice(None) if len(alike) == len(starts) else at
        result = moments(map_obs(partial(by_step, rows=rows_of, count=len(alike)), trajectory.obs))
        if result is None:
            return None
        rows |= zip(alike.tolist(), result, strict=True)
    return np.array([rows[sequence] for sequence in range(len(starts))])


def by_step(array: Array, rows: Any, count: int) -> Array:
    """These rows [count * T, ...], sequence after sequence, as [T, count, ...]; images are not copied."""
    result = array[rows].reshape(count, -1, *array.shape[1:]).swapaxes(0, 1)
    if result.ndim > 3:
        return result
    return result.contiguous() if is_tensor(result) else np.ascontiguousarray(result)
