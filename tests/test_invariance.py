"""Where a run's parts run, and how its envs are split, changes nothing but the last bits of its weights."""

import os
from dataclasses import replace

import numpy as np
import pytest

from embodied.config.recipe import load
from embodied.envs.pointmass import env as pointmass
from embodied.learners import train_batch
from embodied.placement import make_plan
from embodied.policies.policy_folder import read_weights
from embodied.run import launch
from embodied.workflows.rl_loop import EmbodiedLoop

ITERATIONS = 3
ARGUMENTS = (
    "recipe=pointmass_ppo env.num_envs=8 env.dtype=float64 env.max_episode_steps=30 policy.dtype=float64 "
    "policy.hidden=[16,16] policy.normalize_observations=true algo.rollout_decisions=40 algo.minibatch_size=80 "
    f"algo.epochs=3 seed=1 run.iterations={ITERATIONS}"
).split()
FOUR = (0, 1, 2, 3)  # what modes are laid out on; a machine with fewer cores shares them

ONE_OF_EACH = {"sim": "cpu:0", "policy,learner": "cpu:1"}
TWO_SIMS = {"sim,policy": "cpu:0-1*2", "learner": "cpu:0"}
TWO_LEARNERS = {"sim,policy": "cpu:0", "learner": "cpu:0-1*2"}
THREE_LEARNERS = {"sim,policy": "cpu:0-1*2", "learner": "cpu:0-2*3"}  # of 8 envs: 2, 3 and 3
FOUR_LEARNERS = {"sim": "cpu:0", "policy,learner": "cpu:0-3*4"}
FOUR_RANKS = {"sim,policy": "cpu:0-1*2", "learner": "cpu:0-3*4"}
ALL_APART = {"sim": "cpu:0-1*2", "policy": "cpu:2", "learner": "cpu:3"}
FAKE = {"sim": "fake:0-1*2", "policy": "fake:2-3", "learner": "fake:2-4"}  # more devices than there are cores


