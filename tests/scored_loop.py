"""A program with a fourth role: workers that score what sims saw before learners get it, in a process of their own."""

from dataclasses import replace

import numpy as np

from embodied.runtime import Worker
from embodied.workflows.contract import Role
from embodied.workflows.rl_loop import EmbodiedLoop, HorizonCollector

WORK = np.full((400, 400), 1e-3)  # a network's, so that scoring takes time


class Scorer(Worker):
    def score(self, shares):
        """Put as many trajectories as each share says from its channel into the learner's, with rewards added."""
        for unscored, count, scored in shares:
            for _ in range(count):
                played = unscored.get()
                bonus = np.float32((WORK @ WORK).sum() * 0)
                scored.put(replace(played, rewards=played.rewards + bonus), weight=played.num_steps)


class ScoredRollouts(HorizonCollector):
    def start(self, workers):
        super().start(workers)
        self.scorers = workers.groups["reward"]
        self.outlets = [workers.cluster.channel(f"unscored-{i}", capacity=None) for i in range(len(self.trajectories))]

    def collect(self, version):
        batch = super().collect(version)
        counts = [len(batch.sources_of(block)) for block in self.blocks]
        shares = list(zip(self.outlets, counts, self.trajectories, strict=True))
        self.scorers.score.each([(shares[i :: len(self.scorers)],) for i in range(len(self.scorers))]).wait()
        return batch


class ScoredLoop(EmbodiedLoop):
    roles = (*EmbodiedLoop.roles, Role("reward", "tests.scored_loop:Scorer"))
    make_source = ScoredRollouts
