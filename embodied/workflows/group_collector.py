"""Collecting whole episodes in groups, as GRPO learns from: sims keep what they have played until it is clear which
groups are wanted, and then send only those. With schedule=periodic a group is handed on as soon as it is certain that
the batch will hold it, to learners that sum up gradients meanwhile (`GroupStream`).

An episode that was lost with its sim worker takes its group along; the arithmetic of what is played, kept and carried
over is in `algorithms/groups.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.algorithms.advantages import group_advantages
from embodied.algorithms.config import GRPOConfig, PPOConfig
from embodied.algorithms.groups import POOLS, Group, GroupPool, PromptPools, score_of
from embodied.core.conversations import SamplingRule
from embodied.core.errors import ConfigError
from embodied.core.types import (
    BatchEnd,
    BatchPart,
    EpisodeList,
    EpisodeResult,
    EpisodeSpec,
    GroupPart,
    RolloutStats,
    Route,
    env_blocks,
)
from embodied.envs import env_class
from embodied.runtime import Handle
from embodied.workflows.contract import WARNING

if TYPE_CHECKING:
    from embodied.workflows.workers import Workers


@dataclass
class GroupedEpisodes:
    """The groups of one iteration, and what it took to collect them."""

    version: int
    stats: list[RolloutStats] = field(default_factory=list)  # per sim and round
    rounds: int = 0
    seconds: float = 0.0
    lost: set[int] = field(default_factory=set)  # episodes
    counts: Counter[str] = field(default_factory=Counter)  # of groups, as the pool's
    drawn: Counter[str] = field(default_factory=Counter)  # of groups, by the pool of their prompts
    carried: int = 0  # episodes that later iterations may learn from
    discarded: int = 0  # episodes of groups that were kept, or begun, and not needed
    ended: dict[int, EpisodeResult] = field(default_factory=dict)  # all that ended and were noted, by episode
    groups: list[Group] = field(default_factory=list)
    sources: list[tuple[str, ...]] = field(default_factory=list)  # per learner rank
    engine: dict[str, float] = field(default_factory=dict)  # what language policies' engines report

    @property
    def finished(self) -> list[EpisodeResult]:
        return sorted((result for part in self.stats for result in part.finished), key=lambda result: result.index)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Conversations to be written down."""
        return sorted((sample for part in self.stats for sample in part.samples), key=lambda sample: sample["index"])

    @property
    def problems(self) -> list[str]:
        """Why episodes that ended count for nothing."""
        return [problem for part in self.stats for problem in part.problems]

    @property
    def episodes(self) -> np.ndarray:
        return np.array([episode for group in self.groups for episode in group.episodes], np.int64)