def trained(folder, placement, backend="inline", stages=1, options=(), route=None):
    """The weights after a few iterations under this plan, and the gradient norms on the way."""
    config = load([*ARGUMENTS, f"pipeline.stages={stages}", f"cluster.backend={backend}", *options]).config
    plan = make_plan(placement, FOUR, config.env.num_envs, stages)
    here = sorted(os.sched_getaffinity(0))
    hosts = [replace(host, cores=tuple({here[core % len(here)] for core in host.cores})) for host in plan.hosts]
    plan = replace(plan, hosts=tuple(hosts))
    with launch.cluster(config, plan, folder) as cluster:
        loop = EmbodiedLoop(config, cluster)
        loop.weight_sync.routes = [route] * len(loop.workers.policies) if route else []
        loop.publish(0)
        norms = [loop.iterate(i, ITERATIONS)[1]["train/grad_norm"] for i in range(ITERATIONS)]
        loop.save_learners(folder / "saved")
    return read_weights(folder / "saved" / "policy"), norms


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The weights of the plan that all others are compared with. It learns and stays clear of every threshold, else two
    plans could differ by far more than rounding: a clip, a success or a wall could flip."""
    rewards, margins = [], {"success": [], "wall": [], "clip": []}
    step, loss = pointmass.PointMassEnv._step, train_batch.loss_sum

    def watched_step(env, actions, active):
        moved = env._position + pointmass.DRAG * env._velocity + pointmass.PUSH * env.config.size * actions
        margins["wall"].append(np.abs(np.abs(moved) - env.config.size).min())
        result = step(env, actions, active)
        margins["success"].append(np.abs(env._distance() - pointmass.REACH * env.config.size).min())
        rewards.extend(result.rewards)
        return result

    def watched_loss(logprobs, entropy, values, items, config):
        assert config.logprob_level in ("action", "chunk") and not config.target_kl  # one ratio per decision
        ratio = (logprobs - items.logprobs).sum(dim=-1).exp().detach()
        margins["clip"] += [float((ratio - edge).abs().min()) for edge in (1 - config.clip_low, 1 + config.clip_high)]
        return loss(logprobs, entropy, values, items, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pointmass.PointMassEnv, "_step", watched_step)
        patch.setattr(train_batch, "loss_sum", watched_loss)
        weights, norms = trained(tmp_path_factory.mktemp("reference"), ONE_OF_EACH)
    assert np.std(rewards) > 0.01 and min(rewards) < 0 < 0.9 < max(rewards)  # progress, setbacks and successes
    assert min(norms) > 0.01
    assert all(seen and min(seen) > 1e-6 for seen in margins.values()), {k: min(v) for k, v in margins.items()}
    return weights


PLACEMENTS = {
    **{"one_of_each": ONE_OF_EACH, "two_sims": TWO_SIMS, "two_learners": TWO_LEARNERS},
    **{"three_learners": THREE_LEARNERS, "all_apart": ALL_APART, "fake": FAKE},
    **{mode: mode for mode in ("auto", "collocated", "disaggregated", "hybrid")},
}
FAST = {("one_of_each", 2), ("three_learners", 1), ("all_apart", 2), ("auto", 1)}


@pytest.mark.parametrize(
    ("placement", "stages"),
    [
        pytest.param(placement, stages, id=f"{name}-{stages}", marks=[] if (name, stages) in FAST else pytest.mark.slow)
        for name, placement in PLACEMENTS.items()
        for stages in (1, 2)
    ],
)
def test_every_placement_gives_the_same_weights(reference, tmp_path, placement, stages):
    check_same(trained(tmp_path, placement, stages=stages)[0], reference)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_questions_that_are_answered_together_give_the_same_weights(reference, tmp_path, stages):
    together = ["pipeline.merge_rows=8", "pipeline.merge_wait_s=0.05"]
    check_same(trained(tmp_path, ALL_APART, stages=stages, options=together)[0], reference)


ON_PROCESSES = {"one_of_each": ONE_OF_EACH, "all_apart": ALL_APART, "two_learners": TWO_LEARNERS, "four": FOUR_RANKS}


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("local", "all_apart"),
        *(pytest.param("local", name, marks=pytest.mark.slow) for name in ("one_of_each", "two_learners", "four")),
        *(pytest.param("ray", name, marks=pytest.mark.slow) for name in ON_PROCESSES),
    ],
)
def test_processes_give_the_same_weights_as_threads(reference, tmp_path, backend, name):
    check_same(trained(tmp_path, ON_PROCESSES[name], backend)[0], reference)


def test_four_learners_that_each_act_with_their_own_weights_give_the_same(reference, tmp_path):
    check_same(trained(tmp_path, FOUR_LEARNERS, stages=4)[0], reference)


@pytest.mark.parametrize(
    ("placement", "backend", "options", "route"),
    [
        (ONE_OF_EACH, "inline", ["learner.micro_batch_size=7"], None),
        (TWO_LEARNERS, "inline", ["learner.micro_batch_size=16", "learner.checkpoint_activations=true"], None),
        pytest.param(
            TWO_LEARNERS,
            "local",
            ["learner.shard=true", "learner.micro_batch_size=16"],
            "buckets",
            marks=pytest.mark.slow,
        ),
        pytest.param(FOUR_RANKS, "ray", ["learner.shard=true"], None, marks=pytest.mark.slow),
    ],
    ids=["accumulated", "accumulated_by_two", "sharded_and_sent_in_buckets", "sharded_by_four_on_ray"],
)
def test_how_learners_compute_and_send_changes_nothing(reference, tmp_path, placement, backend, options, route):
    check_same(trained(tmp_path, placement, backend, options=options, route=route)[0], reference)
    assert not list(tmp_path.glob("ranks-*"))


@pytest.mark.parametrize(
    ("backend", "placement"),
    [
        ("inline", "collocated"),
        pytest.param("local", TWO_LEARNERS, marks=pytest.mark.slow),
        pytest.param("local", "collocated", marks=pytest.mark.slow),
    ],
)
def test_repeating_a_plan_gives_the_same_bits(reference, tmp_path, backend, placement):
    first, again = (trained(tmp_path / str(attempt), placement, backend, stages=2)[0] for attempt in range(2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    check_same(first, reference)


@pytest.mark.parametrize(
    ("granularity", "backend"),
    [(7, "inline"), *(pytest.param(n, "local", marks=pytest.mark.slow) for n in (1, 16, 40))],
)
def test_in_which_pieces_rollouts_are_handed_on_changes_no_bit(reference, tmp_path, granularity, backend):
    placement = {"sim": "cpu:0", "policy": "cpu:1", "learner": "cpu:2"}
    found = trained(tmp_path, placement, backend, options=[f"pipeline.granularity={granularity}"])[0]
    assert all(np.array_equal(found[name], reference[name]) for name in reference)


def check_same(ours, reference):
    assert ours.keys() == reference.keys()
    worst = max(float(np.abs(ours[name] - reference[name]).max()) for name in reference)
    assert worst < 1e-9
