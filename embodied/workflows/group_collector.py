"""Whole episodes in groups, for GRPO and all training with conversations.

Sims keep their episodes until the groups of the batch are chosen, and send only these. `algorithms/group_pool.py`
decides which groups are played, wanted and carried over. With schedule=periodic a group is sent as soon as the batch is
certain to contain it, to the rank with the lowest cost so far, and learners accumulate gradients meanwhile. With
pipeline.granularity certain groups are sent when they have so many decisions; without schedule=periodic learners then
update when the batch is complete. Otherwise groups are sent at that time, distributed by cost (`placement/balance.py`).
Groups may pass through roles on their way (`Relays`): with roles that stream each group as soon as all its episodes
have ended, or with roles that only add columns as soon as it is certain.

Learners use a group when all of it was sent: to one learner rank, or a part of it to each. If an episode is lost with
its sim before that, its group is lost, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from embodied.algorithms.advantages import group_advantages
from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.algorithms.group_pool import POOLS, Group, GroupPool, PromptPools, score_of
from embodied.core.arrays import gather
from embodied.core.errors import ConfigError
from embodied.core.types import (
    EpisodeList,
    EpisodeResult,
    EpisodeSpec,
    Job,
    Played,
    Report,
    SamplingRule,
    Unit,
    deal_by_task,
    env_blocks,
)
from embodied.envs import env_class
from embodied.envs.store import EpisodeRef, Stores, Transfer
from embodied.runtime import Handle
from embodied.workflows import WARNING
from embodied.workflows.collector import Batch, Collector
from embodied.workflows.dealing import Dealer
from embodied.workflows.relay import metrics_of

if TYPE_CHECKING:
    from embodied.config.sections import PipelineSection
    from embodied.policies.language.config import LanguageConfig
    from embodied.workflows.launched_workers import Workers
    from embodied.workflows.rollout_manager import Round


@dataclass
class GroupTransfer:
    """A group on its way from its stores to learner ranks."""

    group: Group
    shares: dict[int, list[int]]  # by rank, the places of its episodes in the group; empty: padding
    transfers: dict[int, Transfer]  # by rank

    def done(self) -> bool:
        return all(transfer.done() for transfer in self.transfers.values())

    def was_sent(self) -> bool:
        """True if the whole group was sent; False if a sim died first."""
        return all(len(transfer.succeeded()) == len(transfer.calls) for transfer in self.transfers.values())

    def units(self) -> Iterator[tuple[int, Unit]]:
        """The unit of each rank, without advantages."""
        episodes, scores = np.array(self.group.episodes), np.array(self.group.scores)
        for rank, share in self.shares.items():
            at = share or [0]
            yield rank, Unit(tuple(self.transfers[rank].calls), episodes[at], scores=scores[at], is_padding=not share)


class Groups(Collector):
    """A group's way: dealt and playing (`pool`); open, until all its episodes have ended; ready, if its scores differ;
    taken or certain, so it belongs to the batch; `adding` while roles add columns; `ready` to be sent; `under_way` from
    its stores to learners; then one of `groups`, with a unit for each rank."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        config = self.config
        self.algo, self.text = config.algo, workers.spec.text
        self.listens = self.relays.streams or (self.sends_early and not self.relays.worker_groups)
        in_epochs = self.algo.prompts == "epochs"
        self.plays_groups = self.text and env_class(config.env).plays_groups(config.env)
        self.question_counts = env_class(config.env).count_training_questions(config.env) if in_epochs else ()
        self.episodes = EpisodeList(
            config.seed, "train", workers.tasks, group_size=self.algo.group_size, question_counts=self.question_counts
        )
        self.pool = GroupPool(self.algo, discards_surplus(self.algo, config.pipeline))
        self.prompt_pools = PromptPools(self.algo.pools, config.seed, self.algo.group_size) if self.algo.pools else None
        self.sampling = sampling_of(config.policy) if self.text else SamplingRule()
        self.stores = Stores(self.rollouts.sims, *self.relays.worker_groups)
        self.refs = self.stores.refs  # of episodes that are played, stored or sent
        self.dealer = Dealer(config, self.learners, self.text, self.refs)
        self.whole: dict[int, list[int]] = {}  # by group, its episodes of the round
        self.ended: dict[int, EpisodeResult] = {}  # episodes of the round, as their sims report them
        self.under_way: list[GroupTransfer] = []
        self.piece = config.pipeline.granularity or 0  # decisions of certain groups that are sent together
        self.first = 0  # iteration of the first collected batch
        self.empty, self.why = 0, ""  # consecutive iterations without gradient, and the reason
        self.unusable = ""  # reason if all episodes of the last batch were discarded
        self.warned = False  # True: the user was warned of discarded episodes
        if self.algo.filter_metric == "success" and not workers.spec.has_success:
            raise ConfigError(
                "algo.filter_metric=success bounds the rate of success, but this env has none; try "
                "algo.filter_metric=return"
            )

    @property
    def exhausted(self) -> str:  # type: ignore[override]
        """The reason to end the run now; empty while batches have a gradient."""
        if why := self.unusable or self.suspicion:
            return why
        if self.empty < self.algo.max_empty:
            return ""
        return (
            f"nothing to learn from in the last {self.empty} iterations (algo.max_empty): {self.why}. Where all "
            "episodes succeed, the run is done; where none does, start from a policy that sometimes succeeds, or try "
            "another env.reward, a larger algo.group_size or algo.filter=resample"
        )

    @property
    def suspicion(self) -> str:
        """Why weights may have learned from a dropped server's answers; empty unless policy.suspects=stop."""
        if not (remarks := self.rollouts.remarks) or remarks.since is None:
            return ""
        return (
            f"answers of a dropped server were used since version {remarks.since} of the weights "
            f"(policy.suspects=stop). Checkpoints up to v{remarks.since:06d} are from before: remove the later ones, "
            "and resume=RUN continues from there"
        )

    @property
    def collected(self) -> float:
        return min(1.0, self.pool.present / self.algo.groups)

    # What to play next

    def begin(self) -> None:
        if self.batch.number == 1:
            self.first = self.rollouts.weight_sync.learned
        self.groups: list[Group] = []  # sent to learners
        self.is_taken = False  # True: all groups of the batch are known
        self.ready: list[Group] = []  # certain groups with all columns of roles, to be sent
        self.adding: dict[tuple[int, ...], Group] = {}  # by their episodes, certain groups that pass roles
        self.units: list[tuple[int, Unit]] = []  # of ranks, without schedule=periodic: to be announced at the end
        self.lost: set[int] = set()  # episodes
        self.loads = np.zeros(len(self.channels))  # by rank, the cost of the groups sent during the rollout
        self.dealt_to_dead: list[int] = []  # episodes that were dealt to sims that died
        self._drop_groups_of(self.stores.lost_among(self.pool.held))  # the first round plays as many more
        for episode in self.refs.keys() - {*self.pool.held}:
            del self.refs[episode]
        self.pool.counts.clear()
        if self.prompt_pools is not None:
            self.prompt_pools.counts.clear()

    def next_jobs(self) -> dict[int, Job]:
        """Rounds of whole groups, until the algorithm has enough. Neighbouring episodes go to the same sim, so a dead
        sim loses its own groups alone. If a batch has equally many groups of every task, a sim plays the same few tasks
        in each batch."""
        rollouts, first = self.rollouts, not self.batch.rounds
        if not (count := self.pool.wanted(self.batch.rounds, self.config.env.num_envs)):
            return {}
        together = self.algo.group_size if self.plays_groups else 1  # episodes for the same sim
        count = -(-count // together) * together
        specs, num_sims = self.specs_of(self.pool.deal(count)), len(rollouts.sims)
        by_task = not self.text and self.algo.groups % rollouts.num_tasks == 0 and rollouts.num_tasks > 1
        blocks: Sequence[Sequence[int]] = [
            range(block.start * together, block.stop * together) for block in env_blocks(count // together, num_sims)
        ]
        blocks = deal_by_task([spec.task for spec in specs], num_sims) if by_task else blocks
        samples = sampled([spec.index for spec in specs], self.config.run.samples) if first else frozenset()
        self.shares = {sim: [specs[at] for at in block] for sim, block in enumerate(blocks) if block}
        return {sim: Job(share, at_once=self.listens, samples=samples) for sim, share in self.shares.items()}

    def specs_of(self, indices: Sequence[int]) -> list[EpisodeSpec]:
        """The episodes with these numbers, with their groups' prompts."""
        size, numbers = self.algo.group_size, np.array(indices, np.int64)
        if self.prompt_pools is None:
            return self.episodes.at(numbers)
        return self.episodes.at(np.array([self.prompt_pools.draw(index // size) * size for index in indices]), numbers)

    # What was played

    def begin_round(self, jobs: dict[int, Job]) -> None:
        for sim, job in jobs.items():
            self.stores.put(self.rollouts.sims.workers[sim], [spec.index for spec in job.episodes])
        playing = sorted(spec.index for job in jobs.values() for spec in job.episodes)
        self.whole = gather((episode // self.algo.group_size, episode) for episode in playing)
        self.ended = {}

    def add_report(self, report: Report) -> None:
        self._end(report.finished)

    def add_round(self, played: Round) -> None:
        if remarks := self.rollouts.remarks:
            for episode in remarks.suspects & self.refs.keys():
                self.refs[episode].is_lost = True
            remarks.suspects.clear()
        results = [result for of_sim in played.played.values() for result in of_sim.finished]
        if self.relays.worker_groups and not self.relays.streams:
            self.record(self._relayed(results))
        else:
            self._end(results)
            self._wait_for_roles()
        self.dealt_to_dead += [spec.index for sim in played.failures for spec in self.shares.get(sim, ())]
        self._drop_groups_of(sorted(self.pool.playing))
        self._drop_groups_of(self.stores.lost_among(self.pool.held))

    def record(self, results: Iterable[EpisodeResult]) -> None:
        """Record the outcomes of episodes; known outcomes change nothing."""
        new = {result.index: result for result in results if result.index in self.pool.playing}
        for episode, result in new.items():
            self.refs[episode].end(result, self.config.policy.chunk, self.text)
        solved = {index: bool(result.success_once) for index, result in new.items()}
        if self.prompt_pools is not None:
            self.prompt_pools.add(solved)
        longest = self.config.policy.max_tokens if self.algo.overlong else 0
        self.pool.add({index: score_of(result, self.algo, longest) for index, result in new.items()}, solved)

    def _end(self, results: Iterable[EpisodeResult]) -> None:
        """Record the outcomes of episodes; if roles that stream decide, when their groups have passed these."""
        if not (self.relays.streams and self.relays.deciding):
            self.record(results)
            return
        ended = {result.index: result for result in results if result.index not in self.ended}
        self.ended |= ended
        for number in sorted({episode // self.algo.group_size for episode in ended}):
            if self.ended.keys() >= {*self.whole[number]}:
                self.relays.decide(tuple(self.whole[number]), [*self.whole].index(number))

    def _pass_on(self) -> None:
        """Record the outcomes of groups that have passed deciding roles; groups that have passed the others are
        ready."""
        for passage, rewards in self.relays.go_on(self.stores):
            if group := self.adding.pop(passage.episodes, None):
                if rewards:
                    self.ready = sorted([*self.ready, group])
                else:
                    self._drop_chosen(group)
            elif rewards:
                self.record(self.ended[episode]._replace(total_reward=rewards[episode]) for episode in passage.episodes)
            else:
                self._drop_groups_of(passage.episodes)

    def _wait_for_roles(self) -> None:
        """Wait for the outcomes of all groups."""
        self.go_on()
        while self.relays.passing(self.relays.deciding):
            self.rollouts.wait_and_replace(*self.relays.calls(), until=self.is_due)
            self.go_on()

    def _relayed(self, results: list[EpisodeResult]) -> list[EpisodeResult]:
        """The outcomes of a round, with rewards from relaying roles."""
        size = self.algo.group_size
        outcomes = {result.index: result for result in results}
        groups = gather((index // size, index) for index in sorted(outcomes)).values()
        rewards, metrics = self.relays.pass_groups(map(tuple, groups), self.stores)
        self.batch.metrics |= metrics
        return [outcomes[index]._replace(total_reward=reward) for index, reward in rewards.items()]

    # What was lost

    def sim_replaced(self, sim: int) -> int:
        """Mark the episodes of a dead sim. They are counted with their groups, so none is abandoned."""
        self.stores.worker_died(self.rollouts.sims.workers[sim])
        return 0

    def _drop_groups_of(self, episodes: Collection[int]) -> None:
        """Drop the groups of lost episodes."""
        self.pool.drop_groups_of(episodes)
        self.lost.update(episodes)

    def _drop_chosen(self, group: Group) -> None:
        """Drop a lost group that the batch already contains."""
        if group.episodes[0] // self.algo.group_size in self.pool.sent:
            self._drop_groups_of(group.episodes)
        else:
            self.pool.counts.update(kept=-1, incomplete=1)
            self.lost.update(group.episodes)
        self.groups = [other for other in self.groups if other != group]

    # What is certain

    def is_due(self) -> bool:
        """During a round: true if reports wait, or groups have come to roles or learners."""
        return super().is_due() or self.relays.is_due() or any(transfer.done() for transfer in self.under_way)

    def certain_units(self, wait: bool) -> Iterator[tuple[int, Unit]]:
        """Groups that are sent early, when learners have their data. Certain groups begin to pass roles."""
        self._pass_on()
        while self.sends_early or self.relays.adds_columns:
            for group, of_ranks in self._arrived() if self.sends_early else ():
                if self.begins_early:
                    compared = self.advantages([group])
                    yield from ((rank, with_advantages(unit, compared)) for rank, unit in of_ranks)
                else:
                    self.units += of_ranks
            for group in () if self.is_taken else self.pool.certain():
                self.pool.mark_sent(group)
                self._complete(group)
            if self.sends_early and (
                wait or sum(self.dealer.items(group.episodes) for group in self.ready) >= self.piece
            ):
                groups, self.ready = self.ready, []
                for group in groups:
                    self._send(group, self._shares(group), keep=not self.begins_early)
            if not (wait and (self.under_way or self.relays.passing())):
                return
            self.rollouts.wait_and_replace(*self._transfers(), *self.relays.calls(), until=self.is_due)
            self._pass_on()

    def _complete(self, group: Group) -> None:
        """Let a certain group pass the roles that add columns, if there are any."""
        if self.relays.adds_columns:
            self.adding[group.episodes] = group
            self.relays.add_columns(group.episodes, group.episodes[0] // self.algo.group_size)
        else:
            self.ready = sorted([*self.ready, group])

    def remaining_units(self) -> Iterator[tuple[int, Unit]]:
        """All groups of the batch, unless they were sent during the rollout."""
        self.is_taken = True
        for group in self.pool.take():
            self._complete(group)
        yield from self.certain_units(wait=True)
        self.finishing = self.relays.finish() if self.relays.streams else []
        if self.prompt_pools is not None:
            self.prompt_pools.forget_all_but(self.pool.open)
        if not self.begins_early:
            self._send_all(self.ready)
            compared = self.advantages(self.groups)
            for rank, unit in self.units:
                yield rank, with_advantages(unit, compared)

    def finish_batch(self) -> None:
        """The episodes are in the order of their numbers. Carried-over episodes stay in their stores, and others are
        forgotten."""
        batch = self.batch
        self.rollouts.wait_and_replace(*self.stores.forget_all_but(self.pool.held))
        results = [self.refs[episode].result for episode in self.dealt_to_dead if episode not in self.lost]
        saved = tuple(result for result in results if result)  # that sims had ended before they died
        batch.played += [Played(sum(result.length for result in saved), saved)] if saved else []
        super().finish_batch()
        batch.finished.sort(key=lambda result: result.index)
        self.rollouts.wait_and_replace(*self.finishing)
        batch.metrics |= metrics_of(self.finishing) | self._metrics()
        if self.text:
            batch.metrics |= added(self.rollouts.ask(self.rollouts.policies.engine_numbers))
        counts = ", ".join(f"{count} {name}" for name, count in sorted((+self.pool.counts).items()))
        mean = f", mean return {np.mean([one.total_reward for one in batch.finished]):.3g}" if batch.finished else ""
        batch.why_empty = f"its groups were {counts or 'none'}{mean}"

    def advantages(self, groups: Sequence[Group]) -> dict[int, float] | None:
        """The advantage of each episode within its group; None with PPO, whose learners use values."""
        algo = self.algo
        if algo.name == "ppo" or not groups:
            return None
        scores = np.array([group.scores for group in groups])
        compared = group_advantages(scores, algo.baseline, algo.scale, algo.deviation).ravel().tolist()
        return dict(zip((episode for group in groups for episode in group.episodes), compared, strict=True))

    def _metrics(self) -> dict[str, float]:
        batch, counts, algo = self.batch, self.pool.counts, self.algo
        metrics: dict[str, float] = {}
        if self.prompt_pools is not None:
            metrics |= {f"groups/{name}_prompts": self.prompt_pools.counts[name] for name in (*POOLS, "unseen")}
        if self.question_counts:
            metrics["groups/epochs"] = self.pool.dealt / (algo.group_size * sum(self.question_counts))
        if self.text:
            metrics["faults/unusable_answers"] = len(batch.problems)
        return metrics | {
            "faults/lost_episodes": len(self.lost),
            "train/balance_ratio": self.dealer.balance_ratio(batch.units, self._iteration),
            "groups/used": len(self.groups),
            "groups/kept": counts["kept"],
            "groups/dropped_equal": counts["equal"],
            "groups/dropped_out_of_bounds": counts["out_of_bounds"],
            "groups/dropped_incomplete": counts["incomplete"],
            "groups/carried_episodes": len(self.pool.held),
            "groups/discarded_episodes": self.pool.discarded,
            "groups/rounds": batch.rounds,
        }

    @property
    def _iteration(self) -> int:
        """The iteration of the batch."""
        return self.first + self.batch.number - 1

    def update(self, batch: Batch, iteration: int, total: int) -> Handle | None:
        self._count_empty(batch)
        return super().update(batch, iteration, total)

    def _count_empty(self, batch: Batch) -> None:
        """Count batches without a gradient, and warn of unusable conversations."""
        has_gradient = any(batch.units)
        self.empty = 0 if has_gradient else self.empty + 1
        self.why = self.why if has_gradient else batch.why_empty
        self.solved = (
            not self.suspicion and bool(batch.finished) and all(result.success_once for result in batch.finished)
        )
        if problems := batch.problems:
            total = len(problems) + len(batch.finished)
            why = f"{len(problems)} of {total} conversations count for nothing, the first because {problems[0]}"
            self.unusable = "" if batch.finished else why
            if batch.finished and not self.warned:
                self.warned = True
                self.rollouts.notify(f"{WARNING}{why}; metrics.jsonl counts them as faults/unusable_answers")

    # From stores to learners

    def _shares(self, group: Group) -> dict[int, list[int]]:
        """The places of a group's episodes for each rank: all for the rank with the lowest cost so far; with shards,
        whose ranks run their passes together, some for every rank."""
        places, in_step = range(len(group.episodes)), self.config.learner.in_step
        parts = [[place] for place in places] if in_step else [[*places]]
        costs = [self.dealer.cost([group.episodes[place] for place in share]) for share in parts]
        shares: dict[int, list[int]] = {rank: [] for rank in range(len(self.channels))} if in_step else {}
        for number in sorted(range(len(parts)), key=lambda number: -costs[number]):
            rank = int(np.argmin(self.loads))
            self.loads[rank] += costs[number]
            shares[rank] = sorted(shares.get(rank, []) + parts[number])
        return shares

    def _send_all(self, groups: list[Group]) -> None:
        """Send every learner rank its part of a batch; groups lost with a sim are left out. A rank without episodes
        gets a copy of an episode as padding."""
        self._drop_groups_of(self.stores.lost_among(self.pool.held))
        lost = [group for group in groups if self.stores.lost_among(group.episodes)]
        for group in lost:
            self._drop_chosen(group)
        if left := [group for group in groups if group not in lost]:
            rank_of = self.dealer.deal(left, self._iteration)
            padding: dict[int, list[int]] = {rank: [] for rank in {*range(len(self.channels))} - {*rank_of.values()}}
            for group in left:
                shares = gather((rank_of[episode], place) for place, episode in enumerate(group.episodes))
                self._send(group, padding | shares, keep=True)
                padding = {}
        self._take_units()
        while self.groups and (idle := {*range(len(self.channels))} - {rank for rank, _ in self.units}):
            there = [group for group in self.groups if not self.stores.lost_among(group.episodes[:1])]
            if not there:  # a rank has no unit, and no copy is left for it
                self.groups, self.units = [], []
                return
            self._send(there[0], {rank: [] for rank in idle}, keep=True)
            self._take_units(padding=True)

    def _take_units(self, padding: bool = False) -> None:
        """Wait for the groups on their way to learners."""
        self.rollouts.wait_and_replace(*self._transfers())
        self.units += [unit for _, of_ranks in self._arrived(padding) for unit in of_ranks]

    def _transfers(self) -> list[Handle]:
        """The calls for all groups on their way to learners."""
        return [call for group in self.under_way for one in group.transfers.values() for call in one.calls.values()]

    def _arrived(self, padding: bool = False) -> Iterator[tuple[Group, Iterator[tuple[int, Unit]]]]:
        """The groups whose transfer has ended, with the units of ranks; lost groups are left out, unless only copies of
        them were lost as `padding`."""
        over = [transfer for transfer in self.under_way if transfer.done()]
        self.under_way = [transfer for transfer in self.under_way if transfer not in over]
        for transfer in over:
            if transfer.was_sent():
                if transfer.group not in self.groups:
                    self.groups = sorted([*self.groups, transfer.group])
                yield transfer.group, transfer.units()
            elif not padding:
                self._drop_chosen(transfer.group)

    def _send(self, group: Group, shares: dict[int, list[int]], keep: bool) -> None:
        """Begin to send a group; its episodes are forgotten afterwards unless `keep` is true."""
        transfers = {}
        for rank, share in sorted(shares.items(), key=lambda item: len(item[1])):  # copies for padding come first
            episodes = [group.episodes[place] for place in share or [0]]
            transfers[rank] = self.stores.send(episodes, self.channels[rank], self.batch.number, keep=keep or not share)
        self.under_way.append(GroupTransfer(group, shares, transfers))

    # What to save

    def save(self) -> dict[str, np.ndarray]:
        """The pool and its stored episodes."""
        stores = self.stores.groups[self.relays.deciding]
        parts = [state for state in self.rollouts.ask(stores.get_stored) if state]
        names = parts[0] if parts else ()
        return self._pool_state() | {f"kept.{name}": np.concatenate([state[name] for state in parts]) for name in names}

    def abandon(self) -> dict[str, np.ndarray]:
        """The pool without kept episodes, which were lost with the sims, and without those that were sent to learners,
        which took no step."""
        super().abandon()
        size = self.algo.group_size
        sent = (episode for number in self.pool.sent for episode in range(number * size, (number + 1) * size))
        lost = {*self.pool.playing, *self.pool.held, *sent}
        self.pool.drop_groups_of(lost)
        if self.prompt_pools is not None:
            self.prompt_pools.forget_all_but(())
        self.rollouts.abandoned_episodes += len(lost)
        return self._pool_state()

    def _pool_state(self) -> dict[str, np.ndarray]:
        pool = {f"groups.{name}": array for name, array in self.pool.state().items()}
        if self.prompt_pools is not None:
            pool |= {f"pools.{name}": array for name, array in self.prompt_pools.state().items()}
        lengths = [(episode, *self.refs[episode].length) for episode in self.pool.held]
        numbers = {"empty": np.array(self.empty), "lengths": np.array(lengths, np.int64).reshape(-1, 4)}
        return pool | {f"groups.{name}": array for name, array in numbers.items()}

    def restore(self, state: dict[str, np.ndarray]) -> int:
        """No episode was open. Those that were kept by a sim that died before the checkpoint are abandoned with their
        groups."""
        groups = {name[7:]: array for name, array in state.items() if name.startswith("groups.")}
        self.pool.restore(groups)
        self.empty = int(groups["empty"]) % self.algo.max_empty
        rows = groups["lengths"].tolist()
        self.refs |= {episode: EpisodeRef("", is_lost=True, length=tuple(length)) for episode, *length in rows}
        if self.prompt_pools is not None:
            self.prompt_pools.restore({name[6:]: array for name, array in state.items() if name.startswith("pools.")})
        if kept := {name[5:]: array for name, array in state.items() if name.startswith("kept.")}:
            stores = self.stores.groups[self.relays.deciding]
            for worker, episodes in zip(
                stores.workers, self.rollouts.ask(lambda: stores.set_stored(kept)), strict=True
            ):
                self.stores.put(worker, episodes)
        lost = self.stores.lost_among(self.pool.held)
        self.pool.drop_groups_of(lost)
        return len(lost)


def with_advantages(unit: Unit, compared: Mapping[int, float] | None) -> Unit:
    """The unit with the advantages of its episodes."""
    if compared is None:
        return unit
    return replace(unit, advantages=np.array([compared[episode] for episode in unit.ids.tolist()]))


def added(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sums over several workers; for gaps between log-probs the largest."""
    total: dict[str, float] = {}
    for unit in parts:
        for name, number in unit.items():
            before = total.get(name, 0.0)
            total[name] = max(before, number) if "gap" in name else before + number
    return total


def sampling_of(policy: LanguageConfig) -> SamplingRule:
    """How rollouts draw tokens. Losses compare with the log-probs among all tokens at this temperature."""
    drawn = policy.temperature, policy.top_p, policy.top_k
    return SamplingRule(*drawn, logprob_temperature=policy.temperature, min_p=policy.min_p)


def sampled(episodes: list[int], count: int) -> frozenset[int]:
    """`count` episodes of an iteration, spread over its groups."""
    count = min(count, len(episodes))
    return frozenset(episodes[number * len(episodes) // count] for number in range(count))


def discards_surplus(algo: PPOConfig | GRPOConfig, pipeline: PipelineSection) -> bool:
    """True if surplus groups of an iteration are dropped: in the next iteration they would be stale."""
    return bool(pipeline.lag) or pipeline.begins_early if algo.surplus is None else algo.surplus == "discard"
