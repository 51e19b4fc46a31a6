"""What is said of answers: how they are scored, and which options mean something for a policy that speaks alone."""

import pytest
import torch

from embodied.algorithms.config import GRPOConfig
from embodied.algorithms.group_pool import score_of
from embodied.algorithms.losses import out_of_bounds, policy_loss_sum
from embodied.core.types import EpisodeResult
from embodied.records.results import episodes_csv, read_episodes


def result(reward=1.0, truncated=False, tokens=4):
    return EpisodeResult(0, "sums", -1, 1, 1, reward, True, True, truncated=truncated, tokens=tokens)


@pytest.mark.parametrize(("tokens", "score"), [(1, 1.0), (6, 1.0), (7, 0.75), (9, 0.25), (10, 0.0), (12, 0.0)])
def test_the_last_tokens_before_the_limit_cost_up_to_one(tokens, score):
    assert score_of(result(tokens=tokens), GRPOConfig(name="dapo", overlong=4), 10) == score


def test_an_answer_that_was_cut_off_is_scored_as_it_is_or_as_nothing():
    cut = result(truncated=True, tokens=10)
    assert score_of(cut, GRPOConfig(name="grpo")) == score_of(cut, GRPOConfig(name="grpo", truncated="mask")) == 1.0
    assert score_of(cut, GRPOConfig(name="grpo", truncated="punish")) == 0.0
    assert score_of(result(), GRPOConfig(name="grpo", truncated="punish")) == 1.0
    assert score_of(cut, GRPOConfig(name="grpo", truncated="punish", overlong=4), 10) == -1.0


def test_an_answer_has_the_geometric_mean_of_its_tokens_ratios():
    """Two answers with ratios 2, 8 and 1/2: 4, 4 and 1/2; clipped to 1.2, 1.2 and, for A=-1, to 0.8."""
    now = torch.tensor([2.0, 8.0, 0.0, 0.5]).double().log().nan_to_num(neginf=3.0)[:, None, None].requires_grad_()
    mask = torch.tensor([True, True, False, True])[:, None]
    known = (torch.zeros(4, 1, 1).double(), torch.tensor([1.0, 1.0, 9.0, -1.0]).double(), mask, torch.ones(4).double())
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "level": "episode"}
    numbers = torch.tensor([3, 3, 3, 5])
    loss, stats = policy_loss_sum(now, *known, **options, answers=numbers)
    assert loss.item() == pytest.approx(-1.2 - 1.2 + 0.8) and stats["clip_fraction"] == 3
    loss, _ = policy_loss_sum(now, *known, **options | {"clip": "aipo", "ratio_cap": 8.0}, answers=numbers)
    assert loss.item() == pytest.approx(-4 - 4 + 0.5)
    loss.backward()  # of each of the two tokens: half of what both gain
    assert now.grad.flatten().tolist() == pytest.approx([-4.0, -4.0, 0.0, 0.5])


def test_answers_are_masked_by_their_tokens():
    """Ratios 2 and 8: their mean is 4, their product 16, their error 5 either way."""
    proximal = torch.tensor([2.0, 8.0]).log()[:, None, None]
    known = proximal, torch.zeros(2, 1, 1), torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    common = {"name": "grpo", "logprob_level": "episode", "episode_mask_high": 5.0}
    for kind, left_out in (("mean", False), ("product", True)):
        assert out_of_bounds(*known, GRPOConfig(**common, episode_mask=kind)).tolist() == [left_out] * 2
    for bound, left_out in ((4.9, True), (5.1, False)):
        bounded = GRPOConfig(**common | {"episode_mask_high": bound}, episode_mask="error")
        assert out_of_bounds(*known, bounded).tolist() == [left_out] * 2
        assert out_of_bounds(-proximal, *known[1:], bounded).tolist() == [left_out] * 2


def test_episodes_csv_has_columns_for_answers_where_there_are_any(tmp_path):
    acted = EpisodeResult(1, "reach", -1, 1, 5, 1.0, True, True)
    for results, header in (([acted], ""), ([result(truncated=True), result()], ",truncated,tokens,rewards")):
        (tmp_path / "episodes.csv").write_text(episodes_csv(results))
        assert episodes_csv(results).splitlines()[0].endswith(f"error{header}")
        assert read_episodes(tmp_path) == results
