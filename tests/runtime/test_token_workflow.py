"""Reasoning-style RL on the same API: an engine samples token sequences of any length, a reward worker scores them, a
learner updates a bigram language model by REINFORCE and publishes versioned weights. Nothing here knows of robots."""

from itertools import pairwise

import numpy as np

from embodied.runtime import Cluster, HostPlan, Worker

VOCABULARY, STOP, PROMPTS, SAMPLES, ROUNDS = 6, 0, 4, 16, 25


def probabilities(logits):
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


class Engine(Worker):
    def generate(self, weights, samples):
        for _ in range(ROUNDS):
            version, logits = weights.get()
            p = probabilities(logits)
            for prompt in range(1, PROMPTS + 1):
                random = np.random.Generator(np.random.Philox(key=[version, prompt]))
                for number in range(SAMPLES):
                    tokens = [prompt]
                    while len(tokens) < 12 and (len(tokens) == 1 or tokens[-1] != STOP):
                        tokens.append(int(random.choice(VOCABULARY, p=p[tokens[-1]])))
                    samples.put((number, version, np.array(tokens)), key=prompt, weight=len(tokens))


class Reward(Worker):
    def score(self, samples, scored):
        for _ in range(ROUNDS):
            for prompt in range(1, PROMPTS + 1):
                for _ in range(SAMPLES):
                    number, version, tokens = samples.get(key=prompt)
                    followed = tokens[1:] == tokens[:-1] % (VOCABULARY - 1) + 1  # count upwards, 5 is followed by 1
                    scored.put((number, version, tokens, followed.mean()), key=prompt)


class Learner(Worker):
    def learn(self, scored, weights):
        logits, rewards, versions = np.zeros((VOCABULARY, VOCABULARY)), [], []
        for version in range(ROUNDS):
            weights.put((version, logits.copy()))
            gradient = np.zeros_like(logits)
            groups = [scored.get_batch(SAMPLES, key=prompt) for prompt in range(1, PROMPTS + 1)]
            for group in groups:
                baseline = np.mean([reward for *_, reward in group])
                for _, acted, tokens, reward in sorted(group, key=lambda item: item[0]):
                    versions.append((version, acted))
                    for before, after in pairwise(tokens):
                        gradient[before] -= (reward - baseline) * probabilities(logits[before])
                        gradient[before, after] += reward - baseline
            logits += 0.5 * gradient
            rewards.append(np.mean([reward for group in groups for *_, reward in group]))
        return logits, rewards, versions


def run_workflow(backend):
    hosts = [HostPlan("engine", ("engine",)), HostPlan("reward", ("reward",)), HostPlan("learner", ("learner",))]
    with Cluster(backend, hosts, timeout_s=30) as cluster:
        engine = cluster.launch(Engine, "engine")
        reward = cluster.launch(Reward, "reward")
        learner = cluster.launch(Learner, "learner")
        samples = cluster.channel("samples", home=reward, capacity=PROMPTS * SAMPLES)
        scored = cluster.channel("scored", home=learner, capacity=PROMPTS * SAMPLES)
        weights = cluster.channel("weights", home=engine, capacity=1)
        work = [engine.generate(weights, samples), reward.score(samples, scored)]
        ((logits, rewards, versions),) = learner.learn(scored, weights).wait()
        for handle in work:
            handle.wait()
    return logits, rewards, versions


def test_the_token_workflow_learns_the_same_on_every_backend(processes):
    logits, rewards, versions = run_workflow("inline")
    assert np.mean(rewards[:2]) < 0.3 < 0.9 < np.mean(rewards[-2:])
    assert all(trained_on == acted for trained_on, acted in versions)
    assert len(versions) == ROUNDS * PROMPTS * SAMPLES
    again, rewards_again, versions_again = run_workflow(processes)
    np.testing.assert_array_equal(again, logits)
    assert (rewards_again, versions_again) == (rewards, versions)
