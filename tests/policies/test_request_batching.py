"""Requests of several sims that wait for a policy worker are answered together, and no answer depends on that."""

import threading

import numpy as np
import pytest

from embodied.config.recipe import load
from embodied.core.errors import StaleWeights, Unusable, WrongShape
from embodied.core.types import ActionSpec, ActRequest, EnvSpec, Merging, PolicyOutput, SamplingRule
from embodied.policies import make_policy
from embodied.policies.config import MLPConfig
from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from embodied.policies.pi0.config import Pi0Config
from embodied.policies.policy_worker import PolicyWorker, RequestBatcher
from embodied.policies.smolvla.config import SmolVLAConfig
from embodied.runtime import Cluster, HostPlan, Timers

SPEC = EnvSpec(ActionSpec(3), state_dim=4, images={"top": (16, 16, 3)}, instruction=True)
FAMILIES = {
    "openvla": OpenVLAConfig(name="openvla", dtype="float64"),
    "discrete": OpenVLAOFTConfig(name="openvla_oft", chunk=2, proprio=True, film=True, dtype="float64"),
    "l1": OpenVLAOFTConfig(name="openvla_oft", chunk=2, head="l1", dtype="float64"),
    "pi0": Pi0Config(name="pi0", dtype="float64"),
    "flow_noise": Pi0Config(name="pi0", exploration="flow_noise", dtype="float64"),
    "pi05": Pi0Config(name="pi05", dtype="float64"),
    "smolvla": SmolVLAConfig(name="smolvla", steps=2, dtype="float64"),
}
TOLD = ("push", "put the red cup on the plate, and then the green one", "go on", "lift the lid of the old box")
TOGETHER = Merging(rows=64)


@pytest.fixture
def channel():
    with Cluster("inline", [HostPlan("a", ("sim",))]) as cluster:
        yield cluster.channel


def worker_of(config, merging=TOGETHER, policy=None):
    worker = PolicyWorker(config, 0, merging=merging)
    worker.timers = Timers()
    worker.build(SPEC)
    worker.policy = policy or make_policy(config, SPEC, 0).eval()
    worker.weights.version = 3
    return worker


def seen(seed, rows):
    draw = np.random.default_rng(seed)
    frames = draw.integers(0, 256, (rows, 16, 16, 3), np.uint8)
    words = [TOLD[(seed + row) % len(TOLD)] for row in range(rows)]
    return {"images": {"top": frames}, "state": draw.normal(size=(rows, 4)), "instruction": words}


def question(sim, rows, **what):
    episodes = 100 * sim + np.arange(rows)
    return ActRequest(f"sim-{sim}/0#1", 1, seen(sim, rows), episodes, episodes % 5, **what)


def mixed():
    """What comes in the middle of a rollout, after an episode was cut off, and at the end of one."""
    return [question(0, 2), question(1, 1, final_obs=seen(7, 2)), question(2, 3), question(3, 2, value_only=True)]


def asked(worker, channel, requests, name="", **how):
    """-> the replies by source, and how often the policy worker acted."""
    inbox = channel(f"requests{name}")
    replies = {request.source: channel(f"replies{name} {request.source}") for request in requests}
    for request in [*requests, None]:
        inbox.put(request)
    before = worker.timers.totals()["act"].count if "act" in worker.timers.totals() else 0
    try:
        worker.serve(inbox, replies, how.pop("version", 3), **how)
    finally:
        acted = worker.timers.totals()["act"].count - before if "act" in worker.timers.totals() else 0
        found = {source: [end.get() for _ in range(end.qsize())] for source, end in replies.items()}
        worker.found = found
    return found, acted


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_answers_do_not_depend_on_what_they_were_merged_with(config, channel):
    together, acted = asked(worker_of(config), channel, mixed(), "together")
    alone, acted_alone = asked(worker_of(config, Merging()), channel, mixed(), "alone")
    assert (acted, acted_alone) == (1, 4)
    assert together.keys() == alone.keys()
    for source, (one,) in alone.items():
        (other,) = together[source]
        assert (other.source, other.key, other.version) == (one.source, one.key, 3)
        close(other.values, one.values)
        assert (other.final_values is None) == (one.final_values is None)
        if one.final_values is not None:
            close(other.final_values, one.final_values)
        if one.output is None:
            assert other.output is None
            continue
        for name in ("actions", "logprobs", "values"):
            close(getattr(other.output, name), getattr(one.output, name))
        assert other.output.replay.keys() == one.output.replay.keys()
        for name, kept in one.output.replay.items():
            close(other.output.replay[name], kept)


