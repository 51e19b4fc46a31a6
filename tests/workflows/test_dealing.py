"""What the driver deals to learner ranks: costs of lengths, gradient steps, room, and what a checkpoint keeps."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from idle_groups import idle_groups
from tiny_language import SEES, build

from embodied.algorithms.group_pool import Group
from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.core.types import ActionSpec, EnvSpec, EpisodeResult, Unit
from embodied.envs.store import EpisodeRef
from embodied.learners.train_batch import RankBatch
from embodied.policies import make_policy
from embodied.train import main
from embodied.workflows.dealing import Dealer

GROUPS, SIZE = 8, 2


def dealer(*options, recipe="sums_grpo", ranks=2, cost=(1.0, 0.0)):
    config = load([f"recipe={recipe}", f"algo.groups={GROUPS}", f"algo.group_size={SIZE}", "env.num_envs=4", *options])
    asked = SimpleNamespace(pass_cost=lambda: SimpleNamespace(wait=lambda: [cost]))
    return Dealer(config.config, [asked] * ranks, text=recipe == "sums_grpo", refs={})


def ended(dealer, lengths, prompt=2, places=0):
    """The groups of episodes of these lengths, which the dealer gets."""
    episodes = range(len(lengths))
    for i, n in enumerate(lengths):
        result = EpisodeResult(i, "a", -1, 0, n, 0.0, None, None, prompt_tokens=prompt, all_tokens=n, places=places)
        dealer.refs[i] = EpisodeRef("sim-0")
        dealer.refs[i].end(result, dealer.config.policy.chunk, dealer.text)
    return [Group((*episodes[i : i + SIZE],), (0.0,) * SIZE) for i in range(0, len(lengths), SIZE)]


def test_conversations_are_dealt_in_groups_whose_prompt_costs_once():
    found = dealer(cost=(1.0, 0.5))
    groups = ended(found, [20, 20, 20, 20, 3, 4, 3, 3])
    assert found.cost(groups[2].episodes) == (2 + 1 + 2) + 0.5 * (4 + (9 - 4) + (16 - 4))
    rank_of = found.deal(groups, 0)
    assert [rank_of[episode] for episode in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    units = [[Unit((), np.array(g.episodes)) for g in groups if rank_of[g.episodes[0]] == rank] for rank in range(2)]
    costs = [found.cost(group.episodes) for group in groups]
    assert found.balance_ratio(units, 0) == pytest.approx((costs[0] + costs[2]) / (sum(costs) / 2))
    apart = [[Unit((), np.array([0])), Unit((), np.array([2, 3]))], [Unit((), np.array([1]))]]
    assert found.balance_ratio(apart, 0) == pytest.approx(
        (found.cost([0]) + costs[1]) * 2 / (2 * found.cost([0]) + costs[1])
    )


def test_the_pictures_of_a_group_cost_once_what_its_vision_tower_computes():
    """Two places of four patches each go through its two blocks, beside a hundred tokens."""
    policy = build(SEES, preset="tiny_vl")
    token, pair, place = policy.pass_cost()
    assert place == 4 * sum(p.numel() for p in policy.model.base_model.visual.blocks.parameters())
    for options, times in (((), 1), (("learner.share_prompts=false",), 2)):
        found = dealer(*options, cost=(token, pair, place))
        ended(found, [20, 20, 20, 20], places=2)
        plain = dealer(*options, cost=(token, pair, place))
        groups = ended(plain, [20, 20, 20, 20])
        more = found.cost(groups[0].episodes) - plain.cost(groups[0].episodes)
        assert more == times * 2 * place > 0


def test_episodes_of_robots_are_dealt_one_by_one_by_their_decisions():
    found = dealer("policy.chunk=4", recipe="pointmass_grpo")
    groups = ended(found, [17, 4, 4, 4])  # 5, 1, 1 and 1 decisions
    assert found.deal(groups, 0) == {0: 0, 1: 1, 2: 1, 3: 1}


def test_minibatches_are_those_that_ranks_take():
    found = dealer(f"algo.minibatch_size={2 * SIZE}", "algo.epochs=3")
    batch = object.__new__(RankBatch)
    vars(batch).update(num_samples=GROUPS * SIZE, group_size=SIZE)
    orders = np.concatenate([batch.order(found.config.seed, 5, epoch)[::SIZE] // SIZE for epoch in range(3)])
    assert np.array_equal(np.concatenate(found.steps(GROUPS, 5)), orders)
    assert {len(step) for step in found.steps(GROUPS, 5)} == {2}


def test_a_learner_has_no_more_than_it_has_room_for():
    tight, found = (dealer(f"learner.most_items={most}") for most in (50, 60))
    for one in (tight, found):
        groups = ended(one, [30, 30, 10, 10, 10, 10, 10, 10])
    with pytest.raises(ConfigError, match=r"120 tokens .* \(learner.most_items\); try 120"):
        tight.deal(groups, 0)
    assert [*found.deal(groups, 0).values()] == [0, 0, 1, 1, 1, 1, 1, 1]


def test_a_language_models_cost_is_that_of_its_weights_and_of_attention_over_all_pairs():
    """Llama of width 128 with 3 layers: 2 x 128 x L products for L^2 / 2 pairs in each."""
    config = load(["recipe=sums_grpo"]).config.policy
    policy = make_policy(config, EnvSpec(ActionSpec(1), max_episode_steps=1, text=True), 0)
    embedding = policy.model.get_input_embeddings().weight.numel()
    token, pair, place = policy.pass_cost()
    assert not place
    assert token == pytest.approx(sum(p.numel() for p in policy.model.parameters()) - embedding, rel=0.01)
    shape = policy.model.config
    assert pair == shape.num_hidden_layers * shape.hidden_size
    # Work is counted in the same unit: a shared prompt of 3 passes once with answers of 2 and 1, forward and back.
    talks = {"actions": np.array([5, 6, 7, 8, 9, 5, 6, 7, 8]), "mask": np.array([0, 0, 0, 1, 1, 0, 0, 0, 1], bool)}
    policy(talks | {"lengths": np.array([5, 4]), "groups": np.array([0, 0])})
    trained, products = policy.take_work()
    assert trained == 6 and products == pytest.approx(3 * (6 * token + 2 * pair * (1 + 2 + 3 + 4 + 5 + 4)))


@pytest.mark.parametrize(
    ("recipe", "schedule"), [("pointmass_ppo", "sync"), ("pointmass_grpo", "periodic"), ("pointmass_grpo", "async")]
)
def test_a_run_logs_how_equal_the_loads_of_its_learners_are(recipe, schedule, tmp_path):
    options = ["run.iterations=2", "eval.episodes=1", "env.num_envs=4", f"pipeline.schedule={schedule}"]
    if recipe == "pointmass_ppo":
        options += ["run.env_steps=null", "algo.rollout_decisions=8", "algo.minibatch_size=16"]
    else:
        options += ["algo.groups=3", "algo.group_size=2", "algo.epochs=1", "algo.minibatch_size=null"]
    place = 'placement={sim: "fake:0", policy: "fake:1", learner: "fake:2-3"}'
    assert main([f"recipe={recipe}", *options, place, "cluster.backend=inline", f"run.dir={tmp_path}"]) == 0
    (path,) = tmp_path.glob("*/metrics.jsonl")
    ratios = [json.loads(line)["train/balance_ratio"] for line in path.read_text().splitlines()]
    assert len(ratios) == 2 and all(1.0 <= ratio < 1.5 for ratio in ratios)
    assert recipe == "pointmass_grpo" or ratios == [1.0, 1.0]


def test_a_group_that_ranks_compute_together_leaves_all_as_much_to_do():
    """Groups of 32, 16, 16 and eight times 8 on 4 ranks, where attention is all that costs: 32 on ranks 0 and 1."""
    found = dealer("learner.sequence_degree=auto", ranks=4, cost=(0.0, 1.0))
    found.learners[0].divides = lambda: SimpleNamespace(wait=lambda: [((1, 2, 4), (0.0, 0.0, 1e9))])
    lengths = [length for size in (32, 16, 16, *[8] * 8) for length in (size, 1)]
    groups = ended(found, lengths, prompt=0)
    rank_of = found.deal(groups, 0)
    units = [[Unit((), np.array(g.episodes)) for g in groups if rank_of[g.episodes[0]] == rank] for rank in range(4)]
    assert found.balance_ratio(units, 0) == pytest.approx(1.0, abs=0.01)
    found.divides = None
    assert found.balance_ratio(units, 0) > 1.9


def test_scores_that_are_compared_are_those_of_cut_and_long_answers():
    options = ["algo.truncated=punish", "algo.overlong=2", "algo.groups=1", "algo.group_size=4", "env.num_envs=4"]
    found = idle_groups(load(["recipe=sums_grpo", *options]).config, ("sums",), text=True)
    found.begin_round(found.next_jobs())
    tokens, cut = (2, 4, 5, 5), (False, False, False, True)
    found.record(
        EpisodeResult(i, "sums", -1, 1, 1, 1.0, True, True, truncated=cut[i], tokens=tokens[i]) for i in range(4)
    )
    assert found.pool.take()[0].scores == (1.0, 0.5, 0.0, -1.0)
