"""What learners say of their speed: tokens a second, and the share of what their devices can compute."""

import pytest
import torch
from tiny_language import answers, build, inputs_of

from embodied.learners import throughput
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model
from embodied.runtime.collective import Alone


def test_trainer_tokens_and_mfu_count_what_passes_compute_per_second(monkeypatch):
    """A pass that teaches and one that does not, in two seconds. The prompt is computed once: 6 tokens, which see
    1, 2, 3, 4, 5 and 4 tokens; a backward pass costs two forward passes, and a product is two operations."""
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(throughput, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(throughput, "peak_rate", lambda device, dtype: 1e9)
    policy, inputs = build(), inputs_of(*answers([7, 8], [9], prompt=(5, 6, 7)))
    told = throughput.Throughput(Model(policy, LearnerConfig()))
    with told.measured():
        policy(inputs).logprobs.sum().backward()
        with torch.no_grad():
            policy(inputs)
    token, pair, _ = policy.pass_cost()
    operations = 2 * (3 + 1) * (6 * token + 2 * pair * (1 + 2 + 3 + 4 + 5 + 4))
    assert told.numbers(Alone()) == {
        "text/trainer_tokens_per_s": 3.0,
        "text/mfu": pytest.approx(operations / 2 / 1e9),
    }
    assert told.numbers(Alone()) == {}, "nothing was learned since"
