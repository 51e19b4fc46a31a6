"""Imitation by learners alone, without a driver that announces the examples of each iteration."""

from embodied.workflows.imitation import examples_of


def imitate(learner, iteration, total):
    """Learn from the examples of an iteration of `total`."""
    return learner.imitate(examples_of(learner.algo, learner.seed, learner.demos.total, iteration), iteration, total)
