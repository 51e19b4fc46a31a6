"""Which prompts are tried again."""

from collections import Counter

import numpy as np
import pytest
from idle_groups import idle_groups

from embodied.algorithms.group_pool import PromptPools, pool_of
from embodied.config.recipe import load
from embodied.core.types import EpisodeResult

SIZE = 4


def tried(pools, group, solved):
    """Let a group try its prompt, which so many of it solve."""
    prompt = pools.draw(group)
    pools.add({group * SIZE + i: i < solved for i in range(SIZE)})
    return prompt


def test_a_quarter_is_hard_and_three_quarters_are_normal():
    assert [pool_of(solved / 4) for solved in range(5)] == ["hard", "hard", "normal", "normal", "easy"]


def test_pools_are_drawn_from_by_their_weights():
    """Weights 0.5, 2, 0 and 1 for unseen ones: of 7 draws 1, 4, 0 and 2 on average."""
    pools = PromptPools((0.5, 2.0, 0.0), 0, SIZE)
    rates = {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    found = Counter()
    for group in range(100, 3600):
        pools.rates = dict(rates)
        prompt = pools.draw(group)
        found[prompt if prompt < 100 else "unseen"] += 1
        pools.forget_all_but(())
    wanted = {0: 250, 1: 250, 2: 1000, 3: 1000, "unseen": 1000}
    assert found.keys() == wanted.keys()
    assert all(abs(found[name] - count) < 5 * count**0.5 for name, count in wanted.items())
    assert pools.counts == Counter(hard=found[0] + found[1], normal=found[2] + found[3], unseen=found["unseen"])


def test_a_prompt_moves_to_the_pool_of_its_latest_rate_and_is_drawn_by_one_group_at_a_time():
    pools = PromptPools((1e9, 1e9, 1e9), 0, SIZE)
    assert tried(pools, 0, 0) == 0 and pools.rates == {0: 0.0}
    assert pools.draw(1) == 0 == pools.draw(1)
    assert pools.draw(2) == 2, "0 is being tried"
    assert tried(pools, 1, 4) == 0 and pools.rates == {0: 1.0}


def test_draws_go_on_after_a_resume_as_they_would_have():
    def play(pools, groups):
        return [tried(pools, group, group % 5) for group in groups]

    whole, first = PromptPools((1.0, 2.0, 1.0), 3, SIZE), PromptPools((1.0, 2.0, 1.0), 3, SIZE)
    wanted = play(whole, range(30))
    begun = play(first, range(15))
    first.draw(15)
    first.add({60: False, 61: False})  # of group 15, none of which solves it
    again = PromptPools((1.0, 2.0, 1.0), 3, SIZE)
    again.restore(first.state())
    assert begun + play(again, range(15, 30)) == wanted
    assert again.rates == whole.rates and len(set(wanted)) < 30


def test_groups_that_never_end_are_forgotten():
    pools = PromptPools((1e9, 1e9, 1e9), 0, SIZE)
    tried(pools, 0, 2)
    assert pools.draw(1) == 0
    pools.forget_all_but(())
    assert pools.draw(2) == 0 and not pools.solved


@pytest.mark.parametrize("size", [4, 16])
def test_drawn_prompts_are_played_and_their_rates_are_in_the_checkpoint(size):
    options = ["recipe=sums_grpo", "env.num_envs=4", "algo.groups=2", "algo.pools=[1e9,1e9,1e9]"]
    found = idle_groups(load([*options, f"algo.group_size={size}"]).config, ("sums",), text=True)
    jobs = found.next_jobs()
    found.begin_round(jobs)
    specs = jobs[0].episodes
    assert specs == [found.episodes[index] for index in range(2 * size)]
    results = [
        EpisodeResult(s.index, s.task, -1, s.seed, 1, float(s.index % 2), bool(s.index % 2), True) for s in specs
    ]
    found.record(results)
    assert found.prompt_pools.rates == {0: 0.5, 1: 0.5}
    again = found.specs_of(found.pool.deal(2 * size))
    assert [spec.index for spec in again] == list(range(2 * size, 4 * size))
    assert {spec.seed for spec in again} == {spec.seed for spec in specs}
    assert all(len({spec.seed for spec in again[g * size : (g + 1) * size]}) == 1 for g in range(2))
    assert np.array_equal(found.prompt_pools.state()["prompts"], [0, 1])
