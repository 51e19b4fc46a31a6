"""Collects whole episodes in groups, for GRPO: sims keep their episodes until the groups of the batch are chosen, and
send only these. With schedule=periodic a group is sent as soon as the batch is certain to contain it, and learners
accumulate gradients meanwhile.

If an episode is lost with its sim worker, its group is lost, too. `algorithms/groups.py` decides which groups are
played, kept and carried over.

The driver's record of whole episodes: the worker that keeps each, and the groups sent to learners.

Learners use a group when all of it was sent: to one learner rank, or a part of it to each. If a sim dies before that,
its parts are ignored. With schedule=periodic a group is sent as soon as the batch is certain to contain it, to the rank
with the lowest cost so far, and learners process it during the rollout. Otherwise groups are sent when the batch is
complete, distributed by cost (`placement/balance.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.algorithms.advantages import group_advantages
from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.algorithms.groups import POOLS, Group, GroupPool, PromptPools, score_of
from embodied.core.arrays import gather
from embodied.core.conversations import SamplingRule
from embodied.core.errors import ConfigError
from embodied.core.types import (
    EpisodeList,
    EpisodeResult,
    EpisodeSpec,
    Job,
    Played,
    Report,
    Unit,
    deal_by_task,
    env_blocks,
)
from embodied.envs import env_class
from embodied.runtime import Channel, Handle, WorkerGroup
from embodied.workflows.collector import Collector
from embodied.workflows.contract import WARNING
from embodied.workflows.dealing import Dealer

if TYPE_CHECKING:
    from embodied.config.sections import PipelineSection
    from embodied.workflows.rollout_manager import RolloutManager
    from embodied.workflows.workers import Workers


@dataclass
class GroupedEpisodes:
    """The groups of one iteration, and the statistics of their collection."""

    number: int  # number of the batch in its channels
    version: int
    stats: list[Played] = field(default_factory=list)  # per sim and round
    rounds: int = 0
    seconds: float = 0.0
    lost: set[int] = field(default_factory=set)  # episodes
    counts: Counter[str] = field(default_factory=Counter)  # of groups, as the pool's
    drawn: Counter[str] = field(default_factory=Counter)  # of groups, by the pool of their prompts
    carried: int = 0  # episodes kept for later iterations
    discarded: int = 0  # episodes of surplus groups, complete or begun
    ended: dict[int, EpisodeResult] = field(default_factory=dict)  # all recorded results, by episode
    groups: list[Group] = field(default_factory=list)  # groups sent to learners
    units: list[list[Unit]] = field(default_factory=list)  # units of each learner rank
    balance_ratio: float = 1.0  # of the ranks' costs
    ends: list[tuple[int, float]] = field(default_factory=list)  # of conversations, as in Played, over all rounds
    reported: dict[str, float] = field(default_factory=dict)  # by relaying roles and engines

    @property
    def finished(self) -> list[EpisodeResult]:
        return sorted((result for stats in self.stats for result in stats.finished), key=lambda result: result.index)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Conversations for samples.jsonl."""
        return sorted((sample for stats in self.stats for sample in stats.samples), key=lambda sample: sample["index"])

    @property
    def problems(self) -> list[str]:
        """Reasons for discarded episodes."""
        return [problem for stats in self.stats for problem in stats.problems]

    @property
    def episodes(self) -> np.ndarray:
        return np.array([episode for group in self.groups for episode in group.episodes], np.int64)