def close(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    if ours.dtype.kind in "iu":  # tokens, and steps of the flow
        assert np.array_equal(ours, theirs)
    else:
        tiny = 1e-9 if ours.dtype == np.float64 else 1e-6
        assert np.abs(ours - theirs).max() <= tiny * max(np.abs(theirs).max(), 1)


@pytest.mark.parametrize("name", ["openvla", "discrete"])
def test_merged_requests_give_the_same_tokens_in_single_precision(name, channel):
    config = FAMILIES[name].model_copy(update={"dtype": "float32"})
    requests = [question(sim, 1 + sim % 3) for sim in range(6)]
    together, acted = asked(worker_of(config), channel, requests, "together")
    alone, _ = asked(worker_of(config, Merging()), channel, requests, "alone")
    assert acted == 1
    for source, (one,) in alone.items():
        assert np.array_equal(together[source][0].output.replay["tokens"], one.output.replay["tokens"])
        assert np.array_equal(together[source][0].output.actions, one.output.actions)


class Counting:
    """A policy whose action is the episode's own noise; it counts the rows it is asked for."""

    def __init__(self):
        self.rows = []

    def act(self, obs, noise, temperature=1.0):
        self.rows.append(len(noise))
        if (obs["state"] > 1e6).any():
            raise ValueError("a state out of this world")
        actions = noise[:, None, :3].copy()
        actions[np.isnan(obs["state"]).any(axis=1)] = np.nan
        values = actions[:, 0, 0]
        return PolicyOutput(actions, actions, values[:, None] if (obs["state"] < -1e6).any() else values, {})

    def value(self, obs):
        return obs["state"].sum(axis=1)


def counting(merging=TOGETHER):
    return worker_of(MLPConfig(), merging, Counting())


def test_no_more_rows_than_asked_for_and_a_large_question_by_itself(channel):
    worker = counting(Merging(rows=4))
    requests = [question(sim, rows) for sim, rows in enumerate((2, 2, 1, 4, 9, 1, 1))]
    found, acted = asked(worker, channel, requests)
    assert worker.policy.rows == [4, 1, 4, 9, 2]
    assert acted == 5 and all(len(replies) == 1 for replies in found.values())


@pytest.mark.parametrize(("state", "error"), [(1e7, ValueError), (np.nan, Unusable), (-1e7, WrongShape)])
def test_a_request_that_fails_does_not_keep_merged_requests_from_their_answers(state, error, channel, capfd):
    requests = [question(sim, 2) for sim in range(3)]
    good, _ = asked(counting(), channel, [requests[0], requests[2]], "good")
    requests[1].obs["state"][0] = state
    worker = counting()
    with pytest.raises(error):
        asked(worker, channel, requests, "bad")
    assert "3 requests are answered one by one" in capfd.readouterr().out
    assert [len(replies) for replies in worker.found.values()] == [1, 0, 1]
    for source, (reply,) in good.items():
        assert np.array_equal(worker.found[source][0].output.actions, reply.output.actions)


def test_questions_of_an_earlier_round_are_left_out(channel):
    worker, inbox = counting(), channel("requests")
    replies = {"sim-0/0#2": channel("replies")}
    late = ActRequest("sim-0/0#1", 1, seen(0, 2), np.arange(2), np.arange(2))
    new = ActRequest("sim-0/0#2", 1, seen(0, 3), np.arange(3), np.arange(3))
    for request in (late, new, late, None):
        inbox.put(request)
    assert worker.serve(inbox, replies, 3) == 3
    assert worker.policy.rows == [3]


def test_a_worker_with_stale_weights_answers_no_request(channel):
    worker = counting()
    with pytest.raises(StaleWeights):
        asked(worker, channel, [question(0, 1), question(1, 1)], version=4)
    assert not any(worker.found.values())


def test_merging_waits_for_other_sims_and_never_for_other_stages_of_the_same_sim(channel):
    for wait_s, sources, rows in ((30.0, ("sim-0/0#1", "sim-1/0#1"), [2]), (0.0, ("sim-0/0#1", "sim-1/0#1"), [1, 1])):
        worker, inbox = counting(Merging(64, wait_s)), channel(f"requests {wait_s}")
        replies = {source: channel(f"replies {wait_s} {source}") for source in sources}
        thread = threading.Thread(target=worker.serve, args=(inbox, replies, 3))
        thread.start()
        for sim in range(2):
            inbox.put(question(sim, 1))
            if not wait_s:  # answered before the other one has asked
                replies[sources[sim]].get(timeout_s=20)
        inbox.put(None)
        thread.join(20)
        assert worker.policy.rows == rows
    worker, inbox = counting(Merging(64, 30.0)), channel("stages")
    replies = {source: channel(source) for source in ("sim-0/0#1", "sim-0/1#1")}
    thread = threading.Thread(target=worker.serve, args=(inbox, replies, 3))
    thread.start()
    inbox.put(question(0, 1))
    replies["sim-0/0#1"].get(timeout_s=20)  # long before the 30 s
    inbox.put(None)
    thread.join(20)


def test_merging_does_not_wait_for_a_sim_that_asks_another_worker(channel):
    worker, requests = counting(Merging(64, 30.0)), [question(sim, 1) for sim in (0, 1)]
    inbox, ends = channel("requests"), {request.source: channel(request.source) for request in requests}
    serving = threading.Thread(
        target=worker.serve, args=(inbox, ends, 3), kwargs={"first_sources": [requests[0].source]}
    )
    serving.start()
    inbox.put(requests[0])
    ends[requests[0].source].get(timeout_s=20)  # long before the 30 s
    inbox.put(None)
    serving.join(20)
    assert worker.policy.rows == [1]


def test_a_sim_that_was_waited_for_in_vain_is_waited_for_again_when_it_has_asked(channel):
    inbox = channel("requests")
    batcher = RequestBatcher(inbox, ["sim-0/0#1", "sim-1/0#1"], Merging(64, 0.3))
    inbox.put(question(0, 1))
    assert len(batcher.take()) == 1 and batcher.sims == {"sim-0"}
    inbox.put(question(0, 1))
    assert len(batcher.take()) == 1
    inbox.put(question(1, 1))
    batcher.merging = Merging(64, 60.0)
    later = threading.Timer(0.05, inbox.put, [question(0, 1)])
    later.start()
    assert len(batcher.take()) == 2
    later.join()


def test_large_networks_merge_by_default_and_small_ones_do_not():
    rows = {
        recipe: load([f"recipe={recipe}"]).config.merged_rows
        for recipe in ("maniskill_ppo", "maniskill_ppo_rgb", "pointmass_ppo", "pointmass_grpo_openvla_oft_tiny")
    }
    assert rows == {"maniskill_ppo": 1, "maniskill_ppo_rgb": 1, "pointmass_ppo": 1} | {
        "pointmass_grpo_openvla_oft_tiny": 64
    }
    assert load(["recipe=pointmass_ppo_pi0_tiny"]).config.merged_rows == 64
    assert load(["recipe=pointmass_ppo_pi0_tiny", "pipeline.merge_rows=8"]).config.merged_rows == 8


def test_evaluations_have_noise_of_their_own(channel):
    worker = worker_of(MLPConfig(chunk=2, dtype="float64"))
    rules = (SamplingRule(), SamplingRule(stream="eval"), SamplingRule())
    rounds = [asked(worker, channel, [question(0, 2)], str(i), rule=rule)[0] for i, rule in enumerate(rules)]
    train, evaluation, again = (found["sim-0/0#1"][0].output.actions for found in rounds)
    assert np.array_equal(train, again) and (train != evaluation).all()
