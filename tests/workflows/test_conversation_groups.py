"""What a collector of groups does for policies that speak."""

from idle_collector import idle_collector

from embodied.config.recipe import load
from embodied.core.types import EpisodeResult
from embodied.workflows.group_collector import GroupedEpisodes


def collector(*options):
    config = load(["recipe=sums_grpo", "env.num_envs=4", *options]).config
    return idle_collector(config, ("sums",), text=True)


def test_scores_that_are_compared_are_those_of_cut_and_long_answers():
    found = collector("algo.truncated=punish", "algo.overlong=2", "algo.groups=1", "algo.group_size=4")
    batch = GroupedEpisodes(1, 0)
    found.pool.deal(4)
    tokens, cut = (2, 4, 5, 5), (False, False, False, True)
    found.add(
        [EpisodeResult(i, "sums", -1, 1, 1, 1.0, True, True, truncated=cut[i], tokens=tokens[i]) for i in range(4)],
        batch,
    )
    assert found.pool.take()[0].scores == (1.0, 0.5, 0.0, -1.0)