class GroupCollector(Collector):
    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        config = workers.config
        self.algo, self.early = config.algo, config.pipeline.begins_early
        in_epochs = self.algo.prompts == "epochs"
        self.questions = env_class(config.env).training_questions(config.env) if in_epochs else ()
        self.episodes = EpisodeList(
            config.seed, "train", workers.tasks, group_size=self.algo.group_size, questions=self.questions
        )
        self.pool = GroupPool(self.algo, discards_surplus(self.algo, config.pipeline))
        self.prompts = PromptPools(self.algo.pools, config.seed, self.algo.group_size) if self.algo.pools else None
        self.first = 0  # iteration of the first collected batch
        self.playing: GroupedEpisodes | None = None  # the batch in collection
        self.empty, self.why = 0, ""  # consecutive iterations without gradient, and the reason
        self.solved = False  # every episode of the last batch succeeded
        self.unusable = ""  # reason if all episodes of the last batch were discarded
        self.warned = False  # True: the user was warned of discarded episodes
        self.text = workers.spec.text  # episodes are conversations
        # Losses need the log-probs of the distribution that tokens were drawn from.
        drawn_at = config.policy.temperature if self.text else 1.0
        self.sampling = SamplingRule(drawn_at, logprob_temperature=drawn_at)
        self.samples: list[dict[str, Any]] = []  # samples of the last batch
        self.ends: list[tuple[int, float]] = []  # ends of its conversations
        self.dealer = Dealer(config, self.learners, self.text)
        self.experience = Experience(self.rollouts, config.learner.in_step, self.relays.groups)
        self.rollouts.training = self
        if self.algo.filter_metric == "success" and not workers.spec.has_success:
            raise ConfigError(
                "algo.filter_metric=success bounds the rate of success, but this env has none; try "
                "algo.filter_metric=return"
            )

    def total_iterations(self) -> int:
        """`run.iterations`: the length of whole episodes is not known in advance."""
        return self.config.run.iterations

    @property
    def exhausted(self) -> str:
        """The reason to end the run now; empty while batches have a gradient."""
        if self.unusable:
            return self.unusable
        if self.empty < self.algo.max_empty:
            return ""
        return (
            f"nothing to learn from in the last {self.empty} iterations (algo.max_empty): {self.why}. Where all "
            "episodes succeed, the run is done; where none does, start from a policy that sometimes succeeds, or try "
            "another env.reward, a larger algo.group_size or algo.filter=resample"
        )

    # A batch

    def collect(self, version: int) -> GroupedEpisodes:
        if not self.batches:
            self.first = self.rollouts.weight_sync.learned
        self.batches += 1
        batch = self.playing = GroupedEpisodes(self.batches, version, units=[[] for _ in self.trajectories])
        self.pool.counts.clear()
        if self.prompts is not None:
            self.prompts.counts.clear()
        self.experience.begin(self.trajectories)
        if self.early:
            self.begin_early(batch.number, one_by_one=True)
        # Rounds of whole groups, until the algorithm has enough.
        while count := self.pool.wanted(batch.rounds, self.config.env.num_envs):
            self._play(self.specs_of(self.pool.deal(count)), batch)
        groups = self.pool.take()
        if self.prompts is not None:
            self.prompts.forget_all_but(self.pool.open)
            batch.drawn = self.prompts.counts.copy()
        # Send the groups now, unless they were sent during the rollout; carried-over episodes stay with the sims.
        if not self.early:
            self._send_all(groups, batch)
        batch.balance_ratio = self.dealer.balance_ratio(batch.units, self._iteration(batch))
        self.experience.forget_all_but(self.pool.held)
        self.dealer.forget_all_but(self.pool.held)
        if self.text:
            batch.reported |= added(self.rollouts.ask(self.rollouts.policies.engine_numbers))
        batch.counts, batch.carried, batch.discarded = +self.pool.counts, len(self.pool.held), self.pool.discarded
        return batch

    def specs_of(self, indices: Sequence[int]) -> list[EpisodeSpec]:
        """The episodes with these numbers, with their groups' prompts."""
        size, numbers = self.algo.group_size, np.array(indices, np.int64)
        if self.prompts is None:
            return self.episodes.at(numbers)
        return self.episodes.at(np.array([self.prompts.draw(index // size) * size for index in indices]), numbers)

    def update(self, batch: GroupedEpisodes, iteration: int, total: int) -> Handle | None:
        self.samples, self.ends = batch.samples, batch.ends
        self._count_empty(batch)
        if not self.learning:
            if not batch.groups:
                return None
            self._send_units(batch)
        return self.end_batch(batch.number, iteration, total)

    def _send_units(self, batch: GroupedEpisodes) -> None:
        """Tell the learner ranks their units, now that the scores of all groups are known."""
        compared = self.advantages(np.array([group.scores for group in batch.groups]))
        for channel, units in zip(self.trajectories, batch.units, strict=True):
            for unit in units:
                known = None if compared is None else compared[np.searchsorted(batch.episodes, unit.ids)]
                channel.put(replace(unit, advantages=known), key=batch.number)

    def _iteration(self, batch: GroupedEpisodes) -> int:
        """The iteration of a batch."""
        return self.first + batch.number - 1

    def advantages(self, scores: np.ndarray) -> np.ndarray | None:
        """Advantages of the groups' scores [G, S], flat; None with PPO, whose learners use values."""
        algo = self.algo
        if algo.name == "ppo":
            return None
        return group_advantages(scores, algo.baseline, algo.scale, algo.deviation).ravel()

    def metrics(self, batch: GroupedEpisodes) -> dict[str, float]:
        counts, sims = batch.counts, len(self.rollouts.sims)
        pools = (*POOLS, "unseen") if self.prompts is not None else ()
        drawn = {f"groups/{name}_prompts": batch.drawn[name] for name in pools}
        if self.questions:
            drawn["groups/epochs"] = self.pool.dealt / (self.algo.group_size * sum(self.questions))
        return drawn | {
            "env_steps": sum(part.env_steps for part in batch.stats),
            "time/rollout_s": batch.seconds,
            "time/step_s": sum(part.step_s for part in batch.stats) / sims,
            "time/reset_s": sum(part.reset_s for part in batch.stats) / sims,
            "time/act_s": sum(part.wait_s for part in batch.stats) / sims,
            "faults/lost_episodes": len(batch.lost),
            **({"faults/unusable_answers": len(batch.problems)} if self.text else {}),
            "train/balance_ratio": batch.balance_ratio,
            "groups/used": len(batch.groups),
            "groups/kept": counts["kept"],
            "groups/dropped_equal": counts["equal"],
            "groups/dropped_out_of_bounds": counts["out_of_bounds"],
            "groups/dropped_incomplete": counts["incomplete"],
            "groups/carried_episodes": batch.carried,
            "groups/discarded_episodes": batch.discarded,
            "groups/rounds": batch.rounds,
            **batch.reported,
        }

    def save(self) -> dict[str, np.ndarray]:
        """The pool and its kept episodes."""
        kept = {f"kept.{name}": array for name, array in self.experience.get_kept().items()}
        return self._pool_state() | kept

    def abandon(self) -> dict[str, np.ndarray]:
        """The pool without kept episodes: they were lost with the sims."""
        self.close_channels()
        lost = {*self.pool.playing, *self.pool.held}
        self.pool.lose(lost)
        if self.prompts is not None:
            self.prompts.forget_all_but(())
        self.rollouts.abandoned_episodes += len(lost)
        return self._pool_state()

    def _pool_state(self) -> dict[str, np.ndarray]:
        pool = {f"groups.{name}": array for name, array in self.pool.state().items()}
        if self.prompts is not None:
            pool |= {f"pools.{name}": array for name, array in self.prompts.state().items()}
        return {**pool, "groups.empty": np.array(self.empty), "groups.lengths": self.dealer.state()}

    def restore(self, state: dict[str, np.ndarray]) -> int:
        """Restore the arrays of `save`. No episode was open, so none is abandoned."""
        groups = {name[7:]: array for name, array in state.items() if name.startswith("groups.")}
        self.pool.restore(groups)
        self.empty = int(groups["empty"]) % self.algo.max_empty
        self.dealer.restore(groups["lengths"])
        if self.prompts is not None:
            self.prompts.restore({name[6:]: array for name, array in state.items() if name.startswith("pools.")})
        if kept := {name[5:]: array for name, array in state.items() if name.startswith("kept.")}:
            self.experience.set_kept(kept)
        return 0

    # Inside

    def _play(self, specs: list[EpisodeSpec], batch: GroupedEpisodes) -> None:
        """Play a round of episodes. Neighbouring episodes go to the same sim, so a dead sim loses few groups. If a
        batch has equally many groups of every task, a sim plays the same few tasks in each batch."""
        rollouts = self.rollouts
        by_task = not self.text and self.algo.groups % rollouts.num_tasks == 0 and rollouts.num_tasks > 1
        num_sims = len(rollouts.sims)
        blocks = deal_by_task([spec.task for spec in specs], num_sims) if by_task else env_blocks(len(specs), num_sims)
        shares = {sim: [specs[at] for at in block] for sim, block in enumerate(blocks) if block}
        ends_early = self.early and not self.relays.groups  # else no group is certain before the round is over
        shown = sampled([spec.index for spec in specs], self.config.run.samples) if not batch.rounds else frozenset()
        jobs = {sim: Job(share, at_once=ends_early, samples=shown) for sim, share in shares.items()}
        workers = rollouts.sims.workers
        self.experience.keep_at({workers[sim]: [spec.index for spec in share] for sim, share in shares.items()})
        ended = rollouts.play(jobs, self.sampling, rollouts.take_beside(), self if ends_early else None)
        stats = [*ended.played.values()]
        batch.stats += stats
        batch.ends += [(tokens, batch.seconds + seconds) for part in stats for tokens, seconds in part.ends]
        batch.seconds += ended.seconds
        batch.rounds += 1
        self.add(self._relayed([result for part in stats for result in part.finished], batch), batch)
        self.leave_out(sorted(self.pool.playing), batch)
        self._lose_what_is_gone(batch)
        if self.early:
            self._send_what_is_certain()
            batch.stats += saved([spec.index for sim in ended.failures for spec in shares.get(sim, ())], batch)

    def add(self, results: Iterable[EpisodeResult], batch: GroupedEpisodes) -> None:
        """Add the outcomes of episodes; known outcomes change nothing."""
        new = {result.index: result for result in results if result.index in self.pool.playing}
        batch.ended |= new
        if self.prompts is not None:
            self.prompts.add({index: bool(result.success_once) for index, result in new.items()})
        longest = self.config.policy.max_tokens if self.algo.overlong else 0
        self.dealer.add(new.values())
        scores = {index: score_of(result, self.algo, longest) for index, result in new.items()}
        self.pool.add(scores, {index: bool(result.success_once) for index, result in new.items()})

    def _relayed(self, results: list[EpisodeResult], batch: GroupedEpisodes) -> list[EpisodeResult]:
        """The outcomes of a round, with rewards from relaying roles."""
        if not self.relays.groups:
            return results
        size = self.algo.group_size
        outcomes = {result.index: result for result in results}
        groups = gather((index // size, index) for index in sorted(outcomes)).values()
        rewards, metrics = self.relays.pass_groups(map(tuple, groups), self.experience)
        batch.reported |= metrics
        return [outcomes[index]._replace(total_reward=reward) for index, reward in rewards.items()]

    # To the learners

    def hear(self, report: Report) -> None:
        if self.playing is not None:
            self.add(report.finished, self.playing)

    def lose(self, sim: int) -> int:
        """Whole episodes of a dead sim are counted with their groups."""
        return 0

    def due(self) -> bool:
        """With schedule=periodic, during a round: true if episodes have ended or groups were sent."""
        return self.rollouts.inbox.qsize() > 0 or any(batch.done() for batch in self.experience.under_way)

    def go_on(self) -> None:
        """Add ended episodes, and send the groups that are certain now."""
        assert self.playing is not None
        batch = self.playing
        self.rollouts.read_reports()
        self._accept(self.experience.arrived(), batch)
        for group in self.pool.certain():
            self.pool.hand_on(group)
            self.experience.send(group, batch.number, self.dealer.cost)

    def _send_what_is_certain(self) -> None:
        """At the end of a round, send all certain groups to the learners, and wait."""
        self.go_on()
        while self.experience.under_way:
            self.rollouts.settle(*(call for other in self.experience.under_way for call in other.handles))
            self.go_on()

    def _send_all(self, groups: list[Group], batch: GroupedEpisodes) -> None:
        """Send every learner rank its part of a batch; groups lost with a sim are left out."""
        self._lose_what_is_gone(batch)
        lost = [group for group in groups if self.experience.gone(group.episodes)]
        for group in lost:
            self._leave_out(group, batch)
        if left := [group for group in groups if group not in lost]:
            self.experience.send_all(left, batch.number, self.dealer.deal(left, self._iteration(batch)))
            self._accept(self.experience.wait(), batch)
        while batch.groups and (idle := [rank for rank, units in enumerate(batch.units) if not units]):
            there = [group for group in batch.groups if not self.experience.gone(group.episodes[:1])]
            if not there:
                batch.groups = []  # a rank has no unit, and no copy is left for it
                return
            self.experience.pad(there[0], idle, batch.number)
            self._accept([one for one in self.experience.wait() if one.arrived()], batch)

    def _accept(self, sent: Iterable[GroupTransfer], batch: GroupedEpisodes) -> None:
        """Let learners learn from groups that have arrived."""
        for one in sent:
            group = one.group
            if not one.arrived():
                self._leave_out(group, batch)
                continue
            if group not in batch.groups:
                batch.groups = sorted([*batch.groups, group])
            advantages = self.advantages(np.array([group.scores])) if self.learning else None
            for rank, unit in units_of(one, advantages).items():
                batch.units[rank].append(unit)
                if self.learning:
                    self.trajectories[rank].put(unit, key=batch.number)

    def _leave_out(self, group: Group, batch: GroupedEpisodes) -> None:
        """Leave out a lost group that the pool has already returned."""
        if self.learning:
            self.leave_out(group.episodes, batch)
        else:
            self.pool.counts.update(kept=-1, incomplete=1)
            batch.lost.update(group.episodes)
            batch.groups = [one for one in batch.groups if one != group]

    def _lose_what_is_gone(self, batch: GroupedEpisodes) -> None:
        """Drop the groups of replaced sims; their kept episodes are lost."""
        self.leave_out(self.experience.gone(self.pool.held), batch)

    def leave_out(self, episodes: Collection[int], batch: GroupedEpisodes) -> None:
        """Drop the groups of lost episodes."""
        self.pool.lose(episodes)
        batch.lost.update(episodes)

    def _count_empty(self, batch: GroupedEpisodes) -> None:
        self.empty = 0 if batch.groups else self.empty + 1
        self.solved = bool(batch.finished) and all(result.success_once for result in batch.finished)
        if problems := batch.problems:
            total = len(problems) + len(batch.finished)
            why = f"{len(problems)} of {total} conversations count for nothing, the first because {problems[0]}"
            self.unusable = "" if batch.finished else why
            if batch.finished and not self.warned:
                self.warned = True
                self.rollouts.notify(f"{WARNING}{why}; metrics.jsonl counts them as faults/unusable_answers")
        if not batch.groups:
            returns = [result.total_reward for result in batch.finished]
            counts = ", ".join(f"{count} {name}" for name, count in sorted(batch.counts.items()))
            mean = f", mean return {np.mean(returns):.3g}" if returns else ""
            self.why = f"its groups were {counts or 'none'}{mean}"


def added(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sums over several workers; for gaps between log-probs the largest."""
    total: dict[str, float] = {}
    for part in parts:
        for name, number in part.items():
            before = total.get(name, 0.0)
            total[name] = max(before, number) if "gap" in name else before + number
    return total


def saved(episodes: Collection[int], batch: GroupedEpisodes) -> list[Played]:
    """The known results of these episodes, whose sims died in this round."""
    known = [batch.ended[episode] for episode in episodes if episode in batch.ended]
    results = tuple(result for result in known if result.index not in batch.lost)
    return [Played(sum(result.length for result in results), results)] if results else []


def sampled(episodes: list[int], count: int) -> frozenset[int]:
    """`count` episodes of an iteration, spread over its groups."""
    count = min(count, len(episodes))
    return frozenset(episodes[number * len(episodes) // count] for number in range(count))


def discards_surplus(algo: PPOConfig | GRPOConfig, pipeline: PipelineSection) -> bool:
    """True if surplus groups of an iteration are dropped: in the next iteration they would be stale."""
    return bool(pipeline.lag) or pipeline.begins_early if algo.surplus is None else algo.surplus == "discard"


@dataclass
class GroupTransfer:
    """A group on its way from sims to learner ranks."""

    group: Group
    shares: dict[int, list[int]]  # by rank, the places of its episodes in the group; empty: padding
    calls: dict[int, dict[str, Handle]]  # by rank and source

    @property
    def handles(self) -> list[Handle]:
        return [call for calls in self.calls.values() for call in calls.values()]

    def done(self) -> bool:
        return all(call.done() for call in self.handles)

    def arrived(self) -> bool:
        """True if the whole group was sent; False if a sim died first."""
        return all(call.succeeded() and call.wait()[0] for call in self.handles)


class Experience:
    """Whole episodes kept by workers, and groups on their way to learners."""

    def __init__(self, rollouts: RolloutManager, in_step: bool, relays: Sequence[WorkerGroup] = ()) -> None:
        """With `in_step` every rank takes some episodes of every group, and all run their passes together. Sims keep
        their episodes, unless these pass through the `relays`."""
        self.rollouts, self.in_step = rollouts, in_step
        self.keepers = [rollouts.sims, *relays]
        self.worker = {name: group[rank] for group in self.keepers for rank, name in enumerate(group.workers)}
        self.channels: list[Channel] = []
        self.kept_by: dict[int, tuple[str, int]] = {}  # episode -> its worker, and the worker's life
        self.sent = 0  # parts of groups, in all
        self.under_way: list[GroupTransfer] = []
        self.loads = np.zeros(0)  # by rank, the cost of this batch's groups sent during the rollout

    def begin(self, channels: list[Channel]) -> None:
        """Begin a batch; its groups go to the learner ranks through these channels."""
        self.channels, self.loads = channels, np.zeros(len(channels))

    def keep_at(self, episodes: Mapping[str, Collection[int]]) -> None:
        """Record the workers that play or keep these episodes."""
        lives = self.rollouts.lives
        self.kept_by |= {number: (worker, lives[worker]) for worker, numbers in episodes.items() for number in numbers}

    def forget_all_but(self, episodes: tuple[int, ...]) -> None:
        """Let all workers forget all other episodes."""
        self.kept_by = {episode: self.kept_by[episode] for episode in episodes if episode in self.kept_by}
        self.rollouts.settle(*(group.forget_all_but(episodes) for group in self.keepers))

    def gone(self, episodes: Collection[int]) -> list[int]:
        """The episodes whose worker has died since."""
        return [episode for episode in episodes if not self._there(episode)]

    def _there(self, episode: int) -> bool:
        worker, life = self.kept_by[episode]
        return self.rollouts.lives[worker] == life

    def hand_in(self, episodes: Sequence[int], channel: Channel, batch: int, keep: bool = False) -> dict[str, Handle]:
        """Let the workers that keep these episodes put them into a channel; returns the calls by source."""
        self.sent += 1
        calls = {}
        for worker, numbers in gather((self.kept_by[episode][0], episode) for episode in episodes).items():
            source = f"{worker}#{self.sent}"
            calls[source] = self.worker[worker].hand_in(numbers, source, channel, batch, keep=keep)
        return calls

    def get_kept(self) -> dict[str, np.ndarray]:
        """All kept episodes, as arrays for a checkpoint."""
        parts = [part for part in self.rollouts.ask(self.keepers[-1].get_kept) if part]
        return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}

    def set_kept(self, arrays: dict[str, np.ndarray]) -> None:
        """Restore the arrays of `get_kept`."""
        keepers = self.keepers[-1]
        self.keep_at(dict(zip(keepers.workers, self.rollouts.ask(lambda: keepers.set_kept(arrays)), strict=True)))

    def send(self, group: Group, batch: int, cost: Callable[[Sequence[int]], float]) -> None:
        """Begin to send a certain group; `cost` gives the cost of episodes on one rank."""
        places = range(len(group.episodes))
        parts = [[place] for place in places] if self.in_step else [[*places]]
        costs = [cost([group.episodes[place] for place in part]) for part in parts]
        shares: dict[int, list[int]] = {rank: [] for rank in range(len(self.channels))} if self.in_step else {}
        for number in sorted(range(len(parts)), key=lambda number: -costs[number]):
            rank = int(np.argmin(self.loads))
            self.loads[rank] += costs[number]
            shares[rank] = sorted(shares.get(rank, []) + parts[number])
        self._send(group, shares, batch, keep=False)

    def send_all(self, groups: Sequence[Group], batch: int, rank_of: Mapping[int, int]) -> None:
        """Begin to send all groups of a batch, each episode to its rank. A rank without episodes gets a copy of an
        episode as padding."""
        shares: dict[int, list[int]] = {rank: [] for rank in {*range(len(self.channels))} - {*rank_of.values()}}
        for group in groups:
            shares |= gather((rank_of[episode], place) for place, episode in enumerate(group.episodes))
            self._send(group, shares, batch, keep=True)
            shares = {}

    def pad(self, group: Group, ranks: Collection[int], batch: int) -> None:
        """Begin to send an episode as padding to these ranks."""
        self._send(group, {rank: [] for rank in ranks}, batch, keep=True)

    def arrived(self) -> list[GroupTransfer]:
        """Groups whose transfer has ended, successfully or not; they are no longer under way."""
        over = [batch for batch in self.under_way if batch.done()]
        self.under_way = [batch for batch in self.under_way if batch not in over]
        return over

    def wait(self) -> list[GroupTransfer]:
        """Wait for all transfers, and return them."""
        self.rollouts.settle(*(call for transfer in self.under_way for call in transfer.handles))
        return self.arrived()

    def _send(self, group: Group, shares: dict[int, list[int]], batch: int, keep: bool) -> None:
        calls = {}
        for rank, share in sorted(shares.items(), key=lambda item: len(item[1])):  # copies for padding come first
            episodes = [group.episodes[place] for place in share or [0]]
            calls[rank] = self.hand_in(episodes, self.channels[rank], batch, keep=keep or not share)
        self.under_way.append(GroupTransfer(group, shares, calls))


def units_of(sent: GroupTransfer, advantages: np.ndarray | None = None) -> dict[int, Unit]:
    """The unit of each rank from a group that has arrived; `advantages` [S] of its episodes need no
    other group."""
    episodes, scores = np.array(sent.group.episodes), np.array(sent.group.scores)
    units = {}
    for rank, share in sent.shares.items():
        at = share or [0]
        compared = None if advantages is None else advantages[at]
        units[rank] = Unit(tuple(sent.calls[rank]), episodes[at], compared, scores[at], is_padding=not share)
    return units
