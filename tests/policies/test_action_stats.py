"""The ranges of a model that nobody has published: from demonstrations, kept with its weights."""

import json
from dataclasses import replace

import pytest
import tiny_vla
import torch
from tiny_vla import ROBOT, observe

from embodied.core.errors import ConfigError
from embodied.policies import load_policy

SPEC = replace(ROBOT, state_dim=2)
ACTION = {"q01": [-0.5, 0.0, -1.0], "q99": [0.5, 0.0, 1.0], "min": [-1.0, 0.0, -1.0], "max": [1.0, 0.0, 1.0]}
STATE = {"q01": [0.0, 2.0], "q99": [0.04, 4.0], "min": [0.0, 1.0], "max": [0.05, 5.0]}


def build(**options):
    return tiny_vla.build("openvla_oft", spec=SPEC, chunk=2, head="l1", proprio=True, **options)


@pytest.fixture
def demos(tmp_path):
    folder = tmp_path / "demos"
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "stats.json").write_text(json.dumps({"action": ACTION, "observation.state": STATE}))
    return folder


def test_ranges_of_demonstrations_travel_with_the_weights(demos, tmp_path):
    made = build(statistics=str(demos))
    numbers = torch.tensor([[0.04, 3.0]], dtype=torch.float64)
    assert made.proprio_statistics.to_unit(numbers).round(decimals=6).tolist() == [[1.0, 0.0]]
    assert made.actions_of(torch.tensor([1.0, 0.3, -1.0]).double()).round(decimals=6).tolist() == [0.5, 0.0, -1.0]
    made.save_pretrained(tmp_path / "policy")
    (demos / "meta" / "stats.json").unlink()
    again, plain = load_policy(tmp_path / "policy"), build()
    plain.load_weights({name: tensor.numpy() for name, tensor in made.state_dict().items()})
    for policy in (again, plain):
        assert (
            policy.statistics.low.tolist() == ACTION["q01"] and policy.proprio_statistics.high.tolist() == STATE["q99"]
        )
    assert again.config.statistics is None and build().statistics.low.tolist() == [-1.0] * 3


def test_ranges_stay_exact_whatever_the_weights_are(demos):
    assert build(statistics=str(demos), dtype="bfloat16").proprio_statistics.high.tolist() == STATE["q99"]


def test_a_published_model_takes_the_ranges_of_a_dataset(demos, tmp_path):
    build().save_published(tmp_path / "published")
    made = build(pretrained=str(tmp_path / "published"), statistics=str(demos))
    assert made.statistics.high.tolist() == ACTION["q99"]
    made.save_pretrained(tmp_path / "policy")
    again = load_policy(tmp_path / "policy")
    assert again.statistics.high.tolist() == ACTION["q99"] and again.config.statistics == "demos"


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"q99": None}, "q99 of action is None"),
        ({"q99": "0"}, "action has"),
        ({"q99": [0.0, None, 1.0]}, "q99 of action is"),
        ({"q99": [float("nan"), 0.0, 1.0]}, "q99 of action is"),
        ({"q01": [0.0]}, "action has 1 numbers, the env 3"),
    ],
)
def test_invalid_action_ranges_are_refused_with_a_way_to_count_them(demos, action, words):
    (demos / "meta" / "stats.json").write_text(json.dumps({"action": ACTION | action}))
    with pytest.raises(ConfigError, match=rf"stats\.json cannot be read: .*{words}.*quantiles .* writes it"):
        build(statistics=str(demos))


def test_a_number_that_no_demonstration_moves_does_not_drown_the_others(demos):
    """Its fitted scale goes to nothing; as a likelihood its gradient would grow without end."""
    made = build(statistics=str(demos))
    inputs = {"obs": observe(2, SPEC), "actions": torch.full((2, 2, 3), 0.4)}
    with torch.no_grad():
        made.log_scale.copy_(torch.tensor([-2.0, -20.0, -2.0]))
    made.imitate(inputs, None).mean().backward()
    gradient = made.action_head.model.fc2.bias.grad.abs()
    assert float(gradient.max()) <= 1.0 and float(gradient[0]) > 0
    assert made.log_scale.grad.abs().min() > 0