class GroupCollector:
    def __init__(self, workers: Workers) -> None:
        """Lay a channel to each learner; sims put into `outlets`, learners read `trajectories`."""
        config = workers.config
        self.config, self.algo = config, config.algo
        in_epochs = self.algo.prompts == "epochs"
        self.questions = env_class(config.env).training_questions(config.env) if in_epochs else ()
        self.episodes = EpisodeList(
            config.seed, "train", workers.tasks, group_size=self.algo.group_size, questions=self.questions
        )
        self.pool = GroupPool(self.algo, discards_surplus(self.algo, config.pipeline.schedule))
        self.prompts = PromptPools(self.algo.pools, config.seed, self.algo.group_size) if self.algo.pools else None
        self.stream: GroupStream | None = None  # with schedule=periodic, that of this iteration
        self.empty, self.why = 0, ""  # iterations in a row that learned nothing
        self.solved = False  # every episode of the last batch succeeded
        self.unusable = ""  # why no episode of the last batch counts
        self.warned = False  # that some do not
        self.handed = 0  # times that episodes were handed over
        self.rollouts, self.learners = workers.rollouts, workers.learners
        self.text = workers.spec.text  # episodes are conversations
        # Losses compare with the log-probs of tokens as they were drawn.
        drawn_at = config.policy.temperature if self.text else 1.0
        self.sampling = SamplingRule(drawn_at, logprob_temperature=drawn_at) if self.text else 1.0
        self.samples: list[dict[str, Any]] = []  # of the batch that was learned from last
        self.trajectories = self.outlets = workers.trajectory_channels()
        workers.cluster.watch(workers.journal)
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
        """Why the run should end here; empty while there is something to learn from."""
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
        batch = GroupedEpisodes(version)
        self.pool.counts.clear()
        if self.prompts is not None:
            self.prompts.counts.clear()
        if self.config.pipeline.schedule == "periodic":
            self.stream = GroupStream(self, batch)
        # Rounds of whole groups, until the algorithm has what it asks for.
        while count := self.pool.wanted(batch.rounds, self.config.env.num_envs):
            self._play([self.spec_of(index) for index in self.pool.deal(count)], batch)
        taken = self.pool.take()
        if self.prompts is not None:
            self.prompts.keep(self.pool.open)
            batch.drawn = self.prompts.counts.copy()
        # Learners get them now, unless they took them as they came; what is carried over stays with the sims.
        if self.stream is None:
            batch.groups = taken
            self._hand_over(batch)
        self.rollouts.settle(self.rollouts.sims.keep(self.pool.held))
        if self.text:
            batch.engine = added(self.rollouts.ask(self.rollouts.policies.engine_numbers))
        batch.counts, batch.carried, batch.discarded = +self.pool.counts, len(self.pool.held), self.pool.discarded
        return batch

    def spec_of(self, index: int) -> EpisodeSpec:
        """The episode of this number, with the prompt that was drawn for its group."""
        if self.prompts is None:
            return self.episodes[index]
        prompt = self.prompts.draw(index // self.algo.group_size)
        return replace(self.episodes[prompt * self.algo.group_size], index=index)

    def update(self, batch: GroupedEpisodes, iteration: int, total: int) -> Handle | None:
        self.samples = batch.samples
        self._count_empty(batch)
        if self.stream is not None:
            return self.stream.end(iteration, total)
        if not batch.groups:
            return None
        scores = np.array([group.scores for group in batch.groups])
        blocks = self._learner_blocks(scores.size)
        about = (self.rollouts.weight_sync.learned, scores.ravel(), self.advantages(scores))
        parts = [BatchPart(batch.episodes, block.start, block.stop, *about) for block in blocks]
        shares = zip(self.trajectories, batch.sources, parts, strict=True)
        return self.learners.update.each([(*share, iteration, total) for share in shares])

    def advantages(self, scores: np.ndarray) -> np.ndarray | None:
        """Advantages of the scores [G, S] of groups, one episode after the other; None with PPO, whose learners judge
        by values."""
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
            "groups/used": len(batch.groups),
            "groups/kept": counts["kept"],
            "groups/dropped_equal": counts["equal"],
            "groups/dropped_out_of_bounds": counts["out_of_bounds"],
            "groups/dropped_incomplete": counts["incomplete"],
            "groups/carried_episodes": batch.carried,
            "groups/discarded_episodes": batch.discarded,
            "groups/rounds": batch.rounds,
            **batch.engine,
        }

    def save(self) -> dict[str, np.ndarray]:
        """The pool, and the episodes that the sims keep for it."""
        parts = [part for part in self.rollouts.ask(self.rollouts.sims.get_kept) if part]
        names = parts[0] if parts else ()
        kept = {f"kept.{name}": np.concatenate([part[name] for part in parts]) for name in names}
        pool = {f"groups.{name}": array for name, array in self.pool.state().items()}
        if self.prompts is not None:
            pool |= {f"pools.{name}": array for name, array in self.prompts.state().items()}
        return {**pool, **kept, "groups.empty": np.array(self.empty)}

    def restore(self, state: dict[str, np.ndarray]) -> int:
        """Go on from `save`. Nothing is abandoned, since no episode was open."""
        groups = {name[7:]: array for name, array in state.items() if name.startswith("groups.")}
        self.pool.restore(groups)
        self.empty = int(groups["empty"]) % self.algo.max_empty
        if self.prompts is not None:
            self.prompts.restore({name[6:]: array for name, array in state.items() if name.startswith("pools.")})
        if kept := {name[5:]: array for name, array in state.items() if name.startswith("kept.")}:
            self.rollouts.ask(lambda: self.rollouts.sims.set_kept(kept))
        return 0

    # Inside

    def _play(self, specs: list[EpisodeSpec], batch: GroupedEpisodes) -> None:
        """A round of episodes. Neighbours go to the same sim, so one that dies takes few groups along."""
        rollouts = self.rollouts
        blocks = enumerate(env_blocks(len(specs), len(rollouts.sims)))
        shares = {sim: specs[block.start : block.stop] for sim, block in blocks if block}
        beside, rollouts.beside = rollouts.beside, {}
        shares = {sim: [] for sim in beside} | shares

        shown = sampled([spec.index for spec in specs], self.config.run.samples) if not batch.rounds else frozenset()

        def begin(sim: int, route: Route) -> Handle:
            more: dict[str, Any] = {"beside": beside[sim]} if sim in beside else {}
            if self.text:
                more["shown"] = shown
            return rollouts.sims[sim].collect(shares[sim], route, noted=self.stream is not None, **more)

        if self.stream is not None:
            self.stream.begin({spec.index: sim for sim, share in shares.items() for spec in share})
        calls, _ = rollouts.play(
            shares, begin, self.config.pipeline.stages, self.sampling, "train", background=self.stream
        )
        played = [call for call in calls.values() if call.succeeded()]
        stats = [call.wait()[0] for call in played]
        batch.stats += stats
        batch.seconds += max((call.seconds() for call in played), default=0.0)
        batch.rounds += 1
        self.add([result for part in stats for result in part.finished], batch)
        self.lose(sorted(self.pool.playing), batch)
        self._lose_what_is_gone(batch)
        if self.stream is not None:
            self.stream.hand_on_certain()
            dead = [sim for sim, call in calls.items() if not call.succeeded()]
            batch.stats += self.stream.saved([spec.index for sim in dead for spec in shares[sim]])

    def add(self, results: Iterable[EpisodeResult], batch: GroupedEpisodes) -> None:
        """Add the outcomes of episodes; those that are known already change nothing."""
        new = {result.index: result for result in results if result.index in self.pool.playing}
        batch.ended |= new
        if self.prompts is not None:
            self.prompts.add({index: bool(result.success_once) for index, result in new.items()})
        longest = self.config.policy.max_tokens if self.algo.overlong else 0
        scores = {index: score_of(result, self.algo, longest) for index, result in new.items()}
        self.pool.add(scores, {index: bool(result.success_once) for index, result in new.items()})

    def _hand_over(self, batch: GroupedEpisodes) -> None:
        """Every learner rank gets its part of the episodes; groups that went down with a sim are left out."""
        while True:
            there = self._lose_what_is_gone(batch)
            lost = [group for group in batch.groups if not there.issuperset(group.episodes)]
            batch.groups = [group for group in batch.groups if group not in lost]
            self.pool.counts.update(kept=-len(lost), incomplete=len(lost))
            batch.lost.update(episode for group in lost for episode in group.episodes)
            if not batch.groups:
                return
            self.handed += 1
            episodes = batch.episodes
            blocks = self._learner_blocks(len(episodes))
            wanted = [episodes[block.start : block.stop] if len(block) else episodes[:1] for block in blocks]
            calls = [
                self.rollouts.sims[sim].hand_over(wanted, self.source(sim), tuple(self.outlets))
                for sim in range(len(self.rollouts.sims))
            ]
            self.rollouts.settle(*calls)
            if all(call.succeeded() for call in calls):
                sent = [call.wait()[0] for call in calls]
                batch.sources = [
                    tuple(self.source(sim) for sim, ranks in enumerate(sent) if rank in ranks)
                    for rank in range(len(blocks))
                ]
                return

    def _learner_blocks(self, episodes: int) -> list[range]:
        """The episodes, of so many, that each learner rank learns from: whole groups of conversations, which have a
        prompt in common; of other episodes about as many as any rank."""
        size = self.algo.group_size if self.text else 1
        blocks = env_blocks(episodes // size, len(self.learners))
        return [range(block.start * size, block.stop * size) for block in blocks]

    def source(self, sim: int) -> str:
        """The name under which a sim hands over now."""
        return f"sim-{sim}#{self.handed}"

    def _lose_what_is_gone(self, batch: GroupedEpisodes) -> set[int]:
        """Sims that were replaced have forgotten what they kept; returns what is still there."""
        there = {episode for kept in self.rollouts.ask(self.rollouts.sims.kept) for episode in kept}
        self.lose([episode for episode in self.pool.held if episode not in there], batch)
        return there

    def lose(self, episodes: Collection[int], batch: GroupedEpisodes) -> None:
        """Drop the groups of episodes that nobody can bring any more."""
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
    """The sums of numbers of several workers."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


@dataclass
class GroupTransfer:
    """A group on its way from sims to learner ranks."""

    group: Group
    shares: dict[int, range]  # by rank, the places of its episodes in the group
    calls: dict[int, dict[str, Handle]]  # by rank and source

    @property
    def handles(self) -> list[Handle]:
        return [call for calls in self.calls.values() for call in calls.values()]

    def done(self) -> bool:
        return all(call.done() for call in self.handles)

    def arrived(self) -> bool:
        """True if all of it was sent; not where a sim died first."""
        return all(call.succeeded() and call.wait()[0] for call in self.handles)


class GroupStream:
    """Hands the groups of an iteration on as soon as it is certain that it will learn from them.

    Each goes as a whole to the learner rank that has had the fewest env steps, or tokens, so far. Where ranks hold
    shards of the weights, all of them take every group together, some of its episodes each. A rank learns from a group
    when all of it was sent. Episodes of a group that a sim sent before it died count for nothing.
    """

    def __init__(self, collector: GroupCollector, batch: GroupedEpisodes) -> None:
        """Learners begin to wait for groups."""
        if collector.outlets is not collector.trajectories:
            raise ConfigError(
                f"pipeline.schedule=periodic: sims send groups straight to learners, but {type(collector).__name__} "
                "lets them pass through other workers; try pipeline.schedule=sync"
            )
        self.collector, self.batch = collector, batch
        self.pool, self.rollouts, self.channels = collector.pool, collector.rollouts, collector.trajectories
        self.notes = self.rollouts.journal
        self.played_by: dict[int, int] = {}  # episode -> sim
        self.under_way: list[GroupTransfer] = []
        self.had = [0] * len(self.channels)  # by rank, env steps or tokens
        self.began = perf_counter()
        self.accumulating = collector.learners.accumulate.each([(channel, batch.version) for channel in self.channels])

    def begin(self, played_by: dict[int, int]) -> None:
        """A round begins, in which these sims play these episodes."""
        self.played_by |= played_by

    def due(self) -> bool:
        """True if episodes have ended, or groups are sent."""
        return self.notes.qsize() > 0 or any(one.done() for one in self.under_way)

    def go_on(self) -> None:
        """Add what has ended, and hand on what is certain then."""
        while self.notes.qsize():
            self.collector.add(self.notes.get().finished, self.batch)
        sent = [one for one in self.under_way if one.done()]
        self.under_way = [one for one in self.under_way if one not in sent]
        for one in sent:
            self._learn(one)
        for group in self.pool.certain():
            self.pool.hand_on(group)
            self.under_way.append(self._send(group))

    def hand_on_certain(self) -> None:
        """Hand on, at the end of a round, until the learners have all that is certain now."""
        self.go_on()
        while self.under_way:
            self.rollouts.settle(*(call for transfer in self.under_way for call in transfer.handles))
            self.go_on()

    def saved(self, episodes: Collection[int]) -> list[RolloutStats]:
        """The results of these episodes that are known although their sims died in this round."""
        known = [self.batch.ended[episode] for episode in episodes if episode in self.batch.ended]
        results = tuple(result for result in known if result.index not in self.batch.lost)
        return [RolloutStats(sum(result.length for result in results), results, 0.0, 0.0, 0.0)] if results else []

    def end(self, iteration: int, total: int) -> Handle:
        """There are no more groups: the learners' step, with what there is to say of it."""
        last = BatchEnd(iteration, total, perf_counter() - self.began)
        for channel in self.channels:
            channel.put(last)
        return self.accumulating

    def _send(self, group: Group) -> GroupTransfer:
        collector = self.collector
        collector.handed += 1
        size = len(group.episodes)
        if collector.config.learner.shard:
            shares = dict(enumerate(env_blocks(size, len(self.channels))))
        else:
            rank, results = int(np.argmin(self.had)), [self.batch.ended[episode] for episode in group.episodes]
            self.had[rank] += sum(result.tokens or result.length for result in results)
            shares = {rank: range(size)}
        calls = {}
        for rank, share in sorted(shares.items(), key=lambda item: len(item[1])):  # copies for padding come first
            sent: dict[int, list[int]] = {}
            for place in share or range(1):
                sent.setdefault(self.played_by[group.episodes[place]], []).append(group.episodes[place])
            calls[rank] = {
                collector.source(sim): self.rollouts.sims[sim].hand_on(
                    episodes, collector.source(sim), self.channels[rank], keep=not share
                )
                for sim, episodes in sent.items()
            }
        return GroupTransfer(group, shares, calls)

    def _learn(self, sent: GroupTransfer) -> None:
        if not sent.arrived():
            self.collector.lose(sent.group.episodes, self.batch)
            return
        self.batch.groups = sorted([*self.batch.groups, sent.group])
        scores, episodes = np.array([sent.group.scores]), np.array(sent.group.episodes)
        advantages = self.collector.advantages(scores)
        for rank, share in sent.shares.items():
            at = list(share or range(1))
            compared = None if advantages is None else advantages[at]
            part = GroupPart(tuple(sent.calls[rank]), episodes[at], compared, scores[0][at], is_padding=not share)
            self.channels[rank].put(part)


def sampled(episodes: list[int], count: int) -> frozenset[int]:
    """So many of an iteration's episodes, spread over its groups."""
    count = min(count, len(episodes))
    return frozenset(episodes[number * len(episodes) // count] for number in range(count))


def discards_surplus(algo: PPOConfig | GRPOConfig, schedule: str) -> bool:
    """True if groups that an iteration did not need are dropped: in the next one they would be older than its own."""
    return schedule != "sync" if algo.surplus is None else algo.surplus == "discard"
